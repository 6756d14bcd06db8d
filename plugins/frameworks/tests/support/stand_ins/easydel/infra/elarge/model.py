"""Settings of a file, and what is made of them."""

import copy
import dataclasses
from pathlib import Path

import yaml

from easydel.infra.elarge.processing import normalize
from easydel.infra.elarge.types.training import get_training_arguments_class

_DEFAULTS = {"trainer_type": "sft", "total_batch_size": 32, "gradient_accumulation_steps": 1}


class eLargeModel:
    def __init__(self, settings):
        self._config = normalize(settings)

    @classmethod
    def from_yaml(cls, path):
        read = yaml.safe_load(Path(path).read_text())
        if not isinstance(read, dict):
            raise TypeError(f"YAML root must be a mapping/dict, got {type(read).__name__}.")
        return cls(read.get("config") or {k: v for k, v in read.items() if k != "actions"})

    def validate(self):
        sharding = self._config["sharding"]
        dims, names = sharding["axis_dims"], sharding["axis_names"]
        if len(dims) != len(names):
            raise ValueError(
                f"sharding.axis_dims ({len(dims)}) must match sharding.axis_names ({len(names)})"
            )

    def to_dict(self):
        return copy.deepcopy(self._config)

    def get_trainer_config(self):
        return {**_DEFAULTS, **self._config.get("trainer", {})}

    def build_training_arguments(self, args_class=None, **overrides):
        """As EasyDeL does: keys that the class has not are dropped without a word."""
        keys = {**self.get_trainer_config(), **overrides}
        kind = args_class or get_training_arguments_class(keys.pop("trainer_type"))
        known = {field.name for field in dataclasses.fields(kind)}
        return kind(**{key: value for key, value in keys.items() if key in known})
