"""Loadax: its own classes of a mesh; a pattern matches the beginning of a selector (`re.match`)."""

from __future__ import annotations

import math
import re
import sys
from types import ModuleType
from typing import Any

from plugins.frameworks.tests.support.own_parsers.sources import module_of, parts_of

_shapes = module_of("loadax", "sharding/mesh_shape.py")
_infer = parts_of("loadax", "sharding/mesh_utils.py", ["infer_mesh_shape"], {"math": math})


def read(*, text: str, selector: str, num_devices: int, num_granules: int) -> dict[str, Any]:
    for name in ("loadax", "loadax.sharding"):
        sys.modules[name] = ModuleType(name)
    sys.modules["loadax.sharding.mesh_shape"] = _shapes
    found: dict[str, Any] = {}
    exec(compile(text, "exported", "exec"), found)
    config = found["mesh_config"]
    shape = next(shape for pattern, shape in config.mesh_rules if re.match(pattern, selector))
    infer = _infer.infer_mesh_shape
    ici = infer(shape.ici_mesh_shape, num_devices=num_devices // num_granules)
    dcn = infer(shape.dcn_mesh_shape, num_devices=num_granules)
    assert math.prod(ici) * math.prod(dcn) == num_devices
    assert set(config.batch_axis_names) <= set(config.mesh_axis_names)
    sizes = zip(config.mesh_axis_names, ici, dcn, strict=True)
    return {
        "sizes": {name: pair for name, *pair in sizes},
        "remat": None,
        "accumulation": 0,
        "global_batch": 0,
    }
