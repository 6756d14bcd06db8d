"""AXLearn: its modifiers, applied to a trainer's configuration as its launcher applies them."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Optional, TypeVar, Union

from plugins.frameworks.tests.support.own_parsers.sources import module_of, parts_of

_config = module_of("axlearn", "common/config.py")
_utils = parts_of(
    "axlearn",
    "common/utils.py",
    ["HybridMeshShape", "match_regex_rules", "infer_mesh_shape"],
    {"dataclasses": dataclasses, "math": math, "re": re},
)
_layer = parts_of("axlearn", "common/base_layer.py", ["RematSpec"], {"dataclasses": dataclasses})
_MODIFIERS = (
    "GradientAccumulationModifier",
    "RematSpecModifier",
    "MeshShapeModifier",
    "ChainConfigModifier",
)


class _Accumulator(_config.Configurable):
    """In place of `MetricAccumulator`, which says nothing of a mesh."""


def with_minibatch_steps(steps: int, metric_accumulator: Any) -> None:
    """In place of AXLearn's function: only its configuration is looked at."""


_known = {name: getattr(_config, name) for name in vars(_config) if not name.startswith("__")}
_known |= {
    "config": _config,
    "Dict": dict,
    "Sequence": Sequence,
    "Union": Union,
    "Optional": Optional,
    "TypeVar": TypeVar,
    "Callable": Callable,
    "RematSpec": _layer.RematSpec,
    "HybridMeshShape": _utils.HybridMeshShape,
    "MeshShape": Sequence,
    "MetricAccumulator": _Accumulator,
    "with_minibatch_steps": with_minibatch_steps,
    "SpmdTrainer": SimpleNamespace(Config=object),
    "__name__": "axlearn.common.trainer_config_modifier",
}
_modifiers = parts_of(
    "axlearn", "common/trainer_config_modifier.py", _MODIFIERS, _known, lazy=False
)


@dataclasses.dataclass
class _Trainer:
    """The fields of a trainer's configuration that modifiers set."""

    mesh_shape: Any = None
    learner: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(forward_fn_transformation=None)
    )
    remat: dict[str, Any] = dataclasses.field(default_factory=dict)

    def set_recursively(self, path: Sequence[str], *, value: Any) -> None:
        assert path[-1] == "remat_spec"
        self.remat[".".join(path[:-1])] = value


def read(*, text: str, selector: str, num_devices: int, num_granules: int) -> dict[str, Any]:
    module = _run(text)
    rule = _utils.match_regex_rules(selector, rules=module["mesh_rules"])
    assert rule is not None, "no rule matches"
    trainer = _config.maybe_instantiate(rule)(_Trainer())
    infer = _utils.infer_mesh_shape
    ici = infer(trainer.mesh_shape.ici_mesh_shape, num_devices=num_devices // num_granules)
    dcn = infer(trainer.mesh_shape.dcn_mesh_shape, num_devices=num_granules)
    assert math.prod(ici) * math.prod(dcn) == num_devices
    (spec,) = trainer.remat.values() or ["nothing"]
    steps = trainer.learner.forward_fn_transformation
    sizes = zip(module["mesh_axis_names"], ici, dcn, strict=True)
    return {
        "sizes": {name: pair for name, *pair in sizes},
        "remat": spec if spec in (None, "nothing") else spec.policy.__name__,
        "accumulation": steps.steps if steps is not None else 1,
        "global_batch": 0,
    }


def _run(text: str) -> dict[str, Any]:
    """A text that we have written ourselves, on AXLearn's own definitions."""
    made = {
        "axlearn": {},
        "axlearn.common": {},
        "axlearn.common.trainer_config_modifier": vars(_modifiers),
        "axlearn.common.utils": vars(_utils),
        "axlearn.common.base_layer": vars(_layer),
    }
    for name, values in made.items():
        module = ModuleType(name)
        vars(module).update({key: value for key, value in values.items() if key[:2] != "__"})
        sys.modules[name] = module
    found: dict[str, Any] = {}
    exec(compile(text, "exported", "exec"), found)
    return found
