"""Classes beside the logical axis names that authors have published: the same up to names.

`python -m benchmarks.published_axes` compares with models out of their repositories.
"""

from __future__ import annotations

import runpy
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
import pytest
from haliax import Axis

from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import StepClasses

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"

# `kernel_axes` in MaxText's layers (attentions.py, linears.py, embeddings.py, decoders.py), layers
# stacked; heads and their inner part are one dimension here, so that the outer one names it.
MAXTEXT = {
    "embed": ("vocab", "embed_vocab"),
    "head": ("embed_vocab", "vocab"),
    "norm": ("norm",),
    "layers/q": ("layers", "embed", "q_heads"),
    "layers/k": ("layers", "embed", "kv_heads"),
    "layers/v": ("layers", "embed", "kv_heads"),
    "layers/o": ("layers", "heads", "embed"),
    "layers/gate": ("layers", "embed", "mlp"),
    "layers/up": ("layers", "embed", "mlp"),
    "layers/down": ("layers", "mlp", "embed"),
    "layers/norm_attention": ("layers", "norm"),
    "layers/norm_mlp": ("layers", "norm"),
}
# MaxText has several names where one dimension may be split in several ways; all of them are the
# width of the residual stream, or heads that are split alike.
SAME = {"embed_vocab": "embed", "norm": "embed", "q_heads": "heads", "kv_heads": "heads"}


def compared(found: StepClasses, names: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """By name of the authors, the class; fails unless each has one of its own."""
    classes: dict[str, set[str]] = defaultdict(set)
    for array in found.arguments:
        for theirs, ours in zip(names.get(array.name, ()), array.dims, strict=False):
            classes[SAME.get(theirs, theirs)].add(ours)
    assert all(len(one) == 1 for one in classes.values()), dict(classes)
    after = {theirs: next(iter(ours)) for theirs, ours in classes.items()}
    assert len({*after.values()}) == len(after), after
    return after


@pytest.mark.slow
def test_a_llama_has_the_axes_that_maxtext_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["infer_llama.py", "--steps", "1"])
    made = runpy.run_path(str(SCRIPTS / "infer_llama.py"))
    args = (made["params"], made["state"], made["tokens"])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    traced = made["train_step"].trace(*args)
    found = classes_of(traced.jaxpr, carried={n: n for n in range(len(paths) - 1)}, names=paths)
    names = {
        "[0]" + "".join(f"['{part}']" for part in path.split("/")): axes
        for path, axes in MAXTEXT.items()
    }
    assert compared(found, names) == {
        "vocab": "vocab", "embed": "embed", "layers": "layers", "heads": "heads", "mlp": "mlp",
    }  # fmt: skip


Batch, Pos, Vocab = Axis("batch", 8), Axis("position", 16), Axis("vocab", 96)
Embed, Mlp, Heads, HeadSize = Axis("embed", 32), Axis("mlp", 64), Axis("heads", 4), Axis("hs", 8)


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="haliax is for an older jax")
def test_haliax_models_have_the_axes_that_they_name() -> None:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    model = {
        "attention": hnn.Linear.init(Embed, (Heads, HeadSize), key=next(keys), use_bias=False),
        "embed": hnn.Embedding.init(Vocab, Embed, key=next(keys)),
        "head": hnn.Linear.init(Embed, Vocab, key=next(keys), use_bias=False),
        "keys": hnn.Linear.init(Embed, (Heads, HeadSize), key=next(keys), use_bias=False),
        "norm": hnn.LayerNorm.init(Embed),
        "out": hnn.Linear.init((Heads, HeadSize), Embed, key=next(keys), use_bias=False),
        "up": hnn.Linear.init(Embed, Mlp, key=next(keys)),
        "down": hnn.Linear.init(Mlp, Embed, key=next(keys)),
    }

    def loss(model: Any, tokens: Any) -> Any:
        x = model["embed"](hax.named(tokens, (Batch, Pos)))
        inside = model["norm"](x)
        q, k = model["attention"](inside), model["keys"](inside).rename({"position": "key"})
        scores = hax.nn.softmax(hax.dot(q, k, axis=HeadSize), axis="key")
        mixed = hax.dot(scores, k, axis="key")
        x = x + model["out"](mixed)
        x = x + model["down"](hax.nn.gelu(model["up"](x)))
        logits = model["head"](x)
        targets = hax.nn.one_hot(hax.named(tokens, (Batch, Pos)), Vocab)
        value: Any = hax.nn.cross_entropy_loss(logits, Vocab, targets, reduction=hax.mean)
        return value.scalar()

    def step(model: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(model, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), value

    is_named = lambda leaf: isinstance(leaf, hax.NamedArray)  # noqa: E731
    named = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_named)
    paths = [jax.tree_util.keystr(path) for path, leaf in named if is_named(leaf)]
    names = {
        jax.tree_util.keystr(path): tuple(axis.name for axis in leaf.axes)
        for path, leaf in named
        if is_named(leaf)
    }
    traced = jax.jit(step).trace(model, np.zeros((8, 16), np.int32))
    count = len(jax.tree.leaves(model))
    assert count == len(paths)
    found = classes_of(traced.jaxpr, carried={n: n for n in range(count)}, names=[*paths, "tokens"])
    assert compared(found, names) == {
        "vocab": "vocab", "embed": "embed", "mlp": "mlp", "heads": "heads", "hs": "head_dim",
    }  # fmt: skip
    assert found.arguments[-1].dims[0] == "batch"
