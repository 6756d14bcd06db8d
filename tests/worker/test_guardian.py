"""The guardian by itself: ends that come at once, and files that somebody else has planted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from automesh.worker.process import Guarded, read_ending
from tests.support.paths import ROOT
from tests.support.worker_jobs import living

# The worker has always ended before its guardian does anything else.
LATE = """
import os, subprocess, sys
from automesh.worker import guardian

class Late(subprocess.Popen):
    def __init__(self, *words, **named):
        super().__init__(*words, **named)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

guardian.subprocess.Popen = Late
guardian.main(sys.argv[1:])
"""


def test_a_worker_that_ends_at_once_is_not_waited_for(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    words = [str(os.getpid()), str(theirs.fileno()), "-1", str(2**30), "-1"]
    command = [sys.executable, "-c", LATE, *words, "/bin/sh", "-c", "echo said; exit 3"]
    with ours, (tmp_path / "log").open("w+b") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.settimeout(60)
        told = b""
        while not told.endswith(b"\n"):
            told += ours.recv(4096)
        process.wait(timeout=600)
        assert json.loads(told)["code"] == 3
        assert (tmp_path / "log").read_text() == "said\n"


def started(folder: Path, command: list[str]) -> Guarded:
    return Guarded(
        command,
        variables=dict(os.environ),
        log=folder / "worker-1-0001.log",
        memory_limit_bytes=2**30,
        report=folder / "ended.json",
    )


@pytest.mark.parametrize("name", ["worker-1-0001.log", "ended.json"])
def test_no_planted_link_is_written_through(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / name).symlink_to(victim)
    with pytest.raises(OSError) as caught:
        started(tmp_path, ["/bin/sh", "-c", "echo said"])
    assert caught.value.filename == str(tmp_path / name)
    assert victim.read_text() == "mine"
    assert living() == []


def test_the_names_of_its_files_are_not_looked_up_again(tmp_path: Path) -> None:
    """What a step puts into the place of its own log or report is not written through."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    swap = 'for name in worker-1-0001.log ended.json; do rm "$0/$name"; ln -s victim "$0/$name"; '
    swap += "done; ln -s victim $0/ended.json.new; echo said"
    process = started(tmp_path, ["/bin/sh", "-c", swap, str(tmp_path)])
    limit_s = time.monotonic() + 300
    while not process.has_ended() and time.monotonic() < limit_s:
        time.sleep(0.02)
    ending = process.collect_ending()
    assert ending.code == 0
    assert victim.read_text() == "mine"


def test_a_report_outlives_whoever_asked(tmp_path: Path) -> None:
    process = started(tmp_path, ["/bin/sh", "-c", "exit 7"])
    limit_s = time.monotonic() + 300
    while not process.has_ended() and time.monotonic() < limit_s:
        time.sleep(0.02)
    process.collect_ending()
    ending = read_ending((tmp_path / "ended.json").read_bytes())
    assert ending is not None and ending.code == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ended.json", "worker-1-0001.log"]
