"""Logical axes, and the mesh axes that they are split over, as values and as text.

A logical axis names dimensions of arrays (`embed`, `mlp`); a mapping says over which mesh axes such
dimensions are split. The text form of one entry is `mlp:tp+sp`, or `embed:none` for a dimension
that is not split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of

MappedAxes = tuple[str, ...]
"""The mesh axes of one logical axis, the slowest varying first; empty if it is not split."""
LogicalAxes = tuple[tuple[str, MappedAxes], ...]
"""Logical axis -> its mesh axes, in an order that may matter to frameworks."""
Spelled = str | Sequence[str] | None
"""Mesh axes of a logical axis as people write them: `"tp"`, `["tp", "sp"]`, `"none"`, None."""

NONE = "none"
_LOGICAL = re.compile(r"[^\s:=+,\"'`]+")
_DICT = "an axis mapping must be a dict of logical to mesh axes"
_DICT_HINT = "write for example {'embed': 'fsdp', 'mlp': ('tp', 'sp')}"


class LogicalMapping(Mapping[str, str | tuple[str, ...] | None]):
    """Logical axis -> mesh axis, several mesh axes, or None; cannot change and can be hashed.

    Frameworks accept it directly, or as a dict: `haliax.axis_mapping(config.mapping)`,
    `flax.linen.logical_axis_rules(list(config.mapping.items()))`.

    Args:
      values: mesh axes as people write them, see `Spelled`.

    Raises:
      UsageError: an entry is wrong.
      WrongType: no mapping of names to mesh axes.

    Example:
      >>> mapping = LogicalMapping({"embed": "fsdp", "mlp": ["tp", "sp"], "vocab": "none"})
      >>> mapping["mlp"], mapping["vocab"]
      (('tp', 'sp'), None)
      >>> str(mapping)
      'embed:fsdp mlp:tp+sp vocab:none'
    """

    __slots__ = ("_axes",)

    def __init__(self, values: Mapping[str, Spelled] | Iterable[tuple[str, Spelled]] = ()) -> None:
        pairs = pairs_of(values, _DICT, hint=_DICT_HINT)
        self._axes = {name: read_mapped(name, spelled) for name, spelled in pairs}

    @property
    def axes(self) -> LogicalAxes:
        """All entries, in order."""
        return tuple(self._axes.items())

    def __getitem__(self, name: str) -> str | tuple[str, ...] | None:
        axes = self._axes[name]
        return (axes[0] if len(axes) == 1 else axes) if axes else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def __hash__(self) -> int:
        return hash(self.axes)

    def __eq__(self, other: object) -> bool:
        # The order matters, too, to frameworks that use the first rule that fits.
        if isinstance(other, LogicalMapping):
            return self.axes == other.axes
        return dict(self) == other

    def __str__(self) -> str:
        return " ".join(format_mapped(name, axes) for name, axes in self.axes)

    def __repr__(self) -> str:
        return f"LogicalMapping({dict(self)!r})"


def read_mapped(name: str, spelled: Spelled) -> MappedAxes:
    """Reads the mesh axes of a logical axis, as people write them.

    Raises:
      UsageError: not the name of a logical axis; something else than mesh axes, or one twice.
      WrongType: see `check_mapped_types`.

    Example:
      >>> read_mapped("mlp", ["tp", "sp"]), read_mapped("mlp", "tp"), read_mapped("mlp", "none")
      (('tp', 'sp'), ('tp',), ())
    """
    check_mapped_types(name, spelled)
    check_logical(name)
    if spelled is None or spelled == NONE:
        return ()
    axes = (spelled,) if isinstance(spelled, str) else tuple(spelled)
    if NONE in axes or "" in axes:
        raise UsageError(
            f"the logical axis `{name}` is mapped to {list(axes)}, which are no mesh axes",
            hint='write "none" alone for an axis that is not split',
        )
    if len(set(axes)) < len(axes):
        raise UsageError(
            f"the logical axis `{name}` is mapped to {list(axes)}: one of them twice",
            hint="leave one of them out",
        )
    return axes


def pairs_of(values: object, what: str, *, hint: str) -> list[tuple[Any, Any]]:
    """Lists the entries of a mapping, or of a sequence or iterator of pairs.

    Args:
      what: what it must be, for the error.

    Raises:
      WrongType: neither.

    Example:
      >>> pairs_of({"mlp": "tp"}, "a mapping", hint="")
      [('mlp', 'tp')]
    """
    items = cast("Mapping[Any, Any]", values).items() if isinstance(values, Mapping) else values
    if isinstance(items, Iterable) and not isinstance(items, str | bytes):
        pairs = [
            tuple(cast("Sequence[Any]", pair)) if isinstance(pair, list | tuple) else ()
            for pair in cast("Iterable[Any]", items)
        ]
        if all(len(pair) == 2 for pair in pairs):
            return cast("list[tuple[Any, Any]]", pairs)
    raise WrongType(f"{what}, got {kind_of(values)}: {values!r}", hint=hint)


def check_mapped_types(name: object, spelled: object) -> None:
    """Checks types: a string as the name; a string, a sequence of them or None as the mesh axes.

    Raises:
      WrongType: something else.

    Example:
      >>> check_mapped_types("mlp", ["tp", "sp"])
    """
    if not isinstance(name, str):
        raise WrongType(
            f"the logical axes of a mapping must be strings, got {kind_of(name)}: {name!r}",
            hint="use the name of the axis, not the axis",
        )
    listed = cast("Sequence[Any]", spelled) if isinstance(spelled, Sequence) else [spelled]
    if spelled is not None and not all(isinstance(axis, str) for axis in listed):
        raise WrongType(
            f"logical axis `{name}` must be mapped to a mesh axis, several or None, "
            f"got {spelled!r}",
            hint="write for example 'tp' or ('tp', 'sp')",
        )


def check_logical(name: str) -> None:
    """Checks that a name can be a logical axis in the text of a plan.

    Raises:
      UsageError: empty, or with spaces, quotes or one of `: = + ,`.
    """
    if not _LOGICAL.fullmatch(name):
        raise UsageError(
            f"`{name}` is not the name of a logical axis",
            hint="leave out spaces, quotes, colons, commas, `=` and `+`",
        )


def format_axes(axes: MappedAxes) -> str:
    """Formats mesh axes as text.

    Example:
      >>> format_axes(("tp", "sp")), format_axes(())
      ('tp+sp', 'none')
    """
    return "+".join(axes) or NONE


def parse_axes(text: str) -> MappedAxes:
    """Parses mesh axes from the text of `format_axes`.

    Example:
      >>> parse_axes("tp+sp"), parse_axes("none")
      (('tp', 'sp'), ())
    """
    return () if text == NONE else tuple(text.split("+"))


def format_mapped(name: str, axes: MappedAxes) -> str:
    """Formats one entry of a mapping.

    Example:
      >>> format_mapped("mlp", ("tp", "sp"))
      'mlp:tp+sp'
    """
    return f"{name}:{format_axes(axes)}"


def check_mapped_axes(mapping: Iterable[tuple[str, MappedAxes]], names: Sequence[str]) -> None:
    """Checks that a mapping only uses existing mesh axes.

    Raises:
      UsageError: naming the logical axis and the axes that there are.
    """
    for logical, axes in mapping:
        unknown = [axis for axis in axes if axis not in names]
        if unknown:
            raise UsageError(
                f"the logical axis `{logical}` is mapped to `{unknown[0]}`, which is no mesh axis"
                f"{did_you_mean(unknown[0], names)}",
                hint=f"the mesh axes are: {', '.join(names)}",
            )


NO_MAPPING = LogicalMapping()
