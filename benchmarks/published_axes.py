"""Classes that are told from the flow of a step, beside the logical axis names of the authors.

    python -m benchmarks.published_axes CHECKOUTS

CHECKOUTS holds one folder for each repository, named `OWNER_NAME`. Each model is made small, a
training step of it is traced, and for every array of the parameters the authors' names of its
dimensions are compared with the classes: two dimensions have one name if and only if they have one
class. What differs is listed; the last line on stdout is JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import linen as nn

from automesh.program.infer.classes import classes_of

Names = Mapping[str, Sequence[str | None]]
BATCH, LENGTH, VOCAB = 8, 16, 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of others.

    Attributes:
      params: its parameters.
      names: by path, what the authors call the dimensions; None for one without a name.
      loss: of parameters and tokens.
    """

    params: Any
    names: Names
    loss: Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is the same, and what is not.

    Attributes:
      arrays: how many have names.
      one_to_one: (name, class) where each of both is always beside the other.
      split: by name, the classes that it has, where these are several.
      merged: by class, the names that it has.
    """

    model: str
    arrays: int
    one_to_one: tuple[tuple[str, str], ...]
    split: Mapping[str, tuple[str, ...]]
    merged: Mapping[str, tuple[str, ...]]


def compare(name: str, model: Model) -> Comparison:
    """Traces a step of a model and compares its classes."""

    def step(params: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(model.loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    traced = jax.jit(step).trace(model.params, tokens)
    found = classes_of(
        traced.jaxpr, carried={n: n for n in range(len(paths))}, names=[*paths, "tokens"]
    )
    classes_by: dict[str, set[str]] = defaultdict(set)
    names_by: dict[str, set[str]] = defaultdict(set)
    arrays = 0
    for array in found.arguments:
        names = model.names.get(array.name)
        # Names that are given before a kernel gets its last shape do not say which is which.
        if names is None or len(names) != len(array.dims):
            continue
        arrays += 1
        for theirs, ours, size in zip(names, array.dims, array.shape, strict=True):
            if theirs and size > 1:
                classes_by[theirs].add(ours)
                names_by[ours].add(theirs)
    pairs = [
        (theirs, *ours)
        for theirs, ours in classes_by.items()
        if len(ours) == 1 and len(names_by[next(iter(ours))]) == 1
    ]
    return Comparison(
        model=name,
        arrays=arrays,
        one_to_one=tuple((theirs, ours) for theirs, ours in pairs),
        split={one: tuple(sorted(many)) for one, many in classes_by.items() if len(many) > 1},
        merged={one: tuple(sorted(many)) for one, many in names_by.items() if len(many) > 1},
    )


def _cross_entropy(logits: Any, tokens: Any) -> Any:
    taken = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return -jnp.mean(taken)


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
        return _cross_entropy(module.apply({"params": params}, tokens), tokens)

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
        return _cross_entropy(logits, tokens)

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


MODELS: Mapping[str, Callable[[Path], Model]] = {
    "google/flax examples/lm1b": lm1b,
    "google-research/t5x examples/t5": lambda checkouts: t5(checkouts, "t5"),
    "google-research/t5x examples/scalable_t5": lambda checkouts: t5(checkouts, "scalable_t5"),
}


def main(
    checkouts: Annotated[Path, typer.Argument(help="Folder with a checkout of each repository.")],
) -> None:
    """Compares classes with the authors' logical axis names."""
    rows: list[dict[str, Any]] = []
    for name, make in MODELS.items():
        found = compare(name, make(checkouts))
        same = ", ".join(f"{theirs}={ours}" for theirs, ours in found.one_to_one)
        typer.echo(f"{name}: {found.arrays} arrays; the same: {same}", err=True)
        for one, many in found.split.items():
            typer.echo(f"  `{one}` has several classes: {', '.join(many)}", err=True)
        for one, many in found.merged.items():
            typer.echo(f"  class `{one}` has several names: {', '.join(many)}", err=True)
        rows.append(
            {
                "model": name,
                "arrays": found.arrays,
                "one_to_one": dict(found.one_to_one),
                "split": dict(found.split),
                "merged": dict(found.merged),
            }
        )
    typer.echo(json.dumps({"models": rows}))


if __name__ == "__main__":
    typer.run(main)
