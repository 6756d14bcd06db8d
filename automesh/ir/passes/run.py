"""Rewrites the program as the partitioner and a platform's compiler would.

Shardy decides how values are split, and where that changes; XLA's partitioner and the passes of
each backend decide what then runs. `RULES` lists the rewrites, their platforms, and how they are
known. Platform `none` is the module as XLA's partitioner leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from automesh.ir.graph import Graph
from automesh.ir.passes.broadcasts import gather_before_broadcasts
from automesh.ir.passes.chosen import choose_instead_of_scattering
from automesh.ir.passes.collectives import (
    drop_collectives_of_constants,
    gather_what_is_narrow,
    hoist_conversions,
    hoist_gathers,
    reassociate_reductions,
    reduce_by_dimension,
    reduce_first_what_is_sliced,
    scatter_reductions,
    separate_reductions_from_slices,
    stays_on_tpu,
)
from automesh.ir.passes.halos import (
    exchange_halos,
    exchange_rows,
    gather_windows,
)
from automesh.ir.passes.narrowed import move_narrow_for_products
from automesh.ir.passes.offload import drop_moves, mark_host_values
from automesh.ir.passes.pads import gather_padding, merge_pads, wrap_with_rolls
from automesh.ir.passes.simplify import drop_unused, share_equal, simplify_loops
from automesh.ir.passes.sunk import sink_reductions
from automesh.ir.passes.transforms import transform_in_parts
from automesh.ir.passes.windowed import mark_windowed

ALL = frozenset(("none", "cpu", "gpu", "tpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One rewrite.

    Attributes:
      apply: changes a graph in place.
      platforms: platforms whose compilers do it.
      source: where these compilers do it, or where it was observed.
    """

    apply: Callable[[Graph], None]
    platforms: Collection[str]
    source: str


# In this order.
RULES: tuple[Rewrite, ...] = (
    Rewrite(
        apply=simplify_loops,
        platforms=ALL,
        source="WhileLoopSimplifier: loops of no trips, and what loops carry for nobody",
    ),
    Rewrite(
        apply=drop_collectives_of_constants,
        platforms=ALL,
        source="the partitioner makes each device's part of a constant where it is used",
    ),
    Rewrite(
        apply=separate_reductions_from_slices,
        platforms=ALL,
        source="Shardy's canonicalization fuses all-reduce and slice; XLA's partitioner does not, "
        "and each backend has a rule of its own",
    ),
    Rewrite(
        apply=reduce_first_what_is_sliced,
        platforms=ALL,
        source="PartitionDotGroupOnContractingImpl in spmd/dot_handler.cc, so that the first one "
        "can become a reduce-scatter",
    ),
    Rewrite(
        apply=share_equal,
        platforms=frozenset(("tpu",)),
        source="equal rolls have one permute in programs of libtpu 0.0.52",
    ),
    Rewrite(
        apply=exchange_halos,
        platforms=ALL,
        source="PartitionConvolution in spmd/convolution_handler.cc",
    ),
    Rewrite(
        apply=transform_in_parts,
        platforms=ALL,
        source="HandleFft in spmd/fft_handler.cc",
    ),
    Rewrite(
        apply=gather_windows,
        platforms=frozenset(("none", "cpu")),
        source="HandleReduceWindow in spmd/spmd_partitioner.cc; the TPU's compiler makes windows "
        "over all rows a tree of small ones first (libtpu 0.0.52); for GPUs jax lowers running "
        "sums otherwise",
    ),
    Rewrite(
        apply=merge_pads,
        platforms=ALL,
        source="PreprocessHlos in spmd/spmd_partitioner.cc, to have one exchange instead of two",
    ),
    Rewrite(
        apply=wrap_with_rolls,
        platforms=ALL,
        source="FindPadWithWrapPattern and its use in spmd/spmd_partitioner.cc",
    ),
    Rewrite(
        apply=exchange_rows,
        platforms=ALL,
        source="HandleSlice, HandleReduceWindow and HandleReverse in spmd/spmd_partitioner.cc, "
        "whose windows come from ExchangeHaloAndGetValidData; rolls are rotated there",
    ),
    Rewrite(
        apply=share_equal,
        platforms=ALL - {"tpu"},
        source="HloCSE, run by the partitioner on what it made: of equal operations each has its "
        "own permutes of rows, whose channels differ",
    ),
    Rewrite(
        apply=reduce_by_dimension,
        platforms=frozenset(("none", "cpu")),
        source="AllReduceAlongShardingDims in spmd_partitioner_util.cc makes one all-reduce for "
        "each reduced dimension; the GPU's AllReduceFolder makes one again, and the TPU has one",
    ),
    Rewrite(
        apply=gather_before_broadcasts,
        platforms=frozenset(("gpu", "tpu")),
        source="AllGatherBroadcastReorder (gpu_compiler.cc); TPU: the updates of scattered "
        "gradients in programs of libtpu 0.0.52",
    ),
    Rewrite(
        apply=mark_windowed,
        platforms=frozenset(("tpu",)),
        source="spmd/dot_handler.cc with the TPU's threshold; seen in programs of libtpu 0.0.42",
    ),
    Rewrite(
        apply=gather_what_is_narrow,
        platforms=frozenset(("gpu",)),
        source="CollectiveQuantizer (xla/service/gpu/transforms)",
    ),
    Rewrite(
        apply=partial(gather_what_is_narrow, least_bytes=2.0),
        platforms=frozenset(("tpu",)),
        source="all gathers of weights that are converted to bf16 afterwards move bf16 in programs "
        "of libtpu 0.0.42; those that are converted to eight bits move f32 (0.0.52)",
    ),
    Rewrite(
        apply=hoist_conversions,
        platforms=frozenset(("tpu",)),
        source="converted copies of the stacked weights in programs of libtpu 0.0.42; not through "
        "optimization barriers",
    ),
    Rewrite(
        apply=hoist_gathers,
        platforms=frozenset(("cpu",)),
        source="WhileLoopInvariantCodeMotion: in programs of jaxlib 0.12 what a loop gathers again "
        "and again stands in front of it; TPU compilers leave it inside",
    ),
    Rewrite(
        apply=sink_reductions,
        platforms=frozenset(("gpu",)),
        source="WhileLoopAllReduceCodeMotion (gpu_compiler.cc)",
    ),
    Rewrite(
        apply=partial(sink_reductions, kept_inside=frozenset(("scatter",))),
        platforms=frozenset(("tpu",)),
        source="gradients that a loop adds up as they are have one all-reduce behind it in "
        "programs of libtpu 0.0.52; those that it divides first, that an inner loop makes one by "
        "one, or that are rows of a table, have one in every iteration",
    ),
    Rewrite(
        apply=reassociate_reductions,
        platforms=frozenset(("gpu",)),
        source="AllReduceReassociate (gpu_compiler.cc, collective optimizations)",
    ),
    Rewrite(
        apply=partial(reassociate_reductions, apart=frozenset(("scatter",))),
        platforms=frozenset(("tpu",)),
        source="three partial gradients share one all-reduce in programs of libtpu 0.0.42; of an "
        "embedding that is tied to the head, that of the lookup has its own (0.0.52)",
    ),
    Rewrite(
        apply=scatter_reductions,
        platforms=frozenset(("gpu",)),
        source="AllReduceSplitter and ReduceScatterCreator; the CPU compiler has neither",
    ),
    Rewrite(
        apply=partial(scatter_reductions, stays=stays_on_tpu),
        platforms=frozenset(("tpu",)),
        source="`all-reduce-scatter` fusions in programs of libtpu 0.0.42, not behind scatters; "
        "`stays_on_tpu` says what else stays",
    ),
    Rewrite(
        apply=choose_instead_of_scattering,
        platforms=frozenset(("tpu",)),
        source="gradients of logits that labels are taken from are compared and selected inside "
        "of the products that read them in programs of libtpu 0.0.52",
    ),
    Rewrite(
        apply=move_narrow_for_products,
        platforms=frozenset(("tpu",)),
        source="programs of libtpu 0.0.52 for v5e: every gather of float32 weights or activations "
        "that only products of the usual precision read moves bf16",
    ),
    # After all rules that look at what reads a gather.
    Rewrite(
        apply=gather_padding,
        platforms=ALL,
        source="PadToPartitionedShape and the slices behind collectives in spmd_partitioner.cc",
    ),
    Rewrite(
        apply=drop_unused,
        platforms=ALL,
        source="HloDCE",
    ),
    Rewrite(
        apply=drop_moves,
        platforms=frozenset(("cpu",)),
        source="on CPUs the memory of the host and that of the device are one",
    ),
    Rewrite(
        apply=mark_host_values,
        platforms=frozenset(("none", "gpu", "tpu")),
        source="HostOffloader (xla/hlo/transforms/host_offloader.cc): it walks from a move to the "
        "host to the moves back",
    ),
)


def rewrite(graph: Graph, platform: str) -> None:
    """Changes the graph in place into what `platform`'s compiler is expected to run.

    Args:
      platform: cpu, gpu or tpu; `none` for the module as partitioned.
    """
    for rule in RULES:
        if platform in rule.platforms:
            rule.apply(graph)
