"""Reports of studies. Another process makes them with `automesh report`; each is kept until its
study changes.

A user who can write a study can put anything into its page. So the page must not share the origin
of the API's own pages: its headers make the browser treat it as a document without an origin
(`sandbox` without `allow-same-origin`), which cannot call the API, and run only the code whose
hashes are in the page's own policy.
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
_MOST_WAITING = 8  # each waiting request keeps a thread of the server
_PAGE_BYTES = 16 * 2**20
_META = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_SANDBOX = "sandbox allow-scripts allow-downloads; frame-ancestors 'self'"


class Busy(UsageError):
    """Too many reports are requested at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePage:
    """A page, and the policy that is sent with it."""

    html: bytes
    policy: str
    tag: str


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The reports that were requested last.

    Attributes:
      folder: the folder into which they are written.
    """

    folder: Path
    _made: OrderedDict[tuple[object, ...], MadePage] = field(
        default_factory=OrderedDict[tuple[object, ...], MadePage]
    )
    # One at a time: a report takes seconds of a core, and a search may be measuring.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: queue.Queue[str] = field(default_factory=queue.Queue[str])

    def page_of(self, known: KnownStudy) -> MadePage:
        """Returns the report of a study as it was read last.

        Raises:
          UsageError: the report cannot be made.
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
                # The study has changed and was not read since, so nothing identifies the contents
                # of its page.
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
    """Returns the policy that is sent with a report: its own policy, plus one that takes its origin
    away.

    Raises:
      UsageError: the report has no policy.
    """
    found = _META.search(html[: 2**16].decode(errors="replace"))
    if found is None:
        raise UsageError("the report has no policy of what may run in it")
    return f"{found[1]}; {_SANDBOX}"


def _run(words: Sequence[str], folder: Path) -> None:
    """Runs a command of automesh to its end; a process that takes too long is killed.

    Raises:
      UsageError: the command failed; has its message.
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
