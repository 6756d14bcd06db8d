"""A second run, in a fresh process, tells whether a step may be carried; and what depends on the
mesh, where it may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.carried import carried_scripts
from tests.support.made_once import made_once

SCRIPT = """# {meshes}
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh({mesh}, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
data, model = mesh.shape["data"], mesh.shape["model"]
{first}
w = jax.device_put(np.full((16, 32), 0.1, np.float32), NamedSharding(mesh, {weights})){then}


@jax.jit
def train_step({lead}w, x):
    loss, slope = jax.value_and_grad(lambda w: {loss})(w)
    return {lead}w - 0.1 * slope, loss


for step in range({turns}):
    x = jax.device_put(np.ones(({rows}, 16), np.float32), NamedSharding(mesh, {batch}))
    {lead}w, loss = train_step({call}w, x)
"""
NNX = """# data:2,model:4
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
mean = jax.shard_map(
    lambda x: jax.lax.pmean(jnp.mean(x), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
)


@nnx.jit
def train_step(model, x):
    loss, slopes = nnx.value_and_grad(lambda model: mean((model(x) - x) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), slopes))
    return loss


for step in range(6):
    x = jax.device_put(np.ones((48, 16), np.float32), jax.NamedSharding(mesh, P("data")))
    loss = train_step(model, x)
"""
# Its step is for one device, but for what `loss` says.
NO_MESH = """# data:2,model:4
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@jax.jit
def train_step(w, x):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean(({} @ w) ** 2))(w)
    return w - 0.1 * slope, loss


w = jnp.full((16, 32), 0.1)
for step in range(6):
    w, loss = train_step(w, np.ones((48, 16), np.float32))
"""
# The whole training is one call, which alone says how its arguments are split.
LOOP = """# data:2,model:4
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def train_step(w, xs):
    def turn(w, x):
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * slope, loss

    return jax.lax.scan(turn, w, xs)


split = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P(None, "data"))
xs = np.ones((2000, 48, 16), np.float32)
w, losses = jax.jit(train_step, in_shardings=split)(np.full((16, 32), 0.1, np.float32), xs)
print(float(losses[-1]))
"""
PARTS = {
    "meshes": "data:2,model:4",
    "mesh": "(4, 2)",
    "lead": "",
    "call": "",
    "first": "",
    "then": "",
    "weights": 'P(None, "model")',
    "loss": "jnp.mean((x @ w) ** 2)",
    "rows": "48",
    "turns": "6",
    "batch": 'P("data")',
}
CASES: dict[str, dict[str, str]] = {
    "equal": {},
    "batch_by_mesh": {"rows": "8 * data"},
    "batch_and_loss_by_mesh": {"rows": "8 * data", "loss": "jnp.mean((x @ w) ** 2) / data"},
    "batch_by_mesh_in_parts": {
        "rows": "8 * data",
        "first": "split = jax.shard_map(lambda w, x: jax.lax.pmean(jnp.mean((x @ w) ** 2), "
        '"data") / mesh.shape["data"], mesh=mesh, in_specs=(P(None, None), P("data")), '
        "out_specs=P(), check_vma=False)",
        "loss": "split(w, x)",
    },
    "run_for_each": {
        "meshes": "data:2,model:4 | data:8,model:1",
        "weights": 'P("data" if data > 2 else "model", None)',
    },
    "batch_by_run": {
        "meshes": "data:2,model:4 | data:8,model:1",
        "rows": "8 * data",
        "loss": "jnp.mean((x @ w) ** 2) / data",
    },
    "work_by_run": {
        "meshes": "data:2,model:4 | data:8,model:1",
        "rows": "64",
        "loss": "jnp.mean((x[: 8 * data] @ w) ** 2)",
    },
    "model_by_run": {
        "meshes": "data:2,model:4 | data:8,model:1",
        "then": "; w = jax.device_put(np.tile(np.asarray(w), (1, model)), w.sharding)",
    },
    "micro_batches_by_run": {
        "meshes": "data:2,model:4 | data:8,model:1",
        "rows": "data, 32 // data",
    },
    "loop_with_shardings": {"all": LOOP},
    "sharding_by_mesh": {"weights": 'P("data" if data > 2 else "model", None)'},
    "constant_by_mesh": {"loss": "jnp.mean((x @ w) ** 2) / data"},
    "steps_by_mesh": {"loss": "sum(jnp.mean((p @ w) ** 2) for p in jnp.split(x, data))"},
    "ends_by_mesh": {"first": "assert model < 4, 'heads do not divide'"},
    # 48 rows do not divide by 5: the step is not taken there, and the next mesh is.
    "next_mesh": {"meshes": "data:5,model:1 data:3,model:2"},
    "no_mesh": {"meshes": "data:5,model:1 data:7,model:1"},
    # After its first call, with a plain number, the step is given what the compiler has placed.
    "axis_of_one": {
        "mesh": "(8, 1)",
        "weights": 'P("data", "model")',
        "lead": "count, ",
        "call": "step if step == 0 else np.float32(step), ",
    },
    # Of what is computed under jit, jax does not say that it is split over an axis of size 1: the
    # step of the second run is stored, and compared with that of a third.
    "placed_on_axis_of_one": {
        "meshes": "data:2,model:4 data:4,model:2",
        "mesh": "(8, 1)",
        "weights": "P()",
        "then": "; w = jax.jit(lambda w: jax.lax.with_sharding_constraint("
        "w * 2, NamedSharding(mesh, P('data', 'model'))))(w)",
    },
    "placed_and_constant": {
        "meshes": "data:2,model:4 data:4,model:2",
        "mesh": "(8, 1)",
        "weights": "P()",
        "loss": "jnp.mean((x @ w) ** 2) / data",
        "then": "; w = jax.jit(lambda w: jax.lax.with_sharding_constraint("
        "w * 2, NamedSharding(mesh, P('data', 'model'))))(w)",
    },
    # It splits where that divides, which its own mesh does not show.
    "splits_if_it_divides": {
        "meshes": "data:2,model:4 data:4,model:2",
        "mesh": "(8, 1)",
        "weights": "P(None, 'model') if 2 % model == 0 else P()",
    },
    # The second run does not show it either, the winner's does.
    "splits_until_the_winner": {
        "meshes": "data:4,model:2 | data:2,model:4",
        "mesh": "(8, 1)",
        "weights": "P(None, 'model') if 2 % model == 0 else P()",
    },
    # Before, a third run on yet another mesh agreed, and the script's own mesh was refused.
    "splits_its_axis_if_it_divides": {
        "meshes": "data:4,model:2 data:2,model:4",
        "mesh": "(1, 8)",
        "weights": "P(None, 'model') if 2 % model == 0 else P()",
    },
    # Before, `data:8` was ruled out, which does not divide its 12 rows: it leaves them whole there.
    "whole_where_that_does_not_divide": {
        "meshes": "data:2,model:4",
        "rows": "12",
        "batch": "P('data') if 12 % data == 0 else P()",
    },
    # It does not, and fails there.
    "fails_where_that_does_not_divide": {"meshes": "data:2,model:4", "rows": "12"},
    "in_parts": {
        "loss": "jax.shard_map(lambda w, x: jax.lax.pmean(jnp.mean((x @ w) ** 2), ('data',)), "
        "mesh=mesh, in_specs=(P(), P('data')), out_specs=P())(w, x)",
        "weights": "P()",
    },
    # What `jax.shard_map` and `jax.grad` give a script holds what sees their calls.
    "made_in_parts": {
        "first": "split = jax.shard_map(lambda w, x: jax.lax.pmean(jnp.mean((x @ w) ** 2), "
        "('data',)), mesh=mesh, in_specs=(P(), P('data')), out_specs=P())\n"
        "squared = jax.grad(lambda x: x**3 / 3)",
        "loss": "split(w, x) * squared(1.0)",
        "weights": "P()",
    },
    # The mesh has the script's own members as names, not only their texts.
    "members_as_names": {
        "mesh": "(4, 2)",
        "first": "import enum\nAxis = enum.StrEnum('Axis', {'DATA': 'data', 'MODEL': 'model'})\n"
        "mesh = jax.sharding.Mesh(mesh.devices, tuple(Axis))\n"
        "assert all(one is two for one, two in zip(mesh.axis_names, Axis))\n"
        "assert all(isinstance(one, Axis) for one in mesh.abstract_mesh.shape)",
        "weights": "P(None, Axis.MODEL)",
        "batch": "P(mesh.axis_names[0])",
    },
    "asks_its_mesh": {"loss": "jnp.mean((x @ w) ** 2) * mesh.shape['data']"},
    "calls_python": {
        "loss": "jnp.mean((x @ w) ** 2) + jax.lax.stop_gradient(jax.pure_callback(np.asarray, "
        "jax.ShapeDtypeStruct((), np.float32), x[0, 0]))",
    },
    # A demonstration: its values are those of its last call but one, or of its only call.
    "ends_after_two": {"turns": "2"},
    # A class of the script, as a node of trees: the other process has another class of that name.
    "own_nodes": {
        "first": "import dataclasses\n"
        "@jax.tree_util.register_dataclass\n@dataclasses.dataclass\n"
        "class Pair:\n    w: jax.Array\n    x: jax.Array\n"
        "split = jax.shard_map(lambda both: jax.lax.pmean(jnp.mean((both.x @ both.w) ** 2), "
        "('data',)), mesh=mesh, in_specs=(Pair(P(), P('data')),), out_specs=P())",
        "loss": "split(Pair(w, x))",
        "weights": "P()",
    },
    # Before, it was run for each mesh: "No update context found" by the function's own context.
    "nnx_in_parts": {"all": NNX},
    "mesh_for_nothing": {"all": NO_MESH.format("x")},
    "mesh_in_the_program": {
        "all": NO_MESH.format(
            "jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data', None)))"
        )
    },
    # The run for a rule had no arrays, and so it ended at this line.
    "decides_by_data": {
        "meshes": "data:2,model:4 | data:8,model:1",
        "then": "\ncount = int(w.sum())",
    },
    "prints": {"loss": "(jax.debug.print('{}', x[0, 0]), jnp.mean((x @ w) ** 2))[1]"},
}

# The script ends by itself before it is stopped: its function is known all the same.
CASES["in_parts_ends_after_two"] = CASES["in_parts"] | {"turns": "2"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return made_once(tmp_path_factory, "carried", stored_and_checked)[1]


def stored_and_checked(folder: Path) -> dict[str, dict[str, Any]]:
    for name, parts in CASES.items():
        text = parts.get("all") or SCRIPT.format(**(PARTS | parts))
        (folder / f"{name}.py").write_text(text)
    both: list[dict[str, dict[str, Any]]] = []
    for what in ("store", "check"):
        both.append(carried_scripts(what, folder))
        for name in CASES if what == "store" else ():
            if both[0][name]["not_carried"] or both[0][name]["unused_mesh"]:
                (folder / f"{name}.py").unlink()
    stored, checked = both
    return {name: stored[name] | checked.get(name, {}) for name in CASES}


# What each is told; in order of the cases. Nothing: the step may be carried.
SAID = {
    "equal": "",
    "batch_by_mesh": "",
    "micro_batches_by_run": "float32[2, 16, 16] there, and float32[4, 8, 16] elsewhere",
    "loop_with_shardings": "",
    "batch_and_loss_by_mesh": "`args[1]` is float32[16, 16] there, and float32[32, 16] elsewhere",
    "batch_by_mesh_in_parts": "",
    "sharding_by_mesh": "('model', None) there, and by ",
    "constant_by_mesh": "stablehlo.constant dense<2.000000e+00> : tensor<f32>`, and not `",
    "steps_by_mesh": "`train_step` is another program there at steps_by_mesh.py:13: `",
    "next_mesh": "",
    "axis_of_one": "",
    "placed_on_axis_of_one": "",
    "placed_and_constant": "stablehlo.",
    "splits_if_it_divides": "`args[0]` is split by P(None, 'model') there, and by P() elsewhere",
    "splits_until_the_winner": "`args[0]` is split by P() there, and by P(None, 'model') elsewhere",
    "splits_its_axis_if_it_divides": "split by P(None, 'model') there, and by P() elsewhere",
    "whole_where_that_does_not_divide": "split by P() there, and by P('data'",
    "fails_where_that_does_not_divide": "",
    "members_as_names": "",
    "no_mesh": "on data:5,model:1 jax refuses its step (IndivisibleError: dimension 0 of an array ",
    # The trace has other shapes there; the function is traced again.
    "in_parts": "",
    "made_in_parts": "",
    "asks_its_mesh": "",
    "nnx_in_parts": "",
    "own_nodes": "",
    "decides_by_data": "",
    "mesh_in_the_program": "",
    # What only shows something is left out of the step.
    "prints": "",
    "ends_after_two": "",
    "in_parts_ends_after_two": "",
}


@pytest.mark.parametrize("name", SAID)
def test_what_depends_on_the_mesh_is_named(name: str, found: dict[str, dict[str, Any]]) -> None:
    one = found[name]
    assert one["step"] == "train_step"
    assert one["has_values"], "workers do not start the script for them"
    if SAID[name]:
        assert SAID[name] in one["difference"]
    else:
        assert one["difference"] == ""
    # Where the stored step is taken to no mesh, the script is not started for it.
    assert len(one["starts"]) == {
        "no_mesh": 0,
        "placed_and_constant": 2,
        "splits_if_it_divides": 2,
        "splits_until_the_winner": 2,
        "decides_by_data": 2,
        "micro_batches_by_run": 2,
        "whole_where_that_does_not_divide": 2,
        "fails_where_that_does_not_divide": 2,
    }.get(name, 1)
    # The step of the second run is carried, and was compared with that of the first one.
    is_stored = name.startswith("placed") or name == "splits_if_it_divides"
    assert one["stored_on"] == ("data:2,model:4" if is_stored else "")
    if name == "placed_and_constant":
        assert one["starts"][0] == "data:2,model:4"
        assert one["starts"][1].endswith(" (its own mesh has axes of size 1)")


def test_a_step_whose_batch_depends_on_the_mesh_is_carried_with_that_of_its_own(
    found: dict[str, dict[str, Any]],
) -> None:
    """The script was run for each mesh, and a mesh with half of the batch was ranked best."""
    for name, by in (("batch_by_mesh", "trace"), ("batch_by_mesh_in_parts", "function")):
        said = "`x` is [16, 16] on data:2,model:4, and [32, 16] on data:4,model:2"
        assert (found[name]["batch"], found[name]["by"]) == (said, by)
    assert found["equal"]["batch"] == found["batch_and_loss_by_mesh"]["batch"] == ""


def test_a_script_that_is_run_for_each_mesh_is_run_once_for_each(
    found: dict[str, dict[str, Any]],
) -> None:
    """It was run by every process that estimated, compiled or measured a mesh."""
    assert found["run_for_each"]["starts"] == ["data:2,model:4", "data:8,model:1"]
    assert found["run_for_each"]["same_program"]


def test_a_mesh_with_another_batch_is_not_compared(found: dict[str, dict[str, Any]]) -> None:
    said = (
        "batch_by_run.py takes another batch here than on data:4,model:2 (`x` [64, 16], "
        "and [32, 16] there): give it one batch for all meshes to compare them"
    )
    assert found["batch_by_run"]["error"] == said
    said = r"the step of work_by_run.py computes (1\.9|2) times as much here as on data:4,model:2: "
    assert re.match(said, found["work_by_run"]["error"])
    said = (
        "the model of model_by_run.py depends on its mesh (its state has 512 numbers here, and "
        "1,024 on data:4,model:2): times of different models do not compare"
    )
    assert found["model_by_run"]["error"] == said
    assert found["micro_batches_by_run"]["same_program"]


def test_a_mesh_that_the_step_does_not_use_is_not_searched(
    found: dict[str, dict[str, Any]],
) -> None:
    """All meshes were ruled out, since the step uses no axis; it is a step for one device."""
    assert found["mesh_for_nothing"]["unused_mesh"] == "data:4,model:2"
    assert found["mesh_in_the_program"]["unused_mesh"] == ""
    assert found["loop_with_shardings"]["unused_mesh"] == ""


@pytest.mark.slow
def test_the_mesh_of_the_second_run_is_one_that_takes_the_step(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found["equal"]["mesh"] == "data:2,model:4"
    assert found["next_mesh"]["mesh"] == "data:3,model:2"
    assert found["next_mesh"]["starts"] == ["data:3,model:2"]
    assert found["no_mesh"]["mesh"] == ""


@pytest.mark.slow
def test_a_script_that_fails_on_the_other_mesh_fails_in_words(
    found: dict[str, dict[str, Any]],
) -> None:
    assert "heads do not divide" in found["ends_by_mesh"]["error"]


@pytest.mark.slow
def test_what_cannot_be_stored_is_known_after_the_first_run(
    found: dict[str, dict[str, Any]],
) -> None:
    said = found["calls_python"]["not_carried"]
    assert said.startswith("its step calls Python by `pure_callback` at calls_python.py:13")
