"""Rows that devices exchange along a split dimension, as XLA's partitioner groups them.

Device `i` holds the rows from `i * held` on, and needs a window of rows for its part of a result:
of a slice, of a sliding window, of an array that is rolled. What others hold of that window comes
in collective permutes. Each permute sends equally many rows from every device that takes part.

Source: `ExchangeHaloAndGetValidData`, `ExchangeHalo` and `ExchangeHaloCompact` in
xla/service/spmd/spmd_partitioner_util.cc; the tests have the shapes that jaxlib 0.12 compiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWindow:
    """The rows of an array that the rows of a result are made of.

    Row `j` of the result needs the rows `j * stride - low` to `j * stride - low + width - 1`. For a
    slice that begins at `start`, the width is 1 and `low` is `-start`.

    Attributes:
      rows: of the array.
      results: rows of the result.
    """

    rows: int
    results: int
    width: int = 1
    stride: int = 1
    low: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Rows `[start, limit)` of the part of device `source` that device `target` needs.

    Attributes:
      offset: of these rows in the target's window.
    """

    source: int
    target: int
    start: int
    limit: int
    offset: int


@lru_cache(maxsize=1 << 12)  # Layers that are alike ask the same.
def permuted_rows(window: RowWindow, parts: int) -> tuple[int, ...] | None:
    """Counts the rows that each collective permute sends from a device: one number for each
    permute.

    Args:
      window: which rows the result needs.
      parts: devices along the dimension; each holds an equal part, the last one with padding.

    Returns:
      Nothing if every device has what it needs; None if the partitioner gathers the whole array.
    """
    held, made = -(-window.rows // parts), -(-window.results // parts)
    needs = [
        (
            place * made * window.stride - window.low,
            ((place + 1) * made - 1) * window.stride - window.low + window.width,
        )
        for place in range(parts)
    ]
    left = [place * held - first for place, (first, _) in enumerate(needs)]
    right = [limit - (place + 1) * held for place, (_, limit) in enumerate(needs)]
    wide = (made - 1) * window.stride + window.width
    if max(*left, *right) > 2 * wide:
        # The windows lie far from the devices' own parts.
        return None if 2 * wide >= parts * held else _by_segments(needs, held, window.rows)
    return _by_neighbours(left, right, held)


def rotated_rows(rows: int, by: int, parts: int) -> tuple[int, ...]:
    """Does what `permuted_rows` does, for an array whose rows move by `by` places and whose last
    rows come in again at the other end.

    If not every device holds equally many rows, what comes in again moves farther than the rest:
    the partitioner moves all rows by both distances, and chooses (`HandleCustomCallSPMDInternal`).
    """
    padding = -rows % parts
    held = (rows + padding) // parts
    if not rows // parts:
        return ()  # Some devices would hold nothing.
    distances = [by % rows, by % rows + padding] if padding else [by % rows]
    found: list[int] = []
    for distance in distances:
        devices, rest = divmod(distance, held)
        moved = ((devices, held - rest), (devices + 1, rest))
        found += [count for away, count in moved if count and away % parts]
    return tuple(found)


def _by_neighbours(left: list[int], right: list[int], held: int) -> tuple[int, ...] | None:
    """Counts the rows of each permute if every device takes as many rows from the device `d` places
    away as the one that needs most; None if the partitioner gathers the whole array."""
    parts = len(left)
    most_left, most_right = max(left[1:], default=0), max(right[:-1], default=0)
    is_far = most_left > held or most_right > held
    first, last = -max(left), held + max(right)
    if (most_left + most_right + held >= held * parts and is_far) or first >= last:
        return None
    found: list[int] = []
    for away in range(-(-most_left // held)):
        found.append(min(most_left - held * away, held) - max(-away * held - last, 0))
    for away in range(-(-most_right // held)):
        found.append(min(most_right - held * away, held) - max(first - (away + 1) * held, 0))
    return tuple(rows for rows in found if rows > 0)


def _by_segments(needs: list[tuple[int, int]], held: int, rows: int) -> tuple[int, ...]:
    """Counts the rows of each permute if a permute moves one segment for as many devices as
    possible. In a permute a device is a source at most once and a target at most once, and sends
    all rows from the first to the last that any target needs."""
    waiting: list[list[_Segment]] = [[] for _ in needs]
    for target, (first, limit) in enumerate(needs):
        row = max(first, 0)
        while row < min(limit, rows):
            source = row // held
            end = min((source + 1) * held, limit)
            if source != target:
                waiting[source].append(
                    _Segment(
                        source=source,
                        target=target,
                        start=row - source * held,
                        limit=end - source * held,
                        offset=row - first,
                    )
                )
            row = end
    for segments in waiting:
        segments.sort(key=lambda segment: segment.offset)
    found: list[int] = []
    while any(waiting):
        targets: set[int] = set()
        start, limit = held, 0
        for segments in waiting:
            if not segments:
                continue
            one = segments[0]
            is_other_end = (start > one.limit and limit == held and one.start == 0) or (
                limit < one.start and start == 0 and one.limit == held
            )
            if targets and (one.target in targets or is_other_end):
                continue
            targets.add(segments.pop(0).target)
            start, limit = min(start, one.start), max(limit, one.limit)
        found.append(limit - start)
    return tuple(found)
