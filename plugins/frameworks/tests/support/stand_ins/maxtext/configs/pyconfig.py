"""Configurations: defaults of a YAML file, and `key=value` arguments over them."""

import enum
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import yaml

AXES = ("data", "stage", "fsdp", "context", "tensor", "expert")


class CustomRule(enum.Enum):
    """As in MaxText, a setting that is no text."""

    DEFAULT = ""
    PURE_FSDP = "pure-fsdp"


RULES = {"": AXES, "pure-fsdp": ("fsdp",)}


def initialize(argv):
    """As MaxText does: what is wrong is printed, and ends the process."""
    try:
        return _initialize(argv)
    except ValueError as error:
        print(f"MAXTEXT CONFIG ERROR: {error}", file=sys.stderr)
        sys.exit(2)


def _initialize(argv):
    os.environ.setdefault("XLA_FLAGS", "--xla_dump_to=/tmp/xla_dump/")  # As MaxText does.
    keys = yaml.safe_load(Path(argv[1]).read_text())
    for one in argv[2:]:
        key, _, text = one.partition("=")
        if key not in keys:
            raise ValueError(f"1 validation error\n{key}\n  Extra inputs are not permitted")
        kind = type(keys[key])
        keys[key] = text == "true" if kind is bool else kind(text)
    sizes = [size for key, size in keys.items() if key.endswith("_parallelism") and size != -1]
    if any(size < 1 for size in sizes):
        raise ValueError("a size must be positive")
    for name in ("emb_dim", "mlp_dim", "num_query_heads", "num_kv_heads"):
        # MaxText's own keys begin with `base_`; here 0 leaves the default.
        keys[name] = keys[f"base_{name}"] or keys[name]
    devices = len(jax.devices())
    rows = keys["per_device_batch_size"] * devices * keys["gradient_accumulation_steps"]
    rules = keys["custom_mesh_and_rule"]
    return SimpleNamespace(
        **{**keys, "custom_mesh_and_rule": CustomRule(rules)},
        mesh_axes=RULES[rules],
        logical_axis_rules=(("batch", ("data", "fsdp")),),
        global_batch_size_to_train_on=int(rows),
    )
