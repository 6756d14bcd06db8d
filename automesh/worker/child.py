"""The worker process: does the jobs from the control channel, and reports how each one ended.

User code runs in this process and may do anything. An exception, even `SystemExit`, becomes an
answer. Changes to the standard streams, the working directory or signal handlers do not affect the
channel. The guardian sees an end of the process.
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

# Bound before any user code runs, which may replace these functions in their modules.
_exit = os._exit
_fstat, _dup2, _fdopen = os.fstat, os.dup2, os.fdopen
_umask = os.umask
_setitimer, _ALARM = signal.setitimer, signal.ITIMER_REAL
_format_exception = traceback.format_exception


class Child:
    """The loop of a worker process.

    Args:
      channel: to the parent.
      log: the log, for lines that must be in it even if user code changed the standard streams.
      limit_bytes: memory limit of the worker, to name in failures.
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
                # Clears an alarm of the script, which would go off in the next job.
                _setitimer(_ALARM, 0)
                # With a restrictive umask of the script, later jobs could not read their own files.
                _umask(self._own_umask)
        except WireError as error:
            self._write_log(f"automesh: {error}\n")
            _exit(protocol.CHANNEL_LOST)
        # Not sys.exit: threads and exit hooks of the script could delay the end.
        _exit(0)

    def _outcome(self, handler: str, job: Job) -> Message:
        """Does one job; turns every exception except a lost channel into a failure."""
        spoilt = bool(self._interpreter.replaced)
        try:
            handle = self._handler(handler)
            # After the import of jax, which is part of the start and not of the job.
            self._channel.send({"accepted": True})
            return protocol.answer_message(job, self._call_handler(handle, job))
        except WireError:
            raise
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a script must not end the worker
            return self._failure(job, error, spoilt=spoilt)

    def _call_handler(self, handle: Handle, job: Job) -> object:
        """Does a job with the interpreter state that user code left in the previous job."""
        self._interpreter.restore_users()
        try:
            return handle(job, self._emit)
        finally:
            try:
                self._interpreter.restore_own()
            except:  # noqa: E722 - a function that traces, and raises, is switched off by that
                self._interpreter.restore_own()

    def _failure(self, job: Job, error: BaseException, *, spoilt: bool) -> Message:
        """Describes an exception. Even its message is user code, which may raise anything.

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
            # The script wanted to end the process, or the process may be out of memory for good.
            retire = not isinstance(error, Exception) or outcome.kind == "out_of_memory"
            replaced = self._interpreter.replaced
            retire = retire or bool(replaced)  # The replaced builtins may have broken more.
            if replaced and isinstance(outcome, Failed):
                outcome = replace(outcome, hint=blame.hint_where_replaced(replaced, outcome))
            return protocol.failure_message(outcome, retire=retire, doubtful=spoilt)
        except BaseException:  # noqa: BLE001
            reason = "the script raised an exception that cannot be described"
            return protocol.failure_message(Failed(stage=self._stage, reason=reason), retire=True)

    def _handler(self, name: str) -> Handle:
        # Imported in the first job, so that a failure of the import is reported as that job's.
        handle = self._handle or importlib.import_module(name).handle
        self._handle = handle
        return handle

    def _emit(self, event: dict[str, Any]) -> dict[str, Any]:
        """Sends an event of the running job; returns the reply if it asks for one, else {}."""
        self._interpreter.restore_own()
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
            self._interpreter.restore_users()

    def _reopen_streams(self) -> None:
        """Reopens standard streams that an earlier job closed, to get the output of this job."""
        for fd in (1, 2):
            try:
                _fstat(fd)
            except OSError:
                _dup2(self._log.fileno(), fd)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            if _is_closed(getattr(sys, name, None)):
                setattr(sys, name, _fdopen(fd, "w", buffering=1, closefd=False))

    def _end_log(self, number: int) -> str:
        """Writes a last line after a failed job's output, and returns it; "" if that fails.

        Unlike the heading of a job, it does not end with dashes.
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
    """Whether a stream is closed; False for an object of the script that is no stream."""
    try:
        return stream is None or bool(getattr(stream, "closed", False))
    except BaseException:  # noqa: BLE001 - the script's own stream may do anything
        return True


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Ignores an interruption: a SIGINT to a worker alone must not fail a plan, the parent ends its
    workers by other means, and Ctrl-C in the terminal does not reach them."""


def _function(job: Job) -> str:
    """Returns the name of the user's function that the job calls; empty if it calls none."""
    if isinstance(job, DevicesJob | LayoutJob | CalibrateJob):
        return ""
    # An unmodified script has no function yet.
    return job.step.entry.function or Path(job.step.entry.location).name


def main(arguments: list[str]) -> NoReturn:
    """Runs a worker; arguments: descriptor of the channel, memory limit in bytes, handler
    module."""
    control, limit_bytes, handler = int(arguments[0]), int(arguments[1]), arguments[2]
    log = PrivateDescriptor(2)
    # Writes the line of a segmentation fault or an abort to the log.
    faulthandler.enable(log.fileno())
    # A handler and not SIG_IGN, which programs that the script starts would inherit.
    signal.signal(signal.SIGINT, _ignore_signal)
    sys.argv = sys.argv[:1]
    Child(ChildEnd(control), log, limit_bytes).serve(handler)


if __name__ == "__main__":
    main(sys.argv[1:])
