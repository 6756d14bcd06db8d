"""What a fusion holds: matrix products, and the collectives that compilers hide in fusions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from automesh.hlo.kinds import ASYNC_DONE, ASYNC_START, kind_of
from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.schedule.nouns import Matmul
from automesh.hlo.work.flops import flops_of, matmul_of
from automesh.hlo.work.fusion_traffic import users_of
from automesh.hlo.work.uncounted import unpriced_arithmetic

_MOVES = frozenset({"bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element"})


@dataclass(frozen=True, slots=True)
class Held:
    """A collective and the computation that it stands in."""

    computation: Computation
    instruction: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The work inside one fusion, fusions in it included.

    Attributes:
      uncounted: what has no price in it, in words; see `unpriced_arithmetic`.
      starts, finishes: it begins, or ends, an asynchronous collective of a TPU.
    """

    matmuls: tuple[Matmul, ...]
    flops: int
    collectives: tuple[Held, ...]
    uncounted: tuple[str, ...]
    starts: bool
    finishes: bool


def contents_of(module: Module, fusion: Instruction) -> Contents:
    """Looks into a fusion."""
    matmuls: list[Matmul] = []
    flops = 0
    collectives: list[Held] = []
    targets: set[str] = set()
    uncounted: set[str] = set()
    for body, instruction in _instructions(module, fusion):
        product = matmul_of(body, instruction)
        if product is not None:
            matmuls.append(product)
            flops += flops_of(body, instruction)
        elif kind_of(instruction):
            collectives.append(Held(body, instruction))
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


def amounts_to(held: Held) -> str:
    """The kind of a collective in a fusion: an all-reduce of which only a part is kept scatters.

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
