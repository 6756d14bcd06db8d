"""Describes how arrays are split: patterns of paths, with names for dimensions (no jax).

A path consists of the keys, numbers and attributes that lead to an array, joined by `/`:
`params/layers/0/attn/q`. In a pattern, `*` matches anything inside one part, `**` any number of
parts. The first pattern that matches an array decides.

A dimension has a name, several, or `""`: names of mesh axes, and of logical axes that the rule's
`mapping` splits. Any other name only describes the dimension, and splits nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from automesh.errors import UsageError, WrongType, kind_of
from automesh.mesh.mapping import MappedAxes, pairs_of

Dims = tuple[tuple[str, ...], ...]
"""Per dimension, names in the order in which they split it."""
SpelledDims = Sequence[str | Sequence[str]]
"""The names of dimensions as people write them: `["layers", "", ["heads", "fsdp"]]`."""

_PART = re.compile(
    r"\['(?P<key>(?:[^'\\]|\\.)*)'\]"
    r"|\[\"(?P<other>[^\"]*)\"\]"
    r"|\[<flat index (?P<flat>\d+)>\]"  # children without names
    r"|\[(?P<number>[^\]]*)\]"
    r"|\.?(?P<name>[^.\[\]]+)"
)
_MOST_PATTERNS = 10_000


class Shardings(Mapping[str, Dims]):
    """Pattern -> names of the dimensions, in order; immutable and hashable.

    Args:
      values: as people write them, see `SpelledDims`.

    Raises:
      UsageError: an empty pattern, a name twice in a dimension, too many patterns.
      WrongType: no mapping of patterns to sequences of names.

    Example:
      >>> found = Shardings({"params/**/up": ["embed", ["mlp", "fsdp"]], "**/bias": [""]})
      >>> found.first("params/layers/0/up")
      'params/**/up'
      >>> found["**/bias"], found.first("params/head")
      (((),), '')
    """

    __slots__ = ("_dims",)

    def __init__(
        self, values: Mapping[str, SpelledDims] | Iterable[tuple[str, SpelledDims]] = ()
    ) -> None:
        pairs = pairs_of(
            values,
            "shardings must be a dict of patterns to names of dimensions",
            hint='write for example {"params/**/up": ["embed", "mlp"]}',
        )
        if len(pairs) > _MOST_PATTERNS:
            raise UsageError(f"there are {len(pairs)} shardings, and {_MOST_PATTERNS} are the most")
        self._dims = {_checked(pattern): read_dims(pattern, dims) for pattern, dims in pairs}

    def __getitem__(self, pattern: str) -> Dims:
        return self._dims[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dims)

    def __len__(self) -> int:
        return len(self._dims)

    def __hash__(self) -> int:
        return hash(tuple(self._dims.items()))

    def __eq__(self, other: object) -> bool:
        # The order matters, since the first pattern that matches decides.
        if isinstance(other, Shardings):
            return tuple(self._dims.items()) == tuple(other._dims.items())
        return dict(self) == other

    def __repr__(self) -> str:
        return f"Shardings({spelled_shardings(self)!r})"

    def first(self, path: str) -> str:
        """Returns the pattern that decides for an array; empty if none matches its path."""
        return next((pattern for pattern in self._dims if matches(pattern, path)), "")

    @property
    def roots(self) -> tuple[str, ...]:
        """Returns the names of arguments with which patterns begin."""
        firsts = [pattern.partition("/")[0] for pattern in self._dims if "/" in pattern]
        return tuple(dict.fromkeys(one for one in firsts if "*" not in one))


def _checked(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise WrongType(
            f"a pattern of shardings must be a string, got {kind_of(pattern)}: {pattern!r}",
            hint='write for example "params/**/up"',
        )
    if not pattern or not all(pattern.split("/")):
        raise UsageError(
            f"`{pattern}` is no pattern of a path: a part of it is empty",
            hint="part names by a single `/`, as in `params/**/up`",
        )
    return pattern


def read_dims(pattern: str, spelled: Any) -> Dims:
    """Reads the names of the dimensions of an array.

    Raises:
      WrongType: no sequence of names.
      UsageError: a name twice in a dimension.

    Example:
      >>> read_dims("q", ["layers", "", ["heads", "fsdp"]])
      (('layers',), (), ('heads', 'fsdp'))
    """
    if isinstance(spelled, str) or not isinstance(spelled, Sequence):
        raise WrongType(
            f"the dimensions of `{pattern}` must be a list, got {kind_of(spelled)}: {spelled!r}",
            hint='give one name for each dimension: ["embed", "mlp"]; "" for one without',
        )
    found: list[tuple[str, ...]] = []
    for part in cast("Sequence[Any]", spelled):
        names = (part,) if isinstance(part, str) else part
        if not isinstance(names, Sequence) or not all(
            isinstance(name, str) for name in cast("Sequence[Any]", names)
        ):
            raise WrongType(
                f"a dimension of `{pattern}` must be a name or several, got {part!r}",
                hint='write "mlp", ["mlp", "fsdp"], or "" for one that has no name',
            )
        kept = tuple(name for name in cast("Sequence[str]", names) if name)
        if len(set(kept)) < len(kept):
            raise UsageError(
                f"a dimension of `{pattern}` has a name twice: {list(kept)}",
                hint="leave one of them out",
            )
        found.append(kept)
    return tuple(found)


def spelled_dims(dims: Dims) -> list[str | list[str]]:
    """Writes the names of dimensions as people write them.

    Example:
      >>> spelled_dims((("layers",), (), ("heads", "fsdp")))
      ['layers', '', ['heads', 'fsdp']]
    """
    return [list(part) if len(part) > 1 else part[0] if part else "" for part in dims]


def spelled_shardings(shardings: Mapping[str, Dims]) -> dict[str, list[str | list[str]]]:
    """Writes shardings as `Shardings` takes them."""
    return {pattern: spelled_dims(dims) for pattern, dims in shardings.items()}


def axes_of(
    dims: Dims, mapping: Mapping[str, MappedAxes], names: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes that split each dimension.

    Args:
      mapping: of logical axes.
      names: of the mesh axes.

    Example:
      >>> axes_of((("layers",), ("heads", "fsdp")), {"heads": ("tp",)}, ("fsdp", "tp"))
      ((), ('tp', 'fsdp'))
    """
    known = {name: (name,) for name in names} | dict(mapping)
    return tuple(tuple(axis for name in part for axis in known.get(name, ())) for part in dims)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches the whole of a path.

    Example:
      >>> matches("params/**/up", "params/up"), matches("layers/*/up", "layers/a/b/up")
      (True, False)
    """
    return _regex(pattern).fullmatch(path) is not None


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    found: list[str] = []
    parts = pattern.split("/")
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part == "**":
            found.append(r".+" if is_last else r"(?:[^/]+/)*")
        else:
            text = "[^/]*".join(map(re.escape, part.split("*")))
            found.append(text if is_last else f"{text}/")
    return re.compile("".join(found), re.DOTALL)


def path_of(name: str) -> str:
    """Converts a Python expression for an array to a path.

    Example:
      >>> path_of("state.params['layers'][0]['up']"), path_of("opt[0].mu['mlp/~/w']")
      ('state/params/layers/0/up', 'opt/0/mu/mlp/~/w')
      >>> path_of("state[<flat index 0>][2]")
      'state/0/2'
    """
    parts = [
        next(text for text in found.groups() if text is not None) for found in _PART.finditer(name)
    ]
    return "/".join(part for text in parts for part in text.split("/") if part)


NO_SHARDINGS = Shardings()
