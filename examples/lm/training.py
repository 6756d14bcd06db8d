"""The training step around a loss, the arguments of the scripts, and the loop."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import automesh
from lm import adamw, sgd, text
from lm.layout import Layout, Weight

AXES = ("dp", "fsdp", "ep", "tp", "sp")
Loss = Callable[[Any, dict[str, jax.Array]], jax.Array]
Optimizer = adamw.AdamW | sgd.SGD


def arguments(sizes: Iterable[str]) -> argparse.Namespace:
    """The command line; `build` reads it too, so arguments of other programs are skipped."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--size", choices=tuple(sizes), default="tiny", help="preset of the model")
    parser.add_argument("--layers", type=int, help="layers of the model; default: the preset's")
    parser.add_argument("--rows", type=int, help="rows of the global batch; default: the preset's")
    parser.add_argument("--length", type=int, help="tokens of each row; default: the preset's")
    parser.add_argument("--chunk", type=int, help="keys that attention looks at together")
    parser.add_argument("--dtype", help="what is computed in; default: the preset's")
    parser.add_argument(
        "--optimizer", choices=("adamw", "sgd"), default="adamw", help="sgd keeps no moments"
    )
    parser.add_argument(
        "--gather",
        choices=("step", "compiler"),
        default="step",
        help="what gathers weights over fsdp; the compiler may multiply while it does",
    )
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--rules", type=Path, help="default: mesh_rules.toml beside the script")
    parser.add_argument("--target", help="what to look up in the rules; default: these devices")
    parser.add_argument("--devices", type=int, help="train on this many virtual CPU devices")
    return parser.parse_known_args()[0]


def abstract_params(plan: Any, layout: Layout) -> Any:
    """Shapes and shardings of the parameters."""

    def abstract(weight: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            weight.shape, jnp.float32, sharding=layout.sharding(*weight.split)
        )

    return jax.tree.map(abstract, plan)


def abstract_state(plan: Any, layout: Layout, optimizer: Optimizer) -> adamw.State:
    """Shapes and shardings of the parameters and of the optimizer's state; nothing is allocated."""
    params = abstract_params(plan, layout)
    moments = params if isinstance(optimizer, adamw.AdamW) else None
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.sharding())
    return adamw.State(params=params, mean=moments, square=moments, count=count)


def abstract_batch(rows: int, length: int, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of one batch."""
    sharding = layout.sharding(layout.rows, layout.sequence)
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
    return {"inputs": tokens, "targets": tokens}


def initial_params(plan: Any) -> Any:
    """The first values of the parameters, on the host; equal for every mesh.

    Drawn there, one weight at a time: compiling a random generator that is split over a mesh takes
    longer than training a small model, and on every mesh again.
    """
    weights, structure = jax.tree.flatten(plan)
    values = [
        weight.initial(np.random.default_rng([0, number])) for number, weight in enumerate(weights)
    ]
    return jax.tree.unflatten(structure, values)


def initial_state(plan: Any, state: adamw.State) -> adamw.State:
    """The real state, split as the abstract one says; equal on every mesh."""

    def put(value: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(value, like.sharding)

    def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
        return put(np.zeros(like.shape, like.dtype), like)

    return adamw.State(
        params=jax.tree.map(put, initial_params(plan), state.params),
        mean=jax.tree.map(zeros, state.mean),
        square=jax.tree.map(zeros, state.square),
        count=zeros(state.count),
    )


def initial_batch(batch: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The first batch of the text."""
    return jax.device_put(next(text.batches(*batch["inputs"].shape)), shardings(batch))


def shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def make_step(
    loss: Loss, state: adamw.State, layout: Layout, *, microbatches: int, optimizer: Optimizer
) -> Callable[..., tuple[adamw.State, dict[str, jax.Array]]]:
    """The jitted step `(state, batch) -> (state, metrics)`; it takes over the memory of `state`.

    Args:
      loss: of parameters and a batch.
      state: the abstract state; the new one has its shardings.
      layout: of the activations.
      microbatches: parts of the batch whose gradients are computed one after the other.
      optimizer: its hyperparameters.
    """

    def value_and_gradients(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        # Each device keeps the gradients of its own part of the parameters (a reduce-scatter).
        return value, jax.lax.with_sharding_constraint(gradients, shardings(state.params))

    def step(
        state: adamw.State, batch: dict[str, jax.Array]
    ) -> tuple[adamw.State, dict[str, jax.Array]]:
        if microbatches == 1:
            value, gradients = value_and_gradients(state.params, batch)
        else:
            parts = jax.tree.map(lambda rows: _cut(rows, microbatches, layout), batch)

            def add(total: Any, part: dict[str, jax.Array]) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, value_and_gradients(state.params, part)), None

            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            total, _ = jax.lax.scan(add, zeros, parts)
            value, gradients = jax.tree.map(lambda x: x / microbatches, total)
        if isinstance(optimizer, sgd.SGD):
            return sgd.update(state, gradients, optimizer), {"loss": value}
        return adamw.update(state, gradients, optimizer), {"loss": value}

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings(state), None))


def _cut(rows: jax.Array, microbatches: int, layout: Layout) -> jax.Array:
    """[rows, length] -> [microbatches, rows / microbatches, length], no row leaving its device.

    Each device holds neighbouring rows, so every microbatch takes each `microbatches`-th of them.
    """
    cut = rows.reshape(-1, microbatches, rows.shape[1]).swapaxes(0, 1)
    return layout.pin(cut, None, layout.rows, layout.sequence)


def train(build: Callable[..., automesh.Workload], script: str, sizes: Iterable[str]) -> None:
    """Trains on the mesh that the rules name for these devices, and prints the losses."""
    options = arguments(sizes)
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    rules = options.rules or Path(script).parent / "mesh_rules.toml"
    mesh, knobs, compiler_options = chosen_mesh(rules, options)

    workload = build(mesh, **knobs)
    state, batch = workload.args
    step, where = workload.step, None
    if mesh.shape.get("pp", 1) == 1:
        step = step.lower(state, batch).compile(compiler_options=compiler_options)
        where = shardings(batch)
    elif compiler_options:
        sys.exit("error: a pipeline takes no compiler options here")
    rows, length = batch["inputs"].shape
    state, _ = workload.init(mesh)
    for number, batch in zip(range(1, options.steps + 1), text.batches(rows, length)):
        begun = time.perf_counter()
        # A pipeline puts each part of the batch where it is read.
        state, metrics = step(state, jax.device_put(batch, where) if where else batch)
        loss = float(metrics["loss"])
        print(f"step {number:4d}  loss {loss:.4f}  {time.perf_counter() - begun:.3f} s", flush=True)


def chosen_mesh(
    rules: Path, options: argparse.Namespace
) -> tuple[Mesh, dict[str, Any], dict[str, Any]]:
    """The mesh, knobs and compiler options that `automesh search` found for these devices."""
    devices = jax.devices()
    if not rules.exists() and not options.rules:
        print(f"no {rules.name} beside the script: falling back to dp:{len(devices)}")
        shape = (len(devices), 1, 1, 1, 1)
        return Mesh(np.array(devices).reshape(shape), AXES), {}, {}
    try:
        config = automesh.load(rules).select(options.target)
    except automesh.UsageError as error:
        sys.exit(f"error: {error}")
    mesh, knobs = config.create_device_mesh(), dict(config.knobs)
    print(f"{rules} says: {dict(mesh.shape)}, knobs {knobs}")
    return mesh, knobs, dict(config.compiler_options)
