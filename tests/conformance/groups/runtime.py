"""Conformance cases about running pipelines: MultiMesh's microbatches, JaxPP's meshes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from automesh import pipeline
from automesh.pipeline import MpmdMesh, make_schedule, microbatch
from tests.conformance.outcomes import Case, Verdict, attempt, judge, plain, uncovered, wanted
from tests.support.fakes.worlds import cpus

# Every kind of schedule for two ranks and two microbatches of the cases with tasks.
_SCHEDULES = ("gpipe", "1f1b", "wavefront", "zb_h1", "zb_h2")


def run_mesh(case: Case, _: Case) -> Verdict:
    """JaxPP's submeshes, which keep the axis that the mesh is cut along."""
    names, shape = tuple(case["axis_names"]), tuple(case["mesh_shape"])
    devices = np.array(cpus(int(np.prod(shape)))).reshape(shape)
    cut = MpmdMesh(Mesh(devices, names), case["mpmd_axis_name"], keep_axis=True)
    expect = case["expect"]
    each = int(np.prod(expect["submesh_shape"]))
    stated = f"arange({each}*i, {each}*i+{each}).reshape({_dense(expect['submesh_shape'])})"
    as_stated = all(
        [one.id for one in submesh.devices.flat] == list(range(each * i, each * i + each))
        for i, submesh in enumerate(cut.submeshes)
    )
    first = cut.submeshes[0]

    def described() -> dict[str, Any]:
        return {
            "mpmd_axis": first.axis_names.index(cut.axis),
            "n_submeshes": cut.num_ranks,
            "submesh_axis_names": list(first.axis_names),
            "submesh_shape": list(first.devices.shape),
            "submesh_i_device_ids": stated if as_stated else "others",
            "device_coords": {
                number: [int(at[0]) for at in np.where(_ids(first) == int(number))]
                for number in expect["device_coords"]
            },
        }

    return judge([wanted({"returns": expect})], attempt(described))


def _ids(mesh: Mesh) -> Any:
    return np.vectorize(lambda device: device.id)(mesh.devices)


def _dense(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def run_microbatch(case: Case, _: Case) -> Verdict:
    """MultiMesh's sums over microbatches, by one program and by pipelines of every schedule."""
    if case["case"] not in _FUNCTIONS:
        return uncovered(f"the function of `{case['case']}` is not known")
    wish = wanted(case["expect"])
    verdicts = [
        judge([wish], attempt(lambda call=call: _near(call(), wish.returns)))
        for call in _FUNCTIONS[case["case"]](case)
    ]
    return next((one for one in verdicts if one.status != "passed"), verdicts[0])


def _near(got: Any, stated: Any) -> Any:
    """What is stated where it differs by rounding only."""
    arrays = jax.tree.map(np.asarray, got)
    leaves, wishes = jax.tree.leaves(arrays), jax.tree.leaves(stated)
    flat = np.concatenate([np.ravel(leaf) for leaf in leaves])
    if flat.shape == np.shape(wishes) and np.allclose(flat, wishes, rtol=1e-6):
        return stated
    return plain(jax.tree.map(lambda array: array.tolist(), arrays))


Calls = list[Callable[[], Any]]


def _accumulated(fun: Callable[..., Any]) -> Callable[[Case], Calls]:
    def calls(case: Case) -> Calls:
        args = [_arrays(arg) for arg in case["args"]]
        rows = jax.tree.leaves(args[case["argnum"]])[0].shape[case["dim"]]
        summed = pipeline.accumulate(
            fun,
            num_microbatches=rows // case["size"],
            argnum=case["argnum"],
            dim=case["dim"],
        )
        return [lambda: summed(*args)]

    return calls


def _arrays(arg: Any) -> Any:
    """One array, or several that are given as a list of them."""
    try:
        return np.array(arg)
    except ValueError:
        return [np.array(one) for one in arg]


def _two_tasks(case: Case) -> Calls:
    def loss(params: Any, x: Any) -> Any:
        y = pipeline.task(lambda x, p: x * p, stage=0)(x, params[0])
        return pipeline.task(lambda y, p: (y * p).sum(), stage=1)(y, params[1])

    params, x = [np.array(one) for one in case["args"][0]], np.array(case["args"][1])
    return [
        *_accumulated(jax.value_and_grad(loss))(case),
        *_pipelines(loss, params, x, len(x) // case["size"]),
    ]


def _gradients_of_tasks(_: Case) -> Calls:
    def loss(x: Any, scale: Any) -> Any:
        y = pipeline.task(lambda x: x * x * scale[0], stage=0)(x)
        return pipeline.task(lambda y, x: (jnp.cos(y) + x).sum(), stage=1)(y, x)

    return _pipelines(loss, jnp.arange(8.0), np.array([2.0], np.float32), 1)


def _moving_loop(_: Case) -> Calls:
    def loss(one: Any, x: Any) -> Any:
        for number in range(2):
            x = (pipeline.stage_boundary(x) if number else x) ** 2 * one
        return x.sum()

    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    return [
        lambda call=call: call()[0] for call in _pipelines(loss, np.float32(1), x, 2, shape=(2, 1))
    ]


def _pipelines(
    loss: Any, params: Any, batch: Any, count: int, *, shape: tuple[int, int] = (1, 1)
) -> Calls:
    devices = np.array(jax.devices()[: 2 * shape[0] * shape[1]]).reshape(2, *shape)
    step = microbatch(
        loss, mesh=Mesh(devices, ("pp", "x", "y")), num_microbatches=count, reduce="sum"
    )
    schedules = [
        make_schedule(name, num_ranks=2, num_microbatches=count)
        for name in _SCHEDULES
        if count >= 2 or not name.startswith("zb")
    ]
    return [
        lambda one=one: step.compile(params, batch).with_schedule(one)(params, batch)
        for one in schedules
    ]


_FUNCTIONS: Mapping[str, Callable[[Case], Calls]] = {
    "sum of squares": _accumulated(lambda x: (x * x).sum()),
    "pytree argument, (x*y*z).sum()": _accumulated(
        lambda tree: (tree[0] * tree[1] * tree[2]).sum()
    ),
    "pytree argument, (x+y+z).sum(axis=0) (inputs doubled before the loop)": _accumulated(
        lambda tree: (tree[0] + tree[1] + tree[2]).sum(axis=0)
    ),
    "value_and_grad((x*p).sum()), argnum=1": _accumulated(
        jax.value_and_grad(lambda p, x: (x * p).sum())
    ),
    "value_and_grad of two tasks, params tuple, argnum=1": _two_tasks,
    "task gradients: f=task(x*x*scale), g=task((cos(x)+y).sum()); "
    "value_and_grad(g(f(x,2),x)) at arange(8)": _gradients_of_tasks,
    "4 devices, 2 iterations, iteration i runs on devices [2i,2i+1] as (2,1) submesh, f=x*x, "
    "x=arange(8).reshape(4,2), loss=sum(x**4)": _moving_loop,
}

GROUPS: Mapping[str, Callable[[Case, Case], Verdict]] = {
    "jaxpp_mpmd_mesh": run_mesh,
    "multimesh_microbatch": run_microbatch,
}
