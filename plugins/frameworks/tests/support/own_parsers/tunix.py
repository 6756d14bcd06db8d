"""Tunix: its configuration loader's own reading of the mesh, and what makes a mesh of it."""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import omegaconf  # pyright: ignore[reportMissingImports]

from plugins.frameworks.tests.support.own_parsers.sources import parts_of

_Parameters = parts_of(
    "tunix",
    "cli/config.py",
    ["HyperParameters._load_config_from_yaml", "HyperParameters.parse_mesh_config"],
    {"ast": ast, "collections": collections, "omegaconf": omegaconf},
).HyperParameters
_Remat = parts_of(
    "tunix", "models/llama3/model.py", ["RematConfig"], {"enum": enum, "dataclasses": dataclasses}
).RematConfig


def read(*, text: str, selector: str, num_devices: int, num_granules: int) -> dict[str, Any]:
    parameters = _Parameters()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text)
        parameters.config = config = parameters._load_config_from_yaml(path)
    shape, names = parameters.parse_mesh_config("model_config")
    made: dict[str, int] = {}

    def make_mesh(axis_shapes: Any, axis_names: Any, axis_types: Any) -> None:
        # As jax checks it.
        assert math.prod(axis_shapes) == num_devices, axis_shapes
        assert min(axis_shapes) > 0, axis_shapes
        made.update(zip(axis_names, axis_shapes, strict=True))

    kinds = SimpleNamespace(AxisType=SimpleNamespace(Auto=0))
    jax = SimpleNamespace(device_count=lambda: num_devices, make_mesh=make_mesh, sharding=kinds)
    create = parts_of("tunix", "utils/mesh.py", ["create_mesh"], {"jax": jax, "np": np}).create_mesh
    create(shape, names)
    remat = config.model_config.get("remat_config")
    steps = config.get("training_config", {}).get("gradient_accumulation_steps", 1)
    return {
        "sizes": {name: (size, 1) for name, size in made.items()},
        "remat": None if remat is None else _Remat(remat).value,
        "accumulation": steps,
        # `optax.MultiSteps` sums the gradients of so many batches of the data set.
        "global_batch": config.get("batch_size", 0) * steps,
    }
