"""The jobs that a worker does (no jax). Answers are the nouns of `automesh.program.nouns`."""

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
    """The process environment of a worker; a change of it needs a new process.

    Attributes:
      platforms: value of JAX_PLATFORMS, never empty.
      cpu_devices: virtual CPU devices, 0 to leave jax's own number.
      variables: further environment variables, sorted by name.
    """

    platforms: str
    cpu_devices: int = 0
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectJob:
    """Answer: `Inspection`.

    Attributes:
      platform: whose programs are going to be propagated: cpu, gpu, tpu; empty: none are.
      mapping: the logical axes of the search space, each with its first choice.
    """

    step: StepRef
    axis_names: tuple[str, ...]
    platform: str = ""
    mapping: LogicalAxes = ()
    kind: Literal["inspect"] = "inspect"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverJob:
    """Answer: `Discovery`: the mesh and the step of a script that has no `build`; `OtherDevices` if
    it fails because it names another number of devices.

    Attributes:
      wanted: the name of the function that is wanted; empty for the one that looks like the step.
      folder: where the step is stored; empty: nowhere.
      num_devices: how many devices this worker was given, because the script names that number; 0
        if they are those of the target.
    """

    step: StepRef
    wanted: str = ""
    folder: str = ""
    num_devices: int = 0
    kind: Literal["discover"] = "discover"


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryJob:
    """Answer: `CarryCheck`: the stored step on another mesh, and that of a real run there.

    Attributes:
      plans: the first of them is taken on which jax takes the stored step.
    """

    step: StepRef
    plans: tuple[Plan, ...]
    kind: Literal["carry"] = "carry"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraysJob:
    """Answer: `StepMapping`: what the step says of its logical axes at other knobs than its own.

    Apart from the inspection, which a value that ends the process would end, too.

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
    """Answer: `Attachment`.

    Attributes:
      absent: devices that are not here, to be told of as a compile-only client knows them, with
        the memory that its compiler lets a program use; a `Failed` of stage `start` says why they
        cannot be compiled for.
    """

    absent: AbsentDevices | None = None
    kind: Literal["devices"] = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """Answer: `CompileAnswer`, or `Lowered` if the parent answered `{"go": false}` to the event
    `{"event": "lowered", "fingerprint": ...}`, which the worker sends before it compiles.

    Attributes:
      cache_dir: where jax keeps executables for devices that are here.
      effort: how hard the compiler shall try.
      store_dir: where the scheduled program is kept, and that for devices that are not here looked
        for before it is compiled; empty: nowhere.
    """

    step: StepRef
    plan: Plan
    cache_dir: str
    effort: Effort = "default"
    store_dir: str = ""
    kind: Literal["compile"] = "compile"


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarizeJob:
    """Answer: `StepSummary`. Calls `build` twice for the plan."""

    step: StepRef
    plan: Plan
    kind: Literal["summarize"] = "summarize"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildJob:
    """Answer: `BuildAnswer`. Calls `build` and traces the step: nothing is compiled."""

    step: StepRef
    plan: Plan
    kind: Literal["build"] = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """Answer: `Traced`. The program of a plan may be written to a file, line by line.

    Attributes:
      text_file: path of that file; see `automesh.program.lower.program_text`. Empty to write none.
    """

    step: StepRef
    plan: Plan
    text_file: str = ""
    kind: Literal["trace"] = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitJob:
    """Answer: `VisitAnswer`.

    The worker keeps the executables of plans that it has visited, and their arrays only if told:
    else state is rebuilt at every visit.

    Attributes:
      steps: chained steps per sample; 0 measures nothing and only records losses.
      samples: samples to take.
      loss_steps: how many first steps to record the losses of.
      warmup_s: run steps for at least this long before the first sample.
      sensitivity: also try how rounding of the arguments changes the first update.
      keep: leave the state for the next visit to this plan, which goes on with it without warming
        up. The states of several plans stay side by side until a visit that does not keep, or
        another job.
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


# The event with which a worker that propagates tells the parent what it has lowered, and asks what
# others have: see `automesh.sharding.lowerings`.
LOWERINGS = "lowerings"


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagateJob:
    """Answer: `Propagation`: the terms of the step for one set of active axes.

    Attributes:
      mapping: what `build` gets as `mapping`, if it is not empty.
      knobs: keyword arguments for `build`.
      sizes: of the active axes; all others are 1.
      probes: other sizes of the same axes at which the terms must hold too.
      platform: whose compiler's rewrites are applied: cpu, gpu, tpu, or `none`.
      seen: programs that an inspection has lowered, see `Inspection.seen`.
      exact: True if the step must be lowered at `sizes`, not derived from other lowerings.
      largest: of each axis, the largest size at which the terms are wanted; empty: as many devices
        as there are.
      cure: what is changed in a copy of the lowered step first.
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
    """Answer: `Layouts`: where jax's mesh code puts the axes of each ICI shape on a granule.

    Attributes:
      platform, device_kind: of the devices.
      torus: chips along each physical dimension of a granule; empty where there is none.
      devices_per_chip: 2 where a chip is two devices.
      shapes: sizes of the mesh axes inside one granule.
      wraps: per dimension, whether its ends are linked; empty: as is usual for the kind.
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
    """Answer: `Calibration`. Sends the event `{"event": "calibrated", "parts": ..., "of": ...}` as
    it goes.

    Attributes:
      rounds: samples of each probe, in another order in every round.
      sample_s: how long one sample shall take.
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
