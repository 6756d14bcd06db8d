"""A gang: processes on several hosts that run one jax program, and to a pool are one worker.

Every order goes to all of them, and what they say is passed on once all have said it. So all run
the same executables in the same order, and none decides anything by itself: where they have to
agree (whether to compile, how long to warm up, whether all are ready) they send an event and wait,
and the answer goes to all at once. If one is lost or fails alone, the others hang in a collective
or fail with words of their own: then the reports of a moment are collected, the origin is named
(`launch.cause`), and the whole gang is ended from outside.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from automesh.errors import AutomeshError
from automesh.files import open_log
from automesh.launch.cause import RankReport, cause_of, common_failure
from automesh.launch.merge import merged_answer
from automesh.outcomes import Failed, Failure, TimedOut
from automesh.worker import protocol
from automesh.worker.activity import activity_of
from automesh.worker.messages import Job, VisitJob
from automesh.worker.process import Ending
from automesh.worker.protocol import Answer
from automesh.worker.run_time import RunTime
from automesh.worker.wire import Message

GRACE_S = 1.0
"""How long the reports of other processes are waited for after the first failure: a process that
ended is seen by its guardian within a tenth of a second, and the echoes come as fast."""
_DEAF_S = 4.0  # An agent that has not ended its processes by then is stopped, or its host is gone.
# The coordinator's port was free when it was looked up, and somebody took it since.
_PORT_TAKEN = re.compile(r"address already in use|failed to (?:add|bind)|bind.*port", re.IGNORECASE)


class Member(Protocol):
    """One process of a gang, reached by the agent of its host."""

    @property
    def host(self) -> str: ...
    def send(self, message: Message) -> None: ...
    def kill(self, *, force: bool) -> None: ...
    def abandon(self) -> None:
        """Gives up the agent, which does not do what it is told."""
        ...


@dataclass(slots=True, kw_only=True)
class _Rank:
    """What one process has said.

    Attributes:
      steps: how often it has come to a place where others are waited for: stages, agreements.
      waiting: the event that it waits for an answer to.
      result: its last message on the job.
      ended: True once it is gone, or given up.
      is_stopped: True if it was found stopped (SIGSTOP) when it was killed.
    """

    member: Member
    stages: list[str] = field(default_factory=list[str])
    accepted: bool = False
    steps: int = 0
    waiting: Message | None = None
    result: Message | None = None
    tail: str = ""
    ended: bool = False
    is_stopped: bool = False


class _WakeupPipe:
    """A descriptor on which a thread waits until another one wakes it."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # It is awake already, or closed.
            self._writer.send(b"!")

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def __del__(self) -> None:
        self.close()  # Of a gang whose end nobody has waited for.


class Gang:
    """See the module. Everything but `deliver` is called in the pool's thread.

    Args:
      log: of each process there is one beside it, with its rank and its host in the name.
      on_end: told when nothing is left of it; see `automesh.launch.lending`, whose gangs are a
        single process each: that one fails at its start is no verdict on its job then, which
        another host may do.
    """

    def __init__(self, log: Path, on_end: Callable[[Gang], object] | None = None) -> None:
        self.log = log
        self._on_end = on_end
        self.leash = _WakeupPipe()
        self.channel = GangChannel(self)
        self._ranks: list[_Rank] = []
        self._heard: deque[tuple[int, Message, bool]] = deque()
        self._job: Job | None = None
        self._stage = "start"
        self._forwarded = 0
        self._reports: dict[int, RankReport] = {}
        self._decide_at_s = float("inf")
        self._cause: RankReport | None = None
        self._served = 0
        self._killed_at_s = float("inf")
        self._start_error = ""

    def set_members(self, members: Sequence[Member]) -> None:
        """Sets the processes, in the order of their ranks."""
        self._ranks = [_Rank(member=member) for member in members]

    def deliver(self, rank: int, message: Message) -> None:
        """Takes a message of a process; from any thread."""
        self._heard.append((rank, message, False))
        self.channel.wakeup.wake()

    def end(self, rank: int, message: Message) -> None:
        """Takes what an agent, or the loss of one, says of the end of a process; from any thread.

        Args:
          message: `ended` is an `Ending`, or why; see `automesh.launch.agent`.
        """
        self._heard.append((rank, message, True))
        self.channel.wakeup.wake()
        self.leash.wake()

    def give_up(self, why: str) -> None:
        """Says that it can never start; from any thread."""
        self._start_error = why
        for pipe in (self.channel.wakeup, self.leash):
            pipe.wake()

    # What a pool does with a worker; see `automesh.worker.process.Running`.

    def kill(self) -> None:
        """Has all processes ended by their agents."""
        if self._killed_at_s < float("inf"):
            return
        self._killed_at_s = time.monotonic()
        for rank in self._living():
            rank.member.kill(force=False)
        self.leash.wake()

    def kill_deputy(self) -> None:
        """Tries harder; gives up agents that do not obey."""
        is_deaf = time.monotonic() > self._killed_at_s + _DEAF_S
        for rank in self._living():
            rank.member.kill(force=True)
            if is_deaf:
                rank.ended = True
                rank.member.abandon()
        self.leash.wake()

    def has_ended(self) -> bool:
        """True once no process is left."""
        self.leash.drain()
        self.hear()
        return not self._living()

    def run_time(self) -> RunTime:
        """Zeros: what keeps the cores of other hosts busy is not asked."""
        return RunTime()

    def bury(self) -> Ending:
        """Frees what is held. How single processes ended was said on the channel."""
        self.leash.close()
        self.channel.wakeup.close()
        if self._on_end is not None:
            self._on_end(self)
        return Ending(code=None)

    @property
    def served(self) -> int:
        """Jobs that it has answered."""
        return self._served

    @property
    def lost_at_start(self) -> str:
        """Why it was lost before it had begun with anything; empty if it was not."""
        cause = self._cause
        if self._served or self._stage != "start" or cause is None or cause.ending is None:
            return ""
        return cause.failure.reason if isinstance(cause.failure, Failed) else cause.failure.kind

    def activity(self, rank: int) -> str:
        """What one of its processes does, in words; empty if it has no job. From any thread."""
        job, stages = self._job, self._ranks[rank].stages
        if job is None:
            return ""
        words = activity_of(job, stages[-1] if stages else "start")
        return f"{words}, rank {rank} of {len(self._ranks)}" if len(self._ranks) > 1 else words

    def with_log(self, result: Answer | Failure, _last_line: str = "", /) -> Answer | Failure:
        """Adds what the process in question has printed, and its name to a timeout."""
        if isinstance(result, TimedOut):
            result = replace(result, where=result.where or self._waited_for())
        if isinstance(result, Failed | TimedOut) and not result.log_tail:
            of = self._cause.rank if self._cause is not None else 0
            return replace(result, log_tail=self._ranks[of].tail)
        return result

    # What the processes say.

    def order(self, message: Message) -> None:
        """Sends a message to all."""
        if "job" in message:
            self._job = protocol.read_job(message)
            self._stage, self._forwarded = "start", 0
            self._reports.clear()
            self._decide_at_s, self._cause = float("inf"), None
            for rank in self._ranks:
                rank.stages, rank.accepted, rank.steps = [], False, 0
                rank.waiting = rank.result = None
        self._to_all(message)

    def hear(self) -> list[Message]:
        """Works through what was delivered; gives what the gang as a whole has to say."""
        said = self.channel.unread
        if self._start_error:
            for rank in self._ranks:
                rank.ended = True
            if not self._ignores_messages:
                self._job = None
                failed = Failed(stage="start", reason=self._start_error)
                said.append(protocol.failure_message(failed, retire=True))
        while self._heard:
            number, message, is_end = self._heard.popleft()
            if is_end:
                self._end(number, self._ranks[number], message)
            else:
                self._take(number, self._ranks[number], message, said)
            self._conclude(said)
        if not self._ignores_messages and time.monotonic() >= self._decide_at_s:
            self._decide(said)
        return said

    def _take(self, number: int, rank: _Rank, message: Message, said: list[Message]) -> None:
        if self._ignores_messages:
            return
        try:
            self._listen(number, rank, message, said)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._fail(number, f"the worker's message is not understood: {error!r}")
            self._decide(said)

    def _listen(self, number: int, rank: _Rank, message: Message, said: list[Message]) -> None:
        if "accepted" in message:
            rank.accepted = True
            if all(one.accepted for one in self._ranks):
                said.append({"accepted": True})
        elif "event" in message:
            self._event(number, rank, message, said)
        elif message.keys() & {"answer", "failure"}:
            rank.result, rank.steps = message, rank.steps + 1
            rank.tail = str(message.get("tail", rank.tail))
            if "failure" in message:
                self._report_failure(number, rank, message)
        else:
            raise KeyError("answer")

    def _conclude(self, said: list[Message]) -> None:
        """Says how the job went once all have said it, or ended."""
        if self._ignores_messages:
            return
        if all(one.result is not None or one.ended for one in self._ranks):
            self._decide(said) if self._reports else self._answer(said)

    @property
    def _ignores_messages(self) -> bool:
        """Nothing that is said now counts: there is no job, or it is decided how it ended."""
        return self._job is None or self._cause is not None or self._killed_at_s < float("inf")

    def _event(self, number: int, rank: _Rank, message: Message, said: list[Message]) -> None:
        rank.steps += 1
        if message["event"] == "stage":
            rank.stages.append(str(message["stage"]))
            while all(len(one.stages) > self._forwarded for one in self._ranks):
                self._stage = self._ranks[0].stages[self._forwarded]
                self._forwarded += 1
                said.append({"event": "stage", "stage": self._stage})
        elif message.get("reply"):
            rank.waiting = message
            if all(one.waiting is not None for one in self._ranks):
                self._agree(said)
        elif number == 0:
            said.append(message)

    def _agree(self, said: list[Message]) -> None:
        """All wait for an answer: those that are about the gang itself are given here."""
        events = [rank.waiting or {} for rank in self._ranks]
        for rank in self._ranks:
            rank.waiting = None
        first = events[0]
        for number, event in enumerate(events):
            same = ("event", "where", "fingerprint")
            if any(event.get(name) != first.get(name) for name in same):
                what = (
                    "it lowered another program"
                    if event.get("event") == first.get("event") == "lowered"
                    else "it does other things"
                )
                self._fail(number, f"{what} than rank 0 on {self._ranks[0].member.host}")
                self._decide(said)
                return
        match first["event"]:
            case "gather":
                self._to_all({"reply": {}})
            case "slowest":
                slowest_s = max(float(event["seconds"]) for event in events)
                self._to_all({"reply": {"seconds": slowest_s}})
            case _:
                said.append(first)

    def _answer(self, said: list[Message]) -> None:
        """All have answered."""
        job, hosts = self._job, [rank.member.host for rank in self._ranks]
        assert job is not None
        try:
            answers = [protocol.read_result(job, rank.result or {}) for rank in self._ranks]
        except AutomeshError as error:
            self._fail(0, f"an answer is not understood: {error.message}")
            self._decide(said)
            return
        merged = merged_answer(
            [one for one in answers if not isinstance(one, Failure)],
            hosts,
            is_joint=not isinstance(job, VisitJob) or job.plan.num_devices > 1,
        )
        if isinstance(merged, Failed):
            said.append(protocol.failure_message(merged, retire=True))
        else:
            said.append(protocol.answer_message(job, merged))
        self._job, self._served = None, self._served + 1

    # Failures

    def _report_failure(self, number: int, rank: _Rank, message: Message) -> None:
        job = self._job
        assert job is not None
        try:
            failure = protocol.read_result(job, message)
        except AutomeshError as error:
            failure = Failed(stage=self._stage, reason=f"its message is not understood: {error}")
        if isinstance(failure, Failure):
            self._report(number, rank, failure, retire=bool(message.get("retire")))

    def _fail(self, number: int, reason: str) -> None:
        self._report(number, self._ranks[number], Failed(stage=self._stage, reason=reason))

    def _end(self, number: int, rank: _Rank, message: Message) -> None:
        """A process is gone, or the agent that had it."""
        if rank.ended:
            return
        rank.ended, rank.is_stopped = True, bool(message.get("stopped"))
        rank.tail = str(message.get("tail", "")) or rank.tail
        self._write_log(number, rank, str(message.get("log", "")))
        if self._killed_at_s < float("inf"):
            return
        if self._job is None:
            self.kill()  # Idle: the next job gets a new gang.
            return
        ending = Ending(**message["ended"]) if isinstance(message["ended"], dict) else None
        if ending is None:
            failure: Failure = Failed(stage=self._stage, reason=str(message["ended"]))
            ending = Ending(code=None)
        else:
            stage = rank.stages[-1] if rank.stages else "start"
            limit = int(message.get("limit_bytes", 0))
            failure = ending.outcome(stage=stage, memory_limit_bytes=limit)
        # What it has said of its failure before it ended says more than its end.
        if number not in self._reports:
            self._report(number, rank, failure, ending=ending)

    def _report(
        self,
        number: int,
        rank: _Rank,
        failure: Failure,
        *,
        ending: Ending | None = None,
        retire: bool = False,
    ) -> None:
        now_s = time.monotonic()
        self._reports[number] = RankReport(
            rank=number,
            host=rank.member.host,
            failure=failure,
            at_s=now_s,
            ending=ending,
            retire=retire,
        )
        if self._decide_at_s == float("inf"):
            self._decide_at_s = now_s + GRACE_S
            timer = threading.Timer(GRACE_S, self.channel.wakeup.wake)
            timer.daemon = True
            timer.start()

    def _decide(self, said: list[Message]) -> None:
        """Says how the job failed; a gang that failed as a whole and in order stays."""
        reports = list(self._reports.values())
        common = common_failure(reports, len(self._ranks))
        self._job, self._decide_at_s = None, float("inf")
        if common is not None:
            retire = any(one.retire for one in reports)
            said.append(protocol.failure_message(common, retire=retire))
            self._served += 1
            return
        self._cause = cause = cause_of(reports)
        if self._is_accident(cause):
            self.kill()  # Without a verdict the pool starts another gang for the same job.
            return
        doubtful = cause.ending is not None and (cause.ending.by_stranger or self._served > 0)
        said.append(protocol.failure_message(cause.named, retire=True, doubtful=doubtful))

    def _is_accident(self, cause: RankReport) -> bool:
        """Whether the gang was lost before it had begun, by nobody's fault."""
        if self._stage != "start":
            return False
        if cause.ending is not None:
            return cause.ending.by_stranger or self._on_end is not None
        return isinstance(cause.failure, Failed) and bool(_PORT_TAKEN.search(cause.failure.reason))

    def _waited_for(self) -> str:
        """Whom the others waited for when the time was up; empty if that cannot be told."""
        stopped = [rank for rank in self._ranks if rank.is_stopped]
        least = min(rank.steps for rank in self._ranks)
        behind = stopped or [rank for rank in self._ranks if rank.steps == least]
        if len(behind) == len(self._ranks):
            return ""
        return ", ".join(
            f"rank {number} on {rank.member.host}"
            for number, rank in enumerate(self._ranks)
            if rank in behind
        )

    def _living(self) -> list[_Rank]:
        return [rank for rank in self._ranks if not rank.ended]

    def _to_all(self, message: Message) -> None:
        for rank in self._living():
            rank.member.send(message)

    def _write_log(self, number: int, rank: _Rank, text: str) -> None:
        host = re.sub(r"[^\w.-]", "_", rank.member.host)
        path = self.log.with_name(f"{self.log.stem}-rank{number}-{host}.log")
        with contextlib.suppress(OSError), open_log(path) as file:
            file.write(text.encode(errors="backslashreplace"))


class GangChannel:
    """The conversation of a pool with a gang; see `automesh.worker.process.Channel`."""

    def __init__(self, gang: Gang) -> None:
        self.wakeup = _WakeupPipe()
        self.ended = False
        self.unread: list[Message] = []
        self._gang = gang

    def fileno(self) -> int:
        return self.wakeup.fileno()

    @property
    def has_unsent(self) -> bool:
        """False: what is to be sent waits at the agent's own stream."""
        return False

    def send(self, message: Message) -> None:
        """Sends a message to all processes."""
        self._gang.order(message)

    def flush(self) -> None:
        """Nothing is left to be sent."""

    def receive(self) -> list[Message]:
        """What the gang as a whole has said since."""
        self.wakeup.drain()
        said = self._gang.hear()
        self.unread = []
        return said
