"""Finds the fewest patterns that describe how all arrays of a training are split (no jax).

A candidate is an array's path in which a run of parts is replaced by `**`, or numbers by `*`.
Candidates that match arrays with different splits are dropped. Then the one that covers most of the
remaining arrays is taken, again and again: the greedy algorithm for set cover (Chvatal, Mathematics
of Operations Research 4, 1979), which is optimal here if arrays are distinguished by the ends of
their paths, as in models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from automesh.mesh.rules.shardings import Dims, Shardings, matches


def fewest_patterns(arrays: Sequence[tuple[str, Dims]]) -> Shardings:
    """Finds patterns that give every array its dimensions; none matches an array of another kind.

    Args:
      arrays: paths, each once, with the names of their dimensions.

    Example:
      >>> both = (("embed",), ("mlp",))
      >>> list(fewest_patterns([("p/a/0/up", both), ("p/a/1/up", both), ("p/head", ((),))]))
      ['p/a/*/up', 'p/head']
    """
    given = dict(arrays)
    said = _merge_numbered(given)
    matching: dict[str, set[str]] = defaultdict(set)
    for path in said:
        for pattern in _candidates(path):
            matching[pattern].add(path)
    # Of patterns for the same arrays, the most specific one.
    best: dict[frozenset[str], str] = {}
    for pattern, paths in matching.items():
        if len({said[path] for path in paths}) == 1:
            group = frozenset(paths)
            best[group] = max(best.get(group, pattern), pattern, key=_readability)
    found: dict[str, Dims] = {}
    left = set(said)
    while left and best:  # None is left for some paths with `*`.
        group = max(best, key=lambda one: (len(one & left), _readability(best[one])))
        pattern = best.pop(group)
        dims = said[next(iter(group))]
        # A part other than a number at a `*`, or a number where several arrays are merged.
        if any(matches(pattern, path) and given[path] != dims for path in given):
            continue
        found[pattern] = dims
        left -= group
    order = {path: number for number, path in enumerate(said)}
    first = {pattern: min(order[path] for path in matching[pattern]) for pattern in found}
    return Shardings(sorted(found.items(), key=lambda pair: first[pair[0]]))


def _merge_numbered(said: Mapping[str, Dims]) -> dict[str, Dims]:
    """Merges arrays whose paths only differ in numbers, if they are split alike."""
    found: dict[str, dict[str, Dims]] = defaultdict(dict)
    for path, dims in said.items():
        found[_numbered(path)][path] = dims
    merged: dict[str, Dims] = {}
    for path, group in found.items():
        is_one = len(group) > 1 and len({said[one] for one in said if matches(path, one)}) == 1
        merged |= {path: next(iter(group.values()))} if is_one else group
    return merged


def _numbered(path: str) -> str:
    return "/".join("*" if part.isdigit() else part for part in path.split("/"))


def _readability(pattern: str) -> tuple[bool, int, int, str]:
    """Returns a sort key for the most readable pattern: without `**`, with most named parts, the
    shortest."""
    return "**" not in pattern.split("/"), _count_named_parts(pattern), -len(pattern), pattern


def _count_named_parts(pattern: str) -> int:
    """Counts the parts that a pattern names."""
    return sum("*" not in part for part in pattern.split("/"))


def _candidates(path: str) -> Iterator[str]:
    """Lists patterns that match a path, including itself, but none that matches everything."""
    for spelled in {path: None, _numbered(path): None}:
        parts = spelled.split("/")
        yield spelled
        for start in range(len(parts) + 1):
            # `**` may also match no part, except at the end.
            for end in range(start if start < len(parts) else start + 1, len(parts) + 1):
                kept = [*parts[:start], "**", *parts[end:]]
                if any("*" not in part for part in kept):
                    yield "/".join(kept)
