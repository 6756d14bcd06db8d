"""Levanter: `MeshConfig`, decoded as its commands decode it, and the batch by `TrainerConfig`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import draccus  # pyright: ignore[reportMissingImports]
import yaml

from plugins.frameworks.tests.support.own_parsers.sources import (
    Devices,
    jax_with,
    module_of,
    parts_of,
)

_mesh = module_of("levanter", "utils/mesh.py")
_METHODS = (
    "batch_axis_name",
    "microbatch_size",
    "mesh_axis_specs",
    "_mesh_axis_totals",
    "_axis_size",
    "data_axis_size",
    "compute_axis_mapping",
    "parameter_axis_mapping",
    "_validate_and_set_defaults",
)


def read(*, text: str, selector: str, num_devices: int, num_granules: int) -> dict[str, Any]:
    tree = yaml.safe_load(text)
    said = dict(tree["trainer"])
    mesh = draccus.decode(_mesh.MeshConfig, said.pop("mesh"))
    ici, dcn = mesh.axis_shapes(num_devices, num_granules)
    known = {
        "cached_property": cached_property,
        "jax": jax_with(Devices(num_devices, num_granules)),
        "logger": logging.getLogger("levanter"),
        "Sequence": Sequence,
        "ScheduleStep": SimpleNamespace,
    }
    kind = parts_of(
        "levanter", "trainer.py", [f"TrainerConfig.{one}" for one in _METHODS], known
    ).TrainerConfig
    trainer = kind()
    vars(trainer).update(
        {"train_batch_size": 512, "per_device_parallelism": -1, "per_device_eval_parallelism": -1}
        | said
        | {"mesh": mesh, "num_slices": num_granules}
    )
    if "train_batch_size" in said:
        trainer._validate_and_set_defaults()
    maps = (trainer.compute_axis_mapping, trainer.parameter_axis_mapping)
    rows = trainer.microbatch_size
    return {
        "sizes": _sizes(ici, dcn, maps),
        "remat": tree.get("model", {}).get("gradient_checkpointing"),
        "accumulation": trainer.train_batch_size // rows if rows else 0,
        "global_batch": trainer.train_batch_size,
    }


def _sizes(
    ici: Mapping[str, int], dcn: Mapping[str, int], maps: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[int, int]]:
    """Each axis with what lies between slices, if the same arrays are split by both."""
    sizes = {name: (size, 1) for name, size in ici.items()}
    for name, size in dcn.items():
        base = name.removesuffix("_dcn")
        if size > 1:
            split = [value for one in maps for value in one.values() if base in value]
            assert split and all(name in value for value in split), (name, maps)
        sizes[base] = (ici[base], size)
    return sizes
