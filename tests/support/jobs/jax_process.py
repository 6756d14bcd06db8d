"""What each process does in `tests/e2e/test_jax_processes.py`: checks, as JSON values.

python -m tests.support.jobs.jax_process PORT PROCESSES INDEX RESULT_FILE CHECK...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.paths import EXAMPLES

DEVICES = 8
STEPS = 2
SMALL = ("--rows", "8", "--length", "16", "--chunk", "16")


def meshes() -> Any:
    """Process numbers in meshes made in every way, and whether one is made but once."""
    import automesh

    halves = automesh.create_mesh((2, 4), ("dp", "tp"))
    count = _jax().process_count()
    hybrid = automesh.MeshConfig(
        mesh_shape=automesh.HybridMeshShape((1, -1), (-1, 1)), mesh_axis_names=("data", "model")
    )
    return {
        "default": _processes(automesh.create_mesh()),
        "leading": _processes(halves),
        "outer": _processes(automesh.create_mesh((2, 4), ("dp", "tp"), dcn_mesh_dims=(1, -1))),
        "hybrid": _processes(hybrid.create_device_mesh()),
        "text": _processes(automesh.parse_mesh_from_string(f"dcn.dp:{count},tp:-1", ["dp", "tp"])),
        "kept": automesh.create_mesh((2, 4), ("dp", "tp")) is halves,
        "hosts": [hybrid.hosts, hybrid.host_id],
        "host_shape": list(automesh.calculate_host_mesh_shape((2, 4))),
    }


def cpu_helpers() -> Any:
    """Each process has a CPU mesh of its own, and can compute on it without the others."""
    jax = _jax()
    import automesh

    with automesh.cpu_context() as mesh:
        total = float(jax.jit(lambda x: (x * 2).sum())(jax.numpy.ones((4, 4))))
    with automesh.force_cpu() as device:
        forced = jax.numpy.ones(2).devices() == {device}
    return {
        "processes": sorted({one.process_index for one in mesh.devices.flat}),
        "total": total,
        "forced": forced,
        "own": device.process_index == jax.process_index(),
    }


def batches() -> Any:
    """Rows of each process become one batch, and come back."""
    jax = _jax()
    import numpy as np

    import automesh
    from automesh import DataPartitionType

    me, count = jax.process_index(), jax.process_count()
    rows = np.arange(16 // count * 3).reshape(-1, 3) + 1000 * me
    mesh = automesh.create_mesh((4, 2), ("data", "model"))
    whole = automesh.host_to_global_device_array({"x": rows}, mesh=mesh)["x"]
    with jax.set_mesh(mesh):
        copies = automesh.host_to_global_device_array(
            np.arange(5), partition=DataPartitionType.REPLICATED
        )
        inside = jax.jit(
            lambda x: automesh.with_sharding_constraint(
                x * 2, automesh.input_partition_spec(batch_axis_names="data")
            )
        )(whole)
    # All processes along an axis that does not split rows: every one of them has all the rows.
    across = automesh.create_mesh((1, -1), ("data", "model"))
    same = automesh.host_to_global_device_array(
        np.arange(6).reshape(2, 3), mesh=across, batch_axis_names="data"
    )
    return {
        "global": _everywhere(whole),
        "back": bool((automesh.global_to_host_array(whole) == rows).all()),
        "copies": automesh.global_to_host_array(
            copies, partition=DataPartitionType.REPLICATED
        ).tolist(),
        "inside": [list(inside.addressable_data(0).shape), _everywhere(inside)],
        "same": [list(same.shape), automesh.global_to_host_array(same).tolist()],
    }


def elsewhere() -> Any:
    """A mesh of the first process' devices alone: the others cannot place anything on it."""
    jax = _jax()
    import numpy as np

    import automesh

    devices = np.array([one for one in jax.devices() if one.process_index == 0])
    mesh = jax.sharding.Mesh(devices, ("data",))
    try:
        placed = automesh.host_to_global_device_array(np.arange(8), mesh=mesh)
    except automesh.UsageError as error:
        return error.message
    return automesh.global_to_host_array(placed).tolist()


def shard() -> Any:
    """Logical axes over devices of several processes, outside and inside jit."""
    jax = _jax()
    import numpy as np

    import automesh
    from automesh import partition

    mesh = automesh.create_mesh((4, 2), ("data", "model"))
    mapping = {"batch": "data", "embed": "model"}
    tree, names = {"w": np.arange(32.0).reshape(8, 4)}, {"w": ("batch", "embed")}
    outside = partition.shard(tree, mapping, mesh, names=names)["w"]
    inside = jax.jit(lambda one: partition.shard(one, mapping, mesh, names=names))(tree)["w"]
    return {
        "shapes": [list(one.addressable_data(0).shape) for one in (outside, inside)],
        "equal": [
            bool((np.array(_everywhere(one)) == tree["w"]).all()) for one in (outside, inside)
        ],
    }


def dense_lm() -> Any:
    """Losses of the first steps of `examples/dense_lm.py`; each process reads its own rows.

    The loss of every step but the first depends on the gradients of those before.
    """
    jax = _jax()
    import numpy as np

    import automesh

    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["dense_lm.py", *SMALL]
    import dense_lm
    from lm import text

    mesh = automesh.create_mesh((2, 2, 1, 2, 1))
    workload = dense_lm.build(mesh)
    state, _ = workload.init(mesh)
    rows, length = workload.args[1]["inputs"].shape
    losses: list[float] = []
    for _, batch in zip(range(STEPS), text.batches(rows, length)):
        mine = np.array_split(np.arange(rows), jax.process_count())[jax.process_index()]
        placed = automesh.host_to_global_device_array(
            {name: tokens[mine] for name, tokens in batch.items()},
            mesh=mesh,
            batch_axis_names=("dp", "fsdp"),
        )
        state, metrics = workload.step(state, placed)
        losses.append(float(metrics["loss"]))
    return losses


def selected() -> Any:
    """The rule for the attached devices is one for those of all processes, found without a name."""
    import automesh

    processes = _jax().process_count()
    inside = DEVICES // processes
    rules = automesh.Rules(
        axes=("data", "model"),
        batch_axes=("data",),
        rules=tuple(
            automesh.MeshRule(
                match=match,
                mesh_shape=automesh.HybridMeshShape((1, inside), (-1, 1)),
                axis_types="explicit",
            )
            for match in (f"cpu-{DEVICES}", f"cpu-{inside}-{processes}")
        ),
    )
    mesh = rules.select().create_device_mesh()
    return {
        "processes": _processes(mesh),
        "axis_types": [one.name for one in mesh.axis_types],
    }


CHECKS: dict[str, Callable[[], Any]] = {
    check.__name__: check
    for check in (meshes, cpu_helpers, batches, elsewhere, shard, selected, dense_lm)
}


def _jax() -> Any:
    import jax

    return jax


def _processes(mesh: Any) -> list[Any]:
    import numpy as np

    return np.vectorize(lambda device: device.process_index)(mesh.devices).squeeze().tolist()


def _everywhere(array: Any) -> list[Any]:
    """The whole of a global array, on every process."""
    jax = _jax()
    mesh = array.sharding.mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    whole = jax.jit(lambda x: x, out_shardings=everywhere)(array)
    return whole.addressable_data(0).tolist()


def main(port: str, processes: str, index: str, result_file: str, *checks: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES // int(processes))
    jax = _jax()
    if int(processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator_address=f"127.0.0.1:{port}",
            num_processes=int(processes),
            process_id=int(index),
            initialization_timeout=600,
        )
    results = {name: CHECKS[name]() for name in checks}
    Path(result_file).write_text(json.dumps(results))
    if int(processes) > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
