"""The possible outcomes of a plan: every rung returns one of these, never None or inf."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Causes = tuple[tuple[str, float], ...]


def largest_first(causes: Iterable[tuple[str, float]]) -> Causes:
    """Returns (name, seconds), the largest first, without those of zero seconds.

    >>> largest_first([("latency", 0.1), ("memory", 0.0), ("compute", 0.3)])
    (('compute', 0.3), ('latency', 0.1))
    """
    return tuple(
        sorted((cause for cause in causes if cause[1] > 0.0), key=lambda one: (-one[1], one[0]))
    )


# Parts of `uncounted` texts that name work of unknown length: a time without it is only a part of
# the whole. Other texts name work that is small, or is counted roughly.
UNKNOWN_LENGTH = "of unknown length"
NO_COST = "only its operands and results are counted"
NO_PRICE = "has no price"
TO_THE_HOST = "to or from the host or another program"
ON_THE_HOST = "work on the host"
_OPEN = (UNKNOWN_LENGTH, NO_COST, NO_PRICE, TO_THE_HOST, ON_THE_HOST)
_BARE_CALL = re.compile(r"custom call `[^`]*`$")
_TIMES = re.compile(r" \(\d+ times\)$")
# Names of instructions differ between the programs of one step.
_LOOP = re.compile(r"loop `[^`]*`")


def open_ended(uncounted: Iterable[str]) -> frozenset[str]:
    """Returns the texts that name work of unknown length, in words that all plans of a step share.

    >>> sorted(open_ended(["loop `w.1` (a.py:3) of unknown length counted once (2 times)"]))
    ['loop (a.py:3) of unknown length counted once']
    >>> sorted(open_ended(["arithmetic of `sort`: only its bytes are counted"]))
    []
    """
    texts = (_TIMES.sub("", text) for text in uncounted)
    return frozenset(
        _LOOP.sub("loop", text)
        for text in texts
        if _BARE_CALL.search(text) or any(phrase in text for phrase in _OPEN)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind over one set of mesh axes, per step and per device.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute,
        collective-broadcast.
      axes: mesh axes that the groups span, in the order of the mesh; empty if they fit no axes.
      group_size: devices in one group.
      count: executions per step, loops multiplied.
      payload_bytes: bytes of the full (gathered or unreduced) array of one group, summed over
        `count`.
      wire_bytes: bytes that one device sends, by the ring algorithm, summed over `count`.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The work of one device in one step of a compiled program, loops multiplied.

    Attributes:
      flops: floating-point operations of matrix multiplications and convolutions, and those that
        the author of a kernel states.
      hbm_bytes: bytes read and written by top-level instructions and fusions.
      collectives: one entry per kind and set of axes.
      uncounted: what could not be counted (custom calls, loops of unknown length), in words.
    """

    flops: int
    hbm_bytes: int
    collectives: tuple[Collective, ...]
    uncounted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device as the compiler states them; `peak_bytes` is what must fit.

    Attributes:
      first_bytes: peak of the first step's program, if that differs from the program of all later
        steps, which the other figures describe; 0 if it is the same. The larger of the two is
        `peak_bytes`.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    first_bytes: int = 0

    def after(self, first: Memory | None) -> Memory:
        """Returns the memory of a loop whose first step needs `first`; None if it is the same."""
        if first is None:
            return self
        peak_bytes = max(self.peak_bytes, first.peak_bytes)
        return replace(self, peak_bytes=peak_bytes, first_bytes=first.peak_bytes)

    @property
    def total_bytes(self) -> int:
        """Sum of all memory that the program ever has, as if it had all of it at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledOut:
    """The plan is illegal: `rule` is the constraint (stable, for counting), `detail` has
    numbers."""

    rule: str
    detail: str
    kind: Literal["ruled_out"] = "ruled_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """Priced from terms, without compiling.

    Attributes:
      step_s: central estimate of the time of a step, seconds.
      bracket_s: the time if everything overlaps, at the assumed speeds, and the time if nothing
        does.
      bound_s: a proven lower limit of the step time, and the only figure that may rule a plan out;
        0 if none is known.
      memory_bytes: peak on one device; used to sort plans and to rule them out with a margin, never
        to claim that one fits.
      memory_interval: bytes between which the compiler's figure is expected; a high end of 0 means
        that something has an unknown size, and `memory_bytes` is a lower bound. Empty in estimates
        of earlier versions.
      causes: (cause, seconds) that sum to `step_s`: `compute`, `memory`, `ici tp`, `dcn dp`,
        `latency`, largest first.
      uncounted: what has no price, in words.
      own_propagation: True if the terms were made at exactly the sizes of this mesh.
      findings: rules by which something was found in its program, see `report.findings`.
    """

    step_s: float
    bracket_s: tuple[float, float]
    bound_s: float
    memory_bytes: int
    causes: tuple[tuple[str, float], ...]
    uncounted: tuple[str, ...] = ()
    own_propagation: bool = False
    findings: tuple[str, ...] = ()
    memory_interval: tuple[int, ...] = ()
    kind: Literal["estimated"] = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """Times of a compiled schedule that was replayed on the links of its target.

    Attributes:
      step_s: seconds of a step.
      bracket_s: the time of the busiest resource alone, and the time if nothing overlaps.
      causes: (cause, seconds) that sum to `step_s`: `compute`, `memory`, `ici tp`, `dcn dp`,
        `host`, `latency`, largest first. Communication counts here only while the cores wait for
        it.
      communication_s: (wires and axes, seconds) of all transfers, each as if it had its links to
        itself: `ici tp`. The part of their sum that is in `causes` is exposed; a single pair may
        have more in `causes`, where transfers waited for each other.
      busy_s: (resource, seconds in use), at most `step_s` each.
      mfu: FLOPs of the program's matrix products, divided by the chip's peak FLOPs in `step_s`.
      uncounted: what has no price, in words.
      speeds: where the speeds come from, in words.
    """

    step_s: float
    bracket_s: tuple[float, float]
    causes: tuple[tuple[str, float], ...]
    communication_s: tuple[tuple[str, float], ...]
    busy_s: tuple[tuple[str, float], ...]
    mfu: float
    uncounted: tuple[str, ...] = ()
    speeds: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """One program of a stage of a pipeline, as it was compiled.

    Attributes:
      action: what it does: `F`, `B`, `I` or `W` for a microbatch as in a schedule, or `update`:
        the optimizer's part of the stage, once per step.
      counts: of one execution.
      stored: see `Compiled`.
    """

    stage: int
    action: str
    memory: Memory
    counts: Counts
    stored: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """One stage of a compiled pipeline; bytes are those on its worst device.

    Attributes:
      rank: the index along the pipeline's axis.
      lasting_bytes: kept from step to step: parameters, the optimizer's state, sums of gradients.
      activation_bytes: of one microbatch, from its forward pass to the end of its backward pass.
      working_bytes: what the program that needs most has in addition to both, by the compiler.
      finishing_bytes: what the optimizer's update has in addition to `lasting_bytes`, by the
        compiler.
      next_bytes, previous_bytes: sent on and sent back by one device for each microbatch.
      peak_bytes: what its devices need at the worst moment of the schedule, including other stages
        of the rank.
    """

    rank: int
    lasting_bytes: int
    activation_bytes: int
    working_bytes: int
    finishing_bytes: int
    next_bytes: int
    previous_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOutcome:
    """A step that was compiled stage by stage.

    Attributes:
      axis: of the mesh, along which it runs.
      schedule: by name.
      actions: of each rank its actions, as `parse_schedule` reads them.
      programs: all that are run for a microbatch, and the updates.
      bubble: share of the ranks' time in which they are idle, 0 to 1; 0 before it was simulated.
    """

    axis: str
    schedule: str
    actions: tuple[str, ...]
    stages: tuple[StageOutcome, ...]
    programs: tuple[StageProgram, ...]
    bubble: float = 0.0


Effort = Literal["default", "low"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The compiler accepted the plan.

    Attributes:
      fingerprint: hash of the lowered program, equal for programs that differ in axis names alone.
      step_s: time of a step predicted from the replay, else from `counts`, seconds.
      compile_s: seconds spent lowering and compiling; 0 when the result was taken over.
      same_as: text of the plan with the same program that was compiled in place of this one; empty
        if this plan was compiled itself.
      effort: how hard the compiler tried: at `low` its memory is a lower estimate, and its schedule
        is not the one that would run.
      stored: key of the scheduled program in the store of compiled modules; empty if it is not
        kept.
      replay: None if the program's schedule was not replayed.
      pipeline: the stages, if the step is a pipeline; `memory` and `counts` are then those of the
        worst and of the busiest device.
    """

    fingerprint: str
    memory: Memory
    counts: Counts
    step_s: float
    compile_s: float
    same_as: str = ""
    effort: Effort = "default"
    stored: str = ""
    replay: ReplayOutcome | None = None
    pipeline: PipelineOutcome | None = None
    kind: Literal["compiled"] = "compiled"


Numerics = Literal["agree", "differ", "unverified", "other_arguments", "reference", "not_compared"]
# Results of a comparison with which a plan that ran may not become a rule.
EXCLUDED: tuple[Numerics, ...] = ("differ", "unverified", "other_arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The plan ran.

    Attributes:
      step_s: median over rounds of the time of one step, seconds.
      interval_s: 95 % interval of `step_s` over rounds.
      rounds_s: one time per round, seconds per step, in order.
      losses: scalar outputs of the first steps, in order.
      numerics: how `losses` and the first updates compare with the reference's; with `differ`,
        `unverified` and `other_arguments` (the step began with other values, so that nothing can be
        compared) a plan may not become a rule. `not_compared`: a command that reports no losses, or
        different ones in each run.
      numerics_detail: which step and figures disagree; empty if they agree.
      values: `synthetic` if the arguments were made up, `user` if they came from `init` or real
        arrays.
      raced_out: True if the sequential test stopped the plan as slower before the last round.
      confirmed: True if measured again in fresh processes.
      peak_bytes: measured peak on one device where the backend reports it, else the compiler's.
      loss_dtype: the coarsest float type that takes part in `losses`; empty if only the result of
        the comparison is kept.
    """

    step_s: float
    interval_s: tuple[float, float]
    rounds_s: tuple[float, ...]
    losses: tuple[float, ...]
    numerics: Numerics
    numerics_detail: str
    values: Literal["synthetic", "user"]
    raced_out: bool
    confirmed: bool
    peak_bytes: int
    loss_dtype: str = ""
    kind: Literal["measured"] = "measured"


WIDE_INTERVAL = 1.5  # upper end / lower end: a less precise time says little
_UNSTEADY = 2.0


def is_wide(measured: Measured) -> bool:
    """Whether the interval of the step time spans a factor of 1.5 or more."""
    low, high = measured.interval_s
    return high > WIDE_INTERVAL * low


def processes_disagree(rounds_s: Sequence[float], interval_s: tuple[float, float]) -> bool:
    """Whether step times differ too much between processes for the plan to become a rule.

    A wide interval alone may come from few processes that agree well enough; such a time is only
    marked.

    Args:
      rounds_s: seconds per step, one per process.
      interval_s: 95 % interval of their median.
    """
    is_wide = interval_s[1] > WIDE_INTERVAL * interval_s[0]
    return len(rounds_s) > 1 and is_wide and max(rounds_s) > _UNSTEADY * min(rounds_s)


def is_unsteady(measured: Measured) -> bool:
    """Whether a confirmed time may not become a rule: see `processes_disagree`."""
    return processes_disagree(measured.rounds_s, measured.interval_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The plan needs too much memory: at least `needed_bytes`, as seen when it was stopped.

    Attributes:
      reserve_bytes: part of `limit_bytes` that is kept free for other memory of the process.
      is_host: the memory of this machine ran out, of which a worker may take no more than
        `limit_bytes`.
      where: the rank that failed, if the worker is a gang: `rank 3 on host-b`; else empty.
    """

    stage: str
    needed_bytes: int
    limit_bytes: int
    detail: str
    reserve_bytes: int = 0
    is_host: bool = False
    where: str = ""
    kind: Literal["out_of_memory"] = "out_of_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The plan's step raised an exception, crashed, or was not a step.

    Attributes:
      stage: what the worker was doing: start, load, build, lower, compile, materialize, run.
      reason: one sentence for the table.
      log_tail: the last lines of the worker's output or of the traceback.
      hint: what to do about it, if the failure itself tells.
      where: as in `OutOfMemory`; empty as well if all processes of a gang failed alike.
    """

    stage: str
    reason: str
    log_tail: str = ""
    hint: str = ""
    where: str = ""
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The plan was stopped after `limit_s` seconds; `where` is as in `OutOfMemory`."""

    stage: str
    limit_s: float
    log_tail: str = ""
    where: str = ""
    kind: Literal["timed_out"] = "timed_out"


Failure = OutOfMemory | Failed | TimedOut
Outcome = RuledOut | Estimated | Compiled | Measured | OutOfMemory | Failed | TimedOut
