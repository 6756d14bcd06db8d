"""Are plans of `automesh search --infer` faster than those of google-parallax?

    pip install google-parallax
    python -m benchmarks.infer.against_parallax [--step NAME ...] [--budget 4m]

Each step is searched for `cpu:4`, up to a rule. Then one process with four virtual devices runs it
with this rule (`config.apply`), and with google-parallax: its strategies AUTO, FSDP and DDP
(`parallax.jit`), on each mesh of its two axes `data` and `model`. All plans are timed in turns, so
that the noise of the machine meets all of them. A time is the median of the turns.

google-parallax takes a function of (parameters, inputs): the first argument of a step, which may be
its whole state, is given as its parameters. What it cannot do is printed with its error.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = Path(__file__).parent / "steps"
KEPT = Path("results/infer/parallax")
# Steps whose first argument is all of their state, with the names of their functions.
FUNCTIONS = {"contrastive": "train", "dict_llama_scan": "train_step", "dit": "train_step"}
_DEVICES = 4
_TURNS, _CALLS = 7, 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.infer.against_parallax",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--step", nargs="*", default=list(FUNCTIONS), choices=list(FUNCTIONS))
    parser.add_argument("--budget", default="4m", help="of each search")
    parser.add_argument("--rule", help="time the one step with this rule: what the command starts")
    options = parser.parse_args()
    if options.rule:
        print(json.dumps(_timed(options.step[0], Path(options.rule))))
        return
    found: dict[str, Any] = {}
    for step in options.step:
        rule = KEPT / f"{step}.toml"
        if not rule.exists():
            _say(f"{step}: searched for cpu:{_DEVICES}")
            command = ["search", str(STEPS / f"{step}.py"), "--infer"]
            command += ["--target", f"cpu:{_DEVICES}", "--top", "2", "--budget", options.budget]
            command += ["--rules", str(rule), "--results", str(KEPT / "searches")]
            KEPT.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, "-m", "automesh", *command], check=False, stdout=2)
        if not rule.exists():
            found[step] = {"error": "the search wrote no rule"}
            continue
        _say(f"{step}: timed against google-parallax")
        command = [sys.executable, "-m", __spec__.name, "--step", step, "--rule", str(rule)]
        flags = f"--xla_force_host_platform_device_count={_DEVICES}"
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        ended = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, text=True, env=variables
        )
        if ended.returncode:
            found[step] = {"error": f"exit status {ended.returncode}"}
            continue
        found[step] = json.loads(ended.stdout.splitlines()[-1])
        _say(f"    {json.dumps(found[step])}")
    ratios = [
        one["faster_than_its_best"] for one in found.values() if "faster_than_its_best" in one
    ]
    mean = statistics.geometric_mean(ratios) if ratios else None
    print(json.dumps({"faster_than_its_best_geometric_mean": mean, "steps": found}))


def _captured(step: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function of a step, without `jax.jit`, and the arguments of its first call."""
    import jax

    jit, caught = jax.jit, list[tuple[Callable[..., Any], tuple[Any, ...]]]()

    class _CalledError(Exception):
        """Ends the script at its step."""

    def catching(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda inner: catching(inner, **options)
        if getattr(function, "__name__", "") != FUNCTIONS[step]:
            return jit(function, **options)

        def called(*args: Any) -> Any:
            caught.append((function, args))
            raise _CalledError

        return called

    jax.jit = catching
    given, sys.argv = sys.argv, [step]
    try:
        runpy.run_path(str(STEPS / f"{step}.py"), run_name="__main__")
    except _CalledError:
        pass
    finally:
        jax.jit, sys.argv = jit, given
    return caught[0]


def _timed(step: str, rule: Path) -> dict[str, Any]:
    """The time of a call in milliseconds, by plan."""
    import jax

    import automesh

    function, args = _captured(step)
    config = automesh.load(rule).select()
    plans = {f"automesh {config.mesh_axis_names} {config.mesh_shape}": config.apply(function)}
    errors: dict[str, str] = {}
    for strategy, sizes in _offered():
        name = f"parallax {strategy} {sizes}"
        _say(f"    {name}: its shardings")
        try:
            plans[name] = _of_parallax(function, args, strategy, sizes)
        except Exception as error:  # noqa: BLE001 - whatever it raises is what is reported
            errors[name] = f"{type(error).__name__}: {error}"[:200]
    times: dict[str, list[float]] = {name: [] for name in plans}
    for name in list(plans):
        _say(f"    {name}: compiled and run once")
        try:
            jax.block_until_ready(plans[name](*args))
        except Exception as error:  # noqa: BLE001 - as for its compile
            errors[name] = f"{type(error).__name__}: {error}"[:200]
            del plans[name]
    for _ in range(_TURNS):
        for name, call in plans.items():
            began_s = time.perf_counter()
            for _ in range(_CALLS):
                jax.block_until_ready(call(*args))
            times[name].append((time.perf_counter() - began_s) / _CALLS)
    medians = {name: statistics.median(times[name]) for name in plans}
    ours = next((value for name, value in medians.items() if name.startswith("automesh")), math.nan)
    theirs = {name: value for name, value in medians.items() if name.startswith("parallax")}
    found: dict[str, Any] = {
        "step_ms": {name: round(1e3 * value, 3) for name, value in medians.items()},
        "errors": errors,
    }
    if theirs:
        best = min(theirs, key=lambda name: theirs[name])
        found |= {"its_best": best, "faster_than_its_best": theirs[best] / ours}
    return found


def _offered() -> list[tuple[str, tuple[int, int]]]:
    meshes = [(n, _DEVICES // n) for n in range(1, _DEVICES + 1) if _DEVICES % n == 0]
    return [(strategy, sizes) for sizes in meshes for strategy in ("AUTO", "FSDP", "DDP")]


def _of_parallax(
    function: Callable[..., Any], args: Sequence[Any], strategy: str, sizes: tuple[int, int]
) -> Callable[..., Any]:
    """The step compiled with the shardings of google-parallax; each call places its arguments as
    they ask for, as those of `config.apply` do."""
    import jax
    import parallax

    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=auto)
    with jax.set_mesh(mesh):
        wrapped = parallax.jit(function, strategy=parallax.ShardingStrategy[strategy])
        lowered = wrapped.lower(*args)
        compiled = lowered.compile()
    shardings = compiled.input_shardings[0]
    return lambda *given: compiled(*jax.tree.map(jax.device_put, tuple(given), shardings))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
