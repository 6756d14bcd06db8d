"""The terms of a decoder's stages as Megatron lays them out: what `pricing` prices (jax).

The model is the examples', in mixed precision: parameters in bfloat16, gradients summed in float32,
an optimizer that keeps float32 copies. Its microbatch is split over `ep`, an axis that the dense
model has no use for, so that the rows of a device are a formula in the size of that axis; `dp` is
left for the replicas. What is lowered once holds for all layouts with these stages.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from automesh import pipeline
from automesh.jsonio import from_json, to_json
from automesh.mesh.axes import DEFAULT_AXES, PIPELINE, MeshAxis
from automesh.pipeline.runtime.training import TrainState
from automesh.program.nouns import Propagation
from automesh.program.script.build import Built, build_on
from automesh.program.script.workload import Workload
from automesh.sharding.propagate_pipeline import PropagatedStages, propagate_pipeline
from benchmarks.published.layouts import Shape
from benchmarks.support.paths import EXAMPLES

NAMES = (PIPELINE, *DEFAULT_AXES)
ROWS = "ep"  # what cuts a microbatch
_DEVICES = 256
_MODULES = ("adamw", "training", "transformer", "attention", "layout")
_FORMAT = 1  # to be raised when the terms of an unchanged step change


def start() -> None:
    """Makes jax give as many virtual devices as any layout is lowered for."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES)


def terms_of(
    shape: Shape, stages: tuple[int, ...], *, remat: str, splits: bool, rows: int, folder: Path
) -> Propagation:
    """The terms of a model's stages.

    Args:
      stages: layers of each.
      splits: whether `tp` is larger than 1.
      rows: of a microbatch, over all parts of it.
      folder: where answers are kept.
    """
    asked = [_FORMAT, repr(shape), stages, remat, splits, rows, jax.__version__, _sources()]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
    path = folder / f"{digest}.json"
    if path.exists():
        return from_json(json.loads(path.read_text("utf-8")), Propagation)
    found = _propagated(shape, stages, remat=remat, splits=splits, rows=rows)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(to_json(found, Propagation)), "utf-8")
    part.replace(path)
    return found


def _propagated(
    shape: Shape, stages: tuple[int, ...], *, remat: str, splits: bool, rows: int
) -> Propagation:
    build = partial(_build, shape=shape, stages=stages, remat=remat, rows=rows)
    ranks = len(stages)
    given = PropagatedStages(
        build=lambda axes: _built(build, axes),
        axis=PIPELINE,
        ranks=ranks,
        axis_names=NAMES,
        platform="gpu",
    )

    def sizes(rows: int, splits_by: int) -> tuple[tuple[str, int], ...]:
        found = ((PIPELINE, ranks), (ROWS, rows), ("tp", splits_by))
        return tuple((name, size) for name, size in found if size > 1)

    return propagate_pipeline(
        given,
        sizes=sizes(2, 2 if splits else 1),
        # Its formulas must say the same at other sizes.
        probes=[sizes(4 if rows > 4 else 2, 4 if splits else 1)],
        enter=lambda _: None,
    )


def _built(build: Any, axes: Sequence[MeshAxis]) -> Built:
    return build_on(build, axes)


def _build(mesh: Mesh, *, shape: Shape, stages: tuple[int, ...], remat: str, rows: int) -> Workload:
    adamw, training, transformer, attention, layouts = map(_of_examples, _MODULES)
    model = transformer.Decoder(
        vocab=shape.vocab,
        d_model=shape.d_model,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.heads,
        head_size=shape.d_model // shape.heads,
        d_ff=shape.d_ff,
        tied=shape.tied,
    )
    layout = layouts.Layout(mesh=pipeline.MpmdMesh(mesh).abstract_mesh, rows=(ROWS,), sequence=None)
    plan = transformer.weights(model, transformer.swiglu_weights(model))
    params = jax.tree.map(_narrow, training.abstract_params(plan, layout))
    layers = tuple(
        {
            name: jax.ShapeDtypeStruct((count, *one.shape[1:]), one.dtype, sharding=one.sharding)
            for name, one in params["layers"].items()
        }
        for count in stages
    )
    loss = partial(
        transformer.loss,
        model=model,
        layout=layout,
        plan=plan,
        attention=partial(attention.gathered_attention, layout=layout, chunk=shape.chunk),
        mlp=partial(transformer.swiglu, layout=layout),
        remat=remat,
        adds=False,
    )
    step = pipeline.train_step(
        loss,
        optimizer=_Mixed(adamw.Unclipped(optimizer=adamw.AdamW())),
        mesh=mesh,
        num_microbatches=1,
        clip_norm=1.0,
        # As Megatron does: what the backward pass reads is kept. The last stage goes back at once.
        residuals=("save",) * (len(stages) - 1) + ("recompute",),
    )
    batch = training.abstract_batch(rows, shape.length, layout)
    return Workload(step, (TrainState(params={**params, "layers": layers}, optimizer=()), batch))


def _narrow(one: Any) -> Any:
    return jax.ShapeDtypeStruct(one.shape, jnp.bfloat16, sharding=one.sharding)


@dataclass(frozen=True, slots=True)
class _Mixed:
    """An optimizer of narrow parameters, of which it keeps wide copies beside two wide moments."""

    inner: Any

    def init(self, params: Any) -> Any:
        wide = jax.tree.map(lambda one: one.astype(jnp.float32), params)
        return wide, self.inner.init(wide)

    def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        wide, inner = state
        added, inner = self.inner.update(gradients, inner, wide)
        wide = jax.tree.map(jnp.add, wide, added)
        moved = jax.tree.map(lambda new, old: new.astype(old.dtype) - old, wide, params)
        return moved, (wide, inner)


def _of_examples(name: str) -> Any:
    """A module of the examples, which are no package."""
    folder = str(EXAMPLES)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(f"lm.{name}")


def _sources() -> str:
    """A digest of what says what the model is."""
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted((EXAMPLES / "lm").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
