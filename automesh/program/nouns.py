"""What the parent and a worker tell each other about the user's program (no jax)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.cost.pipeline.terms import PipelineTerms
from automesh.cost.terms import Monomial, Terms
from automesh.hardware.absent import AbsentDevices
from automesh.hardware.calibration.points import Point
from automesh.mesh.axes import Scalar
from automesh.outcomes import Counts, Effort, Memory, PipelineOutcome
from automesh.program.capture.nouns import Capture
from automesh.program.script.sources import NOTHING_READ, Reads, Sources
from automesh.space.mapping import SplitArray, StepMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the user pointed at.

    Attributes:
      kind: a script's path, an importable module, or a file with a cloudpickled callable.
      location: absolute path, or dotted module name.
      function: name of the build function inside it (unused for a pickle).
      argv: the script's own arguments, without its name.
      capture: of a script that is run unmodified up to its step, how; `function` is the step's name
        then.
      start: how such a script is started where Python is not given its file: `-m pkg.train`, or
        `--entry NAME` for a console script; `location` is the file of that module.
    """

    kind: Literal["script", "module", "pickle"]
    location: str
    function: str = "build"
    argv: tuple[str, ...] = ()
    capture: Capture | None = None
    start: str = ""

    @property
    def shown(self) -> str:
        """What the user calls it, in short."""
        if self.start:
            return self.start.partition(" ")[2]
        return self.location.rpartition("/")[2] if self.kind == "script" else self.location

    @property
    def by_itself(self) -> str:
        """The command that runs it without automesh."""
        if self.start.startswith("--entry "):
            return self.start.partition(" ")[2]
        if self.location.endswith(".ipynb"):
            return f"jupyter execute {self.shown}"
        return f"python {self.start or self.shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRef:
    """The step that a worker works on, and what user code is told before it builds it.

    Attributes:
      axis_types: of the mesh that `build` gets, as the inspection reported them; empty: as usual.
      facts: of the workload, as the inspection reported them: a mesh must not change them.
      absent: the devices that user code is told of, if the process that runs it has others.
    """

    entry: Entry
    axis_types: tuple[str, ...] = ()
    facts: tuple[tuple[str, int], ...] = ()
    absent: AbsentDevices | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One attached device as jax reports it; `coords` is empty and `slice_index` 0 where there are
    none.

    Attributes:
      says: by attribute, what kernels are chosen by: `compute_capability`, `core_count` and so on.
    """

    id: int
    platform: str
    kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    says: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What jax finds here, without any script; the attributes are those of `Inspection`."""

    devices: tuple[Device, ...]
    process_count: int
    device_memory_bytes: int
    versions: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What the first job of every search learns.

    Attributes:
      devices: all devices, in jax's order.
      process_count: jax processes of the job; only 1 is served.
      device_memory_bytes: what one device can hold, 0 where the backend does not say (CPU).
      knobs: `build`'s keyword parameters after the mesh, with their defaults.
      takes_any_knob: True if `build` has `**kwargs`.
      mapping: what the step says of its logical axes; None if `build` takes no mapping. The arrays
        are looked for if the job names logical axes.
      facts: named integers that constraints may refer to, sorted by name.
      used_axes: mesh axes that any sharding or manual region of the step names; where the job names
        logical axes, other than by way of these.
      axis_types: one of auto, explicit, manual per axis; empty means Auto.
      baseline: the workload's own mesh in text form; empty if it has none.
      tokens_per_step: 0 if the workload does not say.
      has_init: True if `init` gives real initial arguments.
      argument_bytes: bytes of all arguments, unsharded.
      fingerprint: of the program on the all-ones mesh at default knobs.
      source_hash: hash of the script and of the user's modules that it imported.
      sources: these files, each with its own hash.
      reads: what else they read while the step was built.
      versions: of python, automesh, jax, jaxlib, and libtpu or the CUDA plugin where installed.
      environment: XLA, LIBTPU and NCCL environment variables that are set.
      seen: (program without the sizes of its mesh, as a hash; meshes for which it was lowered, at
        the default knobs, for the platform of the job), empty if the job names no platform.
      made_up: arguments of the step without values, where there is no `init` that could give them:
        by the name of the parameter, else `args[0]`.
      notices: what the user should know of the script, one sentence each.
    """

    devices: tuple[Device, ...]
    process_count: int
    device_memory_bytes: int
    knobs: tuple[tuple[str, Scalar], ...]
    takes_any_knob: bool
    facts: tuple[tuple[str, int], ...]
    used_axes: tuple[str, ...]
    axis_types: tuple[str, ...]
    baseline: str
    tokens_per_step: int
    has_init: bool
    argument_bytes: int
    fingerprint: str
    source_hash: str
    versions: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    sources: Sources = ()
    reads: Reads = NOTHING_READ
    seen: tuple[tuple[str, int], ...] = ()
    mapping: StepMapping | None = None
    made_up: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The program was lowered and, being a duplicate of a known one, not compiled."""

    fingerprint: str
    kind: Literal["lowered"] = "lowered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The program of a plan was traced, lowered and written to a file."""

    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildAnswer:
    """What came of building the step of a plan on its mesh, and tracing it. An exception of the
    user's code is no answer, but the job's failure.

    Attributes:
      arguments: those that are split, with the mesh axes.
      uneven: of these, with the dimensions at fault alone, those that jax refuses, because the axes
        do not divide a dimension; empty if the step can be built.
    """

    arguments: tuple[SplitArray, ...]
    uneven: tuple[SplitArray, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileAnswer:
    """What one compile tells.

    Attributes:
      compile_s: of build, lowering and compilation; what was found in the store keeps the seconds
        of its own compile.
      effort: how hard the compiler tried.
      stored: key of the scheduled program in the store; empty if it is not kept.
      asked: what user code asked about devices while it was built and traced for devices that are
        not here, in words, each once.
      pipeline: the stages, if the step is a pipeline.
    """

    fingerprint: str
    memory: Memory
    counts: Counts
    compile_s: float
    effort: Effort = "default"
    stored: str = ""
    asked: tuple[str, ...] = ()
    pipeline: PipelineOutcome | None = None
    kind: Literal["compile_answer"] = "compile_answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafUpdate:
    """What the first step changed in one array that it carries on, by elements read before and
    after it; see `automesh.program.execute.updates`.

    Attributes:
      path: where the array is among the arguments.
      dtype: in which it is kept.
      norm: Euclidean norm of new minus old.
      old_norm: that of the old values: what rounding is measured by.
      spread: standard deviation over mean of the sizes of the changes: near 0 where all elements
        move by the same, as in the first step of Adam.
      apart: largest difference of two copies of an element after the step.
      count: elements that were read.
      is_finite: False if a change is not a number; the figures are then 0.
      projections: of the update on random signs, the same in every plan.
      sensitivity: how far it moves, relative to its norm, if every argument is changed by a unit in
        the last place; 0 where that was not tried. About 1.4 for what is rounding alone, as the
        gradient of a bias that cancels.
    """

    path: str
    dtype: str
    norm: float
    old_norm: float
    spread: float
    apart: float
    count: int
    is_finite: bool
    projections: tuple[float, ...]
    sensitivity: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentDigest:
    """What tells the values of one array among the arguments of a step from other values, by
    elements at the same places of the whole array on every mesh.

    Attributes:
      path: `args[1]['tokens']`.
      dtype: in which it is kept.
      count: elements that were read.
      norm: their Euclidean norm.
      projections: their sums under random signs, the same on every mesh.
    """

    path: str
    dtype: str
    count: int
    norm: float
    projections: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossVector:
    """An array of losses that the first step returns, as of each example of the batch.

    Attributes:
      path: where it is among what the step returns: `[1]['losses']`.
      size: elements that it has.
      values: of those that were read, in their order in the whole array.
    """

    path: str
    size: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitAnswer:
    """What one visit to a finalist tells.

    Attributes:
      samples_s: seconds per step, one per sample of `steps` chained steps with one synchronization.
      losses: scalar float outputs of the first steps from the initial state, in order (all scalars
        of step 1, then of step 2, ...); of a step that returns none, the means of `vectors`.
      loss_dtype: the coarsest float type that takes part in the step: float64, float32, bfloat16,
        float16 ...
      values: where the arguments came from.
      setup_s: seconds spent before the first sample (build, compile or cache, materialize, warm
        up), without `start_s`.
      state_s: those of them that made the state and warmed up, as every visit does that finds no
        state.
      peak_bytes: measured peak of one device, 0 where the backend does not report it.
      fingerprint: of the program that ran.
      updates: of the arrays that the step carries on, where `losses` were asked for.
      start_s: what this process has spent once, for its first visit: until jax had its devices, the
        script was loaded and had built a step for the first time, with all that it imports.
      vectors: arrays of losses of the first step, if it returns no scalar float.
      arguments: of the first step; recorded with `losses`, as are `updates` and `vectors`.
    """

    samples_s: tuple[float, ...]
    losses: tuple[float, ...]
    loss_dtype: str
    values: Literal["synthetic", "user"]
    setup_s: float
    peak_bytes: int
    fingerprint: str
    updates: tuple[LeafUpdate, ...] = ()
    state_s: float = 0.0
    start_s: float = 0.0
    vectors: tuple[LossVector, ...] = ()
    arguments: tuple[ArgumentDigest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """What one propagation of shardings gives.

    Attributes:
      terms: of the step; `terms.fixed` names axes whose sizes are baked into the program.
      failed_probes: of the job's probes, those at which the program is another one: meshes of that
        size need a propagation of their own.
      notes: what the user should know, one sentence each.
      lower_s: spent in `build`, tracing and lowering.
      propagate_s: spent in Shardy and in making terms.
      asked: what user code asked about devices that are not here while it was loaded, built and
        traced, in words, each once; if nothing, the terms hold for any devices of the platform.
      results: bytes of each result on one device, if they were asked for.
      pipeline: of a step that is a pipeline; `terms` then says only where all its terms hold.
    """

    terms: Terms
    failed_probes: tuple[tuple[tuple[str, int], ...], ...]
    notes: tuple[str, ...]
    lower_s: float
    propagate_s: float
    asked: tuple[str, ...] = ()
    results: tuple[Monomial, ...] = ()
    pipeline: PipelineTerms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What single pieces of work take on the attached devices, in the order of the job's probes."""

    points: tuple[Point, ...]
