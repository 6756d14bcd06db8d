"""How long does `automesh check` take, is it silent where nothing changed, and loud where it did?

    python -m benchmarks.check [--mesh fsdp:4,tp:2] [--runs 10] [--then PYTHON]

A rule for the dense example on virtual CPU devices gets its figures by `--update`. Then the script
is checked as it is, `--runs` times, each time by a command of its own with another hash seed, and
once after each of five edits, whose verdict must be the one that stands in `EDITS`. `--then` is the
interpreter that writes the figures, with another version of jax. Another `--mesh` is another rule,
on as many devices as its sizes multiply to. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.paths import EXAMPLES, ROOT

AXES = ("dp", "fsdp", "ep", "tp", "sp")
_SCRIPT = "dense_lm.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of the dense example, and what `check` must say of it.

    Attributes:
      file: below `examples`.
      code: the exit code.
      said: what the reason must name; empty where the rule holds.
    """

    file: str
    old: str
    new: str
    code: int
    said: str = ""


_HIDDEN = 'hidden = layout.pin(hidden, layout.rows, layout.sequence, "tp")'
EDITS = {
    # A constraint that wants the hidden units of all rows on every device.
    "stray all-gather": Edit(
        file="lm/transformer.py",
        old=_HIDDEN,
        new=f"{_HIDDEN}\n    hidden = layout.pin(hidden)",
        code=1,
        said="all-gather",
    ),
    "lost donation": Edit(
        file="lm/training.py",
        old="jax.jit(step, donate_argnums=0, ",
        new="jax.jit(step, ",
        code=1,
        said="outputs beside donated memory",
    ),
    "doubled activation": Edit(
        file="lm/transformer.py",
        old="    x = layout.pin(x, layout.rows, layout.sequence, None)\n\n    def layer",
        new="    x = layout.pin(x, layout.rows, layout.sequence, None)\n"
        "    x = jnp.concatenate([x, x], axis=1)\n"
        '    batch = {**batch, "targets": jnp.concatenate([batch["targets"]] * 2, axis=1)}\n\n'
        "    def layer",
        code=1,
        said="memory",
    ),
    "another batch": Edit(
        file="dense_lm.py",
        old="model=presets.TINY, rows=48,",
        new="model=presets.TINY, rows=96,",
        code=1,
        said="FLOPs",
    ),
    "only reformatted": Edit(
        file="lm/transformer.py",
        old="\n\ndef swiglu(\n",
        new="\n\n# A comment, and other lines.\n\n\ndef swiglu(\n",
        code=0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One command.

    Attributes:
      reasons: of the rules that do not hold.
      told: figures that are not the same, of all rules.
    """

    code: int
    reasons: tuple[str, ...]
    told: tuple[str, ...]
    wall_s: float


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mesh", action="append", help="of a rule (fsdp:4,tp:2)")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--then", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--no-edits", action="store_true")
    given = parser.parse_args(arguments)
    with example() as folder:
        rules = folder / "mesh_rules.toml"
        rules.write_text(rules_text(given.mesh or ["fsdp:4,tp:2"]))
        first = run(folder, "--update", python=given.then)
        print(f"figures written in {first.wall_s:.0f} s", flush=True)
        recorded = rules.read_bytes()
        runs: list[Run] = []
        for number in range(given.runs):
            runs.append(one := run(folder))
            print(f"unchanged {number + 1}: {_words(one)}", flush=True)
        wrong: list[str] = []
        for name, edit in {} if given.no_edits else EDITS.items():
            with edited(folder, edit):
                one = run(folder)
            print(f"{name}: {_words(one)}", flush=True)
            wrong += [] if is_right(edit, one) else [name]
        # Nobody but `--update` writes into the rules.
        assert rules.read_bytes() == recorded
    print(json.dumps(summary(runs, wrong, versions(given.then), versions(sys.executable))))


def rules_text(meshes: Sequence[str]) -> str:
    """A rule by hand for each mesh, for as many CPU devices as its sizes multiply to."""
    text = f'schema = 1\naxes = {json.dumps(AXES)}\nbatch_axes = ["dp", "fsdp"]\n'
    for mesh in meshes:
        sizes = {name: int(size) for name, size in (part.split(":") for part in mesh.split(","))}
        ici = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        text += f'\n[[rule]]\nmatch = "cpu-{math.prod(sizes.values())}"\nici = {{ {ici} }}\n'
        text += 'knobs = { remat = "full" }\n'
    return text


@contextmanager
def example() -> Iterator[Path]:
    """A copy of the examples, without rules that somebody has found for them."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "examples"
        unwanted = shutil.ignore_patterns("__pycache__", "mesh_rules.toml", "results")
        shutil.copytree(EXAMPLES, copy, ignore=unwanted)
        yield copy


@contextmanager
def edited(folder: Path, edit: Edit) -> Iterator[None]:
    """The example with a change in it.

    Raises:
      LookupError: the example has not the text that is changed.
    """
    path = folder / edit.file
    before = path.read_text()
    if edit.old not in before:
        raise LookupError(f"{edit.file} has no {edit.old!r}")
    path.write_text(before.replace(edit.old, edit.new))
    try:
        yield
    finally:
        path.write_text(before)


def run(folder: Path, *options: str, python: str = sys.executable) -> Run:
    """One `automesh check` of the example.

    Raises:
      RuntimeError: it said nothing.
    """
    unwanted = ("PYTHONHASHSEED", "JAX_NUM_CPU_DEVICES")
    variables = {name: value for name, value in os.environ.items() if name not in unwanted}
    variables |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    began_s = time.monotonic()
    done = subprocess.run(
        [python, "-m", "automesh", "check", _SCRIPT, "--json", *options],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.monotonic() - began_s
    try:
        rules = json.loads(done.stdout)["rules"]
    except json.JSONDecodeError:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}") from None
    return Run(
        code=done.returncode,
        reasons=tuple(one["reason"] for one in rules if one["reason"]),
        told=tuple(
            change["what"]
            for one in rules
            for change in one["changes"]
            if change["verdict"] != "same"
        ),
        wall_s=wall_s,
    )


def _words(one: Run) -> str:
    said = "; ".join(one.reasons) or ", ".join(one.told) or "as before"
    return f"exit code {one.code}, {said} ({one.wall_s:.1f} s)"


def is_right(edit: Edit, one: Run) -> bool:
    """Whether a command said of a change what it had to."""
    is_told = any(edit.said in reason for reason in one.reasons) if edit.said else not one.told
    return one.code == edit.code and is_told


def versions(python: str) -> str:
    """The release of jax that an interpreter has."""
    done = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('jax'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def summary(runs: Sequence[Run], wrong: Sequence[str], then: str, now: str) -> dict[str, Any]:
    """What all runs came to: alarms where nothing changed, edits with another verdict, seconds."""
    return {
        "figures_of_jax": then,
        "checked_with_jax": now,
        "runs": len(runs),
        "alarms": sum(one.code != 0 for one in runs),
        "told": sorted({what for one in runs for what in one.told}),
        "wrong_edits": list(wrong),
        "wall_s": round(statistics.median(one.wall_s for one in runs), 1) if runs else 0.0,
        "most_wall_s": round(max((one.wall_s for one in runs), default=0.0), 1),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
