"""Twelve compiles of an example by one agent with one core, and by two."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from automesh.mesh.axes import DEFAULT_AXES, Plan, parse_mesh
from automesh.program.nouns import CompileAnswer, Entry, Inspection, StepRef
from automesh.worker.messages import CompileJob, InspectJob
from automesh.worker.pool import Pool
from benchmarks.fleet.agents import agents, workers
from benchmarks.support.paths import EXAMPLES

DEVICES = 8
ENTRY = Entry(kind="script", location=str(EXAMPLES / "dense_lm.py"), function="build")
_MESHES = ("dp:8", "dp:4,fsdp:2", "fsdp:8", "dp:4,tp:2", "fsdp:4,tp:2", "dp:2,fsdp:2,tp:2")
_TIMEOUT_S = 600.0
PLANS = tuple(
    Plan(axes=parse_mesh(mesh), knobs=(("remat", remat),))
    for mesh in _MESHES
    for remat in ("none", "full")
)


def two_against_one() -> dict[str, Any]:
    """Seconds that one agent takes, and two; nothing but the reason if there is one core alone."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return {"real_not_run": "this process may use one core alone"}
    found = {f"real_{len(own)}_agents_s": _compiled_s(own) for own in (cores[:1], cores)}
    ratio = found["real_1_agents_s"] / found["real_2_agents_s"]
    return {
        "real_compiles": len(PLANS),
        **{name: round(seconds, 2) for name, seconds in found.items()},
        "real_ratio": round(ratio, 3),
    }


def _compiled_s(cores: list[int]) -> float:
    """Seconds until all are compiled, by workers that have imported jax and compiled before."""
    with (
        agents(len(cores), cores=cores) as fleet,
        workers(fleet, handler="automesh.worker.handlers.jobs", cpu_devices=DEVICES) as pool,
    ):
        step = StepRef(entry=ENTRY, facts=_facts(pool))
        # Of two that wait, each worker gets one.
        _compile(pool, step, PLANS[: len(cores)])
        began_s = time.perf_counter()
        _compile(pool, step, PLANS)
        return time.perf_counter() - began_s


def _facts(pool: Pool) -> tuple[tuple[str, int], ...]:
    """What the example says of its workload: a plan must not change it."""
    job = InspectJob(step=StepRef(entry=ENTRY), axis_names=DEFAULT_AXES)
    found = pool.run(job, _TIMEOUT_S)
    assert isinstance(found, Inspection), found
    return found.facts


def _compile(pool: Pool, step: StepRef, plans: Sequence[Plan]) -> None:
    for plan in plans:
        job = CompileJob(step=step, plan=plan, cache_dir="")
        pool.submit(job, _TIMEOUT_S, lambda _: {"go": True})
    while pool.unfinished:
        for finished in pool.wait():
            assert isinstance(finished.result, CompileAnswer), finished.result
