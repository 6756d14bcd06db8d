"""Computes the memory of a step: which buffers live together at each of its points.

The program is walked in the order of its trace, and once more with every operation as late as
possible: compilers choose something in between. A buffer lives from the operation that fills it to
the last one that reads it. A result of the same size may reuse it, if its operation may write where
it reads. Loops keep each carried value in one buffer; values that they pass on unchanged cost
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from automesh.collectives import KINDS
from automesh.cost.terms import Footprint, LivenessPoint, Monomial, Sum, value_of
from automesh.ir.graph import Block, Graph, Operation, Value, added, total_bytes, used_in
from automesh.ir.memory.cpu import CpuBufferModel
from automesh.ir.memory.order import COPY, BufferModel, Order, Step
from automesh.ir.memory.tpu import TpuBufferModel
from automesh.ir.op_kinds import VIEWS
from automesh.ir.passes.offload import is_move, is_to_host

# Operations that may write their result over an operand of the same size; of some only the first.
_UPDATES = frozenset(("dynamic_update_slice", "scatter"))
_NEVER_IN_PLACE = frozenset(
    (
        "dot_general", "convolution", "ragged_dot", "custom_call", "fft", "reduce", "reduce_window",
        "gather", "dynamic_slice", "slice", "sort", "top_k", "transpose", "concatenate", "pad",
        "reverse", "broadcast_in_dim", "iota", "constant", "select_and_scatter", "all_slice",
        "while", COPY,
        *(kind.stablehlo for kind in KINDS if kind.stablehlo and not kind.is_in_place),
    )
)  # fmt: skip
_Live = dict[tuple[tuple[str, int], ...], float]


@dataclass(eq=False, slots=True, kw_only=True)
class _Buffer:
    """A piece of memory.

    Attributes:
      bytes: on one device.
      is_writable: False for arguments that the program must not change.
      is_counted: True while it adds to the live bytes; never if an outer block counts it.
      is_taken: True once another value has reused it; only the first of several can.
      last: position in the block of the last operation that needs it.
      home: the outer block's buffer that contains it.
    """

    bytes: Monomial
    is_writable: bool = True
    is_counted: bool = False
    is_taken: bool = False
    last: int = -1
    home: _Buffer | None = None


def walk(
    top: Block, takeovers: Mapping[int, int], compiler: BufferModel, order: Order
) -> list[LivenessPoint]:
    """Finds the temporaries that live at each operation of a program.

    Args:
      takeovers: position of an output -> position of the argument whose memory it reuses.
    """
    reused = {top.arguments[argument] for argument in takeovers.values()}
    seen = {
        argument: (_Buffer(bytes=compiler.kept_bytes(argument), is_writable=argument in reused),)
        for argument in top.arguments
    }
    places: dict[Value, _Buffer] = {}
    for position, value in enumerate(top.returned):
        argument = takeovers.get(position)
        free = _Buffer(bytes=compiler.kept_bytes(value))
        places[value] = free if argument is None else seen[top.arguments[argument]][0]
    points: list[LivenessPoint] = []
    _BlockWalk(compiler, order, top, seen, places, {}, points).run()
    return points


class _BlockWalk:
    """The walk through one block: its buffers and their lifetimes.

    Args:
      seen: buffers of the values that come from outside.
      places: buffers of an outer block for returned values.
      live: bytes that live outside while the block runs.
      points: the result, filled by the walk.
    """

    def __init__(
        self,
        compiler: BufferModel,
        order: Order,
        block: Block,
        seen: Mapping[Value, tuple[_Buffer, ...]],
        places: Mapping[Value, _Buffer],
        live: _Live,
        points: list[LivenessPoint],
    ) -> None:
        self._compiler, self._points = compiler, points
        self._order: Order = order
        self._steps = compiler.steps(block, order)
        self._returned = block.returned
        self._buffers = dict(seen)
        self._places = {value: place for value, place in places.items() if value not in seen}
        self._live = dict(live)
        self._dying: dict[int, list[_Buffer]] = {}
        self._own: dict[Step, list[tuple[Value, _Buffer]]] = {}

    def run(self) -> None:
        self._place_updated()
        for step in self._steps:
            self._bind(step)
        self._find_last_uses()
        for place, step in enumerate(self._steps):
            if self._runs(step):
                self._step(place, step)

    # The buffers of each value.

    def _place_updated(self) -> None:
        """Makes arrays whose elements are replaced last where the result has to be."""
        made = {result for step in self._steps for result in step.results}
        for step in reversed(self._steps):
            if step.name not in _UPDATES or len(step.results) != 1:
                continue
            before, result = step.operands[0], step.results[0]
            is_alone = len(before.users) == 1 and before not in self._returned
            is_own = before in made and before in self._compiler.stored
            if result in self._places and is_alone and is_own and before.bytes == result.bytes:
                self._places.setdefault(before, self._places[result])

    def _bind(self, step: Step) -> None:
        """Assigns buffers to the results of a step."""
        is_view = step.name in VIEWS
        for number, result in enumerate(step.results):
            start = step.operands[number : number + 1]
            if step.passes_on(number) or (is_view and len(self._read(start)) == 1):
                self._buffers[result] = self._read(start)
            elif self._is_stored(step, result):
                buffer = _Buffer(
                    bytes=self._compiler.kept_bytes(result),
                    is_writable=not _is_copied_from_host(step.operation),
                )
                self._buffers[result] = (buffer,)
                self._own.setdefault(step, []).append((result, buffer))
            else:
                self._buffers[result] = self._read(step.operands)

    def _is_stored(self, step: Step, result: Value) -> bool:
        return result in self._compiler.stored or result in self._places or bool(step.bodies)

    def _runs(self, step: Step) -> bool:
        """Whether the step runs by itself; False if it is computed where its result is read."""
        return step in self._own or bool(step.bodies)

    def _read(self, values: Sequence[Value]) -> tuple[_Buffer, ...]:
        if len(values) == 1:
            return self._buffers.get(values[0], ())
        found: dict[_Buffer, None] = {}
        for value in values:
            found.update(dict.fromkeys(self._buffers.get(value, ())))
        return tuple(found)

    # The last use of each buffer.

    def _find_last_uses(self) -> None:
        for place, step in enumerate(self._steps):
            if not self._runs(step):
                continue
            for buffer in self._needed(step):
                buffer.last = max(buffer.last, place)
        for buffer in self._read(self._returned):
            buffer.last = len(self._steps)

    def _needed(self, step: Step) -> tuple[_Buffer, ...]:
        values = list(step.operands)
        values.extend(value for value in used_in(step.bodies) if value in self._buffers)
        return self._read(values)

    # The bytes that live while steps run.

    def _step(self, place: int, step: Step) -> None:
        if step.name == "while":
            self._loop(place, step)
        elif step.bodies:
            self._branches(place, step)
        else:
            for result, buffer in self._own.get(step, ()):
                self._settle(place, step, result, buffer)
            self._point(step)
        for buffer in self._dying.pop(place, ()):
            self._drop(buffer)

    def _settle(self, place: int, step: Step, result: Value, buffer: _Buffer) -> None:
        """Finds memory for a result: its assigned place, a dying operand's, or new memory."""
        dying = [one for one in self._overwritten(step) if one.last == place]
        home = self._places.get(result)
        if home is not None and (
            home.last < place or any(one is home or one.home is home for one in dying)
        ):
            buffer.home = home
            return
        for one in dying:
            if one.is_writable and not one.is_taken and one.bytes == buffer.bytes:
                self._take_over(one, buffer)
                return
        self._count(buffer, place)

    def _overwritten(self, step: Step) -> tuple[_Buffer, ...]:
        if step.name in _UPDATES:
            return self._read(step.operands[:1])
        if step.name == "all_reduce" and not self._compiler.reduces_in_place:
            return ()
        if step.name == "case":  # A branch may write its result over what it was given.
            return self._needed(step)
        if step.name in _NEVER_IN_PLACE:
            return ()
        if self._compiler.overwrites_moved:
            return self._read(step.operands)
        moved = self._moved(step)
        return tuple(one for one in self._read(step.operands) if one not in moved)

    def _moved(self, step: Step) -> set[_Buffer]:
        """Finds the buffers of which a step reads elements at other places than those it makes."""
        found: set[_Buffer] = set()
        waiting, seen = list(step.operands), set[Value]()
        while waiting:
            value = waiting.pop()
            made = value.producer
            if value in seen or made is None or self._is_own(value):
                continue
            seen.add(value)
            if made.name in _NEVER_IN_PLACE:
                found.update(self._read(made.operands))
            else:
                waiting += made.operands
        return found

    def _is_own(self, value: Value) -> bool:
        """Whether a value is in memory, and not computed where it is read."""
        return value in self._compiler.stored or value in self._places

    def _take_over(self, dying: _Buffer, buffer: _Buffer) -> None:
        dying.is_taken = True
        if dying.is_counted:
            self._drop(dying)
            self._count(buffer, -1)
        else:
            buffer.home = dying.home or dying
            buffer.home.last = max(buffer.home.last, buffer.last)

    def _count(self, buffer: _Buffer, place: int = -1) -> None:
        if buffer.is_counted:
            return
        buffer.is_counted = True
        powers = buffer.bytes.powers
        self._live[powers] = self._live.get(powers, 0.0) + buffer.bytes.coefficient
        self._dying.setdefault(max(buffer.last, place), []).append(buffer)

    def _drop(self, buffer: _Buffer) -> None:
        if buffer.is_counted:
            buffer.is_counted = False
            self._live[buffer.bytes.powers] -= buffer.bytes.coefficient

    def _point(self, step: Step) -> None:
        total = tuple(
            Monomial(coefficient=coefficient, powers=powers)
            for powers, coefficient in sorted(self._live.items())
            if coefficient > 0
        )
        self._points.append(LivenessPoint(bytes=total, source=step.operation.source))

    # Loops and branches.

    def _loop(self, place: int, loop: Step) -> None:
        (body,) = loop.bodies
        seen: dict[Value, tuple[_Buffer, ...]] = {}
        places: dict[Value, _Buffer] = {}
        for number, (start, argument) in enumerate(zip(loop.operands, body.arguments)):
            result = loop.results[number]
            if loop.passes_on(number):
                seen[argument] = tuple(_outer_buffer(b, False) for b in self._read([start]))
                continue
            carried = self._buffers[result][0]
            self._bind_initial_value(place, start, result, carried)
            inside = _outer_buffer(carried, True)
            seen[argument] = (inside,)
            places.setdefault(body.returned[number], inside)
        self._point(loop)
        self._drop_initial_values(place, loop)
        self._inside(body, seen, places)

    def _drop_initial_values(self, place: int, loop: Step) -> None:
        """Drops the initial values of carries, which are copied into the carries by now."""
        (body,) = loop.bodies
        lasting = [value for number, value in enumerate(loop.operands) if loop.passes_on(number)]
        lasting.extend(value for value in used_in([body]) if value in self._buffers)
        kept = {
            *self._read(lasting),
            *(
                self._buffers[result][0]
                for number, result in enumerate(loop.results)
                if not loop.passes_on(number)
            ),
        }
        for buffer in self._dying.get(place, ()):
            if buffer not in kept:
                self._drop(buffer)

    def _bind_initial_value(
        self, place: int, start: Value, result: Value, carried: _Buffer
    ) -> None:
        """Puts the first value of a carry into the loop's buffer."""
        before = self._read([start])
        ends = len(before) == 1 and before[0].last == place and before[0].is_writable
        if ends and not before[0].is_taken and before[0].bytes == carried.bytes:
            self._take_over(before[0], carried)
            return
        home = self._places.get(result)
        if home is not None and home.last < place:
            carried.home = home
            return
        self._count(carried, place)

    def _branches(self, place: int, case: Step) -> None:
        places: list[_Buffer] = []
        for result in case.results:
            buffer = self._buffers[result][0]
            self._settle(place, case, result, buffer)
            places.append(_outer_buffer(buffer, True))
        for body in case.bodies:
            inputs = case.operands[len(case.operands) - len(body.arguments) :]
            seen = {
                argument: tuple(_outer_buffer(b, False) for b in self._read([value]))
                for argument, value in zip(body.arguments, inputs)
            }
            self._point(case)
            self._inside(body, seen, dict(zip(body.returned, places)))

    def _inside(
        self,
        body: Block,
        seen: dict[Value, tuple[_Buffer, ...]],
        places: dict[Value, _Buffer],
    ) -> None:
        for value in used_in([body]):
            if value in self._buffers:
                seen[value] = tuple(_outer_buffer(b, False) for b in self._buffers[value])
        _BlockWalk(self._compiler, self._order, body, seen, places, self._live, self._points).run()


def _is_copied_from_host(operation: Operation) -> bool:
    """Whether an operation copies a value from the host.

    A result that is computed from such a copy does not reuse its memory (programs of libtpu
    0.0.52).
    """
    return is_move(operation) and not is_to_host(operation) and operation.operands[0].on_host


def _outer_buffer(buffer: _Buffer, is_writable: bool) -> _Buffer:
    """Makes the view of a buffer for an inner block."""
    return _Buffer(bytes=buffer.bytes, is_writable=is_writable)


# Finds the points of a program that can be the peak on some mesh.

Powers = tuple[tuple[str, int], ...]
_ROUNDING_BYTES = 0.5
_FEW = 16  # up to so many points are compared one by one, which is as fast


def undominated(points: Sequence[LivenessPoint]) -> tuple[LivenessPoint, ...]:
    """Removes every point that another one reaches (is at least as large) on every mesh."""
    distinct = {point.bytes: point for point in points if point.bytes}
    powers = sorted({one.powers for total in distinct for one in total})
    small = {axis: 2 for one in powers for axis, _ in one}
    kept = _Reachability(powers)
    # A point that reaches another on all meshes also does on the mesh with all sizes 2.
    for point in sorted(distinct.values(), key=lambda p: -value_of(p.bytes, small)):
        if not any(_reaches(other.bytes, point.bytes) for other in kept.candidates(point)):
            kept.points.append(point)
    return tuple(kept.points)


class _Reachability:
    """Points that no other one reaches, with an index that quickly excludes most comparisons.

    `_reaches` lets terms cover only terms that grow no faster. So, for any powers, the coefficients
    of the terms that grow at least as fast must sum to as much in the larger sum as in the smaller.

    Args:
      powers: of all terms of all points.
    """

    def __init__(self, powers: Sequence[Powers]) -> None:
        self.points: list[LivenessPoint] = []
        self._columns = {one: number for number, one in enumerate(powers)}
        self._grow: NDArray[np.float64] | None = None
        self._rows = np.empty((_FEW, len(powers)))
        self._filled = 0

    def candidates(self, point: LivenessPoint) -> Sequence[LivenessPoint]:
        """Returns all kept points that may reach this one."""
        if len(self.points) <= _FEW:
            return self.points
        for kept in self.points[self._filled :]:
            if self._filled == len(self._rows):
                self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
            self._rows[self._filled] = self._coefficients_above(kept.bytes)
            self._filled += 1
        # Every term may have a rounding error.
        least = self._coefficients_above(point.bytes) * (1 - 1e-9) - _ROUNDING_BYTES * (
            len(point.bytes) + 1
        )
        above = (self._rows[: self._filled] >= least).all(axis=1)
        return [self.points[number] for number in np.flatnonzero(above)]

    def _coefficients_above(self, total: Sum) -> NDArray[np.float64]:
        """Sums, per product of powers, the coefficients of terms that grow as fast or faster."""
        if self._grow is None:
            columns = list(self._columns)
            self._grow = np.array(
                [[_grows_faster(one, other) for other in columns] for one in columns], float
            )
        worth = np.zeros(len(self._columns))
        for one in total:
            worth += one.coefficient * self._grow[self._columns[one.powers]]
        return worth


def _reaches(larger: Sum, smaller: Sum) -> bool:
    """Whether `larger` is provably at least `smaller` for all sizes from 1 on.

    Every term of `smaller` is covered by terms of `larger` that grow at least as fast with every
    axis; those that fit most closely first.
    """
    left = {one.powers: one.coefficient for one in larger}
    rest: list[tuple[Powers, float]] = []
    for one in smaller:
        missing = one.coefficient - left.get(one.powers, 0.0)
        left[one.powers] = max(0.0, -missing)
        if missing > 0:
            rest.append((one.powers, missing))
    for powers, missing in rest:
        above = sorted((p for p in left if _grows_faster(p, powers)), key=lambda p: _total(p))
        for one in above:
            used = min(missing, left[one])
            left[one] -= used
            missing -= used
        # Sums of the same floats in another order differ in the last digits.
        if missing > _ROUNDING_BYTES:
            return False
    return True


@lru_cache(maxsize=1 << 16)
def _grows_faster(one: Powers, other: Powers) -> bool:
    first, second = dict(one), dict(other)
    return all(first.get(a, 0) >= second.get(a, 0) for a in first.keys() | second.keys())


def _total(powers: Powers) -> int:
    return sum(power for _, power in powers)


def memory_points(graph: Graph, *, stored: Collection[Value], platform: str) -> Footprint:
    """Finds what the program keeps in memory at each of its points.

    Args:
      graph: after the rewrites of the platform's compiler.
      stored: values that get a buffer of their own; all others are computed where they are read.
      platform: cpu, gpu, tpu or none.
    """
    if platform == "cpu":  # On CPUs both are the same memory.
        graph = replace(graph, host=(), host_outputs=())
    takeovers = _takeovers(graph)
    compiler = _MODELS.get(platform, BufferModel)(stored, dict(graph.mesh))
    points: list[LivenessPoint] = []
    for order in compiler.orders:
        points.extend(walk(graph.top, takeovers, compiler, order))
    on_device = [a for n, a in enumerate(graph.top.arguments) if n not in graph.host]
    outputs = [v for n, v in enumerate(graph.top.returned) if n not in graph.host_outputs]
    own = [v for n, v in enumerate(graph.top.returned) if n not in takeovers]
    padding = _padding([*on_device, *own], compiler)
    nothing = (LivenessPoint(bytes=()),) if padding else ()
    return Footprint(
        points=tuple(_with(padding, point) for point in undominated(points) or nothing),
        argument_bytes=total_bytes(on_device),
        output_bytes=total_bytes(outputs),
        on_chip_bytes=compiler.on_chip_bytes,
        reread_bytes=total_bytes(one for one in on_device if _is_read_again(one)),
        alias_bytes=total_bytes(
            [
                graph.top.returned[output]
                for output, argument in takeovers.items()
                if output not in graph.host_outputs and argument not in graph.host
            ]
        ),
    )


def _is_read_again(value: Value) -> bool:
    """Whether several operations read a value, or a loop does."""
    return len(set(value.users)) > 1 or any(user.bodies for user in value.users)


_MODELS: Mapping[str, type[BufferModel]] = {"cpu": CpuBufferModel, "tpu": TpuBufferModel}


def _padding(lasting: Sequence[Value], compiler: BufferModel) -> Sum:
    """Counts what arguments and outputs take in addition to their elements."""
    return added(
        *(
            replace(kept, coefficient=kept.coefficient - value.device_bytes.coefficient)
            for value in lasting
            if (kept := compiler.kept_bytes(value)) != value.device_bytes
        )
    )


def _with(padding: Sum, point: LivenessPoint) -> LivenessPoint:
    return replace(point, bytes=added(*point.bytes, *padding)) if padding else point


def _takeovers(graph: Graph) -> dict[int, int]:
    """Maps each output to the argument whose memory it reuses.

    A donated argument goes to the first output of its shape, type and sharding, as jax pairs them.
    """
    pairs = {output: argument for argument, output in graph.aliased}
    taken = set(pairs.values())
    free: dict[tuple[object, ...], list[int]] = {}
    for position in graph.donated:
        if position not in taken and position not in graph.host:
            free.setdefault(_kind(graph.top.arguments[position]), []).append(position)
    for position, value in enumerate(graph.top.returned):
        if position in graph.host_outputs:
            continue
        if position not in pairs and (waiting := free.get(_kind(value))):
            pairs[position] = waiting.pop(0)
    return pairs


def _kind(value: Value) -> tuple[object, ...]:
    return (value.shape, value.dtype, value.axes)
