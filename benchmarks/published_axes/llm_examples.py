"""Models of jax-llm-examples, which state the logical axes of each array (`ArrayInfo`).

They are written for a mesh of three axes: here each has one device. Their forward passes without a
cache are trained, with the sizes of `_SMALL`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from benchmarks.published_axes.compare import LENGTH, VOCAB, Model, cross_entropy

_SMALL: Mapping[str, Any] = {
    "embed": 32, "q_heads": 8, "kv_heads": 4, "num_layers": 2, "head_dim": 6,
    "vocab_size": VOCAB, "max_seq_len": LENGTH, "causal": True, "dtype": jnp.float32,
    "ffw_size": 64, "mlp_ffw_size": 64, "moe_ffw_size": 24, "moe_experts_per_tok": 2,
    "moe_num_experts": 16, "quant_layer": False, "quant_cache": False,
    "use_prefill_attn_kernel": False, "use_decode_attn_kernel": False,
}  # fmt: skip
_LATENT: Mapping[str, Any] = {
    "num_heads": 8, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense": 1, "n_routed_experts": 16,
    "num_experts_per_tok": 2, "quantize_moe": False, "quantize_attn": False,
    "quantize_cache": False, "use_decode_ragged_dot_kernel": False,
}  # fmt: skip
# Sizes of each model beside those; the sinks of gpt_oss need as many heads as a head is wide.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "llama3": {},
    "qwen3": {},
    "llama4": {
        "nope_layer_interval": 2, "use_qk_norm": True, "attn_chunk_size": 8,
        "moe_layer_interval": 2,
    },
    "gpt_oss": {
        "sliding_attention_map": ["sliding_attention", "full_attention"],
        "sliding_window_size": 8, "head_dim": 8,
    },
    "deepseek_r1_jax": {**_LATENT, "n_group": 4, "topk_group": 2},
    "kimi_k2": _LATENT,
    # Its routing of tokens fails on meshes with Explicit axes, so that it is dense here.
    "gemma4": {
        "local_kv_heads": 4, "local_head_dim": 6, "global_kv_heads": 2, "global_head_dim": 12,
        "global_k_eq_v": False, "attention_types": ("local_attention", "global_attention"),
        "sliding_window_size": 8, "weight_dtype": jnp.float32, "local_rope_proportion": 1.0,
        "global_rope_proportion": 0.5, "moe_num_experts": 0,
    },
    "nemotron3": {
        "layer_pattern": "M*E", "num_layers": 3, "moe_shared_ffw_size": 48,
        "moe_router_n_groups": 1, "moe_router_topk_groups": 1, "moe_routed_scaling_factor": 2.5,
        "ep_strategy": "decode", "mamba_intermediate_size": 64, "mamba_conv_dim": 64 + 2 * 2 * 10,
        "mamba_num_heads": 8, "mamba_conv_kernel_size": 4, "mamba_n_groups": 2,
        "mamba_ssm_state_size": 10, "mamba_head_dim": 8, "mamba_chunk_size": 8,
        "mamba_dtype": jnp.float32,
    },
}  # fmt: skip
_AUTO = ("deepseek_r1_jax", "kimi_k2")
# Axes that the model splits in one array and not in another one that it is multiplied with.
_WHOLE: Mapping[str, tuple[str, ...]] = {"nemotron3": ("mamba_num_heads", "mamba_n_groups")}


def llm_example(checkouts: Path, folder: str) -> Model:
    """Makes the model of one folder."""
    module = _module(checkouts / "jax-ml_jax-llm-examples" / folder)
    kind = AxisType.Auto if folder in _AUTO else AxisType.Explicit
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), axis_types=(kind,) * 3)
    fields = {field.name for field in dataclasses.fields(module.Config)}
    sizes = {**_SMALL, **EXAMPLES[folder]}
    config = module.Config(
        **{name: value for name, value in sizes.items() if name in fields},
        rules=module.ShardingRules(**dict.fromkeys(_WHOLE.get(folder, ()))),
        mesh=mesh,
    )
    infos = module.Weights.abstract(config)
    paths = jax.tree_util.tree_leaves_with_path(infos, is_leaf=module.is_param)

    def shape_of(info: Any) -> Any:
        dtype = jnp.float32 if jnp.issubdtype(info.dtype, jnp.floating) else info.dtype
        sharding = module.logical_to_sharding(info.logical_axes, mesh, config.rules)
        return jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding)

    def loss(params: Any, tokens: Any) -> Any:
        logits, *_ = module.forward(tokens, jnp.ones_like(tokens), params, config)
        return cross_entropy(logits.astype(jnp.float32), tokens)

    return Model(
        params=jax.tree.map(shape_of, infos, is_leaf=module.is_param),
        names={jax.tree_util.keystr(path): info.logical_axes for path, info in paths},
        loss=loss,
        mesh=mesh if kind == AxisType.Explicit else None,
    )


def _module(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    try:
        name = next(folder.glob("*_jax/model.py")).parent.name
        return importlib.import_module(f"{name}.model")
    finally:
        sys.path.pop(0)
