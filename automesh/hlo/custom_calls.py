"""Changes what custom calls tell their backend, in a serialized module."""

from __future__ import annotations

from collections.abc import Callable

from automesh.hlo import hlo_pb2


def with_texts(module: bytes, target: str, change: Callable[[str], str]) -> bytes:
    """Returns a serialized module with changed texts of some custom calls; all else is as before.

    Args:
      target: of the custom calls.
      change: gets the text as the backend reads it, and gives another one or the same.
    """
    read = hlo_pb2.Module.FromString(module)
    is_changed = False
    for computation in read.computations:
        for one in computation.instructions:
            if one.custom_call_target != target:
                continue
            payload = one.backend_config_payload
            shared = read.payloads[payload.id] if payload.HasField("id") else payload.value
            text = (one.backend_config or shared).decode("utf-8", "replace")
            changed = change(text)
            if changed != text:
                is_changed = True
                one.backend_config = changed.encode()
                one.ClearField("backend_config_payload")
    return read.SerializeToString() if is_changed else module
