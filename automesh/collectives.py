"""The kinds of collectives: one row for each, with its names, what it sends and how it is priced.

A collective moves data between the devices of a group. Every dialect has its own names for the same
kinds; all code that needs one of them reads this table. `why_unpriced` lists the operations that
move data but have no row. A test reads all operations of the installed jaxlib, and fails if one is
in neither list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

MeasuredName = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
]
"""Kinds that a calibration measures, and that have formulas of their own."""
CollectiveName = MeasuredName | Literal["ragged-all-to-all", "collective-broadcast", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveKind:
    """One kind of collective.

    Attributes:
      name: of the kind, as HLO has it.
      stablehlo: its operation in StableHLO and in Shardy's dialect; empty if they have none.
      shardy_axes: the attribute of Shardy's operation that holds the axes; empty if it has no such
        operation, or if the axes are read from what the operation moves.
      resized_along: the attribute of StableHLO's operation that says which dimension it makes
        longer or shorter; empty if none.
      megascale: its transfer type in the runtime between TPU slices; empty if there is none.
      sends: what a device of a group of n sends of a full array of V bytes. `ring`: (n-1)/n V in
        each pass; `exchange`: of its own V/n all but the part that it keeps, (n-1)/n V/n;
        `forward`: V.
      passes: how often the array goes round the ring, and waits for its messages.
      is_sharded_before: True if each device holds one part of the full array before, False if it
        holds an array of the full size.
      reduces: it combines the elements of the devices with a function that it calls.
      may_count_replicas: with a channel and no other statement, its groups are of replicas; those
        of other kinds are of partitions.
      is_ragged: only the first operand is sent, and the data say how much of it.
      is_in_place: the result may lie where the operand lay.
      priced_as: the kind whose measured or published speed is used; empty if it has its own.
    """

    name: CollectiveName
    stablehlo: str = ""
    shardy_axes: str = ""
    resized_along: str = ""
    megascale: str = ""
    sends: Literal["ring", "exchange", "forward"]
    passes: int = 1
    is_sharded_before: bool = False
    reduces: bool = False
    may_count_replicas: bool = False
    is_ragged: bool = False
    is_in_place: bool = False
    priced_as: MeasuredName | Literal[""] = ""

    def wire_bytes(self, payload_bytes: int, group_size: int) -> int:
        """Returns the bytes that one device of a group of n sends for a full array of V bytes,
        rounded up.

        An all-reduce is a reduce-scatter and an all-gather: 2 (n-1)/n V. Source: scaling-book,
        sharding.md, and NCCL's algorithm bandwidths (nccl-tests, PERFORMANCE.md).

        >>> kind_named("all-reduce").wire_bytes(1024, 4)
        1536
        >>> kind_named("all-to-all").wire_bytes(1024, 4)
        192
        """
        others = group_size - 1
        match self.sends:
            case "ring":
                return -(-self.passes * others * payload_bytes // group_size)
            case "exchange":
                return -(-others * payload_bytes // group_size**2)
            case "forward":
                return payload_bytes if others else 0


KINDS = (
    CollectiveKind(
        name="all-reduce",
        stablehlo="all_reduce",
        shardy_axes="reduction_axes",
        megascale="ALL_REDUCE",
        sends="ring",
        passes=2,
        reduces=True,
        may_count_replicas=True,
        is_in_place=True,
    ),
    CollectiveKind(
        name="all-gather",
        stablehlo="all_gather",
        shardy_axes="gathering_axes",
        resized_along="all_gather_dim",
        megascale="ALL_GATHER",
        sends="ring",
        is_sharded_before=True,
        may_count_replicas=True,
    ),
    CollectiveKind(
        name="reduce-scatter",
        stablehlo="reduce_scatter",
        shardy_axes="reduce_scatter_axes",
        resized_along="scatter_dimension",
        megascale="REDUCE_SCATTER",
        sends="ring",
        reduces=True,
        may_count_replicas=True,
    ),
    CollectiveKind(
        name="all-to-all",
        stablehlo="all_to_all",
        shardy_axes="params",
        megascale="ALL_TO_ALL",
        sends="exchange",
        is_sharded_before=True,
    ),
    # How much is sent is known only when the program runs: at most the whole array.
    CollectiveKind(
        name="ragged-all-to-all",
        sends="exchange",
        is_sharded_before=True,
        is_ragged=True,
        priced_as="all-to-all",
    ),
    CollectiveKind(
        name="collective-permute",
        stablehlo="collective_permute",
        megascale="ONE_TO_ONE",
        sends="forward",
    ),
    # Passed from device to device, part by part: takes as long as an all-gather of the array.
    CollectiveKind(
        name="collective-broadcast",
        stablehlo="collective_broadcast",
        sends="forward",
        is_in_place=True,
        priced_as="all-gather",
    ),
    # GPU compilers turn a collective-permute into these, TPU compilers all collectives between
    # slices.
    CollectiveKind(name="send", sends="forward", priced_as="collective-permute"),
)
MEASURED: tuple[MeasuredName, ...] = get_args(MeasuredName)
STABLEHLO = {kind.stablehlo: kind for kind in KINDS if kind.stablehlo}
"""Operation in StableHLO -> kind."""
MEGASCALE = {kind.megascale: kind for kind in KINDS if kind.megascale}
"""Transfer type between TPU slices -> kind."""
_UNPRICED = {
    "collective_reduce": "a reduction to one device of each group has no price",
    "send": "the way to the host or to another program has no price",
    "recv": "the way to the host or to another program has no price",
    "infeed": "the way to the host or to another program has no price",
    "outfeed": "the way to the host or to another program has no price",
    "cross_replica_sum": "an all-reduce over replicas, of which a step of jax has one",
    "sharded_to_unreduced": "a reduction that is put off: the collective that ends it is priced",
    "replicated_to_unreduced": "a reduction that is put off: the collective that ends it is priced",
}
_BY_NAME = {kind.name: kind for kind in KINDS}


def kind_named(name: str) -> CollectiveKind:
    """Returns the kind of that name.

    Raises:
      KeyError: there is none.
    """
    return _BY_NAME[name]


def is_kind(name: str) -> bool:
    """Whether a kind has that name."""
    return name in _BY_NAME


def why_unpriced(operation: str) -> str:
    """Says why an operation between devices or with the host has no price; empty if it has one.

    A step that holds such an operation names it as uncounted.

    Args:
      operation: in StableHLO, Shardy's dialect or HLO, without the dialect.
    """
    name = operation.removesuffix("-start").replace("-", "_")
    return "" if name in STABLEHLO else _UNPRICED.get(name, "")


def priced_as(name: str) -> str:
    """Returns the kind whose measured or published speed is used for this kind."""
    return kind_named(name).priced_as or name
