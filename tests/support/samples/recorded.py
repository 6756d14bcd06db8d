"""Modules recorded with `tests/regenerate/record_modules.py`, and what is known of them."""

from __future__ import annotations

import gzip
from functools import cache

from automesh.hlo import Module, read_module
from automesh.hlo.count import count_schedule
from automesh.hlo.schedule.nouns import Compute, DeviceTransfer, Operation, ScheduledProgram, Start
from automesh.hlo.schedule.read import read_schedule
from automesh.outcomes import Counts
from tests.support.hlo_text import flattened
from tests.support.paths import DATA

FOLDER = DATA / "modules"
AXES = ("dp", "fsdp", "tp")

# Per name: sizes of the axes, and of each how many slices it spans.
MESHES: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "cpu_fsdp": ((2, 2, 2), (1, 1, 1)),
    "gpu_cublas": ((1, 2, 8), (1, 1, 1)),
    "gpu_fsdp": ((2, 8, 1), (1, 1, 1)),
    "gpu_offload": ((8, 1, 1), (1, 1, 1)),
    "gpu_overlapped": ((1, 8, 1), (1, 1, 1)),
    "gpu_tp": ((1, 2, 8), (1, 1, 1)),
    "tpu_dcn_dp": ((2, 16, 1), (2, 1, 1)),
    "tpu_dcn_four": ((4, 8, 1), (2, 2, 1)),
    "tpu_dcn_fsdp": ((1, 32, 1), (1, 2, 1)),
    "tpu_dcn_inner": ((2, 16, 1), (1, 2, 1)),
    "tpu_dcn_kinds": ((2, 4, 1), (2, 1, 1)),
    "tpu_dcn_transformer": ((2, 16, 1), (2, 1, 1)),
    "tpu_fsdp": ((4, 4, 1), (1, 1, 1)),
    "tpu_offload": ((16, 1, 1), (1, 1, 1)),
    "tpu_overlapped": ((1, 16, 1), (1, 1, 1)),
    "tpu_pallas": ((16, 1, 1), (1, 1, 1)),
    "tpu_pallas_bare": ((16, 1, 1), (1, 1, 1)),
    "tpu_ring": ((1, 4, 4), (1, 1, 1)),
    "tpu_sparsecore": ((2, 4, 1), (1, 1, 1)),
}

# The transformer of the recordings on 16 devices: 4 layers, width 1024, hidden 4096, 4096 words,
# 64 sequences of 512 tokens.
LAYERS, WIDTH, HIDDEN, WORDS, LENGTH = 4, 1024, 4096, 4096, 512
TOKENS = 64 * LENGTH // 16


def transformer_flops() -> int:
    """Matrix FLOPs of a step on one device, from the sizes alone.

    A layer costs 2 per weight and token, and 4 times length times width per token for attention.
    It runs forwards, again (all but its last product, which nothing needs), and twice backwards;
    the logits run once forwards and twice backwards.
    """
    layer = TOKENS * (2 * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN) + 4 * LENGTH * WIDTH)
    last = 2 * TOKENS * WIDTH * HIDDEN
    return LAYERS * (4 * layer - last) + 3 * (2 * TOKENS * WIDTH * WORDS)


def serialized(name: str) -> bytes:
    return gzip.decompress((FOLDER / f"{name}.pb.gz").read_bytes())


@cache
def module(name: str) -> Module:
    return read_module(serialized(name))


@cache
def schedule(name: str) -> ScheduledProgram:
    sizes, dcn = MESHES[name]
    return read_schedule(module(name), tuple(zip(AXES, sizes)), dcn)


@cache
def counts(name: str) -> Counts:
    return count_schedule(schedule(name))


@cache
def operations(name: str) -> tuple[Operation, ...]:
    """In the order in which they run, loops written out."""
    return tuple(flattened(schedule(name).body))


def transfers(name: str, medium: str = "fabric") -> list[DeviceTransfer]:
    return [
        one.transfer
        for one in operations(name)
        if isinstance(one, Start) and one.transfer.medium == medium
    ]


def computes(name: str, kind: str) -> list[Compute]:
    return [one for one in operations(name) if isinstance(one, Compute) and one.kind == kind]


def collectives(name: str) -> dict[tuple[str, tuple[str, ...], int], tuple[int, int]]:
    """(kind, axes, size) -> count and payload bytes."""
    return {
        (one.kind, one.axes, one.group_size): (one.count, one.payload_bytes)
        for one in counts(name).collectives
    }
