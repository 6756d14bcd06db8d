"""Settings with their defaults."""

import json
from pathlib import Path

from easydel.infra.factory import TaskType

DEFAULTS = {
    "loader": {"dtype": "fp32", "param_dtype": "fp32", "verbose": True},
    "sharding": {
        "axis_dims": (1, 1, 1, -1, 1),
        "axis_names": ("dp", "fsdp", "ep", "tp", "sp"),
        "auto_shard_model": True,
    },
    "quantization": {"apply_quantization": False},
    "base_config": {"values": {"hardware_abstraction": True}},
}


def normalize(settings):
    if "name_or_path" not in settings.get("model", {}):
        raise ValueError("Config must include model.name_or_path")
    parts = {**DEFAULTS, **settings}
    return {
        name: {**DEFAULTS.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in parts.items()
    }


def resolve_task(settings):
    """As EasyDeL does: read off the model's own configuration."""
    read = json.loads((Path(settings["model"]["name_or_path"]) / "config.json").read_text())
    is_text = read["architectures"][0].endswith("ForCausalLM")
    return TaskType.CAUSAL_LM if is_text else TaskType.IMAGE_TEXT_TO_TEXT
