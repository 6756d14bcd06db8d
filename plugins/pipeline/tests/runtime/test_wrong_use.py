"""Pipelines used wrongly: each mistake is told in a sentence, and nothing is left running."""

from __future__ import annotations

import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

from automesh import pipeline
from automesh.errors import UsageError
from automesh.pipeline import MpmdMesh, parse_schedule
from plugins.pipeline.tests.support.pipeline_models import mesh_on, perceptron
from tests.support.paths import ROOT


def call(**changed):
    model = perceptron(2)
    options = {"mesh": mesh_on((2, 2), ("pp", "dp")), "num_microbatches": 4, **changed}
    step = pipeline.train_step(model.free, optimizer=optax.sgd(0.1), **options)
    return step.init(model.params, model.batch)


def overlapping():
    devices = np.array(jax.devices()[:3])
    return MpmdMesh([jax.sharding.Mesh(one, ("dp",)) for one in (devices[:2], devices[1:])])


def on_the_other_stage():
    model, mesh = perceptron(2), mesh_on((2, 2), ("pp", "dp"))
    second = jax.sharding.NamedSharding(MpmdMesh(mesh).submeshes[1], jax.sharding.PartitionSpec())
    step = pipeline.train_step(model.free, optimizer=optax.sgd(0.1), mesh=mesh, num_microbatches=4)
    return step.init(jax.device_put(model.params, second), model.batch)


def unequal_shapes():
    stages = pipeline.repeat_layer(lambda w, x: x @ w[:, :4], 2)
    loss = pipeline.chain(stages, lambda y, _: y.mean())
    weights = pipeline.split_layers(np.ones((2, 8, 8), np.float32), 2)
    return loss(weights, np.ones((2, 8), np.float32))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: call(num_microbatches=3), "16 rows, which cannot be cut evenly into 3"),
        (lambda: call(num_microbatches=1, schedule="zb_h1"), "at least 2 microbatches for 2 ranks"),
        (lambda: call(mesh=overlapping()), "device cpu:1 is in the submeshes 0 and 1"),
        (on_the_other_stage, r"is on the devices \[2, 3\], and its stage is on \[0, 1\]"),
        (unequal_shapes, "a layer that is repeated must return what it takes"),
        (lambda: parse_schedule(["F0 B0 F1 B1", "F0 F1 B0 B1"]), "the schedule can never end"),
        (lambda: call(timeout_s=0), "`timeout_s` must be more than 0, got 0"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(wrong, words):
    with pytest.raises(UsageError, match=words) as raised:
        wrong()
    assert "\n" not in raised.value.message


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("fail", "a stage of the pipeline failed on its devices: RuntimeError: no rows today"),
        ("hang", "a step of the pipeline did not end in 5 s: a stage hangs"),
    ],
)
def test_a_stage_that_fails_or_hangs_ends_its_process(how, words):
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "plugins.pipeline.tests.support.misbehaving_pipeline", how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, ended.stderr
    assert words in told[0]
    assert ended.returncode == 1
    assert time.monotonic() - begun < 100
