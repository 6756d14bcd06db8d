"""Checks which plans can be built, before they are listed, compiled or used as the baseline.

The check calls `build` on the mesh of a plan and traces the step. Estimates come from programs at
other sizes than a plan's own, so they do not show that `build` refuses a mesh. To build every plan
of a large space would take longer than all estimates. So plans are built in the order of the list,
until the list is full. A refusal is applied to other plans in one case only: jax refuses an
argument because its axes do not divide a dimension. Since `build` may choose other shardings on
another mesh, this is concluded only if every plan that was built with the same knobs splits the
argument in this way, and a plan with the same sizes of these axes was refused.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from automesh.errors import UsageError
from automesh.mesh.axes import Call, MeshAxis, Plan
from automesh.outcomes import Failed, RuledOut
from automesh.program.nouns import BuildAnswer, Entry, SizedArray
from automesh.report.progress import Progress
from automesh.space.conditions import SpaceRule
from automesh.space.mapping import SplitArray
from automesh.texts.terminal import clean
from automesh.tuner.estimate.propagator import POLL_S, JobPool
from automesh.tuner.worker_errors import innermost_frame, raised_here
from automesh.worker.blame import ON_THIS_MESH
from automesh.worker.messages import BuildJob
from automesh.worker.pool import Finished

# Most builds besides those of listed plans: of plans that the step refused while it was estimated,
# and of plans whose sizes do not divide a dimension that other plans split.
MOST_SUSPECTS = 32
_STAGES = ("build", "lower")
_RAISED = re.compile(r"(?P<where>.*?) raised (?P<kind>\w+)(?:: (?P<message>.*))?", re.DOTALL)
_CHARS = 160
_DIVIDES = re.compile(r"\S+ divides \d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A dimension of an argument that mesh axes split."""

    place: int
    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspicion:
    """An uneven split that plans would have if they split arguments as other plans do."""

    call: Call
    part: _Part
    sizes: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class BuildCheck:
    """Builds plans of one search and remembers the results.

    Attributes:
      entry: entry of the script, for errors.
      job: makes the job that builds a plan.
      workers: number of builds at the same time.
      deadline_s: time of `clock` after which no build starts.
      timeout_s: limit of one build.
      pulse: is called about every half second.
    """

    entry: Entry
    job: Callable[[Plan], BuildJob]
    pool: JobPool
    progress: Progress
    workers: int
    deadline_s: float
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    pulse: Callable[[], object] = lambda: None
    # None: it took too much time or memory, which says nothing about the mesh.
    _verdicts: dict[Plan, BuildAnswer | Failed | None] = field(
        init=False, default_factory=dict[Plan, "BuildAnswer | Failed | None"]
    )

    def can_be_built(self, plan: Plan) -> bool:
        """Whether the plan was built without a refusal."""
        verdict = self._verdicts.get(built_as(plan))
        return isinstance(verdict, BuildAnswer) and not verdict.uneven

    def is_done(self, plan: Plan) -> bool:
        """Whether a build of the plan was tried."""
        return built_as(plan) in self._verdicts

    def build(self, plans: Iterable[Plan], *, wanted: int, in_any_case: bool = False) -> None:
        """Builds plans in their order until `wanted` of them have succeeded.

        Args:
          in_any_case: whether to build even after the deadline.
        """
        waiting = deque(dict.fromkeys(built_as(plan) for plan in plans))
        running: dict[int, tuple[Plan, bool]] = {}
        good = 0

        def submit(plan: Plan, *, fresh: bool = False) -> None:
            running[self.pool.submit(self.job(plan), self.timeout_s, fresh=fresh)] = (plan, fresh)
            self.progress.now(f"{plan}, building its step")

        while True:
            in_time = in_any_case or self.clock() < self.deadline_s
            while waiting and in_time and len(running) < min(self.workers, wanted - good):
                plan = waiting.popleft()
                if plan in self._verdicts:
                    good += self.can_be_built(plan)
                else:
                    submit(plan)
            if not running:
                return
            for finished in self.pool.wait(POLL_S):
                plan, is_fresh = running.pop(finished.ticket, (None, False))
                if plan is None:
                    continue
                if finished.doubtful and not is_fresh:
                    submit(plan, fresh=True)
                    continue
                self._verdicts[plan] = _verdict(finished)
                good += self.can_be_built(plan)
            self.pulse()
            self.progress.tick()

    def require(self, plan: Plan) -> None:
        """Builds the plan that others will be compared with.

        Raises:
          UsageError: it cannot be built.
        """
        self.build([plan], wanted=1, in_any_case=True)
        verdict = self._verdicts.get(built_as(plan))
        ruled_out = self._ruled_out(plan)
        if ruled_out is None:
            return
        hint = "name the mesh that the script runs on today, for example with --baseline"
        if isinstance(verdict, Failed):
            frames = raised_here(verdict, self.entry)
            hint = f"{hint}; {frames}" if frames else hint
            raise UsageError(f"the baseline `{plan}` cannot be built: {verdict.reason}", hint=hint)
        raise UsageError(f"the baseline `{plan}` cannot be built: {ruled_out.detail}", hint=hint)

    @property
    def data(self) -> dict[Plan, tuple[SizedArray, ...]]:
        """The arguments that are data, of each plan that was built, without granules."""
        return {
            plan: verdict.data
            for plan, verdict in self._verdicts.items()
            if isinstance(verdict, BuildAnswer) and not verdict.uneven
        }

    def refused(self, plans: Sequence[Plan]) -> dict[Plan, RuledOut]:
        """Returns the plans that cannot be built, by their own builds or by those of similar
        plans."""
        # The first and the last plan of each kind: `build` may depend on other axes, too.
        ends = [plan for alike in self._suspects(plans).values() for plan in (alike[0], alike[-1])]
        self.build(ends[:MOST_SUSPECTS], wanted=MOST_SUSPECTS)
        found = {plan: why for plan in plans if (why := self._ruled_out(plan)) is not None}
        refused = self._refused_parts()
        # Computed again: these builds may show that not all meshes split the argument in this way.
        for suspicion, members in self._suspects(plans).items():
            name = refused.get(suspicion)
            if name is not None:
                found |= {plan: _indivisible(plan, suspicion.part, name) for plan in members}
        return found

    def _ruled_out(self, plan: Plan) -> RuledOut | None:
        match self._verdicts.get(built_as(plan)):
            case Failed() as failed:
                return _rule_of(failed)
            case BuildAnswer(uneven=(first, *_)):
                return _indivisible(plan, _parts(first)[0], first.name)
            case _:
                return None

    def _suspects(self, plans: Sequence[Plan]) -> dict[_Suspicion, list[Plan]]:
        """Returns plans that were not built and whose sizes do not divide a dimension that all
        built plans split."""
        common = self._common_parts()
        found: dict[_Suspicion, list[Plan]] = {}
        for plan in plans:
            if self.is_done(plan):
                continue
            for part in common.get(plan.call, ()):
                sizes = tuple(plan.sizes[axis] for axis in part.axes)
                if part.size % math.prod(sizes):
                    suspicion = _Suspicion(call=plan.call, part=part, sizes=sizes)
                    found.setdefault(suspicion, []).append(plan)
                    break
        return found

    def _common_parts(self) -> Mapping[Call, list[_Part]]:
        """Returns the parts that every built plan splits, for each call of `build`."""
        found: dict[Call, dict[_Part, None]] = {}
        for plan, verdict in self._verdicts.items():
            if isinstance(verdict, BuildAnswer):
                here = dict.fromkeys(
                    part for argument in verdict.arguments for part in _parts(argument)
                )
                before = found.get(plan.call, here)
                found[plan.call] = {part: None for part in before if part in here}
        return {call: list(parts) for call, parts in found.items()}

    def _refused_parts(self) -> dict[_Suspicion, str]:
        """Returns the splits that jax refused, with their sizes and the name of the argument."""
        found: dict[_Suspicion, str] = {}
        for plan, verdict in self._verdicts.items():
            if not isinstance(verdict, BuildAnswer):
                continue
            for array in verdict.uneven:
                for part in _parts(array):
                    sizes = tuple(plan.sizes[axis] for axis in part.axes)
                    found[_Suspicion(call=plan.call, part=part, sizes=sizes)] = array.name
        return found


def refusal_notices(refused: Mapping[Plan, RuledOut], most: int = 3) -> tuple[str, ...]:
    """Returns notices with the most frequent reasons of refusals, each with one refused plan."""
    examples: dict[str, tuple[Plan, str, int]] = {}
    for plan, why in refused.items():
        first, detail, number = examples.get(why.rule, (plan, why.detail, 0))
        examples[why.rule] = (first, detail, number + 1)
    ranked = sorted(examples.values(), key=lambda example: -example[2])
    said = [f"`{plan}` cannot be built: {detail}" for plan, detail, _ in ranked[:most]]
    if len(ranked) > most:
        said.append(f"{len(ranked) - most} more reasons why plans cannot be built")
    return tuple(said)


def built_as(plan: Plan) -> Plan:
    """Returns the plan without granules, which neither `build` nor jax's tracing can see."""
    axes = tuple(MeshAxis(name=axis.name, ici=axis.size) for axis in plan.axes)
    return replace(plan, axes=axes, compiler_options=())


def _verdict(finished: Finished) -> BuildAnswer | Failed | None:
    """Returns the result of a build. Only an exception of user code is a refusal: a limit of
    automesh, or the end of the process, says nothing certain about the mesh."""
    match finished.result:
        case BuildAnswer() as answer:
            return answer
        case Failed(stage=stage, reason=reason) as failed:
            is_refusal = _RAISED.fullmatch(reason) or reason.startswith(ON_THIS_MESH)
            return failed if stage in _STAGES and is_refusal else None
        case _:
            return None


def _parts(array: SplitArray) -> list[_Part]:
    return [_Part(place=one.place, size=one.size, axes=one.names) for one in array.split]


def _indivisible(plan: Plan, part: _Part, name: str) -> RuledOut:
    product = "*".join(part.axes)
    rule = SpaceRule(
        name=f"{product} divides {part.size}",
        factors=part.axes,
        relation="divides",
        bound=part.size,
        fact=f"dimension {part.place} of `{name}`",
    )
    return RuledOut(rule=rule.name, detail=rule.detail(plan.sizes))


def is_indivisible(why: RuledOut) -> bool:
    """Whether a plan was refused because its sizes do not divide an array."""
    return bool(_DIVIDES.fullmatch(why.rule))


def _rule_of(failed: Failed) -> RuledOut:
    """Returns the rule under which errors of the same line of user code are counted together."""
    if failed.reason.startswith(ON_THIS_MESH):
        # `train.py fails at train.py:7: ValueError: 127 does not divide`: the numbers differ.
        message = clean(failed.reason.removeprefix(ON_THIS_MESH), _CHARS)
        return RuledOut(rule=message.partition(": ")[0], detail=message)
    raised = _RAISED.fullmatch(failed.reason)
    assert raised is not None
    frame = innermost_frame(failed.log_tail)
    where = f"at {frame}" if frame else f"while {clean(raised['where'])}"
    said = clean(raised["message"] or "", _CHARS).rstrip(" :")
    message = f"{raised['kind']}: {said}" if said else raised["kind"]
    return RuledOut(rule=f"{raised['kind']} {where}", detail=f"{message} ({frame or where})")
