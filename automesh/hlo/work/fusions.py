"""Finds the contents of a fusion: matrix products and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from automesh.hlo.kinds import ASYNC_DONE, ASYNC_START, kind_of
from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.schedule.nouns import ScheduledMatmul
from automesh.hlo.work.flops import flops_of, matmul_of
from automesh.hlo.work.fusion_traffic import users_of
from automesh.hlo.work.uncounted import unpriced_arithmetic

_MOVES = frozenset({"bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element"})


@dataclass(frozen=True, slots=True)
class FusedCollective:
    """A collective and the computation that contains it."""

    computation: Computation
    instruction: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The work inside one fusion, including nested fusions.

    Attributes:
      uncounted: parts without a price, in words; see `unpriced_arithmetic`.
      starts, finishes: it begins, or ends, an asynchronous collective of a TPU.
    """

    matmuls: tuple[ScheduledMatmul, ...]
    flops: int
    collectives: tuple[FusedCollective, ...]
    uncounted: tuple[str, ...]
    starts: bool
    finishes: bool


def contents_of(module: Module, fusion: Instruction) -> Contents:
    """Reads the contents of a fusion."""
    matmuls: list[ScheduledMatmul] = []
    flops = 0
    collectives: list[FusedCollective] = []
    targets: set[str] = set()
    uncounted: set[str] = set()
    for body, instruction in _instructions(module, fusion):
        product = matmul_of(body, instruction)
        if product is not None:
            matmuls.append(product)
            flops += flops_of(body, instruction)
        elif kind_of(instruction):
            collectives.append(FusedCollective(body, instruction))
        elif instruction.opcode == "custom-call":
            targets.add(instruction.target)
        uncounted.add(unpriced_arithmetic(instruction.opcode, instruction.target))
    return Contents(
        matmuls=tuple(matmuls),
        flops=flops,
        collectives=tuple(collectives),
        uncounted=tuple(sorted(uncounted - {""})),
        starts=ASYNC_START in targets,
        finishes=ASYNC_DONE in targets,
    )


def amounts_to(held: FusedCollective) -> str:
    """Returns the kind of a fused collective; an all-reduce and a slice are a reduce-scatter.

    TPU compilers write a reduce-scatter as an all-reduce and a slice of its result.
    """
    kind = kind_of(held.instruction)
    if kind != "all-reduce":
        return kind
    users = users_of(held.computation)
    taken = _final_users(held.instruction, users)
    is_sliced = bool(taken) and all(one.opcode == "dynamic-slice" for one in taken)
    return "reduce-scatter" if is_sliced else kind


def _final_users(value: Instruction, users: dict[int, list[Instruction]]) -> list[Instruction]:
    found: list[Instruction] = []
    for user in users[value.id]:
        found += _final_users(user, users) if user.opcode in _MOVES else [user]
    return found


def _instructions(module: Module, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    body = module.computations[fusion.called[0]]
    for instruction in body.instructions.values():
        yield body, instruction
        if instruction.opcode == "fusion":
            yield from _instructions(module, instruction)
