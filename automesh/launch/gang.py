"""A gang: processes on several hosts that run one jax program and are one worker of a pool.

The gang sends every order to all its processes, and passes a message on to the pool once all of
them have sent it. So all processes run the same executables in the same order, and none decides
anything by itself: where they have to agree (whether to compile, how long to warm up, whether all
are ready), each sends an event and waits, and the gang sends the answer to all at once. If one
process is lost or fails alone, the others hang in a collective or fail with errors of their own.
The gang then collects reports for a moment, names the process that failed first (`launch.cause`),
and has the agents end all processes.
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
"""How long the gang waits for the reports of other processes after the first failure. A guardian
sees the end of its process within a tenth of a second, and the errors that follow from it come as
fast."""
# An agent that has not ended its processes by then is stopped, or its host is gone.
_ABANDON_S = 4.0
# The coordinator's port was free when it was looked up, and somebody took it since.
_PORT_TAKEN = re.compile(r"address already in use|failed to (?:add|bind)|bind.*port", re.IGNORECASE)


class Member(Protocol):
    """One process of a gang, reached by the agent of its host."""

    @property
    def host(self) -> str: ...
    def send(self, message: Message) -> None: ...
    def kill(self, *, force: bool) -> None: ...
    def abandon(self) -> None:
        """Gives up the agent, which does not carry out orders."""
        ...


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One process of a gang, and the messages that it has sent on the running job.

    Attributes:
      steps: how often it has reached a point where it waits for others: stages, agreements.
      waiting: the event whose answer it waits for.
      result: its last message on the job, an answer or a failure.
      ended: True once it has ended or was given up.
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
    """A pair of sockets: one thread waits on one end until another thread writes to the other."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        # OSError: the buffer is full, so the reader wakes anyway; or the pipe is closed.
        with contextlib.suppress(OSError):
            self._writer.send(b"!")

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def __del__(self) -> None:
        self.close()  # Nobody called `close` if nobody waited for the end of the gang.


class Gang:
    """A gang as one worker; see the module. The pool's thread calls all methods except `deliver`,
    `end`, `give_up` and `activity`.

    Args:
      log: path from which the names of the logs are made: one per process, with its rank and host.
      on_end: called when no process is left. Given by `automesh.launch.lending`, whose gangs are a
        single process each: if that one fails at its start, its job is not judged by it, since
        another host may do the job.
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
        """Takes the message of an agent that a process has ended, or that it was lost with its
        agent; from any thread.

        Args:
          message: its `ended` is an `Ending`, or the reason as text; see `automesh.launch.agent`.
        """
        self._heard.append((rank, message, True))
        self.channel.wakeup.wake()
        self.leash.wake()

    def give_up(self, why: str) -> None:
        """Notes why the gang can never start; from any thread."""
        self._start_error = why
        for pipe in (self.channel.wakeup, self.leash):
            pipe.wake()

    # The methods by which a pool uses a worker; see `automesh.worker.process.Running`.

    def kill(self) -> None:
        """Asks the agents to end all processes."""
        if self._killed_at_s < float("inf"):
            return
        self._killed_at_s = time.monotonic()
        for rank in self._living():
            rank.member.kill(force=False)
        self.leash.wake()

    def kill_deputy(self) -> None:
        """Asks the agents to kill the processes by force; gives up agents that are too slow."""
        is_overdue = time.monotonic() > self._killed_at_s + _ABANDON_S
        for rank in self._living():
            rank.member.kill(force=True)
            if is_overdue:
                rank.ended = True
                rank.member.abandon()
        self.leash.wake()

    def has_ended(self) -> bool:
        """Whether no process is left."""
        self.leash.drain()
        self.hear()
        return not self._living()

    def run_time(self) -> RunTime:
        """Returns zeros: the load of other hosts is not measured."""
        return RunTime()

    def collect_ending(self) -> Ending:
        """Closes the pipes. The channel has already reported how each process ended."""
        self.leash.close()
        self.channel.wakeup.close()
        if self._on_end is not None:
            self._on_end(self)
        return Ending(code=None)

    @property
    def served(self) -> int:
        """Number of jobs that the gang has answered."""
        return self._served

    @property
    def lost_at_start(self) -> str:
        """The reason why the gang was lost before it began its first job; empty if it was not."""
        cause = self._cause
        if self._served or self._stage != "start" or cause is None or cause.ending is None:
            return ""
        return cause.failure.reason if isinstance(cause.failure, Failed) else cause.failure.kind

    def activity(self, rank: int) -> str:
        """Returns what one of the processes is doing, in words; empty if it has no job. From any
        thread."""
        job, stages = self._job, self._ranks[rank].stages
        if job is None:
            return ""
        words = activity_of(job, stages[-1] if stages else "start")
        return f"{words}, rank {rank} of {len(self._ranks)}" if len(self._ranks) > 1 else words

    def with_log(self, result: Answer | Failure, _last_line: str = "", /) -> Answer | Failure:
        """Adds the end of the log of the process that failed, and the slow ranks to a timeout."""
        if isinstance(result, TimedOut):
            result = replace(result, where=result.where or self._waited_for())
        if isinstance(result, Failed | TimedOut) and not result.log_tail:
            of = self._cause.rank if self._cause is not None else 0
            return replace(result, log_tail=self._ranks[of].tail)
        return result

    # Messages of the processes.

    def order(self, message: Message) -> None:
        """Sends a message to all processes of the gang."""
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
        """Handles the delivered messages; returns the messages of the gang as a whole."""
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
        """Ends the job once every process has sent its result or has ended."""
        if self._ignores_messages:
            return
        if all(one.result is not None or one.ended for one in self._ranks):
            self._decide(said) if self._reports else self._answer(said)

    @property
    def _ignores_messages(self) -> bool:
        """Whether messages have no effect now: there is no job, or its outcome is settled."""
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
        """Answers the event that all processes wait on, or passes it to the pool."""
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
                    else "it ran something else"
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
        """Merges the answers of all processes into one for the pool."""
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
        """Handles the end of a process, or the loss of its agent."""
        if rank.ended:
            return
        rank.ended, rank.is_stopped = True, bool(message.get("stopped"))
        rank.tail = str(message.get("tail", "")) or rank.tail
        self._write_log(number, rank, str(message.get("log", "")))
        if self._killed_at_s < float("inf"):
            return
        if self._job is None:
            self.kill()  # Idle: the pool starts a new gang for the next job.
            return
        ending = Ending(**message["ended"]) if isinstance(message["ended"], dict) else None
        if ending is None:
            failure: Failure = Failed(stage=self._stage, reason=str(message["ended"]))
            ending = Ending(code=None)
        else:
            stage = rank.stages[-1] if rank.stages else "start"
            limit = int(message.get("limit_bytes", 0))
            failure = ending.outcome(stage=stage, memory_limit_bytes=limit)
        # A failure that the process reported before it ended says more than its exit code.
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
        """Reports how the job failed; keeps the gang if all processes reported the same failure."""
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
            self.kill()  # The pool gets no failure, so it starts another gang for the same job.
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
        """Returns the ranks that the others waited for at the timeout; empty if all were equally
        far."""
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
        """False: the agents' streams keep the messages that are not sent yet."""
        return False

    def send(self, message: Message) -> None:
        """Sends a message to all processes."""
        self._gang.order(message)

    def flush(self) -> None:
        """Does nothing: the channel itself keeps no messages."""

    def receive(self) -> list[Message]:
        """Returns the messages of the gang as a whole since the last call."""
        self.wakeup.drain()
        said = self._gang.hear()
        self.unread = []
        return said
