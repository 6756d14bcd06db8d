"""Traces a value back to where it is computed, through fusions, calls, tuples and copies."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.hlo.nouns import Computation, Instruction, Module

_SAME_VALUE = frozenset({"bitcast", "copy", "reshape", "opt-barrier"})
_INTO = frozenset({"fusion", "call"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledInstruction:
    """An instruction as one caller sees it.

    Attributes:
      arguments: the values of the parameters of `computation`; None if the caller is unknown.
    """

    computation: Computation
    instruction: Instruction
    arguments: tuple[CalledInstruction, ...] | None = None

    def operand(self, index: int) -> CalledInstruction:
        """Returns the place of one operand."""
        operand = self.computation.instructions[self.instruction.operands[index]]
        return CalledInstruction(
            computation=self.computation, instruction=operand, arguments=self.arguments
        )

    def operands(self) -> tuple[CalledInstruction, ...]:
        return tuple(self.operand(index) for index in range(len(self.instruction.operands)))


def origin(module: Module, place: CalledInstruction) -> CalledInstruction:
    """Returns the place where the value at `place` is really computed.

    It is the same value up to shape and layout: the search passes through copies, bitcasts,
    reshapes, tuples, fusions and calls.
    """
    while True:
        instruction = place.instruction
        if instruction.opcode in _SAME_VALUE:
            place = place.operand(0)
        elif instruction.opcode == "parameter" and place.arguments is not None:
            place = place.arguments[instruction.parameter]
        elif instruction.opcode in _INTO:
            callee = module.computations[instruction.called[0]]
            place = CalledInstruction(
                computation=callee,
                instruction=callee.root_instruction,
                arguments=place.operands(),
            )
        elif instruction.opcode == "get-tuple-element":
            source = origin(module, place.operand(0))
            if source.instruction.opcode != "tuple":
                return CalledInstruction(
                    computation=place.computation,
                    instruction=instruction,
                    arguments=place.arguments,
                )
            place = source.operand(instruction.tuple_index)
        else:
            return place


def element(module: Module, place: CalledInstruction, index: int) -> CalledInstruction | None:
    """Returns the place where member `index` of a tuple is computed; None if not visible."""
    source = origin(module, place)
    if source.instruction.opcode != "tuple":
        return None
    return origin(module, source.operand(index))
