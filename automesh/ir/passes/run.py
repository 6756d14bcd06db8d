"""Rewrites that make the program what the partitioner and a platform's compiler make of it.

Shardy says which values are split how and where that changes; what then runs is decided by XLA's
partitioner and by the passes of each backend. `RULES` lists what is followed here, for whom, and
how it is known. Platform `none` is the module as XLA's partitioner leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from automesh.ir.graph import Graph
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
)
from automesh.ir.passes.halos import exchange_halos, exchange_rows, gather_top_k, gather_windows
from automesh.ir.passes.offload import drop_moves, mark_host_values
from automesh.ir.passes.simplify import drop_unused, share_equal, simplify_loops
from automesh.ir.passes.sunk import sink_reductions
from automesh.ir.passes.windowed import mark_windowed

ALL = frozenset(("none", "cpu", "gpu", "tpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rewrite.

    Attributes:
      apply: changes a graph in place.
      platforms: for which it is done.
      source: where the platforms' compilers do it, or where it was seen.
    """

    apply: Callable[[Graph], None]
    platforms: Collection[str]
    source: str


# In this order.
RULES: tuple[Rule, ...] = (
    Rule(
        apply=simplify_loops,
        platforms=ALL,
        source="WhileLoopSimplifier: loops of no trips, and what loops carry for nobody",
    ),
    Rule(
        apply=drop_collectives_of_constants,
        platforms=ALL,
        source="the partitioner makes each device's part of a constant where it is used",
    ),
    Rule(
        apply=separate_reductions_from_slices,
        platforms=ALL,
        source="Shardy's canonicalization fuses all-reduce and slice; XLA's partitioner does not, "
        "and each backend has a rule of its own",
    ),
    Rule(
        apply=reduce_first_what_is_sliced,
        platforms=ALL,
        source="PartitionDotGroupOnContractingImpl in spmd/dot_handler.cc, so that the first one "
        "can become a reduce-scatter",
    ),
    Rule(
        apply=share_equal,
        platforms=ALL,
        source="HloCSE, run by the partitioner on what it made",
    ),
    Rule(
        apply=exchange_halos,
        platforms=ALL,
        source="PartitionConvolution in spmd/convolution_handler.cc",
    ),
    Rule(
        apply=gather_windows,
        platforms=frozenset(("none", "cpu")),
        source="HandleReduceWindow in spmd/spmd_partitioner.cc; the TPU's compiler makes windows "
        "over all rows a tree of small ones first (libtpu 0.0.52); for GPUs jax lowers running "
        "sums otherwise",
    ),
    Rule(
        apply=gather_top_k,
        platforms=frozenset(("none", "cpu")),
        source="the call that the CPU compiler makes of a top-k has no rule of its own: programs "
        "of jaxlib 0.12 gather its operand; for TPUs it stays a sort, which is split",
    ),
    Rule(
        apply=exchange_rows,
        platforms=ALL,
        source="HandleSlice, HandleReduceWindow and HandleReverse in spmd/spmd_partitioner.cc, "
        "whose windows come from ExchangeHaloAndGetValidData; rolls are rotated there",
    ),
    Rule(
        apply=reduce_by_dimension,
        platforms=frozenset(("none", "cpu")),
        source="AllReduceAlongShardingDims in spmd_partitioner_util.cc makes one all-reduce for "
        "each reduced dimension; the GPU's AllReduceFolder makes one again, and the TPU has one",
    ),
    Rule(
        apply=mark_windowed,
        platforms=frozenset(("tpu",)),
        source="spmd/dot_handler.cc with the TPU's threshold; seen in programs of libtpu 0.0.42",
    ),
    Rule(
        apply=gather_what_is_narrow,
        platforms=frozenset(("gpu", "tpu")),
        source="GPU: CollectiveQuantizer (xla/service/gpu/transforms); TPU: all gathers of weights "
        "that are converted afterwards move bf16 in programs of libtpu 0.0.42",
    ),
    Rule(
        apply=hoist_conversions,
        platforms=frozenset(("tpu",)),
        source="converted copies of the stacked weights in programs of libtpu 0.0.42; not through "
        "optimization barriers",
    ),
    Rule(
        apply=hoist_gathers,
        platforms=frozenset(("cpu",)),
        source="WhileLoopInvariantCodeMotion: in programs of jaxlib 0.12 what a loop gathers again "
        "and again stands in front of it; TPU compilers leave it inside",
    ),
    Rule(
        apply=sink_reductions,
        platforms=frozenset(("gpu", "tpu")),
        source="GPU: WhileLoopAllReduceCodeMotion (gpu_compiler.cc); TPU: gradients that a loop "
        "adds up as they are have one all-reduce behind it in programs of libtpu 0.0.52, those "
        "that it divides first, or that an inner loop makes one by one, one in every iteration",
    ),
    Rule(
        apply=reassociate_reductions,
        platforms=frozenset(("gpu", "tpu")),
        source="GPU: AllReduceReassociate (gpu_compiler.cc, collective optimizations); TPU: three "
        "partial gradients share one all-reduce in programs of libtpu 0.0.42",
    ),
    Rule(
        apply=scatter_reductions,
        platforms=frozenset(("gpu", "tpu")),
        source="GPU: AllReduceSplitter and ReduceScatterCreator; TPU: `all-reduce-scatter` fusions "
        "in programs of libtpu 0.0.42, not behind scatters. The CPU compiler has neither",
    ),
    Rule(
        apply=drop_unused,
        platforms=ALL,
        source="HloDCE",
    ),
    Rule(
        apply=drop_moves,
        platforms=frozenset(("cpu",)),
        source="on CPUs the memory of the host and that of the device are one",
    ),
    Rule(
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
