"""Threads of a script, and its ways to end a process at once, do not end automesh's."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT

RUN = """
import os, signal, threading, time
from automesh.program.capture.world.threads import ended_with_the_run
seen = []
with ended_with_the_run():
    try:
        os._exit(3)
    except SystemExit as error:
        seen.append(error.code)
    child = os.fork()
    if not child:
        os._exit(7)
    seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    watchdog = threading.Timer(0.2, lambda: os._exit(5))
    watchdog.start()
watchdog.join()
print(seen, flush=True)
os._exit(0)
"""


def test_a_script_that_leaves_at_once_ends_as_by_sys_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("[3, 7]\n", 0), done.stderr
