"""EasyDeL: the mesh by eformer's `create_mesh`, the batch by its trainer's own formula."""

from __future__ import annotations

import ast
import collections
import enum
import math
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from plugins.frameworks.tests.support.own_parsers.sources import (
    Devices,
    jax_with,
    module_of,
    parts_of,
)

_creation = module_of("eformer", "escale/mesh/creation.py")
_trainer = parts_of(
    "easydel", "trainers/base_trainer.py", ["BaseTrainer.training_batch_size"], {}
).BaseTrainer
_split = parts_of(
    "easydel",
    "trainers/training_utils.py",
    ["make_assertions_and_get_sizes", "_infer_batch_size"],
    {"collections": collections, "tu": jax.tree_util, "PartitionSpec": jax.sharding.PartitionSpec},
).make_assertions_and_get_sizes
_policies = parts_of(
    "easydel",
    "infra/etils.py",
    ["EasyDeLGradientCheckPointers"],
    {"StrEnum": enum.StrEnum, "enum": enum},
).EasyDeLGradientCheckPointers


def read(*, text: str, selector: str, num_devices: int, num_granules: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(ast.parse(text), "exported", "exec"), found)
    config = found["config_kwargs"]
    training = SimpleNamespace(
        **{"total_batch_size": 32, "gradient_accumulation_steps": 1}
        | found.get("training_arguments", {})
    )
    remat = config.get("gradient_checkpointing")
    trainer = _trainer()
    trainer.arguments = training
    rows = trainer.training_batch_size
    batch = {"ids": np.broadcast_to(np.int32(0), (rows,))}
    _, part, _ = _split(batch, training.gradient_accumulation_steps)
    return {
        "sizes": _sizes(config, num_devices, num_granules),
        "remat": remat if remat is None else _policies(remat).value,
        "accumulation": rows // part,
        "global_batch": rows,
    }


def _sizes(
    config: dict[str, Any], num_devices: int, num_granules: int
) -> dict[str, tuple[int, int]]:
    def hybrid(mesh_shape: Any, dcn_mesh_shape: Any, **_: Any) -> list[tuple[int, int]]:
        # As jax checks it.
        assert math.prod(dcn_mesh_shape) == num_granules, dcn_mesh_shape
        assert math.prod(mesh_shape) * num_granules == num_devices, mesh_shape
        return list(zip(mesh_shape, dcn_mesh_shape, strict=True))

    def plain(mesh_shape: Any, **_: Any) -> list[tuple[int, int]]:
        assert math.prod(mesh_shape) == num_devices, mesh_shape
        return [(size, 1) for size in mesh_shape]

    _creation.jax = jax_with(Devices(num_devices, num_granules))
    _creation.create_hybrid_device_mesh, _creation.create_device_mesh = hybrid, plain
    _creation.Mesh = lambda sizes, names, axis_types=None: dict(zip(names, sizes, strict=True))
    _creation._cached_mesh_impl.cache_clear()
    return _creation.create_mesh(
        axis_dims=config["sharding_axis_dims"],
        axis_names=config["sharding_axis_names"],
        dcn_mesh_dims=config["sharding_dcn_axis_dims"],
    )
