"""Gives kernels of a program an identity that does not depend on the folder of their source files
(jax).

Pallas passes a kernel to XLA with the source places of its operations, as absolute paths. So two
environments that differ only in their folder have the same kernel with other bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from automesh.program.kernels.mosaic import UnreadableKernel, kernel_text
from automesh.program.kernels.nouns import GROUP, TARGET
from automesh.program.kernels.triton import TRITON_CONFIG, TRITON_PROGRAM, is_triton, triton_text

_CONFIG = "backend_config"
_PLACES = "debug_locations"  # next to the program, in newer versions of Pallas


def forget_places(operations: Sequence[Any], ir: Any) -> None:
    """Replaces every kernel's program by a hash; leaves one that cannot be read.

    Args:
      operations: all operations of a module, which are changed in place; called in its context.
      ir: MLIR's Python classes.
    """
    for call in operations:
        if call.name != "stablehlo.custom_call":
            continue
        try:
            if is_triton(call, ir):
                _forget_triton(call, ir)
            elif _CONFIG in call.attributes and _target(call, ir) == TARGET:
                text = ir.StringAttr(call.attributes[_CONFIG]).value
                call.attributes[_CONFIG] = ir.StringAttr.get(_plain_config(text))
        except ValueError:  # Another kind of attribute: written by another version of Pallas.
            continue


def _plain_config(text: str) -> str:
    """Returns the backend's text with a hash instead of the kernel, and without its list of
    places."""
    try:
        config: Any = json.loads(text)
        group = config[GROUP]
        body = group["body"]
    except (ValueError, KeyError, TypeError):
        return text
    plain = {name: value for name, value in group.items() if name != _PLACES}
    plain["body"] = _digest(lambda: kernel_text(body)) or body
    return json.dumps({**config, GROUP: plain}, sort_keys=True)


def _forget_triton(call: Any, ir: Any) -> None:
    config = ir.DictAttr(call.attributes[TRITON_CONFIG])
    if digest := _digest(lambda: triton_text(config, ir)):
        entries = {one.name: one.attr for one in config}
        entries[TRITON_PROGRAM] = ir.StringAttr.get(digest)
        call.attributes[TRITON_CONFIG] = ir.DictAttr.get(entries)


def _target(call: Any, ir: Any) -> str:
    return ir.StringAttr(call.attributes["call_target_name"]).value


def _digest(text_of: Callable[[], str]) -> str:
    try:
        return hashlib.sha256(text_of().encode()).hexdigest()
    except UnreadableKernel:
        return ""
