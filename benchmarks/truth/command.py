"""What the compiler makes of steps, mesh by mesh: the truth that estimates are held against.

    python -m benchmarks.truth [--example dense_lm gnn ...] [--devices 8 ...] [--jobs 1]

compiles every factorization of some number of devices over three axes of each step on virtual CPU
devices, a process per step, and keeps the answers in `results/truth/`: a second run is instant. The
steps are the three language models of `examples`, on 8 and on 16 devices, and those of
`benchmarks/support/scripts/steps` and of `benchmarks/support/scripts/kinds`, on 8. A case may also
be compiled for the slice `v5e:2x4`, without a TPU (libtpu).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from automesh.outcomes import Collective, Counts, Memory
from automesh.platforms import platform_named
from automesh.program.nouns import Entry
from benchmarks.support.paths import ROOT

CACHE = ROOT / "results" / "truth"
AXES = ("dp", "fsdp", "ep", "tp", "sp")
# The axes that each language model of the examples is about; the others have size 1.
LANGUAGE_MODELS = {
    "dense_lm": ("dp", "fsdp", "tp"),
    "moe_lm": ("fsdp", "ep", "tp"),
    "long_context": ("fsdp", "tp", "sp"),
}
# The same of the steps in `_STEPS`.
OTHER_STEPS = {
    "gnn": ("dp", "fsdp", "tp"),
    "embedding": ("dp", "fsdp", "tp"),
    "convnet": ("dp", "fsdp", "tp"),
    "unet": ("dp", "fsdp", "tp"),
    "rnn": ("dp", "fsdp", "tp"),
    "shard_map_mlp": ("dp", "fsdp", "tp"),
    "sorted_moe": ("fsdp", "ep", "tp"),
    "diffusion_transformer": ("dp", "fsdp", "tp"),
    "vit": ("dp", "fsdp", "tp"),
    "state_space": ("dp", "fsdp", "tp"),
}
# Steps that differ in kind: the module of `kinds` that has each, and its axes.
_DENSE, _ROUTED = ("dp", "fsdp", "tp"), ("dp", "fsdp", "ep")
KINDS = {
    "pooled": ("vision", _DENSE),
    "depthwise": ("vision", _DENSE),
    "contrastive": ("vision", _DENSE),
    "ragged": ("experts", _ROUTED),
    "one_hot": ("experts", _ROUTED),
    "mapped": ("experts", _ROUTED),
    "accumulated": ("loops", _DENSE),
    "accumulated_strided": ("loops", _DENSE),
    "several_updates": ("loops", _DENSE),
    "remat_stack": ("loops", _DENSE),
    "layer_split_stack": ("loops", _DENSE),
    "offloaded": ("loops", _DENSE),
    "adafactor": ("loops", _DENSE),
    "lora": ("loops", _DENSE),
    "replicated": ("loops", _DENSE),
    "wide_perceptron": ("loops", _DENSE),
    "bfloat16": ("numbers", _DENSE),
    "int8": ("numbers", _DENSE),
    "float8": ("numbers", _DENSE),
    "fourier": ("numbers", _DENSE),
    "stencil": ("numbers", _DENSE),
    "shampoo": ("numbers", _DENSE),
    "full_remat": ("numbers", _DENSE),
    "type_drift": ("numbers", _DENSE),
    "causal": ("sequences", _DENSE),
    "chunked_loss": ("sequences", _DENSE),
    "decode": ("sequences", _DENSE),
    "lstm": ("sequences", _DENSE),
    "linear_recurrence": ("sequences", _DENSE),
    "beam": ("sequences", _DENSE),
}
CHOSEN = LANGUAGE_MODELS | OTHER_STEPS | {name: axes for name, (_, axes) in KINDS.items()}
_FEW = ((1, 8, 1), (2, 2, 2), (8, 1, 1), (1, 2, 4))
# The slice that a case with platform `tpu` is compiled for.
SLICE = "v5e:2x4"
_EXAMPLES = ROOT / "examples"
_STEPS = ROOT / "benchmarks" / "support" / "scripts" / "steps"
_KINDS = ROOT / "benchmarks" / "support" / "scripts" / "kinds"
_SHARED = ("training.py", "attention.py")
SIZE = "mid"
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One example on one mesh.

    Attributes:
      sizes: of all axes, in the order of the mesh.
      size: preset of a language model; the other steps have one size.
      knobs: keyword arguments for `build`, as (name, value).
      platform: cpu, or tpu for the slice `SLICE`.
    """

    example: str
    sizes: tuple[tuple[str, int], ...]
    size: str = SIZE
    knobs: tuple[tuple[str, str | int], ...] = ()
    platform: str = "cpu"

    @property
    def mesh(self) -> str:
        """Its axes above 1: `dp:2,tp:4`."""
        return ",".join(f"{axis}:{size}" for axis, size in self.sizes if size > 1)

    @property
    def entry(self) -> Entry:
        """Where a worker finds the step."""
        is_model = self.example in LANGUAGE_MODELS
        if self.example in KINDS:
            module, _ = KINDS[self.example]
            return Entry(kind="script", location=str(_KINDS / f"{module}.py"))
        folder = _EXAMPLES if is_model else _STEPS
        return Entry(
            kind="script",
            location=str(folder / f"{self.example}.py"),
            argv=("--size", self.size) if is_model else (),
        )

    @property
    def arguments(self) -> tuple[tuple[str, str | int], ...]:
        """Keyword arguments for `build`: the knobs, and which step of a module of `kinds`."""
        return (*self.knobs, ("step", self.example)) if self.example in KINDS else self.knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the compiler says about one case.

    Attributes:
      partitioned: counts of the module as the partitioner leaves it, before anything that is
        specific to a backend: bf16 is still bf16. For a TPU, of the finished module.
      flops: of matrix multiplications in the finished module.
      memory: of one device; its peak is arguments + outputs - alias + temporaries.
    """

    case: Case
    partitioned: Counts
    flops: int
    memory: Memory
    compile_s: float


def cases(examples: Iterable[str] = tuple(CHOSEN), devices: Sequence[int] = ()) -> tuple[Case, ...]:
    """Every factorization of every number of devices over the axes chosen for each example.

    Args:
      devices: their numbers; empty: those of `devices_of` each example.
    """
    return tuple(
        Case(example=example, sizes=tuple((a, dict(zip(axes, sizes)).get(a, 1)) for a in AXES))
        for example in examples
        for axes in (CHOSEN[example],)
        for count in devices or devices_of(example)
        for sizes in factorizations(count, len(axes))
    )


def few_cases(examples: Iterable[str], platforms: Iterable[str] = ("cpu",)) -> tuple[Case, ...]:
    """A few meshes of 8 devices for each example: an axis alone, two and three.

    Two of them for TPUs, whose compiler takes a quarter of a minute for each.
    """
    return tuple(
        Case(
            example=example,
            sizes=tuple((a, dict(zip(CHOSEN[example], sizes)).get(a, 1)) for a in AXES),
            platform=platform,
        )
        for example in examples
        for platform in platforms
        for sizes in (_FEW[:2] if platform == "tpu" else _FEW)
    )


def devices_of(example: str) -> tuple[int, ...]:
    """On how many devices a step is compared by default."""
    return (8, 16) if example in LANGUAGE_MODELS else (8,)


def factorizations(product: int, length: int) -> list[tuple[int, ...]]:
    """All tuples of `length` positive integers with this product, the first one growing slowest."""
    if length == 1:
        return [(product,)]
    return [
        (first, *rest)
        for first in range(1, product + 1)
        if product % first == 0
        for rest in factorizations(product // first, length - 1)
    ]


def truths(
    wanted: Sequence[Case], *, jobs: int = 1, say: Callable[[str], None] | None = None
) -> dict[Case, Truth | str]:
    """Each case's truth, compiled where the cache has none; a string says why there is none."""
    if say is None:
        say = _to_stderr
    found: dict[Case, Truth | str] = {}
    missing: list[Case] = []
    for case in wanted:
        known = cached(case)
        if known is None:
            missing.append(case)
        else:
            found[case] = known
    if missing:
        say(f"truth: {len(found)} meshes are cached, {len(missing)} to compile")
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in missing:
        groups.setdefault((case.example, case.platform), []).append(case)
    number = 0
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for group in pool.map(_compiled, groups.values()):
            for case, answer in group.items():
                number += 1
                found[case] = answer
                what = answer if isinstance(answer, str) else f"{answer.compile_s:.1f} s"
                place = f"{case.example} {case.mesh or '1'} {case.platform}"
                say(f"truth: {number}/{len(missing)} {place}: {what}")
    return {case: found[case] for case in wanted}


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cached(case: Case) -> Truth | None:
    """What an earlier run found, if neither the sources nor jax changed since."""
    path = _path(case)
    return _truth(case, json.loads(path.read_text())) if path.exists() else None


def _compiled(group: Sequence[Case]) -> dict[Case, Truth | str]:
    """Compiles the cases of one step in one process, and in another what it left when it died."""
    found: dict[Case, Truth | str] = {}
    while waiting := [case for case in group if case not in found]:
        answers, failure = _answers(waiting)
        for case, answer in zip(waiting, answers, strict=False):
            found[case] = answer if isinstance(answer, str) else _kept(case, answer)
        if failure:
            found[waiting[len(answers)]] = failure
    return found


def _answers(waiting: Sequence[Case]) -> tuple[list[dict[str, Any] | str], str]:
    """Asks a worker: what it answered, in order, and why it did not answer the next case."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.truth.worker",
                json.dumps([asdict(case) for case in waiting]),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ | dict(platform_named("tpu").worker_variables),
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer after {time.monotonic() - begun:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(('"', "{"))]
    answers = [json.loads(line) for line in lines][: len(waiting)]
    if len(answers) == len(waiting):
        return answers, ""
    said = done.stderr.strip().splitlines() or [""]
    return answers, f"the worker ended with {done.returncode}: {said[-1]}"


def _kept(case: Case, answer: dict[str, Any]) -> Truth:
    path = _path(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(answer, indent=1))
    unfinished.replace(path)
    return _truth(case, answer)


def _truth(case: Case, answer: dict[str, Any]) -> Truth:
    counts = answer["partitioned"]
    moved: list[dict[str, Any]] = [
        {**one, "axes": tuple(one["axes"])} for one in counts["collectives"]
    ]
    return Truth(
        case=case,
        partitioned=Counts(
            flops=counts["flops"],
            hbm_bytes=counts["hbm_bytes"],
            collectives=tuple(Collective(**one) for one in moved),
            uncounted=tuple(counts["uncounted"]),
        ),
        flops=answer["flops"],
        memory=Memory(**answer["memory"]),
        compile_s=answer["compile_s"],
    )


def _path(case: Case) -> Path:
    text = json.dumps([asdict(case), _sources(case.example), metadata.version("jax")])
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    mesh = case.mesh.replace(":", "").replace(",", "_") or "one"
    size = case.size if case.platform == "cpu" else f"{case.size}-{case.platform}"
    return CACHE / f"{case.example}-{size}-{mesh}-{key}.json"


def module_path(case: Case) -> Path:
    """Where the program compiled for a TPU is kept, which is counted again when that changes."""
    versions = [metadata.version(name) for name in ("jax", "libtpu")]
    flags = [dict(platform_named("tpu").worker_variables), os.environ.get("LIBTPU_INIT_ARGS", "")]
    text = json.dumps([asdict(case), _sources(case.example, counts=False), versions, flags])
    return CACHE / "modules" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json.gz"


def _sources(example: str, *, counts: bool = True) -> str:
    """Hash of all that an answer depends on: the example, and what counts."""
    is_model = example in LANGUAGE_MODELS
    folder = _EXAMPLES if is_model else _STEPS
    files = [
        _KINDS / f"{KINDS[example][0]}.py" if example in KINDS else folder / f"{example}.py",
        *((_EXAMPLES / "lm").glob("*.py") if is_model else (_STEPS / one for one in _SHARED)),
    ]
    if counts:
        files += [
            *(ROOT / "automesh" / "hlo").rglob("*.py"),
            ROOT / "benchmarks" / "truth" / "worker.py",
        ]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Compiles what is missing; 1 if some mesh has no truth."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.truth", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--example", nargs="+", choices=tuple(CHOSEN), default=tuple(CHOSEN))
    parser.add_argument("--devices", nargs="+", type=int, default=())
    parser.add_argument("--jobs", type=int, default=1, help="compilations side by side")
    options = parser.parse_args()
    answers = truths(cases(options.example, options.devices), jobs=options.jobs)
    for case, answer in answers.items():
        if isinstance(answer, str):
            print(f"{case.example} {case.mesh}: {answer}")
        else:
            print(
                f"{case.example} {case.mesh}: {answer.flops:.4g} FLOPs, "
                f"{sum(c.wire_bytes for c in answer.partitioned.collectives) / 1e6:.0f} MB sent, "
                f"peak {answer.memory.peak_bytes / 2**20:.0f} MiB"
            )
    failed = sum(isinstance(answer, str) for answer in answers.values())
    print(json.dumps({"meshes": len(answers), "failed": failed}))
    return 1 if failed else 0
