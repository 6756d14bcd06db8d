"""Pipelines on virtual devices give what a single program gives, whatever their schedule."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh import pipeline
from automesh.errors import UsageError, WrongType
from automesh.partition import axis_mapping, shard
from automesh.pipeline import SCHEDULES, MpmdMesh, make_schedule, parse_schedule, simulate
from automesh_pipeline.runtime.dispatch_plan import Run, Send
from plugins.pipeline.tests.support.pipeline_models import mesh_on, perceptron, single_step, worst
from tests.support.paths import ROOT

SEVERAL = ("interleaved", "kimi_k2", "wavefront", "dualpipe_v")
# Sums in another order differ in the last bits of float32.
CLOSE = 1e-5


def mesh_of(pp: int, dp: int = 1) -> Mesh:
    return mesh_on((pp, dp), ("pp", "dp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "residuals"),
    [
        (2, "save"),
        (4, "recompute"),
        pytest.param(2, "recompute", marks=pytest.mark.long),
        pytest.param(4, "save", marks=pytest.mark.long),
    ],
)
def test_every_schedule_gives_value_and_gradients_of_the_single_program(stages, residuals):
    model = perceptron(stages, tied=True)
    wanted = single_step(model, num_microbatches=4)
    ranks = 2
    names = SEVERAL if stages > ranks else [name for name in SCHEDULES if name != "dualpipe_v"]
    compiled = {}
    for name in names:
        schedule = make_schedule(name, num_ranks=ranks, num_microbatches=4, num_stages=stages)
        if schedule.homes not in compiled:
            step = pipeline.microbatch(
                model.free,
                mesh=mesh_of(ranks, 2),
                schedule=schedule,
                num_microbatches=4,
                residuals=residuals,
            )
            compiled[schedule.homes] = step.compile(model.params, model.batch)
        run = compiled[schedule.homes].with_schedule(schedule)
        assert worst(run(model.params, model.batch), wanted) < CLOSE, name


def test_a_schedule_of_ones_own_and_residuals_per_stage():
    model = perceptron(2)
    schedule = parse_schedule(["F0 F1 F2 B2 I0 B1 W0", "F0 F1 F2 I2 B1 W2 B0"])
    wanted = single_step(perceptron(2, rows=12), num_microbatches=3)
    model = perceptron(2, rows=12)
    step = pipeline.microbatch(
        model.free,
        mesh=mesh_of(2),
        schedule=schedule,
        num_microbatches=3,
        residuals=("save", "recompute"),
    )
    assert worst(step(model.params, model.batch), wanted) < CLOSE


def test_submeshes_of_different_shapes_each_with_its_own_constraint():
    devices = np.array(jax.devices()[:6])
    cut = MpmdMesh([Mesh(devices[:4].reshape(2, 2), ("dp", "tp")), Mesh(devices[4:], ("dp",))])

    def loss(params, batch):
        hidden = jax.lax.with_sharding_constraint(batch @ params[0], PartitionSpec("dp"))
        hidden = pipeline.stage_boundary(jnp.tanh(hidden))
        hidden = jax.lax.with_sharding_constraint(hidden, PartitionSpec(None, "dp"))
        return jnp.mean((hidden @ params[1]) ** 2)

    model = perceptron(2)
    params, batch = [one["w"] for one in model.params], model.batch["x"]
    step = pipeline.microbatch(loss, mesh=cut, num_microbatches=2)
    wanted = jax.value_and_grad(
        lambda params, batch: jnp.mean((jnp.tanh(batch @ params[0]) @ params[1]) ** 2)
    )(params, batch)
    assert worst(step(params, batch), wanted) < CLOSE
    compiled = step.compile(params, batch)
    # What the second stage takes was read from its program, and is not what the first one makes.
    split = {
        array.sharding.shard_shape(array.shape)
        for array in inputs_of(compiled, params, batch, stage=1)
    }
    assert split == {(8, 4)}


def inputs_of(compiled, params, batch, *, stage):
    found = []

    def watch(step, held):
        if isinstance(step, Run) and step.action.stage == stage:
            found.extend(held[slot] for slot in step.inputs)

    compiled.run(jax.tree.leaves(compiled.place(params)), batch, watch)
    return found


def test_shardings_that_are_given_are_those_of_parameters_and_gradients():
    model = perceptron(2)
    mesh = mesh_of(2, 4)
    abstract = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(mesh, PartitionSpec("dp"))
        ),
        model.params,
    )
    step = pipeline.microbatch(model.free, mesh=mesh, num_microbatches=2)
    compiled = step.compile(abstract, model.batch)
    _, gradients = step(model.params, model.batch)
    for tree in (compiled.shardings, jax.tree.map(lambda array: array.sharding, gradients)):
        assert {one.spec for one in jax.tree.leaves(tree)} == {PartitionSpec("dp")}
        devices = [{d.id for d in one.device_set} for one in jax.tree.leaves(tree)]
        assert devices == [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2


def test_a_batch_on_the_whole_mesh_whole_scalars_and_other_dimensions():
    mesh = mesh_of(2, 4)

    def loss(params, batch):
        hidden = pipeline.stage_boundary(params[0] @ batch["x"] * batch["scale"])
        return jnp.mean(params[1] @ hidden)

    model = perceptron(2)
    params = [one["w"] for one in model.params]
    x = jax.device_put(model.batch["x"].T, NamedSharding(mesh, PartitionSpec(None, "dp")))
    batch = {"x": x, "scale": np.float32(3)}
    step = pipeline.microbatch(loss, mesh=mesh, num_microbatches=4, dim=1)
    wanted = jax.value_and_grad(lambda p, b: jnp.mean(p[1] @ (p[0] @ b["x"] * b["scale"])))(
        params, jax.tree.map(np.asarray, batch)
    )
    assert worst(step(params, batch), wanted) < CLOSE


def test_sums_instead_of_means_and_bfloat16_parameters():
    def loss(params, batch):
        hidden = pipeline.stage_boundary(batch @ params["a"].astype(jnp.float32))
        return jnp.sum(hidden @ params["b"].astype(jnp.float32))

    model = perceptron(2)
    params = {"a": jnp.bfloat16(model.params[0]["w"]), "b": jnp.bfloat16(model.params[1]["w"])}
    step = pipeline.microbatch(
        loss, mesh=mesh_of(2), num_microbatches=8, reduce="sum", schedule="zb_h1"
    )
    value, gradients = step(params, model.batch["x"])
    wanted = jax.value_and_grad(loss)(params, model.batch["x"])
    assert {one.dtype for one in jax.tree.leaves(gradients)} == {jnp.bfloat16.dtype}
    # A bfloat16 has 8 bits; the sums were float32.
    assert worst((value, gradients), wanted) < 2**-7


def test_one_stage_and_a_loss_in_force():
    with jax.set_mesh(mesh_of(1, 2)):
        step = pipeline.microbatch(lambda w, x: jnp.mean((x @ w) ** 2), num_microbatches=2)
    w, x = perceptron(1).params[0]["w"], perceptron(1).batch["x"]
    wanted = jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
    assert worst(step(w, x), wanted) < CLOSE


def live_bytes(compiled, params, batch, devices_of):
    """Of each rank the most bytes of activations that its devices held at a time."""
    peaks = [0] * len(devices_of)

    def watch(step, held):
        if not isinstance(step, (Run, Send)):
            return
        for rank, devices in enumerate(devices_of):
            arrays = {id(a): a for slot, a in held.items() if slot.kind == "value"}
            here = [a for a in arrays.values() if a.devices() == devices]
            peaks[rank] = max(peaks[rank], sum(array.nbytes for array in here))

    compiled.run(jax.tree.leaves(compiled.place(params)), batch, watch)
    return peaks


def test_fewer_activations_are_held_by_1f1b_than_by_gpipe_as_the_simulator_says():
    ranks, count = 4, 16
    model = perceptron(ranks, rows=64)
    mesh = mesh_of(ranks)
    step = pipeline.microbatch(model.free, mesh=mesh, schedule="gpipe", num_microbatches=count)
    compiled = step.compile(model.params, model.batch)
    devices = [set(one.devices.flat) for one in MpmdMesh(mesh).submeshes]
    one = 4 * model.batch["x"][: 64 // count].size
    measured, simulated = {}, {}
    for name in ("gpipe", "1f1b", "eager_1f1b", "zb_h1"):
        schedule = make_schedule(name, num_ranks=ranks, num_microbatches=count)
        run = compiled.with_schedule(schedule)
        held = live_bytes(run, model.params, model.batch, devices)
        measured[name] = [size / one for size in held[1:]]
        simulated[name] = list(simulate(schedule).peak_live[1:])
    # What has arrived and not begun is held, too: one more at most under these schedules' orders.
    for name, live in simulated.items():
        assert all(s <= m <= s + 2 for s, m in zip(live, measured[name])), (name, measured)
    assert sum(measured["1f1b"]) < sum(measured["eager_1f1b"]) < sum(measured["gpipe"])


def test_wrong_calls():
    model = perceptron(2)
    loss = model.free

    def call(rows=16, params=model.params, **options):
        batch = jax.tree.map(lambda x: x[:rows], model.batch)
        options = {"mesh": mesh_of(2, 2), "num_microbatches": 4, **options}
        return pipeline.microbatch(loss, **options)(params, batch)

    wrong = [
        ({"num_microbatches": 3}, UsageError, "16 rows, which cannot be cut evenly into 3"),
        ({"rows": 0}, UsageError, "0 rows"),
        ({"dim": 2}, UsageError, "no dimension 2"),
        ({"schedule": "zb_h1", "num_microbatches": 1}, UsageError, "needs at least 2 microbatches"),
        ({"schedule": "gpip"}, UsageError, "did you mean `gpipe`"),
        ({"schedule": "dualpipe_v"}, UsageError, "the loss has 2 stages"),
        ({"mesh": mesh_of(4)}, UsageError, "the loss has 2 stages: 2 stages cannot be divided"),
        (
            {"schedule": make_schedule("gpipe", num_ranks=2, num_microbatches=2)},
            UsageError,
            "is for 2 microbatches, and the batch is cut into 4",
        ),
        ({"residuals": ("save",) * 3}, UsageError, "3 entries, and the loss 2 stages"),
        ({"residuals": "keep"}, UsageError, "one of recompute, save"),
        ({"reduce": "max"}, UsageError, "one of mean, sum"),
        ({"mesh": 3}, WrongType, "must be an MpmdMesh"),
        ({"mesh": None}, UsageError, "needs a mesh"),
        ({"num_microbatches": 0}, UsageError, "at least 1, got 0"),
        ({"num_microbatches": 2.0}, WrongType, "must be an int"),
        ({"schedule": 1}, WrongType, "got an int"),
        (
            {"params": [{"w": np.ones((8, 8), int), "b": np.ones(8)}] * 2},
            UsageError,
            r"params\[0\]\['w'\] is of int32, which has no gradient",
        ),
    ]
    for options, kind, words in wrong:
        with pytest.raises(kind, match=words):
            call(**options)
    with pytest.raises(WrongType, match="takes a loss"):
        pipeline.microbatch(3, mesh=mesh_of(2), num_microbatches=2)


def test_parameters_on_the_wrong_devices():
    model = perceptron(2)
    mesh = mesh_of(2, 2)
    step = pipeline.microbatch(model.free, mesh=mesh, num_microbatches=4)
    there = NamedSharding(MpmdMesh(mesh).submeshes[0], PartitionSpec())
    params = jax.device_put(model.params, there)
    with pytest.raises(UsageError, match=r"params\[1\]\['b'\] is on the devices \[0, 1\], and its"):
        step(params, model.batch)
    compiled = step.compile(model.params, model.batch)
    with pytest.raises(UsageError, match="are not of the structure"):
        compiled(model.params[0], model.batch)


def test_shardings_that_a_submesh_cannot_have():
    model = perceptron(2)
    mesh = mesh_of(2, 4)
    step = pipeline.microbatch(model.free, mesh=mesh, num_microbatches=8)
    batch = jax.device_put(model.batch, NamedSharding(mesh, PartitionSpec("dp")))
    with pytest.raises(UsageError, match=r"batch\['x'\] of shape \[2, 8\] cannot be split"):
        step(model.params, batch)
    other = mesh_on((2, 2), ("a", "b"))
    batch = jax.device_put(model.batch, NamedSharding(other, PartitionSpec("a")))
    with pytest.raises(UsageError, match=r"over the mesh axis `a`, which the submesh"):
        step(model.params, batch)


def test_parallelize_reads_shardings_from_the_program():
    def fun(params, batch):
        params = jax.lax.with_sharding_constraint(params, PartitionSpec(None, "x"))
        return jnp.sum(batch @ params)

    def init():
        return jnp.ones((4, 8))

    devices = jax.devices()[:4]
    step, init_params, get_batch = pipeline.parallelize(
        fun, init_params=init, get_input_batch=lambda: np.ones((2, 4)), devices=devices
    )
    params = init_params()
    assert params.sharding.spec == PartitionSpec(None, "x")
    assert step(params, get_batch()) == 64
    with pytest.raises(UsageError, match="got neither"):
        pipeline.parallelize(fun, init_params=init)
    with pytest.raises(UsageError, match="got both"):
        pipeline.parallelize(fun, init_params=init, get_input_batch=init, initial_batch=1)
    with pytest.raises(WrongType, match="must be a function"):
        pipeline.parallelize(fun, init_params=3, initial_batch=1)


def test_wrong_accumulation():
    with pytest.raises(UsageError, match="at least 1, got 0"):
        pipeline.accumulate(jnp.sum, num_microbatches=0)
    with pytest.raises(UsageError, match="argument 1 is to be cut, and there are 1"):
        pipeline.accumulate(jnp.sum, num_microbatches=2, argnum=1)(np.ones(4))
    with pytest.raises(UsageError, match="3 rows, which cannot be cut evenly into 2"):
        pipeline.accumulate(jnp.sum, num_microbatches=2)(np.ones(3))


@pytest.mark.slow
def test_the_examples_of_the_page_hold():
    page = ROOT / "docs" / "running_pipelines.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 15
    assert outcome.failed == 0


def test_logical_names_mean_the_axes_of_each_stages_submesh():
    def loss(params, batch):
        x = shard(batch, names=("rows", None))
        x = pipeline.stage_boundary(jnp.tanh(x @ shard(params[0], names=("embed", "hidden"))))
        return jnp.mean(shard(x, names=("rows", "hidden")) @ params[1])

    model = perceptron(2)
    params, batch = [one["w"] for one in model.params], model.batch["x"]
    mesh = mesh_on((2, 2, 2), ("pp", "dp", "tp"))
    with axis_mapping({"rows": "dp", "hidden": "tp", "embed": None}):
        step = pipeline.microbatch(loss, mesh=mesh, num_microbatches=2)
        compiled = step.compile(params, batch)
    wanted = jax.value_and_grad(lambda p, b: jnp.mean(jnp.tanh(b @ p[0]) @ p[1]))(params, batch)
    assert worst(compiled(params, batch), wanted) < CLOSE
    assert compiled.shardings[0].shard_shape((8, 8)) == (8, 4)
    shapes = [one.sharding.shard_shape(one.shape) for one in compiled.stages.shapes[1].inputs]
    assert shapes == [(4, 4)]


def test_modules_of_flax_are_stages_by_their_names():
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for number in range(4):
                x = jnp.tanh(linen.Dense(8, name=f"layers_{number}")(x))
            return linen.Dense(1, name="head")(x)

    model, x = Model(), perceptron(2).batch["x"]
    params = model.init(jax.random.key(0), x)
    with pipeline.register_task(r"layers_(\d)", lambda match: int(match[1]) // 2):
        step = pipeline.microbatch(
            lambda params, x: jnp.mean(model.apply(params, x) ** 2),
            mesh=mesh_of(2, 2),
            num_microbatches=4,
        )
    wanted = jax.value_and_grad(lambda params, x: jnp.mean(model.apply(params, x) ** 2))(params, x)
    compiled = step.compile(params, x)
    assert worst(compiled(params, x), wanted) < CLOSE
    stages = compiled.stages.split.owners
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    wanted_stages = [int("layers_0" not in name and "layers_1" not in name) for name in names]
    assert list(stages) == wanted_stages
