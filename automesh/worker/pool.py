"""A pool of worker processes that survives whatever they do (no jax).

The pool works only in the caller's thread, inside `wait` and `run`: it has no threads and no signal
handlers. Ctrl-C interrupts these calls at once, and `close` then kills all processes.
"""

from __future__ import annotations

import itertools
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from automesh.errors import AutomeshError
from automesh.outcomes import Failed, Failure, TimedOut
from automesh.worker import protocol
from automesh.worker.activity import OnWait, doing_all
from automesh.worker.messages import Job, Surroundings
from automesh.worker.process import Process, Running, StartWorker, clear_logs
from automesh.worker.protocol import Answer
from automesh.worker.run_time import RunTime, lost_s
from automesh.worker.wire import Message, WireError

# The jobs of a pool and their results (no jax).

OnEvent = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A job that has ended, with its answer or its failure.

    Attributes:
      ticket: the number that `submit` returned for it.
      job: the job.
      result: the answer of its kind of job, or the failure.
      doubtful: True if something else may have caused the failure: an earlier job of the same
        process, which may have replaced builtins, or somebody who killed the process.
    """

    ticket: int
    job: Job
    result: Answer | Failure
    doubtful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job that waits or runs: the arguments of `Pool.submit`, with its ticket.

    Attributes:
      lost_starts: how many workers somebody killed before they began this job.
    """

    ticket: int
    job: Job
    timeout_s: float
    on_event: OnEvent | None
    fresh: bool
    affinity: Hashable = None
    patient: bool = False
    lost_starts: int = 0


START_LIMIT_S = 300.0  # Importing jax takes seconds, and minutes on a very busy machine.
_KILL_LIMIT_S = 1.5  # The guardian needs milliseconds, its deputy half a second.
_CLOSE_LIMIT_S = 1.0
# The end of a process is seen on the channel first, and by its guardian milliseconds later; on a
# machine that is very busy, seconds. A process that lives on for longer has lost its channel.
_SEVERED_S = 10.0
# A job may get this many times its limit as extra time if others had the cores.
_MOST_PATIENCE = 3.0
_LEAST_PATIENCE_S = 0.1  # Even an idle process waits for a core for some milliseconds.
_LOST_STARTS = 3  # After this many lost starts the start itself is the cause.
_KEPT_LOGS = 64  # 4 MB each at most.
_PULSE_S = 0.5  # Longest time between two calls of `on_wait`.


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    """A worker process and its state in the pool. While `task` is None it is idle.

    Attributes:
      deadline: clock time at which the start, the running job, or the killing has taken too long.
      starting: True until the process begins its task, and while jax looks for devices.
      left_s: seconds that its task may take after the start.
      began: when its task began with jax ready; `run_time` was read at that time.
      granted_s: extra time that its task got because others had the cores.
      served: number of jobs that it has finished.
      affinity: affinity of its last job; see `Pool.submit`.
      severed: True once its channel has ended, so that it can answer no more.
      verdict: outcome of the task if it was settled before the process ended; may lack its log
        tail.
      doubtful: True if an earlier job may have caused its verdict.
      dying: True once the pool told it to end.
    """

    process: Running
    generation: int
    task: Task | None = None
    stage: str = "start"
    deadline: float = 0.0
    starting: bool = False
    left_s: float = 0.0
    began: float = 0.0
    run_time: RunTime = field(default_factory=RunTime)
    granted_s: float = 0.0
    served: int = 0
    affinity: Hashable = None
    severed: bool = False
    verdict: Answer | Failure | None = None
    doubtful: bool = False
    dying: bool = False


class Pool:
    """Up to `size` worker processes, which start when there are jobs and serve until they end.

    Use it as a context manager, or call `close`. If this process dies, so do the workers.

    Args:
      size: most processes at the same time; 1 for an attached accelerator, which serves only one.
      surroundings: the environment of the workers.
      log_dir: folder of the logs, made if missing; one file of at most 4 MB per process.
      memory_limit_bytes: limit of each worker together with the processes that it starts.
      handler: module whose function `handle(job, emit)` does the jobs in the worker.
      on_wait: is called inside `wait` and `run` with words on what the workers do, at least twice a
        second.
      start: starts a worker: by default a process on this machine; `automesh.launch` starts gangs
        and processes on other hosts.
      room: gives the number of workers that may run now, if hosts come and go; None for `size`.
    """

    def __init__(
        self,
        *,
        size: int,
        surroundings: Surroundings,
        log_dir: Path,
        memory_limit_bytes: int,
        handler: str = "automesh.worker.handlers.jobs",
        on_wait: OnWait | None = None,
        start: StartWorker = Process,
        room: Callable[[], int] | None = None,
    ) -> None:
        if size < 1 or memory_limit_bytes < 1:
            raise ValueError("a pool needs a size and a memory limit of at least 1")
        self._size = size
        self._surroundings = surroundings
        self._log_dir = log_dir.absolute()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        clear_logs(self._log_dir, keep=_KEPT_LOGS)
        self._memory_limit_bytes = memory_limit_bytes
        self._handler = handler
        self._on_wait = on_wait
        self._start_worker = start
        self._room = room
        self._selector = selectors.DefaultSelector()
        self._tickets = itertools.count(1)
        self._log_numbers = itertools.count(1)
        self._old_logs: deque[Path] = deque()
        self._queue: deque[Task] = deque()
        self._workers: list[_Worker] = []
        self._finished: deque[Finished] = deque()
        self._generation = 0
        self._listened = time.monotonic()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def unfinished(self) -> int:
        """Number of submitted jobs whose result no `wait` or `run` has returned yet."""
        running = sum(worker.task is not None for worker in self._workers)
        return len(self._queue) + running + len(self._finished)

    def submit(
        self,
        job: Job,
        timeout_s: float,
        on_event: OnEvent | None = None,
        *,
        fresh: bool = False,
        affinity: Hashable = None,
        patient: bool = False,
    ) -> int:
        """Puts a job into the queue and returns its ticket.

        Args:
          job: what to do.
          timeout_s: limit in seconds from its start in the worker; the start of a process has its
            own.
          on_event: is called inside `wait` with each event of the job; its result is the reply to
            an event that asks for one. If it raises, `wait` raises too, and the job fails.
          fresh: whether only a new process may do the job.
          affinity: jobs with equal affinity share work, so the job goes to an idle worker whose
            last job had the same one. None for none.
          patient: whether time does not count in which the job was ready to run but others had the
            cores, up to three times `timeout_s`: the limit is meant for jobs that hang.
        """
        task = Task(
            ticket=next(self._tickets),
            job=job,
            timeout_s=timeout_s,
            on_event=on_event,
            fresh=fresh,
            affinity=affinity,
            patient=patient,
        )
        self._queue.append(task)
        self._assign()
        return task.ticket

    def wait(self, timeout_s: float | None = None) -> list[Finished]:
        """Waits for a job to end; returns all ended jobs, [] after `timeout_s` or if none is
        left."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._finished and self.unfinished:
            self._turn_with_progress(deadline)
            if time.monotonic() >= deadline:
                break
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def run(
        self,
        job: Job,
        timeout_s: float,
        on_event: OnEvent | None = None,
        *,
        patient: bool = False,
    ) -> Answer | Failure:
        """Does one job and waits for it while other jobs go on; the arguments are those of
        `submit`."""
        return self.result_of(self.submit(job, timeout_s, on_event, patient=patient))

    def result_of(self, ticket: int) -> Answer | Failure:
        """Waits for one job; results of others are kept for `wait`."""
        while True:
            for finished in self._finished:
                if finished.ticket == ticket:
                    self._finished.remove(finished)
                    return finished.result
            self._turn_with_progress(float("inf"))

    def recycle(self, surroundings: Surroundings | None = None) -> None:
        """Makes all later jobs run in new processes, with new surroundings if given."""
        self._generation += 1
        self._surroundings = surroundings or self._surroundings
        for worker in self._workers:
            if worker.task is None:
                self._kill(worker)

    def close(self) -> None:
        """Kills all workers with all that they started, and drops all jobs, within two seconds.

        A worker on a busy or far machine may take longer to end: whoever closes the pool again
        waits for it again.
        """
        self._queue.clear()
        for worker in self._workers:
            self._kill(worker)
        self._turn_until_empty(_CLOSE_LIMIT_S)
        for worker in self._workers:
            worker.process.kill_deputy()
        self._turn_until_empty(_CLOSE_LIMIT_S)
        self._finished.clear()
        if not self._workers:
            self._selector.close()

    def _turn_until_empty(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._workers and time.monotonic() < deadline:
            self._turn(deadline)

    def _turn_with_progress(self, deadline: float) -> None:
        """Does `_turn`, and reports what the workers are doing."""
        if self._on_wait is None:
            self._turn(deadline)
            return
        self._turn(min(deadline, time.monotonic() + _PULSE_S))
        running = [
            (worker.task.job, worker.stage) for worker in self._workers if worker.task is not None
        ]
        self._on_wait(doing_all(running))

    def _extend_deadlines(self) -> None:
        """Extends the limits of jobs by the time in which the pool did not read their events."""
        away_s = time.monotonic() - self._listened
        self._listened += away_s
        for worker in self._workers:
            worker.deadline += away_s

    def _turn(self, deadline: float) -> None:
        """Waits until something happens or `deadline` has passed, and handles all that happened."""
        self._extend_deadlines()
        limits = [w.deadline for w in self._workers if w.task is not None or w.dying or w.severed]
        patience_s = min([deadline, *limits]) - time.monotonic()
        ready = self._selector.select(max(0.0, patience_s) if patience_s < float("inf") else None)
        self._listened = time.monotonic()
        for key, events in ready:
            worker, part = key.data
            if worker not in self._workers:  # Its end was handled in this same round.
                continue
            if part == "leash":
                self._read_leash(worker)
            else:
                self._read_channel(worker, events)
        self._extend_deadlines()
        for worker in self._workers:
            self._check_deadline(worker)
        self._assign()

    def _assign(self) -> None:
        """Gives queued jobs to idle workers of this generation, and starts workers for others."""
        idle = [one for one in self._workers if one.task is None and not (one.dying or one.severed)]
        while self._queue:
            first = self._queue[0]
            able = [one for one in idle if one.task is None and not (first.fresh and one.served)]
            if not able:
                break
            wanted = first.affinity
            close = [one for one in able if wanted is not None and one.affinity == wanted]
            self._give((close or able)[0], self._queue.popleft())
        while self._queue and len(self._workers) < self._size_now():
            task = self._queue.popleft()
            try:
                worker = self._start()
            except OSError as error:
                reason = f"the worker could not be started: {error}"
                self._finish(task, Failed(stage="start", reason=reason))
                continue
            self._give(worker, task)
        spare = [one for one in idle if one.task is None]
        if self._queue and spare and not any(one.dying or one.severed for one in self._workers):
            self._kill(spare[0])  # Makes room: the next job needs a new process.

    def _size_now(self) -> int:
        return self._size if self._room is None else min(self._size, self._room())

    def _start(self) -> _Worker:
        log = self._log_dir / f"worker-{os.getpid()}-{next(self._log_numbers):04}.log"
        process = self._start_worker(
            surroundings=self._surroundings,
            log=log,
            memory_limit_bytes=self._memory_limit_bytes,
            handler=self._handler,
        )
        worker = _Worker(process=process, generation=self._generation)
        self._workers.append(worker)
        self._selector.register(process.leash, selectors.EVENT_READ, (worker, "leash"))
        self._selector.register(process.channel, selectors.EVENT_READ, (worker, "channel"))
        return worker

    def _give(self, worker: _Worker, task: Task) -> None:
        worker.task, worker.affinity = task, task.affinity
        worker.stage, worker.starting, worker.left_s = "start", True, task.timeout_s
        worker.deadline = time.monotonic() + START_LIMIT_S
        worker.granted_s = 0.0
        self._send(worker, protocol.job_message(task.job, protocol.label(task.job)))

    def _start_clock(self, worker: _Worker, *, starting: bool) -> None:
        """Starts the clock of a worker's start, or restarts that of its job with the time left."""
        if worker.starting == starting:
            return
        now, worker.starting = time.monotonic(), starting
        if starting:
            worker.left_s, worker.deadline = worker.deadline - now, now + START_LIMIT_S
        else:
            worker.deadline = now + worker.left_s
            if worker.task is not None and worker.task.patient:
                worker.began, worker.run_time = now, worker.process.run_time()

    def _send(self, worker: _Worker, message: Message) -> None:
        worker.process.channel.send(message)
        self._watch_channel(worker)

    def _watch_channel(self, worker: _Worker) -> None:
        channel = worker.process.channel
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        if channel in self._selector.get_map():
            self._selector.modify(channel, events, (worker, "channel"))

    def _read_channel(self, worker: _Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            worker.process.channel.flush()
            self._watch_channel(worker)
        if not events & selectors.EVENT_READ or worker.dying:
            return
        try:
            messages = worker.process.channel.receive()
        except WireError as error:
            self._fail_and_kill(worker, f"the worker's message cannot be read: {error}")
            return
        for message in messages:
            self._handle_message(worker, message)
        if worker.process.channel.ended:  # If the process ended, the leash reports it.
            self._ignore_channel(worker)
            if not worker.dying:
                worker.severed = True
                worker.deadline = min(worker.deadline, time.monotonic() + _SEVERED_S)

    def _handle_message(self, worker: _Worker, message: Message) -> None:
        """Acts on one message from a worker."""
        task = worker.task
        if task is None or worker.dying:
            return
        if "accepted" in message:
            self._start_clock(worker, starting=False)
            return
        if "event" in message:
            self._handle_event(worker, task, message)
            return
        try:
            result = protocol.read_result(task.job, message)
        except AutomeshError as error:
            self._fail_and_kill(worker, f"the worker's message is not understood: {error}")
            return
        worker.doubtful = bool(message.get("doubtful"))
        last_line = str(message.get("last_line", ""))
        self._settle(worker, result, retire=bool(message.get("retire")), last_line=last_line)

    def _handle_event(self, worker: _Worker, task: Task, event: Message) -> None:
        if event["event"] == "stage":
            worker.stage = str(event["stage"])
            self._start_clock(worker, starting=worker.stage == "start")
        try:
            reply = task.on_event(event) if task.on_event else None
        except BaseException:
            self._fail_and_kill(worker, "the search failed while it handled an event of this job")
            raise
        if event.get("reply"):
            self._send(worker, {"reply": reply or {}})

    def _settle(
        self, worker: _Worker, result: Answer | Failure, *, retire: bool, last_line: str
    ) -> None:
        """Ends the task of a worker that continues; if the worker retires, its end ends the
        task."""
        assert worker.task is not None
        if retire:
            worker.verdict = result
            self._kill(worker)
            return
        whole = worker.process.with_log(result, last_line)
        self._finish(worker.task, whole, doubtful=worker.doubtful)
        worker.task = None
        worker.served += 1
        if worker.generation != self._generation:
            self._kill(worker)

    def _fail_and_kill(self, worker: _Worker, reason: str) -> None:
        worker.verdict = Failed(stage=worker.stage, reason=reason)
        self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        if not worker.dying:
            worker.dying = True
            worker.deadline = time.monotonic() + _KILL_LIMIT_S
            self._ignore_channel(worker)
            worker.process.kill()

    def _ignore_channel(self, worker: _Worker) -> None:
        if worker.process.channel in self._selector.get_map():
            self._selector.unregister(worker.process.channel)

    def _check_deadline(self, worker: _Worker) -> None:
        if time.monotonic() < worker.deadline:
            return
        if worker.dying:
            worker.process.kill_deputy()
            worker.deadline = time.monotonic() + _KILL_LIMIT_S
        elif worker.severed:
            self._fail_and_kill(worker, protocol.NO_CHANNEL)
        elif worker.task is not None and not self._grant_extra_time(worker, worker.task):
            limit_s = START_LIMIT_S if worker.starting else worker.task.timeout_s
            worker.verdict = TimedOut(stage=worker.stage, limit_s=limit_s)
            self._kill(worker)

    def _grant_extra_time(self, worker: _Worker, task: Task) -> bool:
        """Whether a job is late because others had the cores; if so, extends its limit by that
        time."""
        if not task.patient or worker.starting:
            return False
        lost = lost_s(worker.run_time, worker.process.run_time(), time.monotonic() - worker.began)
        more_s = min(lost, _MOST_PATIENCE * task.timeout_s) - worker.granted_s
        if more_s < _LEAST_PATIENCE_S:
            return False
        worker.granted_s += more_s
        worker.deadline = time.monotonic() + more_s
        return True

    def _read_leash(self, worker: _Worker) -> None:
        """Handles the end of a worker; its last messages may still be in the channel."""
        if not worker.process.has_ended():
            return
        if worker.process.channel in self._selector.get_map():
            self._read_channel(worker, selectors.EVENT_READ)
        self._workers.remove(worker)
        self._ignore_channel(worker)
        self._selector.unregister(worker.process.leash)
        ending = worker.process.collect_ending()
        self._keep_log(worker.process.log)
        task = worker.task
        if task is None:
            return
        # A job that `close` killed with its worker must not start again.
        if worker.verdict is None and worker.stage == "start" and not worker.dying:
            if worker.served:
                # An earlier job killed the process, for instance by a thread that it left running.
                self._queue.appendleft(task)
                return
            if ending.by_stranger and task.lost_starts < _LOST_STARTS:
                # Somebody killed it before it began: neither the job nor the machine is the cause.
                self._queue.appendleft(replace(task, lost_starts=task.lost_starts + 1))
                return
        verdict = worker.verdict or ending.outcome(
            stage=worker.stage, memory_limit_bytes=self._memory_limit_bytes
        )
        doubtful = worker.doubtful
        if worker.verdict is None:
            doubtful = worker.served > 0 or ending.by_stranger
        self._finish(task, worker.process.with_log(verdict), doubtful=doubtful)

    def _keep_log(self, log: Path) -> None:
        self._old_logs.append(log)
        if len(self._old_logs) > _KEPT_LOGS:
            self._old_logs.popleft().unlink(missing_ok=True)

    def _finish(self, task: Task, result: Answer | Failure, *, doubtful: bool = False) -> None:
        self._finished.append(
            Finished(ticket=task.ticket, job=task.job, result=result, doubtful=doubtful)
        )
