"""Finds the pattern of `--step-time regex:` in the output of a command, in bounded time.

Python's engine may need years for one line, and meanwhile blocks its whole process. So it runs in
another process (`matching_process`), which is ended when it takes too long.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from automesh import limits
from automesh.errors import UsageError

_SCRIPT = Path(__file__).with_name("matching_process.py")
_CHUNK_BYTES = 2**16
Found = tuple[dict[str, str | None], str | None]
"""The named groups, and the text of the one group without a name."""


class LineMatcher:
    """A pattern, and the process that searches for it; the process starts with the first line.

    The process ends with `close`, with this object, or with this process.

    Args:
      pattern: a regular expression that Python can compile.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., LineMatcher] | None = None

    def find(self, lines: Iterable[str]) -> list[Found]:
        """Returns what the pattern finds, for those lines in which it finds something.

        Raises:
          UsageError: the search takes too long, or no process can be started.
        """
        found: list[Found] = []
        left = iter(lines)
        # In parts: a command may have printed gigabytes.
        while part := [one[: limits.LINE_CHARS] for one in islice(left, limits.MATCHING_LINES)]:
            answers = self._ask(self._process or self._start(), part)
            found += [(named, unnamed) for named, unnamed in filter(None, answers)]
        return found

    def close(self) -> None:
        """Ends the process."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends only the search.
            )
        except OSError as error:
            raise UsageError(
                "the process that reads step times could not be started: "
                f"{(error.strerror or str(error)).lower()}",
                hint="mend it and run the same command again; what is finished is kept",
            ) from None
        self._process, self._end = process, weakref.finalize(self, _end, process)
        self._tell(process, [self._pattern, limits.MATCHING_S])
        return process

    def _ask(self, process: subprocess.Popen[bytes], lines: list[str]) -> list[Any]:
        self._tell(process, lines)
        assert process.stdout is not None
        answer, deadline_s = bytearray(), time.monotonic() + limits.ANSWER_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                left_s = deadline_s - time.monotonic()
                data = b""
                if left_s > 0 and selector.select(left_s):
                    data = os.read(process.stdout.fileno(), _CHUNK_BYTES)
                if not data:
                    raise self._ended(process)
                answer += data
        return json.loads(answer)

    def _tell(self, process: subprocess.Popen[bytes], message: object) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # The process has ended; reading its answer shows why.
            return

    def _ended(self, process: subprocess.Popen[bytes]) -> UsageError:
        self.close()
        if process.returncode not in (-signal.SIGPROF, -signal.SIGKILL):
            return UsageError(
                f"the process that reads step times ended with code {process.returncode}",
                hint="run the same command again; what is finished is kept",
            )
        return UsageError(
            f"the pattern `{self._pattern}` takes too long to find in what the command prints",
            hint="repeat characters or sets, as in `[0-9.]+`, not groups; and name the text around "
            "the number",
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process, and waits for its end."""
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue
    process.wait()
