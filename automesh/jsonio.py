"""Strict JSON for our dataclasses: an unknown, missing or mistyped key is an error."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from automesh.errors import AutomeshError

T = TypeVar("T")
# Bound now: in a worker, user code may replace `json.dumps`.
_dumps, _loads = json.dumps, json.loads


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(value: Any, kind: Any) -> Any:
    """Turns a dataclass (or a union of them) into plain JSON values; NaN stays a float."""
    # By way of Python objects: pydantic's own JSON mode turns a NaN loss into null.
    return _loads(_dumps(_adapter(kind).dump_python(value)))


def from_json(data: Any, kind: Any) -> Any:
    """Reads plain JSON values into the dataclass (or union) `kind`.

    Raises:
      AutomeshError: naming the path of the first offending key.
    """
    try:
        return _adapter(kind).validate_json(_dumps(data), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise AutomeshError(f"`{path}`: {first['msg']}, got {first.get('input')!r}") from None
