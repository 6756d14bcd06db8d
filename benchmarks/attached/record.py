"""What is measured on an attached accelerator, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from automesh.jsonio import from_json
from automesh.outcomes import Counts, Memory
from automesh.program.nouns import Entry
from benchmarks.support.paths import ROOT
from benchmarks.support.spaces import with_usual_axes

SCRIPT = "benchmarks/support/scripts/made_up.py"
LARGER = "benchmarks/support/scripts/larger.py"
_SPACE = """
[axes]
dp = {}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step at one size.

    Attributes:
      name: of the script in `examples/`, without its ending, or of the step.
      argv: arguments of the script.
      remat, microbatches: values of the knobs; none where the script has no knobs.
      script: that builds it.
    """

    name: str
    argv: tuple[str, ...]
    remat: tuple[str, ...] = ("none", "dots", "full")
    microbatches: tuple[int, ...] = (1, 2)
    script: str = SCRIPT

    @property
    def space(self) -> str:
        """The search space: one axis, which one device fills, and the knobs."""
        knobs = {"remat": list(self.remat), "microbatches": list(self.microbatches)}
        lines = [f"{name} = {json.dumps(values)}" for name, values in knobs.items() if values]
        return with_usual_axes("\n".join([_SPACE, "[knobs]", *lines, ""]))

    def has(self, knob: str) -> bool:
        """Whether the script has a knob of that name."""
        return bool({"remat": self.remat, "microbatches": self.microbatches}[knob])

    @property
    def entry(self) -> Entry:
        return Entry(kind="script", location=str(ROOT / self.script), argv=self.arguments)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the script."""
        return ("--example", self.name, *self.argv) if self.script == SCRIPT else self.argv


# A gigabyte of weights and more, steps of a tenth of a second and more: they fill one GPU.
STEPS = (
    Step(name="dense_lm", argv=("--size", "mid", "--rows", "8")),
    Step(name="moe_lm", argv=("--size", "mid", "--rows", "4")),
    Step(name="long_context", argv=("--size", "mid", "--rows", "2", "--length", "4096")),
)
TINY = tuple(Step(name=step.name, argv=("--size", "tiny")) for step in STEPS)
_OTHERS = (
    *("convnet", "diffusion_transformer", "embedding", "gnn", "rnn", "shard_map_mlp"),
    *("sorted_moe", "state_space", "unet", "vit"),
)


def _other(name: str, *more: str) -> Step:
    argv = ("--step", name, *more)
    called = "-".join((name, *(one.removeprefix("--") for one in more)))
    return Step(name=called, argv=argv, remat=(), microbatches=(), script=LARGER)


# Steps that are no language models, in sizes that fill a GPU, and as small as `benchmarks.terms`
# has them, where it is about what it takes to start kernels.
OTHERS = (*map(_other, _OTHERS), *(_other(name, "--small") for name in _OTHERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan of one step.

    Attributes:
      step: the script and its arguments.
      compile_s: of build, lowering and compilation.
      rounds_s: the median of the samples of each visit, seconds per step.
      spread: (largest - least) / median of all samples.
      peak_bytes: the device's high-water mark, 0 if it did not rise at this plan.
      failure: why there is no time; empty if there is one.
    """

    step: str
    plan: str
    compile_s: float = 0.0
    memory: Memory | None = None
    counts: Counts | None = None
    rounds_s: tuple[float, ...] = ()
    spread: float = 0.0
    peak_bytes: int = 0
    failure: str = ""

    @property
    def step_s(self) -> float:
        """The lesser round: what else happens on the machine only adds."""
        return min(self.rounds_s)

    @property
    def stated_bytes(self) -> int:
        """What must fit, as the compiler states it; 0 if it did not."""
        return self.memory.peak_bytes if self.memory is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was measured on one device.

    Attributes:
      selector: of the device, `gpu-h100-1`.
      device_kind: as jax calls it.
      limit_bytes: what one program may use; 0 if the device does not say.
      steps: that were measured.
    """

    selector: str
    platform: str
    device_kind: str
    limit_bytes: int
    versions: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    rows: tuple[Row, ...] = ()

    def put(self, row: Row) -> Record:
        """With a row in the place of an older one of the same plan."""
        others = [one for one in self.rows if (one.step, one.plan) != (row.step, row.plan)]
        return replace(self, rows=(*others, row))

    def only(self, names: Collection[str]) -> Record:
        """What it has of the steps of these names; without any, all."""
        if not names:
            return self
        return replace(
            self,
            steps=tuple(step for step in self.steps if step.name in names),
            rows=tuple(row for row in self.rows if row.step in names),
        )


def kept(record: Record, path: Path) -> Record:
    """Writes the record, whole or not at all, and gives it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return record


def read_record(path: Path) -> Record:
    """Reads what `--measure` has kept."""
    return from_json(json.loads(path.read_text(encoding="utf-8")), Record)
