"""From a record's flags to the arguments of the MaxText that is installed, and why not.

MaxText renames keys, and drops some. What is known to be only renamed is written in today's word;
what cannot change the compiled step is left out; a record with any other key that the installed
MaxText does not know is not predicted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from benchmarks.recipes.records import Record

# The mesh is said by the plan of the search, for every axis.
_MESH = ("ici_", "dcn_")
# Nothing of these is in the program of a step: what is saved, logged, traced and read, and where.
_NO_PART = frozenset(
    (
        *("steps", "run_name", "runname", "output_dir", "base_output_directory", "gcs_metrics"),
        *("enable_checkpointing", "async_checkpointing", "jax_cache_dir", "reuse_example_batch"),
        *("profiler", "enable_profiler", "profiler_steps", "skip_first_n_steps_for_profiler"),
        *("profile_periodically_period", "skip_jax_distributed_system", "tokenizer_path"),
        *("tokenizer_type", "dataset_type", "allow_split_physical_axes"),
    )
)
# Left out only with this value, at which the key did nothing when there was one.
_DID_NOTHING = {"int8_training": "false"}
# Random experts in the place of the router's choice: the shapes are the same. MaxText 0.2.5 refuses
# it without an axis of experts.
_RANDOM_ROUTING = "use_random_routing"
_TILES = [f"{matrix}_tile_{part}" for matrix in ("wi", "wo") for part in ("fwd", "dlhs", "drhs")]
# Keys of former versions -> those that took their place, with the same value for each.
RENAMED = {
    "fsdp_shard_on_exp": ("shard_exp_on_fsdp",),
    "base_num_heads": ("base_num_query_heads", "base_num_kv_heads"),
    "tile_batch_seq": tuple(f"{tile}_batch_seq" for tile in _TILES),
    "tile_embed_dim": tuple(f"{tile}_embed_dim" for tile in _TILES),
    "tile_mlp_dim": tuple(f"{tile}_mlp_dim" for tile in _TILES),
}
_OWN = "default"  # the model that MaxText's base.yml describes
# The tables of MaxText's own GPT are of December 2023; these defaults of that time are others now.
_TABLES = "AI-Hypercomputer/maxtext"
GPT_DEFAULTS = {
    "decoder_block": "default",
    "base_emb_dim": "2560",
    "base_num_query_heads": "8",
    "base_num_kv_heads": "8",
    "base_mlp_dim": "8192",
    "base_num_decoder_layers": "16",
    "head_dim": "256",
    "mlp_activations": "['relu']",
    "logits_via_embedding": "true",
    "vocab_size": "32768",
    "attention": "flash",
    "dropout_rate": "0.0",
}
# By model of these tables: what MaxText's own script for it has gained since. Without it today's
# MaxText needs more memory than a device has. The vocabulary in eight parts: AI-Hypercomputer's
# maxtext, `src/maxtext/configs/tpu/v4/22b.sh` at 0ad8d3f, pull request 4081 of June 2026.
MENDED = {"maxtext-gpt-22b": {"num_vocab_tiling": "8"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What MaxText is given.

    Attributes:
      words: `key=value`, in order.
      left_out: keys of the record that are not among them, and why, in words.
      remarks: what may make the step another one than that which was measured.
      reason: why the record is not predicted; empty if it is.
    """

    words: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    reason: str = ""


def arguments_of(record: Record, known: Collection[str], models: Collection[str]) -> Arguments:
    """The arguments for a record.

    Args:
      known: the keys that the installed MaxText takes.
      models: the models that it has.
    """
    is_table = record.source == _TABLES
    if reason := _reason(record, models):
        return Arguments(reason=reason)
    taken = dict(GPT_DEFAULTS) if is_table else {}
    left_out, remarks, unknown = list[str](), list[str](), list[str]()
    for key, value in record.flags.items():
        if key.startswith(_MESH):
            continue
        if key in _NO_PART:
            left_out.append(f"{key} (no part of the step)")
        elif key == _RANDOM_ROUTING and not record.mesh.has("expert"):
            left_out.append(f"{key} (MaxText 0.2.5 refuses it without an axis of experts)")
            remarks.append("experts are chosen by the router, not at random")
        elif _DID_NOTHING.get(key) == value.lower():
            left_out.append(f"{key} (did nothing at {value})")
        elif key in known:
            taken[key] = value
        elif key in RENAMED and all(new in known for new in RENAMED[key]):
            taken |= dict.fromkeys(RENAMED[key], value)
            remarks.append(f"{key} is now {', '.join(RENAMED[key][:2])}")
        else:
            unknown.append(key)
    if unknown:
        return Arguments(
            left_out=tuple(left_out),
            reason=f"the installed MaxText does not know {', '.join(unknown)}",
        )
    taken["max_target_length"] = str(record.seq_len)
    if record.per_device_batch_size:
        taken["per_device_batch_size"] = f"{record.per_device_batch_size:g}"
    if is_table:
        remarks.append("defaults of December 2023 are given as arguments; the code is today's")
        for key, value in MENDED.get(record.model, {}).items():
            taken[key] = value
            remarks.append(
                f"{key}={value} is added, as in MaxText's own script for this model since June 2026"
            )
    return Arguments(
        words=tuple(f"{key}={value}" for key, value in taken.items()),
        left_out=tuple(left_out),
        remarks=tuple(remarks),
    )


def _reason(record: Record, models: Collection[str]) -> str:
    """Why a record is not predicted, whatever its flags are; empty if nothing is against it."""
    name = record.flags.get("model_name", "")
    if record.framework != "MaxText":
        return f"a run of {record.framework}, not of MaxText"
    if not record.seq_len:
        return "the length of its sequences is not stated"
    if not record.mesh.text:
        return "its mesh is not stated"
    if not name and record.source != _TABLES:
        return f"`{record.model}` is described in code that is not published"
    if name and name != _OWN and name not in models:
        return f"the installed MaxText has no model `{name}`"
    return ""


def gpt_sizes(record: Record) -> Mapping[str, float]:
    """Sizes of MaxText's own GPT of a record; empty for other models.

    `global_parameter_scale` doubles heads and the inner layer first, then the width, then depth.
    """
    if record.source != _TABLES:
        return {}
    flags = {**GPT_DEFAULTS}
    for key, value in record.flags.items():
        flags |= dict.fromkeys(RENAMED.get(key, (key,)), value)
    doublings = int(math.log2(int(flags.get("global_parameter_scale", "1"))))
    thirds, rest = divmod(doublings, 3)
    return {
        "emb_dim": int(flags["base_emb_dim"]) * 2 ** (thirds + (rest > 1)),
        "num_heads": int(flags["base_num_query_heads"]) * 2 ** (thirds + (rest > 0)),
        "head_dim": int(flags["head_dim"]),
        "mlp_dim": int(flags["base_mlp_dim"]) * 2 ** (thirds + (rest > 0)),
        "num_layers": int(flags["base_num_decoder_layers"]) * 2**thirds,
        "vocab_size": int(flags["vocab_size"]),
        "mlp_matrices": 2,
    }


def digest_of(*parts: object) -> str:
    """Of all that a prediction is asked with: records of one digest are one compile."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
