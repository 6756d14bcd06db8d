"""The loop of the scripts whose arrays have logical axes: `haliax_lm`, `flax_nnx_lm`,
`flax_linen_lm`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import automesh
from lm import text

Rows = dict[str, np.ndarray]


def train(
    build: Callable[..., automesh.Workload],
    batch_of: Callable[[Rows], tuple[Any, ...]],
    script: str,
) -> None:
    """Trains on the mesh and with the mapping that the rules name for these devices.

    Args:
      build: the step is `(state, *batch) -> (state, loss)`.
      batch_of: the step's batch from `inputs` and `targets`, int32 [rows, length].
      script: the path of the script, beside which the rules are.
    """
    options = _arguments()
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    rules = options.rules or Path(script).parent / "mesh_rules.toml"
    try:
        config = automesh.load(rules).select(options.target)
    except automesh.UsageError as error:
        sys.exit(f"error: {error}")
    mesh = config.create_device_mesh()
    print(f"mesh {dict(mesh.shape)}, mapping {dict(config.mapping)}")
    workload = build(mesh, mapping=dict(config.mapping))
    state, *like = workload.init(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    rows, length = workload.facts["batch"], workload.facts["seq"]
    for number, batch in zip(range(1, options.steps + 1), text.batches(rows, length)):
        begun = time.perf_counter()
        placed = jax.device_put(list(batch_of(batch)), shardings)
        state, loss = workload.step(state, *placed)
        print(f"step {number:4d}  loss {loss:.4f}  {time.perf_counter() - begun:.3f} s", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--rules", type=Path, help="default: mesh_rules.toml beside the script")
    parser.add_argument("--target", help="what to look up in the rules; default: cpu-N")
    parser.add_argument("--devices", type=int, help="train on this many virtual CPU devices")
    return parser.parse_known_args()[0]
