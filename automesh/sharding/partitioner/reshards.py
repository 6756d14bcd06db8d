"""Decides which reshards XLA's partitioner does piece by piece, or by a full gather (no jax).

Shardy finds a sequence of all-to-alls, permutes, gathers and slices from any split to any other
one. XLA's partitioner only knows some patterns (`PartitionedHlo::ReshardNoCache` in
xla/service/spmd/spmd_partitioner.cc); if none fits, it gathers the array on every device, along all
dimensions that are cut otherwise afterwards, and slices it ("involuntary full rematerialization").
The decision depends on the number of tiles of each dimension before and after, and on the number of
copies of each tile. On jaxlib 0.12 the CPU compiler gathers in just these cases, in all but 12 of
1,452 pairs of splits of arrays of two and three dimensions over two and three axes; there it
gathers a half only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from automesh.sharding.partitioner.parts import Parts, count

# Sizes at which a decision is made again: if it depends on them, so do the terms.
_TRIED = (2, 4, 8)
_MOST_AXES = 4  # With more dimensions there would be too many combinations.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The split of an array into tiles.

    Attributes:
      tiles: number of pieces of each dimension.
      copies: devices that hold the same piece.
    """

    tiles: tuple[int, ...]
    copies: int

    @property
    def is_whole(self) -> bool:
        return math.prod(self.tiles) == 1


def tiling_of(parts: Sequence[Parts], devices: int) -> Tiling:
    """Returns the tiling of an array whose dimensions are split over `parts`."""
    tiles = tuple(count(each) for each in parts)
    return Tiling(tiles=tiles, copies=devices // math.prod(tiles))


def gathers_all(source: Tiling, target: Tiling) -> bool:
    """Whether the partitioner gathers the whole array to change its tiling."""
    if source.is_whole or target.is_whole:
        return False
    return not _is_known(source, target)


def kept_dimensions(source: Tiling, target: Tiling) -> tuple[bool, ...]:
    """Returns the dimensions that stay split while the others are gathered."""
    return tuple(before == after for before, after in zip(source.tiles, target.tiles, strict=True))


def _is_known(source: Tiling, target: Tiling) -> bool:
    if source.tiles == target.tiles:  # Only the order of the devices changes: a permute.
        return True
    if _by_all_to_all(source, target):
        return True
    if source.copies > 1 and (_divides(source, target) or _by_replicas(source, target)):
        return True
    if target.copies > 1 and (_divides(target, source) or _by_replicas(target, source)):
        return True
    return (
        _by_merging(source, target)
        or _by_replicating_one(source, target)
        or _by_slicing_one(source, target)
    )


def _by_all_to_all(source: Tiling, target: Tiling) -> bool:
    """Whether dimensions only exchange their tiles (`GetReshardAllToAllSourceTargetDims`)."""
    if source.copies != target.copies:
        return False
    before = [*source.tiles, *([source.copies] if source.copies > 1 else [])]
    after = [*target.tiles, *([target.copies] if target.copies > 1 else [])]
    changed = [d for d, tiles in enumerate(before) if tiles != after[d]]
    from_size = _dimensions_by_size(before, changed)
    to_size = _dimensions_by_size(after, changed)
    if {size: len(at) for size, at in from_size.items()} != {
        size: len(at) for size, at in to_size.items()
    }:
        return False
    while from_size:
        size = min(from_size)
        dimension = from_size[size][-1]
        wanted = after[dimension]
        if wanted == size:
            _remove(from_size, size, dimension)
            _remove(to_size, size, dimension)
            continue
        others = from_size[wanted]
        other = others[0]
        if size == 1:
            other = next((one for one in others if after[one] != 1), others[-1])
        elif wanted % size == 0:
            other = next((one for one in others if after[one] == size), others[-1])
        else:
            return False
        _remove(from_size, wanted, other)
        from_size[size][-1] = other
        _remove(to_size, wanted, dimension)
    return True


def _dimensions_by_size(tiles: Sequence[int], changed: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for dimension in changed:
        found.setdefault(tiles[dimension], []).append(dimension)
    return found


def _remove(found: dict[int, list[int]], size: int, dimension: int) -> None:
    found[size].remove(dimension)
    if not found[size]:
        del found[size]


def _divides(coarse: Tiling, fine: Tiling) -> bool:
    """Whether every tile is split further, or unchanged
    (`PartialReplicateReshardCompatibleSharding`)."""
    return all(small % large == 0 for large, small in zip(coarse.tiles, fine.tiles, strict=True))


def _by_replicas(partial: Tiling, tiled: Tiling) -> bool:
    """Whether the last tiles are the copies, and the others move on
    (`ReshardPartialReplicateWithAllToAll`)."""
    if tiled.copies > 1 or partial.tiles[0] != 1:
        return False
    shifted = (*partial.tiles[1:], partial.copies)
    return shifted == tiled.tiles


def _by_merging(source: Tiling, target: Tiling) -> bool:
    """Whether the tiles of two dimensions become those of one, or the other way round
    (`PatternMatchMergeOrSplitSharding`)."""
    if source.copies != target.copies:
        return False
    changed = [d for d, tiles in enumerate(source.tiles) if tiles != target.tiles[d]]
    for first, second in itertools.combinations(changed, 2):
        tiles = (
            source.tiles[first],
            source.tiles[second],
            target.tiles[first],
            target.tiles[second],
        )
        if tiles.count(1) > 1 or tiles[0] * tiles[1] != tiles[2] * tiles[3]:
            continue
        after = list(source.tiles)
        after[first], after[second] = target.tiles[first], target.tiles[second]
        between = Tiling(tiles=tuple(after), copies=source.copies)
        if between == target or _is_known(between, target):
            return True
    return False


def _by_replicating_one(source: Tiling, target: Tiling) -> bool:
    """Whether one dimension is gathered and the rest fits a pattern
    (`PatternMatchPartialReplicateDim`)."""
    copies, rest = divmod(target.copies, source.copies)
    if copies == 1 or rest:
        return False
    for dimension, tiles in enumerate(source.tiles):
        if tiles == copies:
            between = _with(source, dimension, 1, copies=target.copies)
            return between == target or _is_known(between, target)
    return False


def _by_slicing_one(source: Tiling, target: Tiling) -> bool:
    """Whether copies are split along a whole dimension: the reverse of `_by_replicating_one`."""
    if source.copies == 1 or target.copies > 1:
        return False
    cut = (
        _with(source, dimension, source.copies, copies=1)
        for dimension, tiles in enumerate(source.tiles)
        if tiles == 1
    )
    return any(between == target or _is_known(between, target) for between in cut)


def _with(tiling: Tiling, dimension: int, tiles: int, *, copies: int) -> Tiling:
    after = (*tiling.tiles[:dimension], tiles, *tiling.tiles[dimension + 1 :])
    return Tiling(tiles=after, copies=copies)


@lru_cache(maxsize=1 << 12)  # A cache, as a program has few different reshards.
def depends_on_sizes(
    source: tuple[Parts, ...], target: tuple[Parts, ...], mesh: tuple[tuple[str, int], ...]
) -> bool:
    """Whether `gathers_all` changes with the sizes of the axes that split the array."""
    every = [part for parts in (*source, *target) for part in parts]
    axes = sorted({part.axis for part in every})
    if any(part.size != dict(mesh)[part.axis] for part in every):
        return True  # Parts of axes depend on the sizes anyway.
    if len(axes) < 2 or len(axes) > _MOST_AXES:
        return len(axes) > 1
    found: set[bool] = set()
    for sizes in itertools.product(_TRIED, repeat=len(axes)):
        tried = {**dict(mesh), **dict(zip(axes, sizes, strict=True))}
        devices = math.prod(tried.values())
        found.add(gathers_all(_at(source, tried, devices), _at(target, tried, devices)))
    return len(found) > 1


def _at(parts: Sequence[Parts], sizes: Mapping[str, int], devices: int) -> Tiling:
    tiles = tuple(math.prod(sizes[part.axis] for part in each) for each in parts)
    return Tiling(tiles=tiles, copies=devices // math.prod(tiles))
