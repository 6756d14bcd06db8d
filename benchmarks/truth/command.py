"""What the compiler makes of steps, mesh by mesh: the truth that estimates are held against.

    python -m benchmarks.truth [--example dense_lm gnn ...] [--devices 8 ...] [--jobs 1]

compiles every factorization of some number of devices over three axes of each step on virtual CPU
devices, a process per mesh, and keeps the answers in `results/truth/`: a second run is instant. The
steps are the three language models of `examples`, on 8 and on 16 devices, and those of
`benchmarks/support/scripts/steps`, on 8.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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
CHOSEN = LANGUAGE_MODELS | OTHER_STEPS
_EXAMPLES = ROOT / "examples"
_STEPS = ROOT / "benchmarks" / "support" / "scripts" / "steps"
_SHARED = ("training.py", "attention.py")
SIZE = "mid"
_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One example on one mesh.

    Attributes:
      sizes: of all axes, in the order of the mesh.
      size: preset of a language model; the other steps have one size.
      knobs: keyword arguments for `build`, as (name, value).
    """

    example: str
    sizes: tuple[tuple[str, int], ...]
    size: str = SIZE
    knobs: tuple[tuple[str, str | int], ...] = ()

    @property
    def mesh(self) -> str:
        """Its axes above 1: `dp:2,tp:4`."""
        return ",".join(f"{axis}:{size}" for axis, size in self.sizes if size > 1)

    @property
    def entry(self) -> Entry:
        """Where a worker finds the step."""
        is_model = self.example in LANGUAGE_MODELS
        folder = _EXAMPLES if is_model else _STEPS
        return Entry(
            kind="script",
            location=str(folder / f"{self.example}.py"),
            argv=("--size", self.size) if is_model else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the CPU compiler says about one case.

    Attributes:
      partitioned: counts of the module as the partitioner leaves it, before anything that is
        specific to a backend: bf16 is still bf16.
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
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for number, (case, answer) in enumerate(zip(missing, pool.map(_compiled, missing)), 1):
            found[case] = answer
            what = answer if isinstance(answer, str) else f"{answer.compile_s:.1f} s"
            say(f"truth: {number}/{len(missing)} {case.example} {case.mesh or '1'}: {what}")
    return {case: found[case] for case in wanted}


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cached(case: Case) -> Truth | None:
    """What an earlier run found, if neither the sources nor jax changed since."""
    path = _path(case)
    return _truth(case, json.loads(path.read_text())) if path.exists() else None


def _compiled(case: Case) -> Truth | str:
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.truth.worker", json.dumps(asdict(case))],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer after {time.monotonic() - begun:.0f} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [""]
        return f"the worker ended with {done.returncode}: {lines[-1]}"
    answer = json.loads(done.stdout.splitlines()[-1])
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
    return CACHE / f"{case.example}-{case.size}-{mesh}-{key}.json"


def _sources(example: str) -> str:
    """Hash of all that an answer depends on: the example, and what counts."""
    is_model = example in LANGUAGE_MODELS
    files = [
        (_EXAMPLES if is_model else _STEPS) / f"{example}.py",
        *((_EXAMPLES / "lm").glob("*.py") if is_model else (_STEPS / one for one in _SHARED)),
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
