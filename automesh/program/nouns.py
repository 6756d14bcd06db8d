"""The data classes in the messages between parent and worker about the user's program (no jax)."""

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
    """The script, module or pickled function that the user named.

    Attributes:
      kind: a script's path, an importable module, or a file with a cloudpickled callable.
      location: absolute path, or dotted module name.
      function: name of the build function inside it (unused for a pickle).
      argv: the script's own arguments, without its name.
      capture: how an unmodified script is run up to its step; `function` is then the step's name.
      start: how such a script is started if not by its file: `-m pkg.train`, or `--entry NAME` for
        a console script; `location` is then the file of that module.
    """

    kind: Literal["script", "module", "pickle"]
    location: str
    function: str = "build"
    argv: tuple[str, ...] = ()
    capture: Capture | None = None
    start: str = ""

    @property
    def shown(self) -> str:
        """A short name for messages."""
        if self.start:
            return self.start.partition(" ")[2]
        return self.location.rpartition("/")[2] if self.kind == "script" else self.location

    @property
    def is_run_for_each(self) -> bool:
        """Whether it is an unmodified script that is run up to its step for each mesh."""
        capture = self.capture
        return capture is not None and not capture.is_carried and capture.layout is None

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
    """The step that a worker works on, with the facts that user code needs to build it.

    Attributes:
      axis_types: axis types of the mesh for `build`, as the inspection reported them; empty for the
        default.
      facts: facts of the workload, as the inspection reported them; they must not depend on the
        mesh.
      absent: the absent devices that user code sees; None if it sees those of its process.
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
      says: the attributes by which kernels are chosen: `compute_capability`, `core_count` and so
        on.
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
    """The devices and versions that jax finds without a script; the attributes are those of
    `Inspection`."""

    devices: tuple[Device, ...]
    process_count: int
    device_memory_bytes: int
    versions: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The answer of the first job of every search.

    Attributes:
      devices: all devices, in jax's order.
      process_count: jax processes of the job; only 1 is served.
      device_memory_bytes: memory of one device; 0 if the backend does not state it (CPU).
      knobs: `build`'s keyword parameters after the mesh, with their defaults.
      takes_any_knob: True if `build` has `**kwargs`.
      mapping: the facts about the step's logical axes; None if `build` takes no mapping. Its arrays
        are found if the job names logical axes.
      facts: named integers that constraints may refer to, sorted by name.
      used_axes: mesh axes that any sharding or manual region of the step names; if the job names
        logical axes, without those that only these use.
      axis_types: one of auto, explicit, manual per axis; empty means Auto.
      baseline: the workload's own mesh in text form; empty if it has none.
      tokens_per_step: 0 if the workload does not state it.
      has_init: True if `init` gives real initial arguments.
      argument_bytes: bytes of all arguments, unsharded.
      fingerprint: the fingerprint of the program at default knobs, on a mesh of one device; for a
        script that is run for each mesh, or refuses one device, on its own mesh.
      source_hash: hash of the script and of the user's modules that it imported.
      sources: these files, each with its own hash.
      reads: other files, variables and packages that they read while the step was built.
      versions: versions of python, automesh, jax, jaxlib, and of libtpu or the CUDA plugin if
        installed.
      environment: XLA, LIBTPU and NCCL environment variables that are set.
      seen: (program without the sizes of its mesh, as a hash; meshes for which it was lowered, at
        the default knobs, for the platform of the job), empty if the job names no platform.
      made_up: arguments of the step without values, if no `init` can give them: by the name of the
        parameter, else `args[0]`.
      notices: notices for the user about the script, one sentence each.
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
class SizedArray:
    """An array among the arguments of a step, with its whole shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildAnswer:
    """The result of building and tracing the step of a plan on its mesh. An exception of user code
    is no answer, but a failure of the job.

    Attributes:
      arguments: the arguments that are split, with the mesh axes.
      uneven: the arguments among them that jax refuses, because the axes do not divide a dimension;
        only with these dimensions. Empty if the step can be built.
      data: the arguments that are not carried to the next step.
    """

    arguments: tuple[SplitArray, ...]
    uneven: tuple[SplitArray, ...] = ()
    data: tuple[SizedArray, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileAnswer:
    """The answer of one compile.

    Attributes:
      compile_s: seconds of build, lowering and compilation; a program from the store has the
        seconds of its own compile.
      effort: the effort of the compiler.
      stored: key of the scheduled program in the store; empty if it is not kept.
      asked: questions of user code about absent devices while it was built and traced, in words,
        each once.
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


RESULT = "result"
"""Beginning of the path of a returned array that is compared like an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafUpdate:
    """The update of one carried array by the first step, from elements read before and after it;
    see `automesh.program.execute.updates`.

    Attributes:
      path: path of the array in the arguments; for a returned array, `RESULT` and its path.
      dtype: type of its elements.
      norm: Euclidean norm of new minus old.
      old_norm: norm of the old values, the scale of rounding errors.
      spread: standard deviation over mean of the sizes of the changes: near 0 if all elements
        change equally, as in the first step of Adam.
      apart: largest difference of two copies of an element after the step.
      count: elements that were read.
      is_finite: False if a change is not a number; the figures are then 0.
      projections: projections of the update on random signs, which are the same in every plan.
      sensitivity: change of the update, relative to its norm, if every argument is changed by a
        unit in the last place; 0 if not tested. About 1.4 for an update that is only rounding, such
        as the gradient of a bias that cancels.
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
    """A digest of the values of one array argument of a step, from elements at the same positions
    of the whole array on every mesh.

    Attributes:
      path: `args[1]['tokens']`.
      dtype: its type.
      count: elements that were read.
      norm: their Euclidean norm.
      projections: their sums under random signs, the same on every mesh.
      shape: its shape; None in what former versions stored.
    """

    path: str
    dtype: str
    count: int
    norm: float
    projections: tuple[float, ...]
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossVector:
    """An array of losses that the first step returns, for example one for each example of the
    batch.

    Attributes:
      path: path in the return value of the step: `[1]['losses']`.
      size: number of its elements.
      values: values of the elements that were read, in their order in the whole array.
    """

    path: str
    size: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitAnswer:
    """The answer of one visit to a plan.

    Attributes:
      samples_s: seconds per step, one per sample of `steps` chained steps with one synchronization.
      losses: scalar float outputs of the first steps from the initial state, in order (all scalars
        of step 1, then of step 2, ...); for a step that returns none, the means of `vectors`.
      loss_dtype: the coarsest float type that takes part in the step: float64, float32, bfloat16,
        float16 ...
      values: where the arguments came from.
      setup_s: seconds spent before the first sample (build, compile or cache, materialize, warm
        up), without `start_s`.
      state_s: the part of `setup_s` that made the state and warmed up, which every visit without a
        kept state repeats.
      peak_bytes: measured peak of one device; 0 if the backend does not report it.
      fingerprint: the fingerprint of the program that ran.
      updates: the updates of the carried arrays, if `losses` are recorded.
      start_s: seconds that this process has spent once, for its first visit: until jax had its
        devices, and the script was loaded and had built a step for the first time, with all of its
        imports.
      vectors: arrays of losses of the first step, if it returns no scalar float.
      arguments: digests of the arguments of the first step; recorded with `losses`, like `updates`
        and `vectors`.
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
    """The answer of one propagation of shardings.

    Attributes:
      terms: the terms of the step; `terms.fixed` has the axes whose sizes are constants of the
        program.
      failed_probes: the job's probes at which the program differs: meshes of these sizes need
        propagations of their own.
      notes: notices for the user, one sentence each.
      lower_s: seconds of `build`, tracing and lowering.
      propagate_s: seconds of Shardy, and of making the terms.
      asked: the questions of user code about absent devices while it was loaded, built and traced,
        in words, each once; without any, the terms hold for all devices of the platform.
      results: bytes of each result on one device, if the job asks for them.
      pipeline: the stages, if the step is a pipeline; `terms` then only shows at which sizes all of
        its terms hold.
      is_general: True if enough meshes were lowered, and their programs differ only in the sizes of
        their axes. Then the terms do not depend on the other sizes of the job, and searches for
        another number of devices may use them.
    """

    terms: Terms
    failed_probes: tuple[tuple[tuple[str, int], ...], ...]
    notes: tuple[str, ...]
    lower_s: float
    propagate_s: float
    asked: tuple[str, ...] = ()
    results: tuple[Monomial, ...] = ()
    pipeline: PipelineTerms | None = None
    is_general: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimes:
    """The times of single pieces of work on the attached devices, in the order of the job's
    probes."""

    points: tuple[Point, ...]
