"""Runs propagations of shardings in a pool of workers, the most promising first, until a
deadline."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from automesh.mesh.axes import Call, Plan, format_setting
from automesh.outcomes import Failed, Failure, OutOfMemory
from automesh.program.nouns import Propagation, StepRef
from automesh.report.estimates import INTERRUPTED, NO_TIME, STEP_REFUSES
from automesh.report.progress import Progress
from automesh.report.words import failure_reason
from automesh.tuner.estimate.propagations import Need, Sizes
from automesh.tuner.estimate.shared_lowerings import Listener, SharedLowerings
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.worker.messages import Job, PropagateJob
from automesh.worker.pool import Finished, OnEvent
from automesh.worker.protocol import Answer

POLL_S = 0.5


class JobPool(Protocol):
    """The methods of a pool of workers that estimates use."""

    def submit(
        self,
        job: Job,
        timeout_s: float,
        on_event: OnEvent | None = None,
        *,
        fresh: bool = False,
        affinity: Hashable = None,
    ) -> int:
        """Puts a job into the queue and gives its ticket."""
        ...

    def wait(self, timeout_s: float | None = None) -> list[Finished]:
        """Waits for finished jobs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagatedStep:
    """The parts that all propagation jobs of one search share; the attributes are those of the
    jobs."""

    step: StepRef
    axis_names: tuple[str, ...]
    platform: str
    seen: tuple[tuple[str, int], ...] = ()

    def job(self, need: Need, sizes: Sizes) -> PropagateJob:
        """Makes the job for one propagation."""
        return PropagateJob(
            step=self.step,
            axis_names=self.axis_names,
            knobs=need.call[1],
            sizes=sizes,
            probes=need.probes if sizes == need.sizes else (),
            platform=self.platform,
            mapping=need.call[0],
            seen=self.seen,
            exact=need.exact,
            largest=need.largest if sizes == need.sizes else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    need: Need
    sizes: Sizes
    began_s: float
    listener: Listener


class NeedQueue:
    """Hands out needs so that workers rarely change the arguments of `build`.

    A worker lowers a step a few times for each call of `build`, and derives the other sizes from
    these.

    Args:
      needs: most promising first.
      is_deferred: whether the needs of a call come after those of others.
    """

    def __init__(
        self, needs: Sequence[Need], is_deferred: Callable[[Call], bool] | None = None
    ) -> None:
        self._is_deferred = is_deferred or (lambda _: False)
        self._undecided = {need.call for need in needs} if is_deferred else set[Call]()
        self._waiting: dict[Call, deque[Need]] = {}
        for need in needs:
            self._waiting.setdefault(need.call, deque()).append(need)

    def after(self, done: Need) -> Need | None:
        """Returns the next need with the same call as a finished one; None if there is none, or if
        others come first."""
        return None if self._is_deferred(done.call) else self._take(done.call)

    def is_decided(self, done: Need) -> bool:
        """Whether the next need can be chosen before the answer to a finished one is read; not for
        the first one of a call, which shows whether the call is deferred."""
        is_first = done.call in self._undecided
        self._undecided.discard(done.call)
        return not is_first

    def next(self, busy: Sequence[Call]) -> Need | None:
        """Returns the next need of a call that no worker is busy with, else of any; None if none
        waits."""
        calls = sorted(self._waiting, key=lambda call: (self._is_deferred(call), call in busy))
        return self._take(calls[0]) if calls else None

    def _take(self, call: Call) -> Need | None:
        waiting = self._waiting.get(call)
        if not waiting:
            return None
        need = waiting.popleft()
        if not waiting:
            del self._waiting[call]
        return need


@dataclass(slots=True, kw_only=True)
class Propagator:
    """Answers needs, from the cache if possible, else by propagations in workers.

    Attributes:
      workers: number of propagations at the same time.
      deadline_s: time of `clock` after which no propagation starts and running ones are dropped.
      timeout_s: limit of one propagation.
      pulse: is called about every half second.
      heard: is called with each propagation as soon as it is done, or with the reason why there is
        none.
      replied: is called when a job of `ask` is done.
      is_interrupted: True after Ctrl-C, when no propagation starts any more.
      known: propagations of this search until now; new ones are added.
    """

    step: PropagatedStep
    pool: JobPool
    cache: TermsCache
    progress: Progress
    workers: int
    deadline_s: float
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    pulse: Callable[[], object] = lambda: None
    heard: Callable[[Need, Propagation | str], object] = lambda *_: None
    replied: Callable[[], object] = lambda: None
    is_interrupted: bool = False
    known: dict[Need, Propagation] = field(default_factory=dict[Need, Propagation])
    _why_not: str = field(init=False, default=NO_TIME)
    _total: int = field(init=False, default=0)
    _done: int = field(init=False, default=0)
    _left_out: int = field(init=False, default=0)
    _beat_s: float = field(init=False, default=-math.inf)
    _shared: SharedLowerings = field(init=False, default_factory=SharedLowerings)
    _asides: dict[int, Answer | Failure] = field(init=False, default_factory=dict)

    def ask(self, job: Job) -> int:
        """Submits a job of another kind, which runs in parallel with the next propagations."""
        return self.pool.submit(job, self.timeout_s)

    def has_reply(self, ticket: int) -> bool:
        """Whether a job of `ask` is done."""
        return ticket in self._asides

    def reply(self, ticket: int) -> Answer | Failure:
        """Waits for a job of `ask`; returns its answer."""
        while ticket not in self._asides:
            self._put_aside(self.pool.wait(POLL_S))
            self.pulse()
            self.progress.tick()
        return self._asides.pop(ticket)

    def _put_aside(self, finished: Sequence[Finished]) -> None:
        self._asides |= {one.ticket: one.result for one in finished}

    def answer(
        self,
        needs: Sequence[Need],
        note: str = "",
        *,
        is_deferred: Callable[[Call], bool] | None = None,
    ) -> Mapping[Need, Propagation | str]:
        """Does the propagations in their order until the deadline.

        Args:
          note: the purpose of the propagations, for the display.
          is_deferred: whether the propagations with a call come after those with others; asked
            again after each of them.

        Returns:
          For each need its propagation, or the reason why there is none.
        """
        self._total += len(needs)
        answers: dict[Need, Propagation | str] = {}
        left: list[Need] = []
        for need in needs:
            kept = self.known.get(need) or self.cache.find(self.step.job(need, need.sizes))
            if kept is None:
                left.append(need)
            else:
                answers[need] = kept
                self.heard(need, kept)
        self._done += len(answers)
        self._run(NeedQueue(left, is_deferred), answers, note)
        self._left_out += len(needs) - len(answers)
        if needs:
            self._show(note)
        self.known |= {need: one for need, one in answers.items() if isinstance(one, Propagation)}
        why = self._why_not
        return answers | {need: why for need in needs if need not in answers}

    def interrupt(self) -> None:
        """Stops: no propagation starts any more, so only finished ones count."""
        self.is_interrupted = True
        self.stop(INTERRUPTED)

    def stop(self, why: str) -> None:
        """Starts no propagation any more, and drops those that are running.

        Args:
          why: reason of needs without an answer.
        """
        self._why_not = why
        self.deadline_s = -math.inf

    def keep(self, need: Need, found: Propagation) -> None:
        """Stores an answer that was derived from another need's, as if it had been propagated."""
        self.cache.keep(self.step.job(need, need.sizes), found)

    def _run(self, queue: NeedQueue, answers: dict[Need, Propagation | str], note: str) -> None:
        running: dict[int, _Running] = {}
        try:
            self._run_until(queue, answers, note, running)
        except KeyboardInterrupt:
            self.interrupt()
        for one in running.values():  # Dropped, so that no worker waits for their lowerings.
            one.listener.close()

    def _run_until(
        self,
        queue: NeedQueue,
        answers: dict[Need, Propagation | str],
        note: str,
        running: dict[int, _Running],
    ) -> None:
        retried: set[Need] = set()

        def submit(need: Need, sizes: Sizes, *, fresh: bool = False) -> None:
            job = self.step.job(need, sizes)
            # After a doubtful end the lowerings of the previous worker may be damaged.
            listener = self._shared.listener(need.call, is_isolated=fresh)
            # By affinity: to an idle worker that has lowered this call.
            ticket = self.pool.submit(
                job, self.timeout_s, listener, fresh=fresh, affinity=need.call
            )
            running[ticket] = _Running(
                need=need, sizes=sizes, began_s=self.clock(), listener=listener
            )
            self.progress.now(f"{_text(need, sizes)}, propagating shardings")

        def follow(need: Need) -> None:
            if self.clock() < self.deadline_s and (following := queue.after(need)):
                submit(following, following.sizes)

        while True:
            while len(running) < self.workers and self.clock() < self.deadline_s:
                need = queue.next([one.need.call for one in running.values()])
                if need is None:
                    break
                submit(need, need.sizes)
            left_s = self.deadline_s - self.clock()
            if not running or left_s <= 0:
                return
            for finished in self.pool.wait(min(POLL_S, left_s)):
                done = running.pop(finished.ticket, None)
                if done is None:
                    self._put_aside([finished])
                    self.replied()
                    continue
                done.listener.close()
                if finished.doubtful:
                    self._shared.distrust(done.need.call)
                again = () if done.need in retried else _retry(done.need, done.sizes, finished)
                if again:
                    retried.add(done.need)
                    submit(done.need, again, fresh=finished.doubtful)
                    continue
                # Submitted at once, so that the worker need not wait until the answer is stored.
                is_decided = queue.is_decided(done.need)
                if is_decided:
                    follow(done.need)
                answer = answers[done.need] = self._taken(done.need, finished)
                self._note(done.need, answer)
                self._show(note, took_s=self.clock() - done.began_s)
                if not is_decided:
                    follow(done.need)
            self._beat()
            self.progress.tick()

    def _beat(self) -> None:
        """Calls `pulse`, but not too often, since it accesses the storage."""
        now_s = self.clock()
        if now_s - self._beat_s >= POLL_S:
            self._beat_s = now_s
            self.pulse()

    def _note(self, need: Need, answer: Propagation | str) -> None:
        """Counts an answer, and tells it to who listens, who may be interrupted by Ctrl-C."""
        self._done += 1
        if isinstance(answer, Propagation):
            self.known[need] = answer
        self.heard(need, answer)

    def _taken(self, need: Need, finished: Finished) -> Propagation | str:
        result = finished.result
        if isinstance(result, Propagation):
            self.cache.keep(self.step.job(need, need.sizes), result)
            return result
        if isinstance(result, Failure):
            refused = isinstance(result, Failed) and result.stage in ("build", "lower")
            what = STEP_REFUSES if refused else "its shardings could not be propagated"
            return f"{what}: {failure_reason(result)}"
        raise TypeError(f"a propagation was answered with {type(result).__name__}")

    def _show(self, note: str, *, took_s: float = 0.0) -> None:
        left_out = f"{self._left_out} left out" if self._left_out else ""
        self.progress.phase(
            "estimate",
            total=self._total - self._left_out,
            done=self._done,
            note=", ".join(filter(None, (note, left_out))),
            took_s=took_s,
            lanes=self.workers,
        )


def _retry(need: Need, sizes: Sizes, finished: Finished) -> Sizes:
    """Returns the sizes for a retry after a failure; nothing if a retry is useless.

    An earlier job may have damaged a worker that died; and a step may refuse sizes that no plan
    has.
    """
    result = finished.result
    if finished.doubtful:
        return sizes
    refused = isinstance(result, (Failed, OutOfMemory)) and result.stage in ("build", "lower")
    if refused and sizes != need.spare:
        return need.spare
    return ()


def _text(need: Need, sizes: Sizes) -> str:
    mesh = ",".join(f"{axis}:{size}" for axis, size in sizes) or "one device"
    mapping, knobs = need.call
    settings = Plan(axes=(), mapping=mapping, knobs=knobs).settings
    return " ".join([mesh, *(format_setting(*setting) for setting in settings)])
