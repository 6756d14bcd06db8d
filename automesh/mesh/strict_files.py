"""Reads TOML and JSON files that people write; an error names the file and the key."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from automesh.errors import UsageError, did_you_mean
from automesh.jsonio import adapter_of
from automesh.reading import Malformed, parse_json, parse_toml, read_text

T = TypeVar("T")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def read_table(path: Path, kind: type[T]) -> T:
    """Reads a file into the dataclass `kind`; see `check_tree`.

    Raises:
      UsageError: it cannot be read, or is wrong.
    """
    return check_tree(parse_tree(read_text(path), source=path), kind, source=path)


def parse_tree(text: str, *, source: Path) -> dict[str, Any]:
    """Parses JSON if `source` ends in `.json`, TOML otherwise.

    Raises:
      UsageError: a syntax error, with its line; or a limit of such files is exceeded.
    """
    is_json = source.suffix == ".json"
    try:
        tree = parse_json(text) if is_json else parse_toml(text)
    except Malformed as error:
        kind = "JSON" if is_json else "TOML"
        raise UsageError(f"`{source}` is not {kind}: {error.message}") from None
    if not isinstance(tree, dict):
        raise UsageError(f"`{source}` must hold an object, got a {type(tree).__name__}")
    return tree


def check_tree(tree: Any, kind: type[T], *, source: Path) -> T:
    """Reads plain values into the dataclass `kind`; refuses unknown, missing or mistyped keys.

    Raises:
      UsageError: names the file, the first offending key, what was expected and what was got.
    """
    # Through JSON, for strict types in which a list may still be a tuple. TOML's dates become text.
    text = json.dumps(tree, default=str)
    try:
        return adapter_of(kind).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise UsageError(f"`{source}`: {_sentence(error.errors(), tree, kind)}") from None


def _sentence(errors: Sequence[Any], tree: Any, kind: Any) -> str:
    # A misspelt key is the likely reason for a missing one. In a union, a key that one type lacks
    # may be a key of another.
    def is_unlikely(one: Any) -> bool:
        path = _real_path(one["loc"], tree)[0]
        return one["type"] not in _UNKNOWN or path[-1] in _keys_at(kind, path[:-1])

    error = min(errors, key=is_unlikely)
    path, value = _real_path(error["loc"], tree)
    match error["type"]:
        case "missing":
            return f"`{_dotted((*path, error['loc'][-1]))}` is missing"
        case unknown if unknown in _UNKNOWN:
            known = _keys_at(kind, path[:-1])
            others = f"; known are {', '.join(known)}" if known else ""
            hint = did_you_mean(str(path[-1]), known) or others
            return f"`{_dotted(path)}` is not a known key{hint}"
        case "too_short":
            return f"`{_dotted(path)}` must not be empty"
        case _:
            here = [one for one in errors if _real_path(one["loc"], tree)[0] == path]
            got = json.dumps(value, default=str)
            short = got if len(got) <= 60 else f"{got[:57]}..."
            return f"`{_dotted(path)}` {_expectation(here)}, got {short}"


def _expectation(errors: Sequence[Any]) -> str:
    """Says what was expected, of all types of a union: `must be an integer or a string`."""
    # A value out of range is a better message than a wrong type.
    telling = [error for error in errors if not error["type"].endswith("_type")] or errors
    wanted = [one["msg"].removeprefix("Input should be ") for one in telling]
    if any(text == one["msg"] for text, one in zip(wanted, telling, strict=True)):
        return f"is wrong: {telling[0]['msg'][0].lower()}{telling[0]['msg'][1:]}"
    text = " or ".join(dict.fromkeys(wanted))
    return f"must be {re.sub('a valid (?=[aeiou])', 'an ', text).replace('a valid ', 'a ')}"


def _real_path(location: Sequence[str | int], tree: Any) -> tuple[tuple[str | int, ...], Any]:
    """Returns the parts of pydantic's location that exist in the data, without tags of unions."""
    path: list[str | int] = []
    for part in location:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(part)
    return tuple(path), tree


def _keys_at(kind: Any, path: Sequence[str | int]) -> list[str]:
    """Returns the fields of the dataclass, or of each type of a union, at a path."""
    kinds = _alternatives(kind)
    for part in path:
        kinds = [inner for outer in kinds for inner in _inside(outer, part)]
    tables = [table for table in kinds if dataclasses.is_dataclass(table)]
    return list(dict.fromkeys(one.name for table in tables for one in dataclasses.fields(table)))


def _inside(kind: Any, part: str | int) -> list[Any]:
    """Returns the types that a key of a table, or an index of an array, may have."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return _alternatives(hints[str(part)]) if part in hints else []
    arguments = get_args(kind)
    if not arguments:
        return []
    if get_origin(kind) is tuple and isinstance(part, int):
        is_fixed = arguments[-1] is not Ellipsis
        return _alternatives(arguments[min(part, len(arguments) - 1) if is_fixed else 0])
    return _alternatives(arguments[-1])


def _alternatives(kind: Any) -> list[Any]:
    """Returns the types of a union, or the type itself, without `Annotated`."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (types.UnionType, Union):
        return [one for option in get_args(kind) for one in _alternatives(option)]
    return [kind]


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
