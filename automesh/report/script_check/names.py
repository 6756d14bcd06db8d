"""Names of arrays that differ in numbers alone, such as those of layers, as one name."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

NUMBER = re.compile(r"\d+")
_MOST_LISTED = 4
# What jax calls a leaf of a node whose class does not name its parts.
UNNAMED = re.compile(r"\[<flat index (\d+)>\]")
# The argument itself: the user's name for it, or its place.
_ARGUMENT = re.compile(r"(?:kw)?args\[[^\]]*\]|[^.\[]*")


def argument_end(name: str) -> int:
    """Returns the length of the part of an array's name that names its argument: `args[0]` of
    `args[0]['w']`. A number in it is a position, not a layer."""
    found = _ARGUMENT.match(name)
    return found.end() if found is not None else 0


def shorter(names: Sequence[str]) -> list[str]:
    """Returns names with `[N]`, or nothing if all nodes have one leaf, for `<flat index N>`."""
    numbers = {found for name in names for found in UNNAMED.findall(name)}
    short = "" if numbers == {"0"} else r"[\1]"
    return [UNNAMED.sub(short, name) for name in names]


def common_name(names: Sequence[str]) -> str:
    """Returns one name for names that differ in numbers alone: `args[0]['layers'][0..11]['w']`. A
    few names that do not make up whole ranges are listed one by one, such as layers 0 and 2, or
    weights of one layer and biases of another."""
    if len(names) == 1:
        return names[0]
    numbers = [sorted({*one}, key=int) for one in zip(*map(NUMBER.findall, names), strict=True)]
    if math.prod(map(len, numbers)) != len(set(names)) <= _MOST_LISTED:
        return ", ".join(names)
    words = iter(map(_numbers, numbers))
    return NUMBER.sub(lambda _: next(words), names[0])


def _numbers(values: Sequence[str]) -> str:
    first, last = int(values[0]), int(values[-1])
    if len(values) == 1:
        return values[0]
    if last - first + 1 == len(values) or len(values) > _MOST_LISTED:
        return f"{values[0]}..{values[-1]}"
    return ",".join(values)
