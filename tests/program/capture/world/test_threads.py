"""Threads of a script, and its ways to end a process at once, do not end automesh's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


FOUND = """
import sys, time
from pathlib import Path
from automesh.program.capture.discover import discover
from automesh.program.nouns import Entry
kept = []
def keep(call, own, placed):
    time.sleep(2)  # as the arguments of a large model take
    kept.append(str(own.shape_tuple))
found = discover(Entry(kind="script", location=sys.argv[1]), bare=True, keep=keep)
print(found.capture.step.name, found.capture.mesh, found.notices, kept)
"""
HEAD = """
import queue, threading
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))
S = lambda *s: NamedSharding(mesh, P(*s))
@jax.jit
def train_step(w, x):
    loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * g, loss
w = jax.device_put(np.ones((64, 96), np.float32), S(None, "model"))
"""
ACTS_MEANWHILE = """
act = jax.jit(lambda w, x: jnp.tanh(x @ w).mean(0))
def work(w):
    while True:
        act(w, np.ones((48, 64), np.float32))
threading.Thread(target=work, args=(jax.device_put(w, jax.devices()[0]),), daemon=True).start()
for _ in range(30):
    w, loss = train_step(w, jax.device_put(np.ones((48, 64), np.float32), S("data")))
"""
COMPILES_MEANWHILE = """
rows = (16, 24, 32, 40, 48, 56, 64, 72)
def compiled(n):
    x = jax.ShapeDtypeStruct((n, 64), jnp.float32, sharding=S("data"))
    return train_step.lower(w, x).compile()
with ThreadPoolExecutor(4) as pool:
    steps = dict(zip(rows, pool.map(compiled, rows)))
for number in range(30):
    n = rows[number % 2]
    w, loss = steps[n](w, jax.device_put(np.ones((n, 64), np.float32), S("data")))
"""


@pytest.mark.parametrize("rest", [ACTS_MEANWHILE, COMPILES_MEANWHILE])
def test_a_thread_of_the_script_disturbs_neither_the_step_nor_its_storing(
    rest: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + rest)
    done = subprocess.run(
        [sys.executable, "-c", FOUND, str(script)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    right = "train_step data:2,model:2 () [\"(('data', 2), ('model', 2))\"]\n"
    assert done.stdout == right, done.stderr
