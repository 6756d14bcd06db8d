"""The worker: does the jobs that come over the control channel, and says of each how it ended.

User code runs in here and may do anything: what it raises, even `SystemExit`, becomes an answer;
what it does to the standard streams, the working directory or signal handlers does not reach the
channel; what ends the process is seen by the guardian.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from automesh.outcomes import Failed, Failure
from automesh.worker import blame, protocol
from automesh.worker.handlers.interpreter import Interpreter
from automesh.worker.messages import CalibrateJob, DevicesJob, Job, LayoutJob
from automesh.worker.wire import ChildEnd, Message, PrivateDescriptor, WireError

Emit = Callable[[Message], Message]
Handle = Callable[[Job, Emit], object]

# Bound before any user code runs, which may replace what their modules call so.
_exit = os._exit
_fstat, _dup2, _fdopen = os.fstat, os.dup2, os.fdopen
_umask = os.umask
_setitimer, _ALARM = signal.setitimer, signal.ITIMER_REAL
_format_exception = traceback.format_exception


class Child:
    """The loop of a worker process.

    Args:
      channel: to the parent.
      log: the log, for what must be in it whatever user code did to the standard streams.
      limit_bytes: memory that the worker may hold, to be named in failures.
    """

    def __init__(self, channel: ChildEnd, log: PrivateDescriptor, limit_bytes: int) -> None:
        self._channel = channel
        self._log = log
        self._limit_bytes = limit_bytes
        self._stage = "start"
        self._handle: Handle | None = None
        self._interpreter = Interpreter()
        self._own_umask = _umask(0o077)
        _umask(self._own_umask)

    def serve(self, handler: str) -> NoReturn:
        """Does jobs until the parent closes the channel."""
        number = 0
        try:
            while (message := self._channel.receive()) is not None:
                number += 1
                job = protocol.read_job(message)
                self._stage = "start"
                self._reopen_streams()
                self._write_log(f"--- {message['label']} ---\n")
                outcome = self._outcome(handler, job)
                if "failure" in outcome:
                    outcome["last_line"] = self._end_log(number)
                self._channel.send(outcome)
                # An alarm that the script set and left would go off in the next job.
                _setitimer(_ALARM, 0)
                # Of a mask that lets nobody read, what later jobs keep could not be read back.
                _umask(self._own_umask)
        except WireError as error:
            self._write_log(f"automesh: {error}\n")
            _exit(protocol.CHANNEL_LOST)
        # Not sys.exit: threads and exit hooks of the script could hold the process up.
        _exit(0)

    def _outcome(self, handler: str, job: Job) -> Message:
        """Does one job; every exception but a lost channel becomes a failure."""
        spoilt = bool(self._interpreter.replaced)
        try:
            handle = self._handler(handler)
            # After the import of jax: that is part of the start, not of the time for the job.
            self._channel.send({"accepted": True})
            return protocol.answer_message(job, self._lend(handle, job))
        except WireError:
            raise
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a script must not end the worker
            return self._failure(job, error, spoilt=spoilt)

    def _lend(self, handle: Handle, job: Job) -> object:
        """Does a job with the interpreter as user code has left it in the one before."""
        self._interpreter.give()
        try:
            return handle(job, self._emit)
        finally:
            try:
                self._interpreter.take()
            except:  # noqa: E722 - a function that traces, and raises, is switched off by that
                self._interpreter.take()

    def _failure(self, job: Job, error: BaseException, *, spoilt: bool) -> Message:
        """What an exception means. Its words are user code as well, and may raise anything.

        Args:
          spoilt: True if an earlier job has replaced builtins.
        """
        try:
            self._write_log("".join(_format_exception(error)))
            outcome: Failure = blame.failure(
                error,
                stage=self._stage,
                function=_function(job),
                limit_bytes=self._limit_bytes,
            )
            # The script wanted the process to end, or its memory may be unusable.
            retire = not isinstance(error, Exception) or outcome.kind == "out_of_memory"
            replaced = self._interpreter.replaced
            retire = retire or bool(replaced)  # What they have spoilt may be spoilt for all.
            if replaced and isinstance(outcome, Failed):
                outcome = replace(outcome, hint=blame.hint_where_replaced(replaced, outcome))
            return protocol.failure_message(outcome, retire=retire, doubtful=spoilt)
        except BaseException:  # noqa: BLE001
            reason = "the script raised an exception that cannot be described"
            return protocol.failure_message(Failed(stage=self._stage, reason=reason), retire=True)

    def _handler(self, name: str) -> Handle:
        # Imported in the first job, not before: then it has somebody to report a failure to.
        handle = self._handle or importlib.import_module(name).handle
        self._handle = handle
        return handle

    def _emit(self, event: dict[str, Any]) -> dict[str, Any]:
        """Sends an event of the running job; gives the reply if it has `"reply": True`, else {}."""
        self._interpreter.take()
        try:
            if event.get("event") == "stage":
                self._stage = event["stage"]
            self._channel.send(event)
            if not event.get("reply"):
                return {}
            message = self._channel.receive()
            if message is None:
                _exit(0)
            return message["reply"]
        finally:
            self._interpreter.give()

    def _reopen_streams(self) -> None:
        """Undoes that an earlier job closed the standard streams: this one's output is wanted."""
        for fd in (1, 2):
            try:
                _fstat(fd)
            except OSError:
                _dup2(self._log.fileno(), fd)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            if _is_closed(getattr(sys, name, None)):
                setattr(sys, name, _fdopen(fd, "w", buffering=1, closefd=False))

    def _end_log(self, number: int) -> str:
        """Ends a failed job's output with a line of its own, which is the result; "" for none.

        It has no dashes at its end, as the heading of a job has.
        """
        line = f"--- job {number} has failed"
        try:
            self._log.write(f"\n{line}\n".encode())
        except OSError:  # The script may have closed every descriptor.
            return ""
        return line

    def _write_log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # The script may have closed every descriptor.
            self._log.write(text.encode(errors="backslashreplace"))


def _is_closed(stream: Any) -> bool:
    """Whether nothing can be written; what is no stream at all is the script's own affair."""
    try:
        return stream is None or bool(getattr(stream, "closed", False))
    except BaseException:  # noqa: BLE001 - the script's own stream may do anything
        return True


def _pass_over(number: int, frame: FrameType | None) -> None:
    """Does nothing. Whoever interrupts a worker alone means no plan; the parent ends its workers
    otherwise, and a Ctrl-C in the terminal does not reach them."""


def _function(job: Job) -> str:
    """The user's function that the job calls; empty if it calls none."""
    if isinstance(job, DevicesJob | LayoutJob | CalibrateJob):
        return ""
    # A script that is run as it is has no function yet.
    return job.step.entry.function or Path(job.step.entry.location).name


def main(arguments: list[str]) -> NoReturn:
    """Arguments: descriptor of the control channel, memory limit in bytes, module with `handle`."""
    control, limit_bytes, handler = int(arguments[0]), int(arguments[1]), arguments[2]
    log = PrivateDescriptor(2)
    # Says in the log in which line a segmentation fault or an abort came.
    faulthandler.enable(log.fileno())
    # A handler, since programs that the script starts would inherit that a signal is ignored.
    signal.signal(signal.SIGINT, _pass_over)
    sys.argv = sys.argv[:1]
    Child(ChildEnd(control), log, limit_bytes).serve(handler)


if __name__ == "__main__":
    main(sys.argv[1:])
