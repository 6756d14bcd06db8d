"""Threads of a script, and its ways to end a process at once, do not end automesh's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
        [sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.returncode) == ("[3, 7]\n", 0), done.stderr


WAITS = """
import contextlib, queue, threading
from automesh.program.capture.world.threads import ended_with_the_run
class Over(BaseException):
    pass
seen = []
@contextlib.contextmanager
def modes():
    seen.append("inside")
    yield
def learn():
    raise Over("in a thread")
for ends in ((Over,), (Over,)):
    try:
        with ended_with_the_run(modes=modes, ends=ends):
            threading.Thread(target=learn, daemon=True).start()
            queue.Queue().get(timeout=20)
    except Over as error:
        seen.append(str(error))
threading.Thread(target=seen.append, args=("afterwards",)).start()
print(seen, flush=True)
"""


def test_what_ends_the_run_in_a_thread_ends_the_body_that_waits_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    told = ["inside", "in a thread"] * 2 + ["afterwards"]
    assert done.stdout == f"{told}\n", done.stderr


IN_A_LIBRARYS_THREAD = """
from concurrent.futures import ThreadPoolExecutor
from automesh.program.capture.frames import asking_line
from automesh.program.capture.world.threads import ended_with_the_run
with ended_with_the_run():
    with ThreadPoolExecutor() as pool:
        place = pool.submit(asking_line).result()
print(place)
"""


def test_what_a_thread_of_a_library_asks_is_asked_at_the_line_that_had_it_started(
    tmp_path: Path,
) -> None:
    script = tmp_path / "fits.py"
    script.write_text(IN_A_LIBRARYS_THREAD)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.stdout, done.returncode) == ("fits.py:7\n", 0), done.stderr
