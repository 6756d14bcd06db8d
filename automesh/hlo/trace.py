"""Follows a value back to where it was computed, through fusions, calls, tuples and copies."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.hlo.nouns import Computation, Instruction, Module

_SAME_VALUE = frozenset({"bitcast", "copy", "reshape", "opt-barrier"})
_INTO = frozenset({"fusion", "call"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An instruction as one caller sees it.

    Attributes:
      arguments: what the parameters of `computation` stand for; None if the caller is not followed.
    """

    computation: Computation
    instruction: Instruction
    arguments: tuple[Place, ...] | None = None

    def operand(self, index: int) -> Place:
        """The place of one operand."""
        operand = self.computation.instructions[self.instruction.operands[index]]
        return Place(computation=self.computation, instruction=operand, arguments=self.arguments)

    def operands(self) -> tuple[Place, ...]:
        return tuple(self.operand(index) for index in range(len(self.instruction.operands)))


def origin(module: Module, place: Place) -> Place:
    """The place where the value at `place` is really computed.

    It is the same value up to shape and layout: copies, bitcasts, reshapes, tuples and the borders
    of fusions and calls are passed.
    """
    while True:
        instruction = place.instruction
        if instruction.opcode in _SAME_VALUE:
            place = place.operand(0)
        elif instruction.opcode == "parameter" and place.arguments is not None:
            place = place.arguments[instruction.parameter]
        elif instruction.opcode in _INTO:
            callee = module.computations[instruction.called[0]]
            place = Place(
                computation=callee,
                instruction=callee.root_instruction,
                arguments=place.operands(),
            )
        elif instruction.opcode == "get-tuple-element":
            source = origin(module, place.operand(0))
            if source.instruction.opcode != "tuple":
                return Place(
                    computation=place.computation,
                    instruction=instruction,
                    arguments=place.arguments,
                )
            place = source.operand(instruction.tuple_index)
        else:
            return place


def element(module: Module, place: Place, index: int) -> Place | None:
    """The place where member `index` of the tuple at `place` is computed; None if not visible."""
    source = origin(module, place)
    if source.instruction.opcode != "tuple":
        return None
    return origin(module, source.operand(index))
