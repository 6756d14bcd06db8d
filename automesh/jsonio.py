"""Strict JSON for our dataclasses: an unknown, missing or mistyped key is an error."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from automesh.errors import AutomeshError
from automesh.texts.storage_url import masked
from automesh.texts.terminal import as_unicode, is_unicode

T = TypeVar("T")
_SHOWN_CHARS = 100  # of a value that is wrong: it may be all of a file
# Bound now: in a worker, user code may replace `json.dumps`.
_dumps, _loads = json.dumps, json.loads


class NotJson(AutomeshError):
    """A text that is not JSON, or is nested deeper than any JSON that automesh writes."""


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Returns what reads and writes values of a type; making one takes long."""
    return TypeAdapter(kind)


def dumps(value: Any, *, indent: int | None = None, allow_nan: bool = True) -> str:
    """Returns JSON text that every reader accepts: ASCII, no lone surrogates (see `as_unicode`).

    Raises:
      ValueError: a number is not finite, and `allow_nan` is False.
    """
    text = _dumps(value, indent=indent, allow_nan=allow_nan)
    if "\\ud" not in text:  # Hardly any text goes further.
        return text
    plain = _dumps(value, ensure_ascii=False)
    if is_unicode(plain):
        return text
    return _dumps(_loads(as_unicode(plain, mark="\\\\")), indent=indent)


def to_json(value: Any, kind: Any) -> Any:
    """Turns a dataclass (or a union of them) into plain JSON values; NaN stays a float."""
    # By way of Python objects: pydantic's own JSON mode turns a NaN loss into null.
    return _loads(dumps(adapter_of(kind).dump_python(value)))


def to_checked_json(value: Any, kind: Any) -> Any:
    """Does what `to_json` does, after checking that `from_json` can read the result.

    Raises:
      AutomeshError: it cannot.
    """
    text = to_text(value, kind)
    read_json(text, kind)
    return _loads(text)


def to_text(value: Any, kind: Any) -> str:
    """Returns the JSON text of a dataclass directly, without plain values in between."""
    return dumps(adapter_of(kind).dump_python(value))


def from_json(data: Any, kind: Any) -> Any:
    """Reads plain JSON values into the dataclass (or union) `kind`.

    Raises:
      AutomeshError: naming the path of the first offending key.
    """
    try:
        text = dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJson(f"not what JSON can say: {error}") from None
    return read_json(text, kind)


def read_json(text: str | bytes, kind: Any) -> Any:
    """Reads a JSON text, which may be any bytes, into the dataclass (or union) `kind`.

    Raises:
      NotJson: it is not JSON.
      AutomeshError: naming the path of the first offending key.
    """
    try:
        return adapter_of(kind).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            raise NotJson(first["msg"]) from None
        where = f"`{path}`: " if path else ""  # No path: all of it is wrong.
        raise AutomeshError(f"{where}{first['msg']}, got {_shown(first.get('input'))}") from None


def _shown(value: Any) -> str:
    try:
        text = masked(repr(value))  # before it is cut
    except ValueError:  # A whole number of more digits than Python prints.
        text = "a very large number"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
