"""Reads a search space from its TOML file, found by path or by the name of a shipped one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from automesh.errors import UsageError, did_you_mean
from automesh.limits import LARGEST_INTEGER
from automesh.mesh.axes import DEFAULT_AXES, PIPELINE, MeshAxis, Scalar, usual_batch_axes
from automesh.mesh.mapping import check_mapped_axes, format_axes, read_mapped
from automesh.mesh.names import check_names
from automesh.mesh.strict_files import check_tree, parse_tree
from automesh.package import PACKAGE
from automesh.platforms import NAMES
from automesh.reading import check_regular, kind_of_file, read_text
from automesh.space.space import (
    AxisRange,
    Constraint,
    Knob,
    LogicalAxis,
    SearchSpace,
    checked_knob,
)
from automesh.texts.user_text import user_path

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_Positive = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
_Values = Annotated[list[Scalar], Field(min_length=1)]
_Choices = Annotated[list[str | list[str]], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AxisTable:
    min: _Positive | None = None
    max: _Positive | None = None
    size: _Positive | None = None
    dcn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConstraintTable:
    divides: _Positive | str | None = None
    max: _Positive | str | None = None
    min: _Positive | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SpaceTable:
    axes: dict[str, _AxisTable]
    batch_axes: list[str] | None = None
    constraints: dict[str, _ConstraintTable] = field(default_factory=dict)
    mapping: dict[str, _Choices] = field(default_factory=dict)
    knobs: dict[str, _Values] = field(default_factory=dict)
    compiler_options: dict[str, dict[str, _Values]] = field(default_factory=dict)


def read_space(name: str) -> SearchSpace:
    """Reads the space `name`: a shipped one (`auto`, `dense_lm`, ...) or the path of a TOML file.

    Raises:
      UsageError: no such space; or an error in the file, with the path of the key.
    """
    path, shipped = _locate(name)
    try:
        table = check_tree(parse_tree(read_text(path), source=path), _SpaceTable, source=path)
        return _space(table, name=name, shipped=shipped)
    except UsageError as error:
        # Errors of reading name the file; later errors do not.
        where = "" if f"`{path}`" in error.message else f"`{path}`: "
        hint = error.hint or f"`{shipped_spaces()['auto']}` shows what a search space may say"
        raise UsageError(f"{where}{error.message}", hint=hint) from None


def shipped_spaces() -> dict[str, Path]:
    """Maps the name of every space that comes with automesh to its file."""
    installed = PACKAGE / "search_spaces"
    folder = installed if installed.is_dir() else PACKAGE.parent / "search_spaces"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _locate(name: str) -> tuple[Path, bool]:
    shipped = shipped_spaces()
    if name in shipped:
        return shipped[name], True
    path = user_path(name)
    kind = kind_of_file(path)
    if kind not in ("", "a folder"):
        raise UsageError(
            f"`{name}` is {kind}, not a search space file",
            hint=f"give the path of a TOML file, or one of {', '.join(shipped)}",
        )
    if path.is_file():
        return path, path.resolve() in {file.resolve() for file in shipped.values()}
    if path.suffix == ".toml" or "/" in name:
        if not kind:
            check_regular(path)
        raise UsageError(
            f"there is no search space file `{name}`",
            hint=f"give the path of a TOML file, or one of {', '.join(shipped)}",
        )
    raise UsageError(
        f"there is no search space `{name}`{did_you_mean(name, shipped)}",
        hint=f"use {', '.join(shipped) or 'a TOML file'}, or the path of a TOML file",
    )


def _space(table: _SpaceTable, *, name: str, shipped: bool) -> SearchSpace:
    if not table.axes:
        raise UsageError("`axes` must not be empty", hint="write for example `dp = { dcn = true }`")
    axes = [_axis(axis, bounds) for axis, bounds in table.axes.items()]
    listed = [axis.name for axis in axes]
    names = _with_usual_axes(listed) if shipped else tuple(listed)
    axes.sort(key=lambda axis: names.index(axis.name))
    # An axis that cannot vary is in the mesh, but is not enumerated.
    varying = [axis for axis in axes if axis.maximum != 1] or axes
    clash = [knob for knob in table.knobs if knob in names]
    if clash:
        raise UsageError(f"`knobs.{clash[0]}` has the name of a mesh axis", hint="rename one")
    if table.mapping and "mapping" in table.knobs:
        raise UsageError(
            "`knobs.mapping` and the table `mapping` both mean the keyword `mapping` of `build`",
            hint="rename the knob",
        )
    options: list[tuple[str, tuple[Knob, ...]]] = []
    for platform, knobs in table.compiler_options.items():
        if platform not in NAMES:
            meant = did_you_mean(platform, NAMES)
            raise UsageError(
                f"`compiler_options.{platform}` is not a platform{meant}",
                hint=f"use {', '.join(NAMES)}",
            )
        options.append((platform, _knobs(knobs.items(), where=f"compiler_options.{platform}")))
    return SearchSpace(
        name=name,
        shipped=shipped,
        names=names,
        axes=tuple(varying),
        batch_axes=_batch_axes(table.batch_axes, names),
        constraints=tuple(
            constraint
            for product, conditions in table.constraints.items()
            for constraint in _constraints(product, conditions)
        ),
        mapping=tuple(_logical(name, said, names) for name, said in table.mapping.items()),
        knobs=_knobs(table.knobs.items(), where="knobs"),
        compiler_options=tuple(options),
    )


def _axis(name: str, table: _AxisTable) -> AxisRange:
    MeshAxis(name=name)  # Checks the name.
    if table.size is not None:
        if table.min is not None or table.max is not None:
            raise UsageError(
                f"`axes.{name}` has both `size` and a bound; `size` alone fixes the axis"
            )
        return AxisRange(name=name, minimum=table.size, maximum=table.size, dcn=table.dcn)
    return AxisRange(name=name, minimum=table.min or 1, maximum=table.max or 0, dcn=table.dcn)


def _batch_axes(said: Sequence[str] | None, names: Sequence[str]) -> tuple[str, ...]:
    if said is None:
        return usual_batch_axes(names)
    batch = tuple(said)
    try:
        check_names(names, batch)
    except UsageError as error:
        raise UsageError(f"`batch_axes`: {error.message}", hint=error.hint) from None
    return batch


def _with_usual_axes(listed: Sequence[str]) -> tuple[str, ...]:
    """Adds the usual axes to those of a shipped space, with size 1.

    So scripts for the usual axes run with each shipped space.
    """
    usual = (PIPELINE, *DEFAULT_AXES) if PIPELINE in listed else DEFAULT_AXES
    return (*usual, *(name for name in listed if name not in usual))


def _constraints(product: str, table: _ConstraintTable) -> list[Constraint]:
    factors = tuple(factor.strip() for factor in product.split("*"))
    where = f"constraints.{product}"
    for factor in factors:
        if not _NAME.fullmatch(factor):
            raise UsageError(
                f"`{where}` is not a product of axes and knobs",
                hint='write for example `"dp*fsdp" = { divides = "batch" }`',
            )
    found: list[Constraint] = []
    if table.divides is not None:
        found.append(Constraint(factors=factors, relation="divides", bound=table.divides))
    if table.max is not None:
        found.append(Constraint(factors=factors, relation="max", bound=table.max))
    if table.min is not None:
        found.append(Constraint(factors=factors, relation="min", bound=table.min))
    if not found:
        raise UsageError(f"`{where}` says nothing", hint="give it `divides`, `max` or `min`")
    both = table.min is not None and table.max is not None
    if both and isinstance(table.min, int) and isinstance(table.max, int) and table.min > table.max:
        raise UsageError(
            f"`{where}` has min {table.min} above max {table.max}, which nothing meets"
        )
    return found


def _logical(name: str, said: Sequence[str | list[str]], names: Sequence[str]) -> LogicalAxis:
    choices = tuple(read_mapped(name, choice) for choice in said)
    check_mapped_axes([(name, choice) for choice in choices], names)
    for place, choice in enumerate(choices):
        if choice in choices[:place]:
            raise UsageError(f"`mapping.{name}` lists `{format_axes(choice)}` twice")
    return LogicalAxis(name=name, choices=choices)


def _knobs(items: Iterable[tuple[str, Sequence[Scalar]]], *, where: str) -> tuple[Knob, ...]:
    return tuple(
        checked_knob(name, values, said=f"`{where}.{name}` lists") for name, values in items
    )
