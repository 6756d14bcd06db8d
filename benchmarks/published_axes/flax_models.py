"""Models that state the names of their axes in the boxes of Flax, or beside their parameters."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.published_axes.compare import BATCH, LENGTH, VOCAB, Model, cross_entropy


def _boxed(module: Any, apply: Callable[[Any, Any], Any], *inputs: Any) -> Model:
    """A linen module whose parameters are in boxes with names."""
    key = jax.random.key(0)
    boxed = jax.eval_shape(lambda: module.init({"params": key, "dropout": key}, *inputs))["params"]
    named = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=_is_box)
    names = {jax.tree_util.keystr(path): tuple(leaf.names) for path, leaf in named if _is_box(leaf)}
    return Model(params=nn.meta.unbox(boxed), names=names, loss=apply)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.Partitioned)


def lm1b(checkouts: Path) -> Model:
    """The language model of flax's examples."""
    sys.path.insert(0, str(checkouts / "google_flax" / "examples" / "lm1b"))
    try:
        models: Any = importlib.import_module("models")
    finally:
        sys.path.pop(0)
        sys.modules.pop("models", None)
    config = models.TransformerConfig(
        vocab_size=VOCAB, output_vocab_size=VOCAB, emb_dim=32, num_heads=4, num_layers=2,
        qkv_dim=32, mlp_dim=64, max_len=LENGTH, deterministic=True,
    )  # fmt: skip
    tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)
    module = models.TransformerLM(config)

    def apply(params: Any, tokens: Any) -> Any:
        return cross_entropy(module.apply({"params": params}, tokens), tokens)

    return _boxed(module, apply, tokens)


def t5(checkouts: Path, folder: str) -> Model:
    """T5 as its authors train it: `t5`, or `scalable_t5`, whose layers are in a scan."""
    root = checkouts / "google-research_t5x" / "t5x"
    for name, path in (
        ("t5x", root),
        ("t5x.examples", root / "examples"),
        (f"t5x.examples.{folder}", root / "examples" / folder),
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    network: Any = importlib.import_module(f"t5x.examples.{folder}.network")
    config = network.T5Config(
        vocab_size=VOCAB, dtype=jnp.float32, emb_dim=32, num_heads=4, num_encoder_layers=2,
        num_decoder_layers=2, head_dim=8, mlp_dim=64, mlp_activations=("gelu", "linear"),
        dropout_rate=0.0, logits_via_embedding=False,
    )  # fmt: skip
    module = network.Transformer(config)
    tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)

    def apply(params: Any, tokens: Any) -> Any:
        logits = module.apply({"params": params}, tokens, tokens, tokens, enable_dropout=False)
        return cross_entropy(logits, tokens)

    made = jax.eval_shape(
        lambda: module.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)
    )
    axes = jax.tree_util.tree_leaves_with_path(
        made["params_axes"], is_leaf=lambda leaf: hasattr(leaf, "names")
    )
    names = {
        jax.tree_util.keystr(path).replace("_axes']", "']"): tuple(leaf.names)
        for path, leaf in axes
    }
    return Model(params=made["params"], names=names, loss=apply)
