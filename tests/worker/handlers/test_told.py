"""What is done where user code cannot be told of the attached devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automesh.mesh.axes import Plan, parse_mesh
from automesh.program.nouns import BuildAnswer, Propagation, StepRef
from automesh.worker.handlers import jobs
from automesh.worker.messages import BuildJob, PropagateJob
from tests.support.program_jobs import own_process, script
from tests.support.samples.attached_devices import cards

__all__ = ["own_process"]

RUNS_A_KERNEL = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl

def double(ref, out):
    out[...] = ref[...] * 2

def build(mesh):
    kernel = pl.pallas_call(double, jax.ShapeDtypeStruct((16,), jnp.float32))
    is_here = mesh.devices.flat[0].platform == "cpu"
    w = jnp.ones(16) if is_here else kernel(jnp.ones(16))
    return jax.jit(lambda w, x: (x * w).sum()), (w, jax.ShapeDtypeStruct((16,), jnp.float32))
"""
PLAN = Plan(axes=parse_mesh("dp:2"))


@pytest.fixture
def step(own_process: Path) -> StepRef:
    path = own_process / "runs_a_kernel.py"
    path.write_text(RUNS_A_KERNEL)
    return StepRef(entry=script(path), axis_types=("auto",) * len(PLAN.axes), absent=cards(8))


def test_a_build_that_runs_what_only_the_attached_devices_can_is_estimated_untold(
    step: StepRef,
) -> None:
    """They can build it: they did when the script was inspected. Being told of them, `build` fails
    on virtual devices, and every mesh was said to be refused by the step."""
    assert isinstance(jobs.handle(BuildJob(step=step, plan=PLAN), lambda _: {}), BuildAnswer)
    names = tuple(axis.name for axis in PLAN.axes)
    job = PropagateJob(
        step=step, axis_names=names, knobs=(), sizes=(("dp", 2),), probes=(), platform="gpu"
    )
    found = jobs.handle(job, lambda _: {})
    assert isinstance(found, Propagation)
    assert any("only with the kernels that it has for CPUs" in one for one in found.notes)


def test_for_devices_that_are_not_here_a_build_must_run_nothing(step: StepRef) -> None:
    elsewhere = replace(step, absent=replace(cards(8), is_attached=False))
    with pytest.raises(ValueError, match="interpret mode"):
        jobs.handle(BuildJob(step=elsewhere, plan=PLAN), lambda _: {})
