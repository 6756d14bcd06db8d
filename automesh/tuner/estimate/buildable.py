"""Which plans can be built: `build` is called on their meshes and the step traced, before a plan is
listed, compiled or made the yardstick.

Estimates come from programs at other sizes than a plan's own, so that they do not tell of a
`build` that refuses a mesh. Calling it for every plan of a large space would take longer than all
estimates: what is listed is built, in its order, until the list is full. What is found there is
applied to other plans in one case alone, the one that jax decides by: an argument whose axes do not
divide a dimension. Since `build` may choose other shardings on another mesh, this is believed only
where every plan that was built with the same knobs splits an argument so, and one with the same
sizes of these axes was in fact refused.
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
from automesh.program.nouns import BuildAnswer, Entry
from automesh.report.progress import Progress
from automesh.space.conditions import SpaceRule
from automesh.space.mapping import SplitArray
from automesh.texts.terminal import clean
from automesh.tuner.estimate.propagator import POLL_S, JobPool
from automesh.tuner.worker_errors import innermost_frame, raised_here
from automesh.worker.blame import ON_THIS_MESH
from automesh.worker.messages import BuildJob
from automesh.worker.pool import Finished

# Builds beside those of the listed plans: of plans that the step refused while it was estimated,
# and of those whose sizes do not divide what is split elsewhere.
MOST_SUSPECTS = 32
_STAGES = ("build", "lower")
_RAISED = re.compile(r"(?P<where>.*?) raised (?P<kind>\w+)(?:: (?P<message>.*))?", re.DOTALL)
_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A dimension of some argument that mesh axes split."""

    place: int
    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspicion:
    """What plans would split unevenly, if they were like others."""

    call: Call
    part: _Part
    sizes: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class BuildCheck:
    """Builds plans of one search, and remembers what came of it.

    Attributes:
      entry: of the script, for errors.
      job: that builds a plan.
      workers: builds side by side.
      deadline_s: on `clock`: nothing is started after it.
      timeout_s: of one build.
      pulse: called every half second or so.
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
    # None: it took too long, or too much memory, which says nothing about the mesh.
    _verdicts: dict[Plan, BuildAnswer | Failed | None] = field(
        init=False, default_factory=dict[Plan, "BuildAnswer | Failed | None"]
    )

    def can_be_built(self, plan: Plan) -> bool:
        """Whether the plan was built, and nothing refused it."""
        verdict = self._verdicts.get(_built_as(plan))
        return isinstance(verdict, BuildAnswer) and not verdict.uneven

    def is_done(self, plan: Plan) -> bool:
        """Whether it was tried."""
        return _built_as(plan) in self._verdicts

    def build(self, plans: Iterable[Plan], *, wanted: int, in_any_case: bool = False) -> None:
        """Builds plans in their order until so many of them can be built.

        Args:
          in_any_case: without regard to the deadline.
        """
        waiting = deque(dict.fromkeys(_built_as(plan) for plan in plans))
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
        """Builds the plan that others are to be compared with.

        Raises:
          UsageError: it cannot be built.
        """
        self.build([plan], wanted=1, in_any_case=True)
        verdict = self._verdicts.get(_built_as(plan))
        ruled_out = self._ruled_out(plan)
        if ruled_out is None:
            return
        hint = "name the mesh that the script runs on today, for example with --baseline"
        if isinstance(verdict, Failed):
            frames = raised_here(verdict, self.entry)
            hint = f"{hint}; {frames}" if frames else hint
            raise UsageError(f"the baseline `{plan}` cannot be built: {verdict.reason}", hint=hint)
        raise UsageError(f"the baseline `{plan}` cannot be built: {ruled_out.detail}", hint=hint)

    def refused(self, plans: Sequence[Plan]) -> dict[Plan, RuledOut]:
        """Those of `plans` that cannot be built: by themselves, or as plans like them."""
        # Two of each kind, as far apart as the order has them: `build` may look at other axes, too.
        ends = [plan for alike in self._suspects(plans).values() for plan in (alike[0], alike[-1])]
        self.build(ends[:MOST_SUSPECTS], wanted=MOST_SUSPECTS)
        found = {plan: why for plan in plans if (why := self._ruled_out(plan)) is not None}
        refused = self._refused_parts()
        # Once more: what was built just now may have shown that not all meshes split it so.
        for suspicion, members in self._suspects(plans).items():
            name = refused.get(suspicion)
            if name is not None:
                found |= {plan: _indivisible(plan, suspicion.part, name) for plan in members}
        return found

    def _ruled_out(self, plan: Plan) -> RuledOut | None:
        match self._verdicts.get(_built_as(plan)):
            case Failed() as failed:
                return _said(failed)
            case BuildAnswer(uneven=(first, *_)):
                return _indivisible(plan, _parts(first)[0], first.name)
            case _:
                return None

    def _suspects(self, plans: Sequence[Plan]) -> dict[_Suspicion, list[Plan]]:
        """Plans that were not built, and do not divide what all that were built split."""
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
        """What every plan that was built splits, per call of `build`."""
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
        """What jax refused to split, at which sizes, with what the argument is called."""
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
    """For the rules that ruled most plans out, one of these with its reason."""
    examples: dict[str, tuple[Plan, str, int]] = {}
    for plan, why in refused.items():
        first, detail, number = examples.get(why.rule, (plan, why.detail, 0))
        examples[why.rule] = (first, detail, number + 1)
    ranked = sorted(examples.values(), key=lambda example: -example[2])
    said = [f"`{plan}` cannot be built: {detail}" for plan, detail, _ in ranked[:most]]
    if len(ranked) > most:
        said.append(f"{len(ranked) - most} more reasons why plans cannot be built")
    return tuple(said)


def _built_as(plan: Plan) -> Plan:
    """The plan as far as `build` and jax's tracing know it: slices are far from here."""
    axes = tuple(MeshAxis(name=axis.name, ici=axis.size) for axis in plan.axes)
    return replace(plan, axes=axes, compiler_options=())


def _verdict(finished: Finished) -> BuildAnswer | Failed | None:
    """Only an exception is a refusal: what automesh itself cannot do here, and a process that ends,
    say nothing for sure about the mesh."""
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


def _said(failed: Failed) -> RuledOut:
    """A rule that counts what the same line of the user's raises, whatever the numbers in it."""
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
