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
from pathlib import Path
from typing import Any, NoReturn

from automesh.worker import blame, protocol
from automesh.worker.messages import CalibrateJob, DevicesJob, Job, LayoutJob
from automesh.worker.wire import ChildEnd, Message, PrivateDescriptor, WireError

Emit = Callable[[Message], Message]
Handle = Callable[[Job, Emit], object]


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

    def serve(self, handler: str) -> NoReturn:
        """Does jobs until the parent closes the channel."""
        try:
            while (message := self._channel.receive()) is not None:
                job = protocol.read_job(message)
                self._stage = "start"
                self._reopen_streams()
                self._write_log(f"--- {message['label']} ---\n")
                self._channel.send(self._outcome(handler, job))
                # An alarm that the script set and left would go off in the next job.
                signal.setitimer(signal.ITIMER_REAL, 0)
        except WireError as error:
            self._write_log(f"automesh: {error}\n")
            os._exit(protocol.CHANNEL_LOST)
        # Not sys.exit: threads and exit hooks of the script could hold the process up.
        os._exit(0)

    def _outcome(self, handler: str, job: Job) -> Message:
        """Does one job; every exception but a lost channel becomes a failure."""
        try:
            handle = self._handler(handler)
            # After the import of jax: that is part of the start, not of the time for the job.
            self._channel.send({"accepted": True})
            return protocol.answer_message(job, handle(job, self._emit))
        except WireError:
            raise
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a script must not end the worker
            self._write_log("".join(traceback.format_exception(error)))
            outcome = blame.failure(
                error,
                stage=self._stage,
                function=_function(job),
                limit_bytes=self._limit_bytes,
            )
            # The script wanted the process to end, or its memory may be unusable.
            retire = not isinstance(error, Exception) or outcome.kind == "out_of_memory"
            return protocol.failure_message(outcome, retire=retire)

    def _handler(self, name: str) -> Handle:
        # Imported in the first job, not before: then it has somebody to report a failure to.
        handle = self._handle or importlib.import_module(name).handle
        self._handle = handle
        return handle

    def _emit(self, event: dict[str, Any]) -> dict[str, Any]:
        """Sends an event of the running job; gives the reply if it has `"reply": True`, else {}."""
        if event.get("event") == "stage":
            self._stage = event["stage"]
        self._channel.send(event)
        if not event.get("reply"):
            return {}
        message = self._channel.receive()
        if message is None:
            os._exit(0)
        return message["reply"]

    def _reopen_streams(self) -> None:
        """Undoes that an earlier job closed the standard streams: this one's output is wanted."""
        for fd in (1, 2):
            try:
                os.fstat(fd)
            except OSError:
                os.dup2(self._log.fileno(), fd)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            stream = getattr(sys, name)
            if stream is None or getattr(stream, "closed", False):
                setattr(sys, name, os.fdopen(fd, "w", buffering=1, closefd=False))

    def _write_log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # The script may have closed every descriptor.
            self._log.write(text.encode(errors="backslashreplace"))


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
    sys.argv = sys.argv[:1]
    Child(ChildEnd(control), log, limit_bytes).serve(handler)


if __name__ == "__main__":
    main(sys.argv[1:])
