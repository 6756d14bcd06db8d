"""One record through a search of automesh's: the step compiled with its mesh, and replayed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from automesh.units import parse_duration
from benchmarks.recipes.arguments import Arguments, digest_of
from benchmarks.recipes.options import Options
from benchmarks.recipes.records import Record
from benchmarks.support.search_process import SearchProcess

Kind = Literal["predicted", "does not fit", "failed"]
# Axes over which MaxText splits the rows of a batch.
_BATCH_AXES = ("data", "fsdp", "fsdp_transpose", "expert")
# A search of other meshes for a record: those of the shipped space, at the record's knobs.
_OTHERS = """batch_axes = ["data", "fsdp", "expert"]
[axes]
data = { dcn = true }
fsdp = { dcn = true }
expert = {}
context = {}
tensor = { max = 16 }
[constraints]
"data*fsdp*expert" = { divides = "batch" }
fsdp = { divides = "emb_dim" }
expert = { divides = "num_experts" }
context = { divides = "max_target_length" }
tensor = { divides = "num_kv_heads" }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """All that a prediction depends on.

    Attributes:
      options: of the compiler, those that it takes.
      left_out: what the record says that is not asked for, and why.
      remarks: what may make the step another one than that which was measured.
    """

    id: str
    target: str
    mesh: str
    words: tuple[str, ...]
    options: dict[str, str]
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def digest(self) -> str:
        options = sorted(self.options.items())
        return digest_of(self.target, self.mesh, self.words, options, sorted(self.versions.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of one mesh.

    Attributes:
      step_s: replayed; 0 where there is none.
      peak_bytes: of a device by the compiler; what is missing counts where the plan does not fit.
      limit_bytes: what a program may take of a device; 0 if unknown.
      causes: (cause, seconds) that sum to `step_s`.
      mfu: FLOPs of the program's products over the chip's peak; rematerialization counts.
      uncounted: what has no price, in words.
      reason: why there is no time, in words.
      compile_s: seconds of lowering and compiling.
    """

    mesh: str
    kind: Kind
    step_s: float = 0.0
    peak_bytes: int = 0
    limit_bytes: int = 0
    causes: tuple[tuple[str, float], ...] = ()
    mfu: float = 0.0
    uncounted: tuple[str, ...] = ()
    speeds: str = ""
    reason: str = ""
    compile_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A line of the file of predictions.

    Attributes:
      found: the record's own mesh; for a search of other meshes, the best that it found.
      same_as: the record whose compile it is, if the two ask for the same.
      others: what else such a search compiled.
      legal: plans of the search.
    """

    asked: Asked
    digest: str
    found: Found
    same_as: str = ""
    others: tuple[Found, ...] = ()
    legal: int = 0


class Stopped(Exception):
    """The search ended without a verdict that is worth keeping; the same command goes on."""


def asked_of(
    record: Record,
    arguments: Arguments,
    options: Options,
    refused: Mapping[str, str],
    versions: dict[str, str],
) -> Asked:
    """What is asked for a record, with all that is left out."""
    left_out = [*arguments.left_out, *options.left_out]
    left_out += [f"{one} (refused: {why})" for one, why in refused.items()]
    remarks = [*arguments.remarks]
    for name, then in (("jax", record.jax), ("libtpu", record.libtpu)):
        if then and then != versions.get(name):
            remarks.append(f"measured with {name} {then}, compiled with {versions.get(name)}")
    return Asked(
        id=record.id,
        target=record.target,
        mesh=record.mesh.text,
        words=arguments.words,
        options=options.without(refused),
        left_out=tuple(left_out),
        remarks=tuple(remarks),
        versions=versions,
    )


def space_of(mesh: str) -> str:
    """A search space, as TOML, of exactly one mesh."""
    sizes: dict[str, list[int]] = {}
    between: set[str] = set()
    for part in mesh.split(","):
        name, _, size = part.partition(":")
        if name.startswith("dcn."):
            name = name.removeprefix("dcn.")
            between.add(name)
        sizes.setdefault(name, []).append(int(size))
    lines = ["[axes]"]
    for name, parts in sizes.items():
        size = 1
        for part in parts:
            size *= part
        dcn = ", dcn = true" if name in between else ""
        lines.append(f"{name} = {{ size = {size}{dcn} }}")
    batch = [f'"{name}"' for name in _BATCH_AXES if name in sizes]
    return "\n".join([f"batch_axes = [{', '.join(batch)}]", *lines, ""])


def command_of(asked: Asked, folder: Path, *, limit: str, top: int) -> list[str]:
    """What follows `automesh search`.

    The mesh of MaxText's arguments would be compiled as well, and without the compiler options: it
    is said to lie along an axis that the space does not have.

    Args:
      top: plans of the shipped space to compile; 0 for the record's mesh alone.
    """
    words = ["maxtext", "--target", asked.target, "--space", str(folder / "space.toml")]
    words += ["--budget", limit, "--timeout", limit, "--json"]
    words += ["--top", str(top or 1), "--workers", "1", "--results", str(folder / "results")]
    words += ["--rules", str(folder / "rules.toml")]
    words += ["--reserve-hbm", "0"]  # A run that was published may have left nothing free.
    words += [f"--xla={name}={value}" for name, value in asked.options.items()]
    unused = "data" if not top and "fsdp_transpose" in asked.mesh else "fsdp_transpose"
    sizes = [f"ici_{unused}_parallelism=-1", "ici_fsdp_parallelism=1"]
    return [*words, "--", *asked.words, *sizes]


def predicted(
    asked: Asked, folder: Path, *, limit: str, top: int = 0, is_new: bool = False
) -> Prediction:
    """Runs the search of a record, or goes on with it.

    Args:
      limit: of time, as `2h`.
      top: plans of the shipped space to compile; 0 for the record's mesh alone.
      is_new: whether to begin again, as after a failure, which a study keeps.

    Raises:
      Stopped: it did not come to a verdict within its time.
    """
    # Of one digest: a record that asks for the same goes on where another was stopped.
    place = folder / f"{asked.digest}{'-others' if top else ''}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "space.toml").write_text(_OTHERS if top else space_of(asked.mesh), "utf-8")
    words = command_of(asked, place, limit=limit, top=top)
    process = SearchProcess(["--new", *words] if is_new else words, place)
    try:
        # The budget counts from the inspection on, which MaxText's first import may draw out.
        code = process.finish(2.0 * parse_duration(limit) + 600.0)
    except subprocess.TimeoutExpired:
        raise Stopped(f"{asked.id}: still running after twice its time") from None
    except KeyboardInterrupt:
        process.kill()
        raise
    (place / "stderr.txt").write_text(process.words, "utf-8")
    if code == 2:
        failure = Found(mesh=asked.mesh, kind="failed", reason=_said(process.words))
        return Prediction(asked=asked, digest=asked.digest, found=failure)
    try:
        result = process.result()
    except json.JSONDecodeError:
        raise Stopped(f"{asked.id}: exit code {code}: {_said(process.words)}") from None
    return read_result(asked, result, is_search=top > 0)


def read_result(asked: Asked, result: Mapping[str, Any], *, is_search: bool = False) -> Prediction:
    """What a search printed with `--json`.

    Args:
      is_search: whether it was one of the shipped space: its best plan is then what was found.

    Raises:
      Stopped: it says nothing about the record's own mesh, or compiled nothing.
    """
    limit = int(result.get("device_memory_bytes") or 0)
    every = (_found(candidate, limit) for candidate in result["candidates"])
    judged = [found for found in every if found is not None]
    if not judged or not (is_search or judged[0].mesh == asked.mesh):
        raise Stopped(f"{asked.id}: {result.get('stop_reason') or 'nothing was compiled'}")
    return Prediction(
        asked=asked,
        digest=asked.digest,
        found=judged[0],
        others=tuple(judged[1:]),
        legal=int(result["funnel"].get("legal") or 0),
    )


def _found(candidate: Mapping[str, Any], limit: int) -> Found | None:
    """One of its plans; None where nothing was compiled."""
    outcome, mesh = candidate["outcome"], str(candidate["mesh"])
    match outcome["kind"]:
        case "compiled" if outcome.get("replay"):
            replay = outcome["replay"]
            return Found(
                mesh=mesh,
                kind="predicted",
                step_s=replay["step_s"],
                peak_bytes=outcome["memory"]["peak_bytes"],
                limit_bytes=limit,
                causes=tuple((str(name), float(s)) for name, s in replay["causes"]),
                mfu=replay["mfu"],
                uncounted=tuple(replay["uncounted"]),
                speeds=replay["speeds"],
                compile_s=outcome["compile_s"],
            )
        case "out_of_memory" if not outcome["is_host"]:
            return Found(
                mesh=mesh,
                kind="does not fit",
                peak_bytes=outcome["needed_bytes"],
                limit_bytes=outcome["limit_bytes"],
                reason=outcome["detail"],
            )
        case "failed":
            return Found(
                mesh=mesh, kind="failed", reason=f"{outcome['stage']}: {outcome['reason']}"
            )
        case _:
            return None


def _said(words: str) -> str:
    """The error in what a search said on stderr."""
    lines: Sequence[str] = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines[-1:] or ["it said nothing"])[-1].removeprefix("error:").strip()[:400]
