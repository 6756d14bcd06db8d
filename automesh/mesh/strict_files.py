"""TOML and JSON files that people write: a mistake is told with its file and key."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from automesh.errors import UsageError, did_you_mean
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
      UsageError: a syntax error, with its line; or beyond the bounds of such a file.
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
    """Reads plain values into the dataclass `kind`; no unknown, missing or mistyped key passes.

    Raises:
      UsageError: names the file, the first offending key, what was expected and what was got.
    """
    # By way of JSON: strict types that still let a list be a tuple. TOML's dates become text.
    text = json.dumps(tree, default=str)
    try:
        return _adapter(kind).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise UsageError(f"`{source}`: {_sentence(error.errors(), tree, kind)}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _sentence(errors: Sequence[Any], tree: Any, kind: Any) -> str:
    # A misspelt key is the likely reason for one that is missing.
    error = min(errors, key=lambda one: one["type"] not in _UNKNOWN)
    path, value = _real_path(error["loc"], tree)
    match error["type"]:
        case "missing":
            return f"`{_dotted((*path, error['loc'][-1]))}` is missing"
        case unknown if unknown in _UNKNOWN:
            known = _keys_at(kind, path[:-1])
            hint = did_you_mean(str(path[-1]), known) or f"; known are {', '.join(known)}"
            return f"`{_dotted(path)}` is not a known key{hint}"
        case "too_short":
            return f"`{_dotted(path)}` must not be empty"
        case _:
            here = [one for one in errors if _real_path(one["loc"], tree)[0] == path]
            got = json.dumps(value, default=str)
            short = got if len(got) <= 60 else f"{got[:57]}..."
            return f"`{_dotted(path)}` {_expectation(here)}, got {short}"


def _expectation(errors: Sequence[Any]) -> str:
    """`must be an integer or a string`: of a union, each type failed for its own reason."""
    # That a value of one type is out of range says more than that it is not of another type.
    telling = [error for error in errors if not error["type"].endswith("_type")] or errors
    wanted = [one["msg"].removeprefix("Input should be ") for one in telling]
    if any(text == one["msg"] for text, one in zip(wanted, telling, strict=True)):
        return f"is wrong: {telling[0]['msg'][0].lower()}{telling[0]['msg'][1:]}"
    text = " or ".join(dict.fromkeys(wanted))
    return f"must be {re.sub('a valid (?=[aeiou])', 'an ', text).replace('a valid ', 'a ')}"


def _real_path(location: Sequence[str | int], tree: Any) -> tuple[tuple[str | int, ...], Any]:
    """The part of pydantic's location that exists in the data: tags of unions follow it."""
    path: list[str | int] = []
    for part in location:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            break
        path.append(part)
    return tuple(path), tree


def _keys_at(kind: Any, path: Sequence[str | int]) -> list[str]:
    """The fields of the dataclass that a path leads to."""
    for part in path:
        kind = _not_none(kind)
        is_table = dataclasses.is_dataclass(kind)
        kind = get_type_hints(kind)[str(part)] if is_table else get_args(kind)[-1]
    return [field.name for field in dataclasses.fields(_not_none(kind))]


def _not_none(kind: Any) -> Any:
    if get_origin(kind) is types.UnionType:
        return next(option for option in get_args(kind) if option is not types.NoneType)
    return kind


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
