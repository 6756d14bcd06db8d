"""Whether a step that was stored in one run of a script is, on every other mesh, the script's own.

    python -m benchmarks.carry [SCRIPT ...]

Each script is run once, up to its step, which is stored; a second process makes the second run of a
search, and then compares, on every legal mesh of 8 virtual CPU devices, the stored step with a real
run of the script there: fingerprint of the program, shapes, types and shardings of the arguments.

* equal: both are the same, or jax refuses both , in runs without the data of arrays;
* run: the stored step refuses the mesh by itself, and the script is run for it;
* detected: they differ, and the first or the second run said so before any mesh is ranked;
* undetected: they differ, and nobody said so. There must be none.

Without SCRIPT, the scripts of `tests/data/scripts` that have a mesh and no function `build`. The
last line on stdout is JSON: counts of meshes, medians of the seconds of a carry and of a run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.support.paths import ROOT

_SCRIPTS = ROOT / "tests" / "data" / "scripts"
# Without a mesh; too large for this machine; of a library that fails on the newest jax; with 15 s
# of nothing.
_LEFT_OUT = {
    "optimizer_outside_jit",
    "ragged_last_batch",
    "whole_run_in_one_jit",
    "large_model",
    "haliax_loop",
    "slow_start",
}
# Their meshes are written out.
_DEVICES = {"hardcoded_mesh": 4, "no_loss": 4, "unseeded": 4}
_ARGUMENTS = {"absl_flags": ("--workdir", "unused")}
_TIMEOUT_S = 600


def scripts() -> list[Path]:
    """Those of the tests, without the ones that have no mesh."""
    found = [*_SCRIPTS.glob("cases/*.py"), *_SCRIPTS.glob("capture/*.py")]
    return sorted(path for path in found if path.stem not in _LEFT_OUT)


def compared(script: Path) -> dict[str, Any]:
    """What the two processes say of a script."""
    count = _DEVICES.get(script.stem, 8)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}
    environment.pop("XLA_FLAGS", None)
    found: dict[str, Any] = {"script": script.stem}
    with tempfile.TemporaryDirectory() as folder:
        for what in ("--store", "--compare"):
            words = ["-m", "benchmarks.carry", what, folder, str(script)]
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
            if done.returncode:
                return found | {"error": _last_error(done.stderr)}
            found |= json.loads(done.stdout.splitlines()[-1])
            if found.get("not_carried"):
                break
    return found


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line.partition(":")[0]]
    return lines[-1] if lines else "it was killed"


def _store(script: Path, folder: Path) -> dict[str, Any]:
    from automesh.program.capture.discover import discover
    from automesh.program.carry.stored_step import store_in
    from automesh.program.nouns import Entry

    arguments = _ARGUMENTS.get(script.stem, ())
    entry = Entry(kind="script", location=str(script), function="", argv=arguments)
    found = discover(entry, keep=partial(store_in, str(folder)))
    capture = dataclasses.replace(found.capture, folder=str(folder), without_arrays=True)
    entry = dataclasses.replace(entry, function=capture.step.name, capture=capture)
    (folder / "entry.pickle").write_bytes(pickle.dumps((entry, found)))
    return {"step": capture.step.name, "not_carried": found.not_carried}


def _compare(folder: Path) -> dict[str, Any]:
    from automesh.program.capture.abstract.record import ValueNeeded
    from automesh.program.carry.check import check_carried
    from automesh.program.lower.any_step import lower_any
    from automesh.space.enumerate import factorizations
    from automesh.tuner.script.carried import other_meshes

    entry, found = pickle.loads((folder / "entry.pickle").read_bytes())
    own = entry.capture.mesh
    meshes = [plan.axes for plan in other_meshes(own, found.num_devices)]

    def check() -> str:
        return check_carried(entry, meshes, lower=lower_any, entering=lambda _: None).difference

    try:
        try:
            said = check()
        except ValueNeeded:  # A search makes its arrays then.
            capture = dataclasses.replace(entry.capture, without_arrays=False)
            entry = dataclasses.replace(entry, capture=capture)
            said = check()
    # Whatever ends the script before its step: it is run for each mesh then.
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    rows = [
        _on_mesh(entry, dict(zip(own.names, sizes, strict=True)), said)
        for sizes in factorizations(found.num_devices, len(own.names)).tolist()
    ]
    return {"second_run": said, "meshes": rows}


def _on_mesh(entry: Any, sizes: dict[str, int], said: str) -> dict[str, Any]:
    """One mesh: what is carried there, and what the script does."""
    from automesh.mesh.axes import MeshAxis
    from automesh.program.absent.device_queries import own
    from automesh.program.capture.build import build_by_running
    from automesh.program.carry.build import carried_build
    from automesh.program.carry.check import CarriedStep, difference
    from automesh.program.carry.meshes import CannotCarry
    from automesh.program.lower.any_step import lower_any
    from automesh.program.script.build import build_on

    axes = tuple(MeshAxis(name=name, ici=size) for name, size in sizes.items())
    types = entry.capture.searched.axis_types
    capture = dataclasses.replace(entry.capture, carried_by="trace", without_arrays=True)
    carried_entry = dataclasses.replace(entry, capture=capture)

    def refuse(why: str) -> Any:
        raise CannotCarry(why)

    def made(build: Any) -> tuple[Any, float]:
        began_s = perf_counter()
        built = build_on(build, axes, axis_types=types, devices=own())
        step = CarriedStep(by="trace", axes=axes, built=built, program=lower_any(built))
        return step, perf_counter() - began_s

    row: dict[str, Any] = {"mesh": ",".join(f"{name}:{size}" for name, size in sizes.items())}
    carried = real = None
    why: list[str] = []
    try:
        carried, row["carry_s"] = made(carried_build(carried_entry, refuse))
    except CannotCarry as error:
        return row | {"is": "run", "why": error.message}
    # jax refuses what does not divide, by errors of several kinds.
    except Exception as error:  # noqa: BLE001
        why.append(f"carried: {type(error).__name__}: {error}".splitlines()[0])
    try:
        real, row["run_s"] = made(build_by_running(entry))
    except Exception as error:  # noqa: BLE001
        why.append(f"run: {type(error).__name__}: {error}".splitlines()[0])
    if carried is None and real is None:
        return row | {"is": "equal", "why": "; ".join(why)}
    if carried is not None and real is not None:
        differs = difference(real.built, carried, lower_any, entry.capture.step.name)
        if not differs:
            return row | {"is": "equal"}
        why.append(differs)
    return row | {"is": "detected" if said else "undetected", "why": "; ".join(why)}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all scripts."""
    rows = [row for one in found for row in one.get("meshes", ())]
    counts = {
        kind: sum(row["is"] == kind for row in rows)
        for kind in ("equal", "run", "detected", "undetected")
    }
    carry = [row["carry_s"] for row in rows if "carry_s" in row]
    run = [row["run_s"] for row in rows if "run_s" in row]
    return {
        "scripts": sum("meshes" in one for one in found),
        "not_carried": sum(bool(one.get("not_carried")) for one in found),
        "run_for_each_mesh": sum(bool(one.get("second_run")) for one in found),
        "errors": sum("error" in one for one in found),
        "meshes": len(rows),
        **counts,
        "median_carry_s": round(statistics.median(carry), 3) if carry else None,
        "median_run_s": round(statistics.median(run), 3) if run else None,
    }


def main() -> None:
    """Compares, and prints a line for every script and for every mesh that differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scripts", nargs="*", type=Path, metavar="SCRIPT")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if folder := options.store or options.compare:
        (script,) = options.scripts
        with contextlib.redirect_stdout(io.StringIO()):
            said = _store(script, folder) if options.store else _compare(folder)
        print(json.dumps(said))
        return
    found: list[dict[str, Any]] = []
    for script in options.scripts or scripts():
        one = compared(script.resolve())
        found.append(one)
        rows = one.get("meshes", ())
        told = one.get("error") or one.get("not_carried") or one.get("second_run") or ""
        kinds = [row["is"] for row in rows]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        print(f"{one['script']:<24} {counted or '-':<40} {told}", flush=True)
        for row in rows:
            if row["is"] == "undetected":
                print(f"    {row['mesh']}: {row['why']}", flush=True)
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    main()
