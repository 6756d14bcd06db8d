"""Arguments: a file of settings, and `key=value` over them, with dots between nested keys."""

import ast
from pathlib import Path

import jax.numpy as jnp
import optax
import yaml

# Of these, keys that are given take the place of the whole section.
_REPLACED = ("training_config", "optimizer_config")


class HyperParameters:
    """Settings by section, under `config`."""

    def __init__(self, argv):
        try:
            self.config = yaml.safe_load(Path(argv[1]).read_text())
        except FileNotFoundError:
            raise ValueError(f"Config {argv[1]} not found.") from None
        replaced = set()
        for one in argv[2:]:
            key, _, text = one.partition("=")
            first, *rest = key.split(".")
            if first not in self.config:
                raise ValueError(f"Key {first} was passed at the command line but isn't in config.")
            if first in _REPLACED and first not in replaced:
                self.config[first] = {}
                replaced.add(first)
            section = self.config
            for name in (first, *rest)[:-1]:
                section = section.setdefault(name, {})
            # What stands for a tuple stays a text, as in Tunix.
            value = yaml.safe_load(text)
            section[(first, *rest)[-1]] = value
        if self.config["tokenizer_config"]["tokenizer_type"] == "huggingface":
            raise ValueError("Missing `HF_TOKEN` to access hf tokenizer")

    def parse_mesh_config(self, key):
        mesh = self.config[key]["mesh"]
        return ast.literal_eval(mesh["shape"]), ast.literal_eval(mesh["axis_names"])

    def create_optimizer(self, key):
        rate = self.config[key]["learning_rate"]
        # As in Tunix, rates are arrays of a type that is not that of the weights.
        make = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)
        return make(learning_rate=rate)

    def obtain_training_config_dict(self, key):
        return dict(self.config[key])
