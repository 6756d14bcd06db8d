"""Finds whose compiler wrote a module, and in which memory its values are.

The number of a memory space is the backend's own: xla/layout.h (0 is the default, 5 the host's) and
xla/service/gpu/ir_emission_utils.h (of a GPU, 1 is device memory that NCCL has registered).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from automesh.hlo.nouns import Module, Shape
from automesh.platforms.platform import PlatformName

Memory = Literal["main", "chip", "host"]
Touch = tuple[int, int]  # Memory space, bytes.

_HOST_SPACE = 5
# Members of the JSON that only one backend writes at its instructions.
_GPU_MARK = re.compile(rb'"(operation_queue_id|fusion_backend_config|gemm_backend_config)"')
_TPU_MARK = re.compile(rb'"(window_config|flag_configs|custom_call_config|barrier_config)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Bytes read and written, by memory: the device's main one, one on its chip, the host's."""

    main: int = 0
    chip: int = 0
    host: int = 0


def platform_of(module: Module) -> PlatformName:
    """Recognizes whose compiler wrote the module by its marks; `cpu` leaves none."""
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if _GPU_MARK.search(instruction.backend_config):
                return "gpu"
            if _TPU_MARK.search(instruction.backend_config):
                return "tpu"
    return "cpu"


def memory_of(space: int, platform: PlatformName) -> Memory:
    """Returns the memory that the space of a layout means."""
    if platform == "cpu" or space == 0:
        return "main"
    if space == _HOST_SPACE:
        return "host"
    return "chip" if platform == "tpu" else "main"


def leaves_of(shape: Shape) -> tuple[Shape, ...]:
    """Lists the arrays of a shape, in order."""
    if not shape.elements:
        return (shape,)
    return tuple(leaf for element in shape.elements for leaf in leaves_of(element))


def touch_all(*shapes: Shape) -> list[Touch]:
    """Counts every byte of some values once."""
    return [(leaf.memory_space, leaf.bytes) for shape in shapes for leaf in leaves_of(shape)]


def by_memory(touches: Iterable[Touch], platform: PlatformName) -> Touched:
    """Sums bytes by the memory that their space means."""
    totals = {"main": 0, "chip": 0, "host": 0}
    for space, size in touches:
        totals[memory_of(space, platform)] += size
    return Touched(**totals)
