"""A dense decoder language model, trained on the bytes of Paradise Lost.

Search for a mesh, then train on it:

    cd examples
    automesh search dense_lm.py --target cpu:8 --space dense_lm
    python dense_lm.py --devices 8

How the mesh axes are used: `dp` and `fsdp` split the rows of the batch, `fsdp` also the parameters
and the optimizer's state (ZeRO-3), `tp` the heads, the hidden units and the vocabulary, `sp` each
row along its length: norms and residuals are split, the attention gathers keys and values. `ep` is
not used. Where the mesh has the axis `pp`, the layers are dealt to the ranks along it:

    automesh search dense_lm.py --target cpu:8 --space dense_lm_pipeline -- --layers 4
"""

from __future__ import annotations

from functools import partial

from jax.sharding import Mesh
from lm import pipelined, presets, training, transformer
from lm.attention import gathered_attention
from lm.layout import Layout
from lm.presets import Preset

import automesh

SIZES = {
    "tiny": Preset(
        model=presets.TINY, rows=48, length=48, chunk=48, optimizer=presets.TINY_OPTIMIZER
    ),
    "small": Preset(model=presets.SMALL, rows=64, length=1024, chunk=1024),
    "mid": Preset(model=presets.MID, rows=64, length=2048, chunk=1024),
    "1b": Preset(model=presets.LLAMA_1B, rows=64, length=4096, chunk=1024),
    "8b": Preset(model=presets.LLAMA_8B, rows=512, length=8192, chunk=1024),
    "70b": Preset(model=presets.LLAMA_70B, rows=512, length=8192, chunk=1024),
    **presets.public(rows=512, length=4096),
}


def build(
    mesh: Mesh,
    remat: str = "full",
    microbatches: int = 1,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
) -> automesh.Workload:
    """The training step and its arguments on `mesh`: what `automesh search` compiles and measures.

    Args:
      mesh: has the axes dp, fsdp, ep, tp and sp, and may have pp.
      remat: activations that the backward pass computes again: none, dots or full.
      microbatches: parts of the batch whose gradients are accumulated.
      schedule: of a pipeline, by name; see `automesh.pipeline.SCHEDULES`.
      virtual_stages: parts of the model on each rank of a pipeline.
    """
    options = training.arguments(SIZES)
    size = SIZES[options.size].changed(options)
    stages = pipelined.num_stages(mesh, virtual_stages)
    layout = Layout(mesh=pipelined.mesh_of_stage(mesh), gathers=options.gather == "step")
    plan = transformer.weights(size.model, transformer.swiglu_weights(size.model))
    loss = partial(
        transformer.loss,
        model=size.model,
        layout=layout,
        plan=plan,
        attention=partial(gathered_attention, layout=layout, chunk=size.chunk),
        mlp=partial(transformer.swiglu, layout=layout),
        remat=remat,
        adds=stages == 1,
    )
    if stages > 1:
        return pipelined.workload(
            loss,
            plan,
            size,
            mesh=mesh,
            layout=layout,
            stages=stages,
            schedule=schedule,
            microbatches=microbatches,
            facts=size.facts,
        )
    state = training.abstract_state(plan, layout, size.optimizer)
    batch = training.abstract_batch(size.rows, size.length, layout)
    return automesh.Workload(
        step=training.make_step(
            loss, state, layout, microbatches=microbatches, optimizer=size.optimizer
        ),
        args=(state, batch),
        init=lambda _: (training.initial_state(plan, state), training.initial_batch(batch)),
        facts=size.facts,
        tokens_per_step=size.rows * size.length,
    )


if __name__ == "__main__":
    training.train(build, __file__, SIZES)
