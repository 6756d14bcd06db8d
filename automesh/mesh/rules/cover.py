"""The fewest patterns that say how all arrays of a training are split (no jax).

A candidate is what an array's path is once a run of its parts becomes `**`, or its numbers become
`*`. One that matches arrays which are split in different ways is dropped; of the others, the one
that covers most of what is left is taken, again and again: the greedy way to a set cover (Chvatal,
Mathematics of Operations Research 4, 1979), which is optimal here wherever arrays are told apart by
the ends of their paths, as in models they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from automesh.mesh.rules.shardings import Dims, Shardings, matches


def fewest_patterns(arrays: Sequence[tuple[str, Dims]]) -> Shardings:
    """Patterns that give every array its dimensions, and none of them matches one of others.

    Args:
      arrays: paths, each once, with what is said of their dimensions.

    Example:
      >>> both = (("embed",), ("mlp",))
      >>> list(fewest_patterns([("p/a/0/up", both), ("p/a/1/up", both), ("p/head", ((),))]))
      ['p/a/*/up', 'p/head']
    """
    given = dict(arrays)
    said = _by_number(given)
    matching: dict[str, set[str]] = defaultdict(set)
    for path in said:
        for pattern in _candidates(path):
            matching[pattern].add(path)
    # Of patterns for the same arrays, the one that says most of where they are.
    best: dict[frozenset[str], str] = {}
    for pattern, paths in matching.items():
        if len({said[path] for path in paths}) == 1:
            group = frozenset(paths)
            best[group] = max(best.get(group, pattern), pattern, key=_rank)
    found: dict[str, Dims] = {}
    left = set(said)
    while left and best:  # Nothing is left of a path with `*` in it that matches others, too.
        group = max(best, key=lambda one: (len(one & left), _rank(best[one])))
        pattern = best.pop(group)
        dims = said[next(iter(group))]
        # A part that is no number, where `*` stands for one; or a number, where arrays are one.
        if any(matches(pattern, path) and given[path] != dims for path in given):
            continue
        found[pattern] = dims
        left -= group
    order = {path: number for number, path in enumerate(said)}
    first = {pattern: min(order[path] for path in matching[pattern]) for pattern in found}
    return Shardings(sorted(found.items(), key=lambda pair: first[pair[0]]))


def _by_number(said: Mapping[str, Dims]) -> dict[str, Dims]:
    """Arrays whose paths differ in numbers alone as one, where they are split alike."""
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


def _rank(pattern: str) -> tuple[bool, int, int, str]:
    """Which of several patterns is the best to read: without `**`, naming most, the shortest."""
    return "**" not in pattern.split("/"), _told(pattern), -len(pattern), pattern


def _told(pattern: str) -> int:
    """How many parts a pattern names."""
    return sum("*" not in part for part in pattern.split("/"))


def _candidates(path: str) -> Iterator[str]:
    """Patterns that match a path, itself among them; none that matches everything."""
    for spelled in {path: None, _numbered(path): None}:
        parts = spelled.split("/")
        yield spelled
        for start in range(len(parts) + 1):
            # What stands for no part at all matches, too, but at the end.
            for end in range(start if start < len(parts) else start + 1, len(parts) + 1):
                kept = [*parts[:start], "**", *parts[end:]]
                if any("*" not in part for part in kept):
                    yield "/".join(kept)
