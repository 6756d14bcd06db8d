"""The jobs that a worker does (no jax). Their answers are in `automesh.program.nouns`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.cost.terms import Cure
from automesh.hardware.absent import AbsentDevices
from automesh.hardware.calibration.points import Probe
from automesh.mesh.axes import Plan, Scalar
from automesh.mesh.mapping import LogicalAxes
from automesh.outcomes import Effort
from automesh.program.nouns import StepRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The process environment of a worker; another environment needs a new process.

    Attributes:
      platforms: value of JAX_PLATFORMS, never empty.
      cpu_devices: number of virtual CPU devices; 0 leaves the number to jax.
      variables: further environment variables, sorted by name.
    """

    platforms: str
    cpu_devices: int = 0
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectJob:
    """Asks about the step and its axes; the answer is an `Inspection`.

    Attributes:
      platform: the platform whose programs will be propagated: cpu, gpu, tpu; empty for none.
      mapping: the logical axes of the search space, each with its first choice.
    """

    step: StepRef
    axis_names: tuple[str, ...]
    platform: str = ""
    mapping: LogicalAxes = ()
    kind: Literal["inspect"] = "inspect"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverJob:
    """Runs a script without `build` to find its mesh and step; the answer is a `Discovery`.

    The answer is `OtherDevices` if the script fails because it names another number of devices.
    The worker sends the event `{"event": "waits", "text": ...}` if the script goes on for long
    before it trains.

    Attributes:
      wanted: the name of the step function; empty for the function that looks like the step.
      folder: where the step is stored; empty to store it nowhere.
      num_devices: the number of devices that the script names and this worker therefore got; 0 if
        they are those of the target.
      infer: whether the classes of the step's dimensions are wanted even if the script makes a
        mesh.
      measures_nothing: whether the step is only described, as for a dry run, so that the script's
        arrays are made and computed with only if it cannot do without them. For devices that are
        not here this is always so.
    """

    step: StepRef
    wanted: str = ""
    folder: str = ""
    num_devices: int = 0
    infer: bool = False
    measures_nothing: bool = False
    kind: Literal["discover"] = "discover"


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryJob:
    """Compares the stored step on another mesh with a real run there; the answer is a `CarryCheck`.

    Attributes:
      plans: plans to try in order; the first one on which jax accepts the stored step is used.
      limit_s: seconds after which the job is ended; 0 if it is not.
    """

    step: StepRef
    plans: tuple[Plan, ...]
    limit_s: float = 0.0
    kind: Literal["carry"] = "carry"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraysJob:
    """Asks which logical axes split the arrays of the step at other knobs; the answer is a
    `StepMapping`.

    It is a job of its own, since a knob may end the process and with it the inspection.

    Attributes:
      knobs: keyword arguments for `build`.
      axis_names, platform, mapping: as in `InspectJob`.
    """

    step: StepRef
    axis_names: tuple[str, ...]
    knobs: tuple[tuple[str, Scalar], ...]
    mapping: LogicalAxes
    platform: str = ""
    kind: Literal["arrays"] = "arrays"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesJob:
    """Asks which devices the worker has; the answer is an `Attachment`.

    Attributes:
      absent: absent devices, for which the answer has the facts of a compile-only client and the
        memory that its compiler lets a program use; a `Failed` of stage `start` says why they
        cannot be compiled for.
    """

    absent: AbsentDevices | None = None
    kind: Literal["devices"] = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """Lowers and compiles a plan; the answer is a `CompileAnswer`.

    The worker sends the event `{"event": "lowered", "fingerprint": ...}` before it compiles. If the
    parent replies `{"go": false}`, the worker does not compile, and the answer is `Lowered`.

    Attributes:
      cache_dir: where jax keeps executables for attached devices.
      effort: how hard the compiler shall try.
      store_dir: where the scheduled program is kept; for absent devices the worker looks there
        before it compiles. Empty for nowhere.
    """

    step: StepRef
    plan: Plan
    cache_dir: str
    effort: Effort = "default"
    store_dir: str = ""
    kind: Literal["compile"] = "compile"


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarizeJob:
    """Describes the step of a plan, for which it calls `build` twice; the answer is a
    `StepSummary`."""

    step: StepRef
    plan: Plan
    kind: Literal["summarize"] = "summarize"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildJob:
    """Calls `build` and traces the step without compiling it; the answer is a `BuildAnswer`."""

    step: StepRef
    plan: Plan
    kind: Literal["build"] = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """Traces and lowers a plan, and may write its program to a file; the answer is a `Traced`.

    Attributes:
      text_file: path of that file; see `automesh.program.lower.program_text`. Empty to write none.
    """

    step: StepRef
    plan: Plan
    text_file: str = ""
    kind: Literal["trace"] = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitJob:
    """Runs steps of a plan on the devices; the answer is a `VisitAnswer`.

    The worker keeps the executables of visited plans. It keeps their arrays only if `keep` is set;
    else each visit makes them again.

    Attributes:
      steps: chained steps per sample; 0 measures nothing and only records losses.
      samples: samples to take.
      loss_steps: number of first steps whose losses are recorded.
      warmup_s: least time in seconds for which steps run before the first sample.
      sensitivity: whether to test how rounding of the arguments changes the first update.
      keep: whether to keep the state for the next visit to this plan, which then needs no warm-up.
        The states of several plans are kept until a visit without `keep`, or another kind of job.
    """

    step: StepRef
    plan: Plan
    cache_dir: str
    steps: int
    samples: int
    loss_steps: int
    warmup_s: float = 0.0
    sensitivity: bool = False
    keep: bool = False
    kind: Literal["visit"] = "visit"


# The event with which a propagating worker sends the parent its lowerings and asks for those of
# others; see `automesh.sharding.lowerings`.
LOWERINGS = "lowerings"
# Number of calls of `build` whose lowered programs a propagating worker keeps.
MOST_CALLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagateJob:
    """Computes the terms of the step for one set of active axes; the answer is a `Propagation`.

    Attributes:
      mapping: the argument `mapping` of `build`; empty to leave it out.
      knobs: keyword arguments for `build`.
      sizes: sizes of the active axes; all others are 1.
      probes: other sizes of the same axes at which the terms must hold as well.
      platform: the compiler whose rewrites are applied: cpu, gpu, tpu, or `none`.
      seen: programs that an inspection has lowered; see `Inspection.seen`.
      exact: True if the step must be lowered at `sizes` and not derived from other lowerings.
      largest: for each axis, the largest size at which the terms are used; empty for the number of
        devices.
      cure: a change to apply first to a copy of the lowered step.
    """

    step: StepRef
    axis_names: tuple[str, ...]
    knobs: tuple[tuple[str, Scalar], ...]
    sizes: tuple[tuple[str, int], ...]
    probes: tuple[tuple[tuple[str, int], ...], ...]
    platform: str
    mapping: LogicalAxes = ()
    seen: tuple[tuple[str, int], ...] = ()
    exact: bool = False
    largest: tuple[tuple[str, int], ...] = ()
    cure: Cure | None = None
    kind: Literal["propagate"] = "propagate"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutJob:
    """Asks how jax's mesh code lays ICI shapes out on a granule; the answer is a `Layouts`.

    Attributes:
      platform, device_kind: platform and kind of the devices.
      torus: chips along each physical dimension of a granule; empty if it is no torus.
      devices_per_chip: 2 if a chip is two devices.
      shapes: for each layout, the sizes of the mesh axes inside one granule.
      wraps: for each dimension, whether its ends are linked; empty for the usual links of the kind.
    """

    platform: str
    device_kind: str
    torus: tuple[int, ...]
    devices_per_chip: int
    shapes: tuple[tuple[int, ...], ...]
    wraps: tuple[bool, ...] = ()
    kind: Literal["layout"] = "layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateJob:
    """Measures the probes of a calibration; the answer is a `ProbeTimes`.

    The worker sends the event `{"event": "calibrated", "parts": ..., "of": ...}` as it goes on.

    Attributes:
      rounds: number of samples of each probe; each round has another order.
      sample_s: how long one sample should take, in seconds.
    """

    probes: tuple[Probe, ...]
    rounds: int
    sample_s: float
    kind: Literal["calibrate"] = "calibrate"


Job = (
    InspectJob
    | DiscoverJob
    | CarryJob
    | ArraysJob
    | DevicesJob
    | CompileJob
    | SummarizeJob
    | BuildJob
    | TraceJob
    | VisitJob
    | PropagateJob
    | LayoutJob
    | CalibrateJob
)
