"""What each process does in `plugins/pipeline/tests/runtime/test_processes.py`.

    python -m plugins.pipeline.tests.support.pipeline_process \\
      PORT PROCESSES INDEX RESULT_FILE CHECK...

The ports after PORT are for what is sent between devices: one for each process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICES = 8
STEPS = 3
CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def train(
    model: Any, cut: Any, *, specs: Any = None, residuals: str = "recompute", **options: Any
) -> dict[str, list[float]]:
    """Losses and norms of a few steps; every process gives the whole batch."""
    import optax

    from automesh import pipeline

    step = pipeline.train_step(
        model.loss(cut.abstract_mesh),
        optimizer=optax.sgd(0.1, momentum=0.9),
        mesh=cut,
        num_microbatches=4,
        clip_norm=0.5,
        timeout_s=100,
        residuals=residuals,
        **options,
    )
    if specs is not None:
        step.compile(specs, model.batch)
    state = step.init(model.params, model.batch)
    told: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        state, metrics = step(state, model.batch)
        for name, values in told.items():
            values.append(float(metrics[name]))
    return told


def cut_mesh(devices: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    import jax
    import numpy as np

    from automesh import pipeline

    return pipeline.MpmdMesh(jax.sharding.Mesh(np.array(devices).reshape(shape), names))


@check
def stages_on_processes() -> Any:
    """Each process has whole stages, whose weights are tied over the processes."""
    import jax

    from plugins.pipeline.tests.support.pipeline_models import perceptron

    cut = cut_mesh(jax.devices()[:DEVICES], (2, 4), ("pp", "dp"))
    return {"1f1b": train(perceptron(2, tied=True), cut)}


@check
def more_schedules() -> Any:
    """Backward passes in halves, and two stages on each process."""
    import jax

    from plugins.pipeline.tests.support.pipeline_models import perceptron

    cut = cut_mesh(jax.devices()[:DEVICES], (2, 4), ("pp", "dp"))
    return {
        "zb_h1": train(perceptron(2, tied=True), cut, schedule="zb_h1", residuals="save"),
        "dualpipe_v": train(perceptron(4, tied=True), cut, schedule="dualpipe_v"),
    }


@check
def stages_in_processes() -> Any:
    """Each process has a part of every stage: the rows are split over processes."""
    import jax
    import numpy as np

    from plugins.pipeline.tests.support.pipeline_models import perceptron

    devices = np.array(jax.devices()[:DEVICES]).reshape(2, 2, 2)
    cut = cut_mesh(devices.swapaxes(0, 1), (2, 4), ("pp", "dp"))
    return {"1f1b": train(perceptron(2, tied=True, rows=32), cut, specs=split_rows(cut))}


@check
def layouts_that_change() -> Any:
    """A value is split otherwise on the process that gets it than on the one that makes it."""
    import jax

    from plugins.pipeline.tests.support.pipeline_models import Model, perceptron

    cut = cut_mesh(jax.devices()[:DEVICES], (2, 2, 2), ("pp", "a", "b"))
    model = perceptron(2)

    def make(_: Any) -> Any:
        def pin(x: Any, *split: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*split))

        def loss(params: Any, batch: Any) -> Any:
            from automesh import pipeline

            x = pin(jax.numpy.tanh(batch["x"] @ params[0]["w"]), "a", "b")
            x = pipeline.stage_boundary(x)
            x = pin(x, None, "a") @ params[1]["w"]
            return jax.numpy.mean((x - batch["y"]) ** 2)

        return loss

    changing = Model(loss=make, params=model.params, specs=None, batch=model.batch)
    return {"1f1b": train(changing, cut)}


@check
def dense_lm() -> Any:
    """`examples/dense_lm.py` at its smallest, its rows and weights split on each process."""
    import jax

    from plugins.pipeline.tests.support.pipeline_models import AXES, language_model

    cut = cut_mesh(jax.devices()[:DEVICES], (2, 1, 2, 1, 2, 1), AXES)
    model = language_model("dense", 2, rows=16, layers=2)
    return {"1f1b": train(model, cut, specs=model.abstract(cut.abstract_mesh))}


@check
def fails_on_one_process() -> Any:
    """The other one is in the middle of a step then, and waits for it."""
    import jax

    from automesh import pipeline
    from plugins.pipeline.tests.support.pipeline_models import perceptron

    cut = cut_mesh(jax.devices()[:DEVICES], (2, 4), ("pp", "dp"))
    step = pipeline.microbatch(perceptron(2).free, mesh=cut, num_microbatches=4)
    model = perceptron(2)
    step(model.params, model.batch)
    if jax.process_index() == 1:
        raise RuntimeError("a stage of process 1 fails")
    value, _ = step(model.params, model.batch)
    return float(value)


@check
def refusals() -> Any:
    """What is said of meshes and arrays with which processes can do nothing."""
    import jax
    import numpy as np

    import automesh
    from plugins.pipeline.tests.support.pipeline_models import perceptron

    def told(call: Callable[[], Any]) -> str:
        try:
            call()
        except automesh.UsageError as error:
            return str(error)
        return "nothing"

    devices, model = jax.devices()[:DEVICES], perceptron(2)
    half = [one for one in devices if one.process_index == 0]
    crossed = np.array(devices).reshape(2, 4)
    crossed = [*crossed[0, :2], *crossed[1, :2], *crossed[1, 2:], *crossed[0, 2:]]
    everywhere = jax.sharding.Mesh(np.array(devices), ("dp",))
    rows = jax.sharding.NamedSharding(everywhere, jax.sharding.PartitionSpec("dp"))
    spread = jax.tree.map(
        lambda array: jax.make_array_from_callback(
            array.shape, rows, lambda index, array=array: array[index], dtype=array.dtype
        ),
        model.batch,
    )
    whole = cut_mesh(devices, (2, 4), ("pp", "dp"))
    from dataclasses import replace

    return {
        "half": told(lambda: train(model, cut_mesh(half, (2, 2), ("pp", "dp")))),
        "crossed": told(lambda: train(model, cut_mesh(crossed, (2, 4), ("pp", "dp")))),
        "spread": told(lambda: train(replace(model, batch=spread), whole)),
        "addresses": [told_of_address(address, whole, model) for address in ("", "127.0.0.1:0")],
    }


def told_of_address(address: str, cut: Any, model: Any) -> str:
    import jax

    import automesh

    name = "jax_cross_host_transfer_socket_address"
    before = jax.config.values[name]
    jax.config.update(name, address)
    try:
        train(model, cut)
    except automesh.UsageError as error:
        return str(error)
    finally:
        jax.config.update(name, before)
    return "nothing"


def split_rows(cut: Any) -> Any:
    """Parameters whose first dimension is split: over processes, if rows are."""
    import jax

    from plugins.pipeline.tests.support.pipeline_models import perceptron

    rows = jax.sharding.NamedSharding(cut.abstract_mesh, jax.sharding.PartitionSpec("dp"))
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=rows),
        perceptron(2, tied=True).params,
    )


def main(port: str, processes: str, index: str, result_file: str, *checks: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES // int(processes))
    import jax

    if int(processes) > 1:
        jax.config.update(
            "jax_cross_host_transfer_socket_address", f"127.0.0.1:{int(port) + 1 + int(index)}"
        )
        jax.distributed.initialize(
            coordinator_address=f"127.0.0.1:{port}",
            num_processes=int(processes),
            process_id=int(index),
            initialization_timeout=600,
            # How long the service waits for the others when one of them ends.
            shutdown_timeout_seconds=5 if "fails_on_one_process" in checks else 60,
        )
    results = {name: CHECKS[name]() for name in checks}
    Path(result_file).write_text(json.dumps(results))
    if int(processes) > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
