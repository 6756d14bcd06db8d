"""Reports of studies, made by `automesh report` in a process of its own, and kept until a study
changes.

Whoever writes a study writes what is in its page. So the page is never part of what the API's own
pages are: the browser is told to treat it as a document from nowhere (`sandbox` without
`allow-same-origin`), which cannot ask the API anything, and to run nothing in it but the code whose
hashes stand in the page's own policy.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from automesh.errors import UsageError
from automesh.reading import read_bytes
from automesh_service.serve.reading.summary import KnownStudy

MAKING_S = 120.0
_MOST_KEPT = 50
_MOST_WAITING = 8  # each of them keeps a thread of the server
_PAGE_BYTES = 16 * 2**20
_META = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_SANDBOX = "sandbox allow-scripts allow-downloads; frame-ancestors 'self'"


class Busy(UsageError):
    """Too many reports are asked for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePage:
    """A page, and the policy that it is to be sent with."""

    html: bytes
    policy: str
    tag: str


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The reports that were made, those that were asked for last.

    Attributes:
      folder: where they are written.
    """

    folder: Path
    _made: OrderedDict[tuple[object, ...], MadePage] = field(
        default_factory=OrderedDict[tuple[object, ...], MadePage]
    )
    # One at a time: a report takes seconds of a processor, and a search may be at work.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: queue.Queue[str] = field(default_factory=queue.Queue[str])

    def page_of(self, known: KnownStudy) -> MadePage:
        """The report of a study as it was read last.

        Raises:
          UsageError: it cannot be made.
        """
        name = known.summary.name
        stamp = (name, str(known.folder), known.stamp)
        if self._waiting.qsize() >= _MOST_WAITING:
            raise Busy("other reports are being made", hint="try again in a minute")
        self._waiting.put(name)
        try:
            return self._kept_or_made(stamp, known)
        finally:
            self._waiting.get()

    def _kept_or_made(self, stamp: tuple[object, ...], known: KnownStudy) -> MadePage:
        with self._lock:
            if not known.stamp:
                # It was not read since it changed: by nothing is told what its page would be of.
                return self._make(known)
            made = self._made.get(stamp)
            if made is None:
                made = self._make(known)
                self._made[stamp] = made
            self._made.move_to_end(stamp)
            while len(self._made) > _MOST_KEPT:
                self._made.popitem(last=False)
        return made

    def _make(self, known: KnownStudy) -> MadePage:
        sign = hashlib.sha256(known.summary.name.encode()).hexdigest()[:24]
        path = self.folder / f"{sign}.html"
        words = [sys.executable, "-P", "-m", "automesh", "report", f"--out={path}"]
        words += [f"--storage={known.storage}"] if known.storage else []
        try:
            _run([*words, "--", str(known.folder)], self.folder)
            html = read_bytes(path, limit_bytes=_PAGE_BYTES)
        finally:
            path.unlink(missing_ok=True)
        return MadePage(
            html=html, policy=policy_of(html), tag=hashlib.sha256(html).hexdigest()[:32]
        )


def policy_of(html: bytes) -> str:
    """What a report is sent with: its own policy, and that it is of no origin.

    Raises:
      UsageError: it has none.
    """
    found = _META.search(html[: 2**16].decode(errors="replace"))
    if found is None:
        raise UsageError("the report has no policy of what may run in it")
    return f"{found[1]}; {_SANDBOX}"


def _run(words: Sequence[str], folder: Path) -> None:
    """Runs a command of automesh to its end; a process that takes too long is killed.

    Raises:
      UsageError: what it complained of.
    """
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MAKING_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"the report was not made within {MAKING_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise UsageError(errors[-1] if errors else "the report could not be made")
