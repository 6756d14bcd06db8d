"""The timer inside of a command's own Python: which step it finds, and that it changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import automesh
from automesh.outcomes import Failed, Measured
from automesh.tuner.command.run import FinishedRun, Manner, Place, RunResult, Unseen, run
from automesh.tuner.command.step_times import CaptureSource
from automesh.worker.messages import Surroundings
from tests.support.paths import SCRIPTS
from tests.support.worker_jobs import living

SCRIPT = str(SCRIPTS / "flags_jax.py")
STEP_BYTES = 4 * (2 * 64 * 128 + 32 * 64)


def capture(tmp_path: Path, *words: str, program: str = sys.executable) -> RunResult:
    """Runs a program under the timer."""
    manner = Manner(
        program=program,
        surroundings=Surroundings(platforms="cpu", cpu_devices=4),
        source=CaptureSource(),
        skip=2,
        steps=6,
        timeout_s=300.0,
        memory_limit_bytes=2**31,
        cache_dir=tmp_path / "cache",
    )
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    place = Place(logs=logs, name="run-0000")
    return run(
        manner,
        place,
        ("python", *words),
        clock=time.monotonic,
        pulse=lambda: None,
        on_steps=lambda _: None,
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("style", "name"),
    [
        ("decorated", "update"),
        ("method", "step"),
        ("ahead", "a program compiled ahead of time"),
        ("wrapped", "<lambda>"),
        ("references", "write"),
    ],
)
def test_the_step_is_found_whatever_the_style(tmp_path: Path, style: str, name: str) -> None:
    result = capture(tmp_path, SCRIPT, "--fsdp", "2", "--tp", "2", "--style", style)
    assert isinstance(result, FinishedRun), result
    assert len(result.samples_s) >= 5 and all(0 < one < 30 for one in result.samples_s)
    step = result.step
    assert step is not None
    assert (step.name, step.devices, step.argument_bytes) == (name, 4, STEP_BYTES)
    if style == "decorated":
        line = Path(SCRIPT).read_text().splitlines()[step.line - 1]
        assert line == "    def update(weights, batch):"
    if style == "references":
        assert result.losses == ()
    else:
        assert len(result.losses) == 3 and result.loss_dtype == "float32"
        assert result.losses[0] > result.losses[1] > result.losses[2] > 0
    assert living() == []


@pytest.mark.slow
def test_losses_are_those_that_the_program_computes_without_it(tmp_path: Path) -> None:
    result = capture(tmp_path, SCRIPT, "--fsdp", "4")
    assert isinstance(result, FinishedRun)
    metrics = tmp_path / "metrics"
    subprocess.run(
        [sys.executable, SCRIPT, "--fsdp", "4", "--metrics", str(metrics), "--steps", "3"],
        check=True,
        timeout=1200,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "4"},
    )
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert result.losses == pytest.approx(losses, rel=1e-6)


def test_a_program_that_replaces_what_the_timer_calls_is_timed(tmp_path: Path) -> None:
    """Before, a clock that stands still made steps of no time, and the run was never ended."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, runpy, sys, time\n"
        "class Deaf:\n"
        "    def write(self, text): return len(text)\n"
        "    def flush(self): raise OSError('no')\n"
        "time.perf_counter = time.time = lambda: 7.0\n"
        "json.dumps = lambda *args, **settings: 'null'\n"
        "os._exit = lambda code: None\n"
        "sys.stdout = Deaf()\n"
        f"sys.argv = [{SCRIPT!r}, '--fsdp', '4']\n"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    )
    result = capture(tmp_path, str(program))
    assert isinstance(result, FinishedRun), result
    assert all(1e-7 < one < 30 for one in result.samples_s)
    assert len(result.losses) == 3
    assert living() == []


def test_without_a_jitted_step_it_says_so(tmp_path: Path) -> None:
    result = capture(tmp_path, "-c", "import jax; jax.jit(lambda x: x + 1)(1.0)")
    assert isinstance(result, Unseen)
    assert "no jitted function was called three times" in result.reason
    assert "--step-time" in result.hint


def test_without_jax_it_says_so(tmp_path: Path) -> None:
    result = capture(tmp_path, "-c", "print('nothing')")
    assert isinstance(result, Unseen)
    assert "no Python of the command has imported jax" in result.reason


def test_a_program_that_raises_fails_as_it_would(tmp_path: Path) -> None:
    result = capture(tmp_path, SCRIPT, "--fsdp", "4", "--style", "raises")
    assert isinstance(result, Failed)
    assert "FloatingPointError: the loss is not finite" in result.reason


def test_the_timer_is_not_in_the_way_of_anything(tmp_path: Path) -> None:
    """What a program may do to jitted functions and modules works as without the timer."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys\nsys.own_was_run = True\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "assert sys.own_was_run and 'step_timer' not in str(sys.path)\n"
        "import copy, functools, inspect, jax, jax.numpy as jnp\n"
        "from jax import jit\n"
        "@jit\n"
        "def f(x, y=1):\n"
        "    '''Doc.'''\n"
        "    return x * y\n"
        "assert f.__name__ == 'f' and f.__doc__ == 'Doc.'\n"
        "assert str(inspect.signature(f)) == '(x, y=1)'\n"
        "assert isinstance(f, jax.stages.Wrapped)\n"
        "assert copy.deepcopy(f) is f and hash(f) and f == f\n"
        "assert float(f(2.0, y=3)) == 6.0\n"
        "assert float(jax.grad(f)(2.0)) == 1.0\n"
        "assert jax.vmap(f)(jnp.ones(3)).shape == (3,)\n"
        "assert jax.eval_shape(f, 2.0).shape == ()\n"
        "assert 'mul' in str(jax.make_jaxpr(lambda x: f(x, y=x))(2.0))\n"
        "assert f.lower(2.0).compile()(2.0) == 2.0\n"
        "assert f.trace(2.0).jaxpr is not None\n"
        "f.clear_cache()\n"
        "@jax.jit(static_argnames='n')\n"
        "def g(x, n): return x * n\n"
        "assert float(g(2.0, n=4)) == 8.0\n"
        "class C:\n"
        "    @functools.partial(jax.jit, static_argnums=0)\n"
        "    def m(self, x): return x + 1\n"
        "assert float(C().m(1.0)) == 2.0\n"
        "try:\n"
        "    f(object())\n"
        "except TypeError: pass\n"
        "else: raise SystemExit('no TypeError')\n"
        "assert type(f.__wrapped__).__name__ == 'function' and f.__wrapped__(2.0) == 2.0\n"
        "@jax.jit\n"
        "def ones(): return jnp.ones(3)\n"
        "@jax.jit\n"
        "def outer(x): return x + ones() + f(jnp.ones(3))\n"
        "for size in (3, 1): outer(jnp.ones(size))\n"
        "for _ in range(9): jax.eval_shape(outer, jnp.ones(3)), jax.make_jaxpr(ones)()\n"
        "print('all', 'is', 'well')\n"
    )
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "own"), before])
    try:
        result = capture(tmp_path, str(program))
    finally:
        os.environ["PYTHONPATH"] = before
    assert isinstance(result, Unseen), result
    assert "no jitted function was called three times" in result.reason
    assert "all is well" in (tmp_path / "logs" / "run-0000.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "step_time", ["jsonl:{run_dir}/m.jsonl", r"regex:loss (?P<loss>[0-9.]+) in (?P<s>[0-9.]+) s"]
)
def test_what_the_program_says_itself_is_searched_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_time: str
) -> None:
    """As the guide's search does by capture."""
    monkeypatch.chdir(tmp_path)
    result = automesh.search(
        command=f"{sys.executable} {SCRIPT} --fsdp {{fsdp}} --tp {{tp}} "
        "--metrics {run_dir}/m.jsonl",
        step_time=step_time,
        target="cpu:8",
        budget="1s",
        top=1,
        results=tmp_path / "results",
    )
    ran = [one for one in result.found.candidates if isinstance(one.outcome, Measured)]
    assert len(ran) == 2 and result.found.funnel.waiting == 2
    assert {one.outcome.numerics for one in ran} == {"agree", "reference"}
    assert result.found.facts.searched.axes == ("fsdp", "tp")
    assert living() == []
