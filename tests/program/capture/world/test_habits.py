"""Habits of scripts, two at once: each is run twice in one process, and both runs are the same."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.made_once import made_once
from tests.support.paths import ROOT

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
{first}
{second}
def main(argv=None):
    n = jax.device_count()
    mesh = jax.make_mesh((n // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w = jax.device_put(np.full((16, 32), 0.1, np.float32), NamedSharding(mesh, P(None, "model")))
    @{jit}
    def train_step(w, x):
        {inside}
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss
    for step in range(6):
        rows = {rows}
        w, loss = train_step(w, jax.device_put(rows, NamedSharding(mesh, P("data"))))
        {after}
{start}
"""
PARTS = {
    "first": "",
    "second": "",
    "jit": "jax.jit",
    "inside": "",
    "rows": "np.ones((32, 16), np.float32)",
    "after": "pass",
    "start": "main()",
}
UNSEEDED = {"rows": "np.random.default_rng().normal(size=(32, 16)).astype(np.float32)"}
BY_THE_CLOCK = {
    "first": "import time; rng = np.random.default_rng(int(time.time()))",
    "rows": "rng.normal(size=(32, 16)).astype(np.float32)",
}
GLOBAL_RANDOM = {
    "first": "import random",
    "rows": "np.float32(random.random() + np.random.rand(32, 16)).astype(np.float32)",
}
SAVES = {
    "first": "import pathlib; saved = pathlib.Path(__file__).parent / 'saved.npy'",
    "second": "print('resumed' if saved.exists() else 'anew')",
    "rows": "np.full((32, 16), 2.0 if saved.exists() and step < 1 else 1.0, np.float32)",
    "after": "np.save(saved, np.asarray(w))",
}
FLAGS = {
    "second": "from absl import app, flags\n"
    "flags.DEFINE_string('workdir', None, 'a folder')\n"
    "flags.DEFINE_flag(flags.Flag(flags.IntegerParser(), flags.ArgumentSerializer(), 'c.lr2', 1,"
    " 'x'), module_name='numpy')\n"
    "flags.DEFINE_float('c.lr', 0.1, 'as ml_collections names them')\n"
    "flags.mark_flags_as_required(['workdir'])\njax.config.config_with_absl()",
    "start": "app.run(main)",
}
SET_MESH = {
    "first": "assert jax.sharding.get_mesh().empty",
    "second": "jax.set_mesh(jax.make_mesh((jax.device_count() // 2, 2), ('data', 'model'), "
    "axis_types=(AxisType.Auto,) * 2))",
}
PROFILE = {"second": "jax.profiler.start_trace('/nowhere/profile')"}
GUARDS = {
    "second": "for name, value in (('jax_transfer_guard', 'disallow'), ('jax_debug_nans', True), "
    "('jax_numpy_dtype_promotion', 'strict'), ('jax_numpy_rank_promotion', 'raise')):\n"
    "    jax.config.update(name, value)",
}
JOB = {
    "first": "jax.distributed.initialize(); assert jax.distributed.is_initialized()\n"
    "from jax._src.distributed import global_state\n"
    "global_state.client.wait_at_barrier('start', 10)\n"
    "global_state.client.key_value_set('a', 'b')\n"
    "assert global_state.client.blocking_key_value_get('a', 10) == 'b'",
    "second": "assert jax.process_count() == 1 and jax.process_index() == 0\n"
    "assert len(jax.local_devices()) == jax.device_count()\n"
    "assert {one.process_index for one in jax.devices()} == {0}",
}
TOO_LATE = {
    "second": "jax.config.update('jax_num_cpu_devices', 3)\nimport os\n"
    "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=3'",
}
THREADS = {
    "first": "import threading, time",
    "second": "def work():\n    while True:\n        time.sleep(0.01); double(1.0)\n"
    "double = jax.jit(lambda x: 2 * x)\nthreading.Thread(target=work, daemon=True).start()",
}
SHOWS = {"inside": "jax.debug.print('loss {}', x.sum())"}
SECOND_MESH = {
    "rows": "jax.device_put(np.ones((32, 16), np.float32), NamedSharding(Mesh(np.array("
    "jax.devices()), ('devices',)), P('devices')))",
}
HYBRID = {
    "second": "from jax.experimental import mesh_utils\n"
    "mesh_utils.create_hybrid_device_mesh((jax.local_device_count() // 2, 2), "
    "(jax.process_count(), 1), process_is_granule=True)",
}
SLICES = {
    "second": "from jax.experimental import mesh_utils\n"
    "slices = 1 + max(getattr(one, 'slice_index', 0) for one in jax.devices())\n"
    "assert slices == 2\n"
    "mesh_utils.create_hybrid_device_mesh((jax.device_count() // 4, 2), (slices, 1))",
}
ORBAX = {
    "first": "import pathlib, orbax.checkpoint as ocp",
    "second": "manager = ocp.CheckpointManager(pathlib.Path(__file__).parent / 'saved')",
    "after": "manager.save(step, args=ocp.args.StandardSave({'w': w})); "
    "manager.wait_until_finished(); assert manager.latest_step() == step; "
    "w = manager.restore(step, args=ocp.args.StandardRestore({'w': w}))['w']",
}
# The last one is saved in the background, when the run ends.
ORBAX_LATE = {
    **ORBAX,
    "after": "manager.save(step, args=ocp.args.StandardSave({'w': w}))",
}

# The body waits for the thread that trains, which uses another one.
TRAINS_IN_A_THREAD = {
    "first": "import concurrent.futures, queue, threading\n"
    "pool = concurrent.futures.ThreadPoolExecutor(1)",
    "after": "pool.submit(lambda: print(float((loss * 2).sum()))).result()",
    "start": "threading.Thread(target=main, daemon=True).start()\nqueue.Queue().get()",
}
# The compiler of the CPU knows neither the options nor the kernel.
OPTIONS = {
    "first": "import functools\nassert jax.default_backend() == 'tpu'\n"
    "OPTIONS = {'xla_tpu_enable_latency_hiding_scheduler': 'true'}",
    "jit": "functools.partial(jax.jit, compiler_options=OPTIONS)",
}
KERNEL = {
    "second": "from jax.experimental import pallas as pl\n"
    "def body(x_ref, out_ref):\n    out_ref[...] = x_ref[...] * 2\n"
    "def kernel(x):\n    return pl.pallas_call(body, out_shape=x, interpret=False)(x)",
    "inside": "x = x + jax.lax.stop_gradient(kernel(x))",
}
AHEAD = {"after": "train_step.lower(w, rows).compile(compiler_options=OPTIONS)"}

HERE = {
    "unseeded-flags": (UNSEEDED, FLAGS),
    "clock-set_mesh": (BY_THE_CLOCK, SET_MESH),
    "random-profile": (GLOBAL_RANDOM, PROFILE),
    "saves-flags": (SAVES, FLAGS),
    "saves-profile": (SAVES, PROFILE),
    "job-saves": (SAVES, JOB),
    "guards-unseeded": (GUARDS, UNSEEDED),
    "guards-flags": (FLAGS, GUARDS),
    "too-late-job": (JOB, TOO_LATE),
    "threads-unseeded": (THREADS, UNSEEDED),
    "threads-job": (JOB, THREADS),
    "second-mesh-flags": (SECOND_MESH, FLAGS),
    "second-mesh-profile": (SECOND_MESH, PROFILE),
    "shows-clock": (SHOWS, BY_THE_CLOCK),
    "orbax-flags": (ORBAX, FLAGS),
    "orbax-late-unseeded": (ORBAX_LATE, UNSEEDED),
}
ELSEWHERE = {
    "hybrid-job": (HYBRID, JOB),
    "slices-flags": (FLAGS, SLICES),
    "job-saves": (SAVES, JOB),
    "too-late-shows": (TOO_LATE, SHOWS),
    "guards-set_mesh": (SET_MESH, GUARDS),
    "second-mesh-unseeded": (UNSEEDED, SECOND_MESH),
    "orbax-job": (ORBAX, JOB),
    "in-a-thread-flags": (FLAGS, TRAINS_IN_A_THREAD),
    "options-kernel": (OPTIONS, KERNEL),
    "options-ahead": (OPTIONS, AHEAD),
}
_ADDED = ("first", "second")  # Of both habits; of all else the last one counts.


def write(cases: dict[str, tuple[dict[str, str], dict[str, str]]], folder: Path) -> list[str]:
    for name, (one, other) in cases.items():
        parts = {**PARTS, **one, **other}
        for key in _ADDED:
            parts[key] = "\n".join(part[key] for part in (one, other) if key in part)
        text = SCRIPT.replace("{inside}", parts["inside"] or "pass")
        for key in ("first", "second", "jit", "rows", "after", "start"):
            text = text.replace("{" + key + "}", parts[key])
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return [str(folder / f"{name}.py") for name in cases]


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    @functools.cache
    def looked(target: str) -> dict[str, Any]:
        return made_once(tmp_path_factory, f"habits on {target}", lambda one: run(target, one))[1]

    def run(target: str, folder: Path) -> dict[str, Any]:
        cases, count = (HERE, 4) if target == "local" else (ELSEWHERE, 16)
        scripts = write(cases, folder)
        before = sorted(folder.iterdir())
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.jobs.habits", target, *scripts],
            cwd=ROOT,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(count),
                "AUTOMESH_CPU_DEVICES": str(count),
            },
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(folder.iterdir()) == before, "a run has left files behind"
        return json.loads(done.stdout.splitlines()[-1])

    return looked


def check(seen: dict[str, Any], mesh: str) -> None:
    assert "error" not in seen, seen
    assert seen["mesh"] == mesh
    first, second = seen["digests"]
    assert first == second, "the second run has other arguments"


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_two_habits_at_once(name: str, look: Callable[[str], dict[str, Any]]) -> None:
    check(look("local")[f"{name}.py"], "data:2,model:2")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_two_habits_at_once_for_two_slices(
    name: str, look: Callable[[str], dict[str, Any]]
) -> None:
    seen = look("tpu-v5p-16-2")[f"{name}.py"]
    check(seen, "data:8,model:2")
    asked = "job" in name or "hybrid" in name
    said = [one for one in seen["notices"] if "was shown one process with all 16 devices" in one]
    assert bool(said) == asked
    # A mesh of `jax.process_count()` rows is another one there.
    assert all("its own mesh is another one there" in one and "--baseline" in one for one in said)


@pytest.mark.slow
def test_what_a_script_wanted_to_write_is_said(look: Callable[[str], dict[str, Any]]) -> None:
    notices = look("local")["saves-profile.py"]["notices"]
    assert any("saved.npy`: kept apart in a private folder" in one for one in notices)
    notices = look("local")["too-late-job.py"]["notices"]
    assert any("asks for 3 devices" in one for one in notices)
    notices = look("local")["shows-clock.py"]["notices"]
    assert any("seeds random numbers by the clock" in one for one in notices)
