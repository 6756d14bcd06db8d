"""Adds counted costs to the kernels of a program that state none (jax).

Pallas lets authors state a cost, but few do. In a program for an estimate, the counted cost is
written in the place of a stated one. A program that is compiled is not changed, since XLA's
scheduler reads that text, too: there the cost is added to the compiler's result.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from automesh.hlo.custom_calls import with_texts
from automesh.program.kernels.constants import Array, Constants
from automesh.program.kernels.grid import count_kernel
from automesh.program.kernels.mosaic import MosaicKernel, UnreadableKernel, body_of, read_kernel
from automesh.program.kernels.nouns import GROUP, TARGET, KernelCost
from automesh.program.kernels.triton import (
    TRITON_CONFIG,
    TRITON_TARGET,
    is_triton,
    read_triton,
    touched_bytes,
)
from automesh.program.notes import note

_MOST_PARTS = 64  # of a constant: most parts tried to find the busiest device


def state_costs(module: Any) -> None:
    """Writes the cost of its kernels into a lowered program, in place."""
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    with module.context:
        for call, cost in _counted(module, ir):
            text = ir.StringAttr(call.attributes["backend_config"]).value
            call.attributes["backend_config"] = ir.StringAttr.get(_with_cost(text, cost))
        for call, cost in _counted_triton(module, ir):
            # Its program is no longer needed, and differs between sizes of the mesh.
            del call.attributes[TRITON_CONFIG]
            call.attributes["backend_config"] = ir.StringAttr.get(_of_triton(cost))


def kernel_costs(lowered: Any) -> dict[str, KernelCost]:
    """Returns the costs of the kernels of a lowered program, by hashes of the kernels' programs.

    The bytes of a kernel for GPUs are left at 0: they are those of the arrays of each of its calls.

    Args:
      lowered: `jax.stages.Lowered`.
    """
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    module: Any = lowered.compiler_ir("stablehlo")
    found: dict[str, KernelCost] = {}
    with module.context:
        for call, cost in _counted(module, ir):
            key = _key(body_of(ir.StringAttr(call.attributes["backend_config"]).value))
            if key not in found or cost.flops > found[key].flops:
                found[key] = cost
        for call, cost in _counted_triton(module, ir):
            # XLA keeps the attribute as text.
            found[_key(str(call.attributes[TRITON_CONFIG]))] = replace(cost, bytes_accessed=0)
    return found


def with_costs(module: bytes, costs: Mapping[str, KernelCost]) -> bytes:
    """Adds the counted costs to the kernels of a serialized HLO module."""
    if not costs:
        return module

    def added(text: str) -> str:
        cost = costs.get(_key(body_of(text)))
        return text if cost is None else _with_cost(text, cost)

    def instead(text: str) -> str:
        key = _key(text)
        # Only a hash of its program, to distinguish it from others.
        return text if key not in costs else _of_triton(costs[key], program=key)

    return with_texts(with_texts(module, TARGET, added), TRITON_TARGET, instead)


def _key(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _with_cost(text: str, cost: KernelCost) -> str:
    config = json.loads(text)
    config[GROUP] |= cost.fields()
    return json.dumps(config)


def _of_triton(cost: KernelCost, **more: str) -> str:
    return json.dumps({GROUP: cost.fields() | more})


def _counted(module: Any, ir: Any) -> Iterator[tuple[Any, KernelCost]]:
    """Yields the custom calls that state no cost, each with its counted cost."""
    constants = Constants.of(module, ir)
    kernels: dict[str, MosaicKernel | None] = {}
    for call in _calls(module, ir):
        body = body_of(ir.StringAttr(call.attributes["backend_config"]).value)
        if body not in kernels:
            kernels[body] = _kernel(body)
        kernel = kernels[body]
        if kernel is None:
            continue
        fetched = [constants.parts(value) for value in list(call.operands)[: kernel.scalars]]
        try:
            yield call, _heaviest(kernel, fetched)
        except UnreadableKernel as why:
            note(f"a kernel for TPUs is not counted: {why}")


def _calls(module: Any, ir: Any) -> list[Any]:
    return [
        call
        for call in _custom_calls(module, ir)
        if ir.StringAttr(call.attributes["call_target_name"]).value == TARGET
        and "backend_config" in call.attributes
        and _states_nothing(ir.StringAttr(call.attributes["backend_config"]).value)
    ]


def _custom_calls(module: Any, ir: Any) -> list[Any]:
    found: list[Any] = []

    def visit(one: Any) -> Any:
        if one.name == "stablehlo.custom_call":
            found.append(one)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _counted_triton(module: Any, ir: Any) -> Iterator[tuple[Any, KernelCost]]:
    """Yields the custom calls with a GPU kernel, for which Pallas drops the author's cost."""
    costs: dict[Any, KernelCost | None] = {}
    for call in _custom_calls(module, ir):
        if not is_triton(call, ir):
            continue
        # MLIR keeps equal attributes once.
        config = call.attributes[TRITON_CONFIG]
        if config not in costs:
            costs[config] = _cost_of_triton(call, ir)
        cost = costs[config]
        if cost is not None:
            yield call, replace(cost, bytes_accessed=touched_bytes(call))


def _cost_of_triton(call: Any, ir: Any) -> KernelCost | None:
    try:
        cost = count_kernel(read_triton(call, ir), ())
    except UnreadableKernel as why:
        note(f"a kernel for GPUs is not counted: {why}")
        return None
    # Small products run in parallel and keep the device busy, so their shape does not determine the
    # time.
    dtype = cost.product.dtype if cost.product is not None else ""
    return replace(cost, product=None, dtype=dtype, is_whole=True)


def _states_nothing(text: str) -> bool:
    try:
        config = json.loads(text)
    except ValueError:
        return False
    group = cast("dict[str, Any]", config.get(GROUP)) if isinstance(config, dict) else None
    return isinstance(group, dict) and "body" in group and not group.get("cost_estimate")


def _kernel(body: str) -> MosaicKernel | None:
    try:
        return read_kernel(body)
    except UnreadableKernel as why:
        note(f"a kernel for TPUs is not counted: {why}")
        return None


def _heaviest(kernel: MosaicKernel, fetched: Sequence[Sequence[Array]]) -> KernelCost:
    """Returns the cost on the device with the most work, for which all others wait."""
    number = max((1, *(len(parts) for parts in fetched)))
    costs: list[KernelCost] = []
    seen: set[bytes] = set()
    for place in range(min(number, _MOST_PARTS)):
        arrays = [
            np.asarray(parts[place if len(parts) > 1 else 0], np.int64)
            if len(parts) in (1, number)
            else None
            for parts in fetched
        ]
        key = b"".join(b"?" if one is None else one.tobytes() for one in arrays)
        if key not in seen:
            seen.add(key)
            costs.append(count_kernel(kernel, arrays))
    return max(costs, key=lambda one: (one.flops, one.bytes_accessed))
