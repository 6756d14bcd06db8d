"""Which starts of transfers an operation waits for, across loops.

A compiler may start a transfer in one trip of a loop and finish it in the next, or before the loop
and in it, or in it and after it. The handle then travels as a member of the loop's state. All
places through which one handle can travel make a lane.
"""

from __future__ import annotations

from automesh.hlo.nouns import Computation, Instruction, Module

_SAME = frozenset({"bitcast", "copy", "opt-barrier", "async-update"})
_WHOLE = -1
# An instruction's value, or one member of its tuple.
_Place = tuple[int, int]


class Lanes:
    """The lanes of a module, found once by joining places that hold the same handle."""

    def __init__(self, module: Module) -> None:
        self._leaders: dict[_Place, _Place] = {}
        self._names: dict[_Place, str] = {}
        for computation in module.computations.values():
            if not computation.is_fusion:
                for instruction in computation.instructions.values():
                    self._follow(module, computation, instruction)

    def of_start(self, start: Instruction) -> str:
        """The lane that the handle of `start` enters; it is called after the first start asked."""
        return self._names.setdefault(self._leader((start.id, _WHOLE)), start.name)

    def of_done(self, done: Instruction) -> str:
        """The lane that `done` waits for."""
        handle = (done.operands[0], _WHOLE)
        return self._names.setdefault(self._leader(handle), f"into {done.name}")

    def join(self, one: Instruction, other: Instruction) -> None:
        """Makes two handles travel together."""
        self._join((one.id, _WHOLE), (other.id, _WHOLE))

    def _follow(self, module: Module, computation: Computation, instruction: Instruction) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "get-tuple-element":
            self._join((instruction.id, _WHOLE), (operands[0], instruction.tuple_index))
        elif opcode == "tuple":
            for index, operand in enumerate(operands):
                self._join((instruction.id, index), (operand, _WHOLE))
        elif opcode in _SAME:
            self._join_values(instruction, computation.instructions[operands[0]])
        elif opcode == "while":
            self._join_values(instruction, computation.instructions[operands[0]])
            for callee in module.called(instruction):
                self._join_values(instruction, callee.parameters()[0])
            self._join_values(instruction, module.called(instruction)[0].root_instruction)
        elif opcode == "call":
            callee = module.called(instruction)[0]
            self._join_values(instruction, callee.root_instruction)
            for number, parameter in callee.parameters().items():
                self._join_values(parameter, computation.instructions[operands[number]])

    def _join_values(self, one: Instruction, other: Instruction) -> None:
        self._join((one.id, _WHOLE), (other.id, _WHOLE))
        for index in range(len(one.shape.elements)):
            self._join((one.id, index), (other.id, index))

    def _join(self, one: _Place, other: _Place) -> None:
        self._leaders[self._leader(one)] = self._leader(other)

    def _leader(self, place: _Place) -> _Place:
        path: list[_Place] = []
        while (above := self._leaders.setdefault(place, place)) != place:
            path.append(place)
            place = above
        for passed in path:
            self._leaders[passed] = place
        return place
