"""A model's configuration and class, by what its `config.json` says."""

import json
from pathlib import Path

from easydel.modules.small import SmallConfig, SmallForCausalLM


class AutoEasyDeLConfig:
    @classmethod
    def from_pretrained(cls, folder, partition_axis=None, model_task=None, **placed):
        read = json.loads((Path(folder) / "config.json").read_text())
        config = SmallConfig(**read)
        config.add_basic_configurations(partition_axis=partition_axis or {}, **placed)
        return config


def get_modules_by_type(model_type, task):
    if model_type != "small":
        raise KeyError(f"model type {model_type} is not registered for {task}")
    return SmallConfig, SmallForCausalLM
