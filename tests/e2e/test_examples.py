"""The example scripts compute the same on every mesh, learn, and say what a search needs."""

from __future__ import annotations

import inspect
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.support.example_runs import (
    AXES,
    EXAMPLES,
    NAMES,
    arguments,
    build,
    device_mesh,
    module,
    run,
)

# Every axis that the script uses above 1, every value of the knobs, a size that is no power of two.
MESHES = [
    ("dense_lm", {"fsdp": 2, "tp": 2, "sp": 2}, {"remat": "none", "microbatches": 2}, 30),
    ("dense_lm", {"dp": 2, "fsdp": 3, "tp": 2}, {"remat": "dots"}, 2),
    ("moe_lm", {"fsdp": 2, "ep": 2, "tp": 2}, {"remat": "dots", "microbatches": 2}, 10),
    ("moe_lm", {"dp": 3, "ep": 4}, {"remat": "none"}, 2),
    ("long_context", {"fsdp": 2, "tp": 2, "sp": 2}, {"remat": "dots", "microbatches": 2}, 10),
    ("long_context", {"dp": 2, "sp": 4}, {"remat": "none"}, 2),
]
ALONE = 10  # steps on one device
PIPELINED = ("dense_lm", "moe_lm")
LONG = pytest.mark.long


# One of each kind at every landing, the others where there is time.
SOME = [
    mesh if (mesh[0], mesh[3]) in {("dense_lm", 30)} else pytest.param(*mesh, marks=LONG)
    for mesh in MESHES
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "knobs", "steps"), SOME)
def test_losses_equal_those_of_one_device(name, sizes, knobs, steps):
    alone = run(name, steps=ALONE).losses
    shared = run(name, tuple(sizes.items()), tuple(knobs.items()), steps).losses
    compared = min(ALONE, steps)
    np.testing.assert_allclose(shared[:compared], alone[:compared], rtol=2e-5)
    assert steps < 30 or shared[-1] < 3.2 < math.log(256) < shared[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "knobs", "steps"), SOME)
def test_collectives_are_those_of_the_axes(name, sizes, knobs, steps):
    shared = run(name, tuple(sizes.items()), tuple(knobs.items()), steps).collectives
    assert ("all-to-all" in shared) == ("ep" in sizes)
    assert ("collective-permute" in shared) == (name == "long_context" and "sp" in sizes)
    assert run(name, steps=ALONE).collectives <= {"all-reduce"}  # over groups of one


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "size", "billions"),
    [
        # Llama 3.2 1B has 1.24 billion: its head is its embedding, here they are two.
        ("dense_lm", "1b", 1.50),
        ("dense_lm", "8b", 8.03),
        ("dense_lm", "70b", 70.55),
        ("moe_lm", "8x7b", 46.70),
        ("long_context", "8b-128k", 8.03),
        ("long_context", "70b-128k", 70.55),
    ],
)
def test_large_presets_are_lowered_without_allocating(name, size, billions):
    before = len(jax.live_arrays())
    workload = build(name, {"fsdp": 2, "tp": 4}, size=size)
    lowered = workload.step.lower(*workload.args)
    state, _ = workload.args
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    assert round(parameters / 1e9, 2) == billions
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(workload.args))
    assert "sdy.sharding" in lowered.as_text()
    assert len(jax.live_arrays()) == before


def gathered_by(who: str, name: str):
    with arguments(name, "--gather", who):
        return module(name).build(device_mesh({"fsdp": 4, "tp": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_step_leaves_gathers_to_the_compiler_if_it_is_told_to(name):
    programs = [gathered_by(who, name) for who in ("step", "compiler")]
    texts = [one.step.lower(*one.args).as_text() for one in programs]
    ours, theirs = (text.count("sharding_constraint") for text in texts)
    assert theirs < ours


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_the_compiler_gathers_give_the_same_losses(name):
    losses: list[float] = []
    for who in ("step", "compiler"):
        workload = gathered_by(who, name)
        state, batch = workload.init(None)
        losses.append(float(workload.step(state, batch)[1]["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_facts_do_not_depend_on_the_mesh(name):
    alone, shared = build(name, {}), build(name, {"fsdp": 2, "tp": 2})
    assert alone.facts == shared.facts
    assert alone.tokens_per_step == alone.facts["batch"] * alone.facts["seq"] > 0


def test_unknown_remat_is_refused():
    workload = build("dense_lm", {}, remat="sometimes")
    with pytest.raises(ValueError, match="none, dots, full"):
        workload.step.lower(*workload.args)


RULES = """
schema = 1
axes = ["dp", "fsdp", "ep", "tp", "sp"]
batch_axes = ["dp", "fsdp"]
[[rule]]
match = "cpu-16"
ici = { fsdp = 8, sp = 2 }
knobs = { remat = "none", microbatches = 2 }
"""


def test_script_trains_on_the_mesh_of_the_rules(tmp_path, capsys):
    rules = tmp_path / "mesh_rules.toml"
    rules.write_text(RULES)
    dense = module("dense_lm")
    with arguments("dense_lm", "--steps", "2", "--rules", str(rules)):
        module("lm.training").train(dense.build, dense.__file__, dense.SIZES)
    said = capsys.readouterr().out
    assert "'fsdp': 8" in said and "'sp': 2" in said and "'microbatches': 2" in said
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
    assert losses == pytest.approx(run("dense_lm", steps=ALONE).losses[:2], abs=1e-4)


def test_script_says_why_no_rule_applies(tmp_path):
    rules = tmp_path / "mesh_rules.toml"
    rules.write_text(RULES)
    dense = module("dense_lm")
    words = ("--rules", str(rules), "--target", "tpu-v5p-128")
    with arguments("dense_lm", *words), pytest.raises(SystemExit, match="tpu-v5p-128"):
        module("lm.training").train(dense.build, dense.__file__, dense.SIZES)


def test_script_without_rules_says_what_it_falls_back_to(tmp_path, capsys):
    training = module("lm.training")
    with arguments("dense_lm"):
        options = training.arguments(["tiny"])
    mesh, knobs, compiler_options = training.chosen_mesh(tmp_path / "mesh_rules.toml", options)
    assert mesh.shape == {"dp": 16, "fsdp": 1, "ep": 1, "tp": 1, "sp": 1}
    assert knobs == compiler_options == {}
    assert "falling back to dp:16" in capsys.readouterr().out


def pipelined(name, layers, **knobs):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1, 1, 1, 1), ("pp", *AXES))
    with arguments(name, "--layers", f"{layers}"):
        return module(name).build(mesh, microbatches=4, **knobs)


@pytest.mark.plugin("pipeline")
@pytest.mark.parametrize("name", PIPELINED)
def test_where_the_mesh_has_a_pipeline_the_layers_are_dealt_to_its_stages(name):
    workload = pipelined(name, 4, schedule="interleaved", virtual_stages=2)
    state, batch = workload.args
    stages = state.params["layers"]
    assert len(stages) == 4
    assert {len(one.sharding.device_set) for one in jax.tree.leaves(state)} == {2}
    assert [sorted({leaf.shape[0] for leaf in one.values()}) for one in stages] == [[1]] * 4
    homes = [min(device.id for device in one["query"].sharding.device_set) for one in stages]
    assert homes == [0, 2, 0, 2]
    assert batch["inputs"].shape == (48, 48)
    assert workload.facts["num_layers"] == 4


@pytest.mark.plugin("pipeline")
@pytest.mark.long
def test_sgd_keeps_no_moments_and_trains_alike_in_a_pipeline():
    sgd = ("--layers", "2", "--optimizer", "sgd")
    with arguments("dense_lm", *sgd):
        alone = module("dense_lm").build(device_mesh({"dp": 2}))
        dealt = module("dense_lm").build(
            Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1, 1, 1, 1), ("pp", *AXES)),
            microbatches=4,
        )
    assert alone.args[0].mean is None and alone.args[0].square is None
    losses: dict[str, list[float]] = {"alone": [], "dealt": []}
    for name, workload in (("alone", alone), ("dealt", dealt)):
        state, batch = workload.init(None)
        for _ in range(6):
            state, metrics = workload.step(state, batch)
            losses[name].append(float(metrics["loss"]))
    assert losses["dealt"] == pytest.approx(losses["alone"], rel=1e-4)
    assert losses["alone"][-1] < losses["alone"][0] - 0.1


@pytest.mark.plugin("pipeline")
def test_layers_that_cannot_be_dealt_evenly_are_refused():
    with pytest.raises(ValueError, match="3 layers cannot be divided evenly over 2 stages"):
        pipelined("dense_lm", 3)


@pytest.mark.parametrize("name", NAMES)
def test_build_takes_the_knobs_of_its_space(name):
    parameters = list(inspect.signature(module(name).build).parameters.values())
    of_pipelines = ["schedule", "virtual_stages"] if name in PIPELINED else []
    wanted = ["mesh", "remat", "microbatches", *of_pipelines]
    assert [parameter.name for parameter in parameters] == wanted
    assert all(parameter.default is not parameter.empty for parameter in parameters[1:])


def test_text_is_ascii_and_of_the_stated_size():
    text = (EXAMPLES / "data" / "paradise_lost.txt").read_bytes()
    assert 300_000 < len(text) < 500_000
    assert text.isascii()
    assert b"Of Mans First Disobedience" in text[:200]
