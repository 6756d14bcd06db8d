"""Reads compiler options of the command line, `--xla NAME=VALUE`, as knobs of a search space."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from automesh.errors import UsageError
from automesh.mesh.axes import Scalar
from automesh.platforms import NAMES
from automesh.reading import Malformed, OutOfBounds, parse_toml
from automesh.space.space import Knob, SearchSpace, checked_knob

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXAMPLE = "--xla xla_jf_spmd_threshold_for_windowed_einsum_mib=default,1000000"
# Truth values in XLA_FLAGS, in addition to TOML's words.
_TRUTH = {"true": True, "True": True, "false": False, "False": False}


def parse_options(texts: Iterable[str]) -> tuple[Knob, ...]:
    """Reads `NAME=VALUE` or `NAME=VALUE,VALUE`; an option that is given twice has all values.

    Values are whole numbers, numbers, `true`, `false` or words; quotes make anything a word;
    `default` leaves the option to the compiler.

    Raises:
      UsageError: not of that form, or a value twice.
    """
    values: dict[str, list[Scalar]] = {}
    for text in texts:
        name, equals, said = text.strip().removeprefix("--").partition("=")
        name = name.strip()
        if not equals or not _NAME.fullmatch(name):
            raise UsageError(
                f"`--xla {text}` is not of the form NAME=VALUE",
                hint=f"write for example `{_EXAMPLE}`",
            )
        values.setdefault(name, []).extend(_values(said))
    return tuple(_knob(name, found) for name, found in values.items())


def knobs_of(options: Mapping[str, Scalar | Sequence[Scalar]]) -> tuple[Knob, ...]:
    """Makes knobs of compiler options with one or several values each.

    Raises:
      UsageError: a name that no option has, no value, or a value twice.
    """
    knobs: list[Knob] = []
    for name, said in options.items():
        if not _NAME.fullmatch(name):
            raise UsageError(f"`{name}` is not the name of a compiler option")
        is_one = isinstance(said, bool | int | float | str)
        knobs.append(_knob(name, [said] if is_one else list(said)))
    return tuple(knobs)


def _knob(name: str, values: Sequence[Scalar]) -> Knob:
    if not values:
        raise UsageError(
            f"the compiler option `{name}` is given no value",
            hint=f"write for example `{_EXAMPLE}`",
        )
    return checked_knob(name, values, said=f"the compiler option `{name}` is given")


def with_options(space: SearchSpace, knobs: Sequence[Knob]) -> SearchSpace:
    """Adds compiler options to a space, on every platform; replaces those of the same name."""
    if not knobs:
        return space
    named = {knob.name: knob for knob in knobs}

    def merged(platform: str) -> tuple[Knob, ...]:
        kept = [knob for knob in space.options_for(platform) if knob.name not in named]
        return (*kept, *knobs)

    options = tuple((platform, merged(platform)) for platform in NAMES)
    return replace(space, compiler_options=options)


def _values(text: str) -> list[Scalar]:
    if not text.strip():
        return []
    try:
        found: list[Any] = parse_toml(f"values = [{text}]")["values"]
        if all(isinstance(value, bool | int | float | str) for value in found):
            return found
    except OutOfBounds as error:
        raise UsageError(
            f"the values of a compiler option are out of bounds: {error.message}",
            hint=f"write for example `{_EXAMPLE}`",
        ) from None
    except Malformed:
        pass  # Words without quotes, which stand for themselves.
    try:
        pieces = next(csv.reader([text], skipinitialspace=True))
    except csv.Error as error:  # A line end, or a word of more than 128 KiB.
        raise UsageError(
            f"the values of a compiler option cannot be told apart: {error}",
            hint=f"write for example `{_EXAMPLE}`",
        ) from None
    return [value_of(piece.strip()) for piece in pieces if piece.strip()]


def value_of(text: str) -> Scalar:
    """Reads a word without quotes: a truth value, a number, or the word itself."""
    if text in _TRUTH:
        return _TRUTH[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
