"""Strict JSON for our dataclasses: an unknown, missing or mistyped key is an error."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from automesh.errors import AutomeshError
from automesh.terminal import as_unicode, is_unicode

T = TypeVar("T")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def dumps(value: Any, *, indent: int | None = None, allow_nan: bool = True) -> str:
    """JSON text that every reader takes: all ASCII, and no lone surrogates, see `as_unicode`.

    Raises:
      ValueError: a figure is not finite, and `allow_nan` is False.
    """
    text = json.dumps(value, indent=indent, allow_nan=allow_nan)
    if "\\ud" not in text:  # Hardly any text goes further.
        return text
    plain = json.dumps(value, ensure_ascii=False)
    if is_unicode(plain):
        return text
    return json.dumps(json.loads(as_unicode(plain, mark="\\\\")), indent=indent)


def to_json(value: Any, kind: Any) -> Any:
    """Turns a dataclass (or a union of them) into plain JSON values; NaN stays a float."""
    # By way of Python objects: pydantic's own JSON mode turns a NaN loss into null.
    return json.loads(dumps(_adapter(kind).dump_python(value)))


def to_text(value: Any, kind: Any) -> str:
    """The text of `to_json`, without the detour over plain values."""
    return json.dumps(_adapter(kind).dump_python(value))


def from_json(data: Any, kind: Any) -> Any:
    """Reads plain JSON values into the dataclass (or union) `kind`.

    Raises:
      AutomeshError: naming the path of the first offending key.
    """
    try:
        return _adapter(kind).validate_json(dumps(data), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise AutomeshError(f"`{path}`: {first['msg']}, got {first.get('input')!r}") from None
