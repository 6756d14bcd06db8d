"""Turns a partitioned MLIR module into a `Graph` (jax).

All calls are inlined. `Operation.name` is that of StableHLO, CHLO or Shardy without the dialect;
`attributes` hold, as plain tuples, ints, floats and strings:

  dot_general, ragged_dot   lhs_batch, rhs_batch, lhs_contracting, rhs_contracting: dimensions;
                            ragged_dot also lhs_ragged, rhs_group; dot_general also declared:
                            axes that split left side, right side and result before reshards
                            were inserted, None where unknown
  convolution               lhs_batch, lhs_feature, lhs_spatial, rhs_input, rhs_output, rhs_spatial,
                            out_batch, out_feature, out_spatial: dimensions; feature_groups,
                            batch_groups; window: a `WindowDimension` for each spatial dimension
  broadcast_in_dim          dims
  transpose                 perm
  reduce                    dims, reducer
  reduce_window             window: the sizes; reducer
  scatter                   reducer; unique, sorted: bools; update_window_dims,
                            inserted_window_dims, scatter_dims
  gather                    slice_sizes, offset_dims, collapsed_dims, start_dims, sorted
  dynamic_slice             sizes
  slice                     start, limit, stride
  pad                       low, high, interior
  concatenate, sort, iota   dim
  top_k                     dim
  compare                   direction
  constant                  splat: the number if all elements are the same, else None
  custom_call               target, config: the backend's text; cost: {"flops", "bytes_accessed",
                            "transcendentals"} if it states them, as a Pallas kernel may, at the
                            sampled sizes; cost_terms: the same as sums, at all sizes; counted:
                            what `program.kernels` notes of a kernel in which it counted them;
                            placement: memory that a value is moved to (`pinned_host`, `device`);
                            aliases: (output, operand) positions that share memory
  while                     condition_source; the body's arguments pair up with operands and results
                            (a condition that reads arrays is computed in front of the loop and at
                            the end of its body, by operations with the attribute in_condition; the
                            last value that is carried is then what it says)
  case                      bodies are the branches (those of `if`: true, false); values of the
                            surrounding block are used directly

Collectives (all_gather, all_slice, reduce_scatter, all_reduce, all_to_all, collective_permute):
  axes                      mesh axes that they run over, in the order of the mesh; empty: they move
                            nothing
  per_dimension             all_gather, all_slice, reduce_scatter: per dimension, the axes gathered
                            or scattered there
  reducer                   add, maximum ... of reductions in manual regions (Shardy's always add)
  manual                    True if the program itself states it, in a manual region
  group                     devices of one group at the sampled sizes
  split_dim, concat_dim     all_to_all of manual regions
  pairs                     collective_permute of manual regions: (source, target) partitions
  exact                     False if its groups are no product of whole axes: `axes` are then those
                            that its members differ in

`enter_manual` and `leave_manual` stand where values enter and leave a `shard_map`: views that move
nothing, one operation for all values. Between them a value has the shape that one device holds over
the manual axes (`Value.manual`); its `axes` name the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from automesh.cost.terms import Sum
from automesh.ir.graph import IN_CONDITION, Block, Graph, Operation, Value
from automesh.sharding.attribute_names import COST, DIMENSIONS, FIXED, TRIPS
from automesh.sharding.mlir.attributes import AttributeReader
from automesh.sharding.mlir.axes import MeshReader
from automesh.sharding.mlir.locations import SourceReader
from automesh.sharding.mlir.trip_counts import trips
from automesh.sharding.partitioner.top_k import TARGET
from automesh.sharding.passes import bindings, functions_of
from automesh.sharding.size_dependence import ANYHOW, read_dimensions, read_formulas

_RETURNS = frozenset(("func.return", "stablehlo.return", "sdy.return"))
_CALLS = frozenset(("func.call", "call"))
# They only annotate a value and return it.
_SAME = frozenset(
    ("sdy.propagation_barrier", "sdy.sharding_constraint", "sdy.data_flow_edge", "stablehlo.tuple")
)
# Without operands, but not the same on every device or at every time.
_NOT_CONSTANT = frozenset(("partition_id", "replica_id", "custom_call", "rng", "infeed"))


def read_graph(module: Any, sources: dict[Any, str] | None = None) -> Graph:
    """Reads the operation that `passes.partitioned` returns.

    Args:
      sources: see `Prepared`; newly read lines are added.
    """
    with module.context:
        return _Importer(module, sources).graph()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """The scope in which operations are read.

    Attributes:
      values: graph value of each visible MLIR value.
      into: the block that gets the operations.
      manual: mesh axes of the manual regions around them.
    """

    values: dict[Any, Value]
    into: Block
    manual: tuple[str, ...] = ()

    def inside(self, block: Any, arguments: Sequence[Value]) -> _Scope:
        """Makes the scope of an inner block, which sees all values of this one."""
        return replace(
            self, values=self.values | dict(zip(block.arguments, arguments, strict=True))
        )


class _Importer:
    """Walks one module; its `MeshReader` collects the axes that do not split arrays evenly."""

    def __init__(self, module: Any, sources: dict[Any, str] | None) -> None:
        found = bindings()
        self._ir, self._sdy = found.ir, found.sdy
        self._functions = functions_of(module, found.ir)
        self._axes = MeshReader(found, module)
        self._note_fixed(module)
        self._read_attributes = AttributeReader(found, self._axes)
        self._sources = SourceReader(found, sources)
        # MLIR keeps equal types and attributes once, and a program has few that differ.
        self._tensors: dict[Any, tuple[tuple[int, ...], str]] = {}
        self._shardings: dict[Any, Sequence[Any]] = {}
        self._noted: dict[Value, Sequence[tuple[tuple[str, int], ...]]] = {}

    def graph(self) -> Graph:
        main = self._functions["main"]
        block = main.regions[0].blocks[0]
        top = Block()
        scope = _Scope(values={}, into=top)
        given = self._dictionaries(main, "arg_attrs", len(block.arguments))
        for argument, attributes in zip(block.arguments, given, strict=True):
            value = self._value(argument, attributes.get("sdy.sharding"), ())
            scope.values[argument] = value
            top.arguments.append(value)
        top.returned = self._block(block, scope)
        returned = self._dictionaries(main, "res_attrs", len(top.returned))
        return Graph(
            top=top,
            mesh=self._axes.mesh,
            donated=tuple(
                position
                for position, one in enumerate(given)
                if "jax.buffer_donor" in one or "tf.aliasing_output" in one
            ),
            aliased=tuple(
                (position, self._ir.IntegerAttr(one["tf.aliasing_output"]).value)
                for position, one in enumerate(given)
                if "tf.aliasing_output" in one
            ),
            host=_on_host(given),
            host_outputs=_on_host(returned),
            sub_axes=tuple(sorted(self._axes.sub_axes)),
            padded=tuple(sorted(self._axes.padded)),
        )

    def _dictionaries(self, function: Any, name: str, count: int) -> list[dict[str, Any]]:
        if name not in function.attributes:
            return [{} for _ in range(count)]
        entries = self._ir.ArrayAttr(function.attributes[name])
        return [{one.name: one.attr for one in self._ir.DictAttr(entry)} for entry in entries]

    def _value(self, value: Any, sharding: Any, manual: tuple[str, ...]) -> Value:
        shape, dtype = self._tensor(value)
        if sharding is None:
            return Value(shape=shape, dtype=dtype, axes=((),) * len(shape), manual=manual)
        axes, divided, stated, in_part = self._axes.dimensions(sharding, shape, manual)
        return Value(
            shape=divided, dtype=dtype, axes=axes, manual=manual, stated=stated, in_part=in_part
        )

    def _tensor(self, value: Any) -> tuple[tuple[int, ...], str]:
        kind = value.type
        known = self._tensors.get(kind)
        if known is None:
            try:
                tensor = self._ir.RankedTensorType(kind)
            except ValueError:  # A token: it orders effects and takes no memory.
                known = (0,), "i1"
            else:
                known = tuple(tensor.shape), str(tensor.element_type)
            self._tensors[kind] = known
        return known

    def _results(
        self, operation: Any, operands: list[Value], manual: tuple[str, ...]
    ) -> list[Value]:
        attributes = operation.attributes
        if "out_sharding" in attributes:
            # Shardy's own collectives keep the shape. They were inserted after the annotations were
            # made.
            moved = self._value(operation.results[0], attributes["out_sharding"], manual)
            if operands[0] in self._noted:
                self._apply(moved, self._noted[operands[0]])
            return [moved]
        shardings: Sequence[Any] = [None] * len(operation.results)
        if "sdy.sharding" in attributes and len(operation.results):
            stated = attributes["sdy.sharding"]
            shardings = self._shardings.get(stated, ())
            if not shardings:
                shardings = list(self._sdy.TensorShardingPerValueAttr(stated).shardings)
                self._shardings[stated] = shardings
        values = [
            self._value(result, sharding, manual)
            for result, sharding in zip(operation.results, shardings, strict=True)
        ]
        if DIMENSIONS in attributes:
            self._apply_all(attributes, values)
        return values

    def _apply_all(self, attributes: Any, values: list[Value]) -> None:
        noted = read_dimensions(self._ir.StringAttr(attributes[DIMENSIONS]).value)
        for value, dimensions in zip(values, noted, strict=True):
            self._apply(value, dimensions)

    def _apply(self, value: Value, noted: Sequence[tuple[tuple[str, int], ...]]) -> None:
        """Divides the sampled axis sizes out of a shape, into `axes` and `grown`."""
        self._noted[value] = noted
        shape, axes = list(value.shape), list(value.axes)
        grown: list[tuple[str, ...]] = [()] * len(shape)
        free: list[int] = []
        for index, powers in zip(range(len(shape)), noted, strict=False):
            if ANYHOW in powers:
                free.append(index)
                continue
            for axis, power in sorted(powers, key=lambda pair: self._axes.place(pair[0])):
                size = self._axes.size((axis,)) ** abs(power)
                if power < 0:
                    shape[index] *= size
                    axes[index] += (axis,) * -power
                else:
                    shape[index] //= size
                    grown[index] += (axis,) * power
        value.shape, value.axes = tuple(shape), tuple(axes)
        value.grown = tuple(grown) if any(grown) else ()
        value.free = tuple(free)

    def _block(self, block: Any, scope: _Scope) -> list[Value]:
        """Reads the operations of a block; returns the operands of its terminator."""
        for one in block.operations:
            operation = one.operation
            name: str = operation.name
            operands = [scope.values[operand] for operand in operation.operands]
            if name in _RETURNS:
                return operands
            if name in _CALLS or name == "stablehlo.composite":
                results = self._call(operation, operands, scope)
            elif name == "sdy.manual_computation":
                results = self._manual(operation, operands, scope)
            elif name == "sdy.named_computation":
                body = operation.regions[0].blocks[0]
                results = self._block(body, scope.inside(body, operands))
            elif name in _SAME and len(operands) == len(operation.results):
                results = operands
            else:
                results = self._operation(operation, operands, scope)
            scope.values.update(zip(operation.results, results, strict=True))
        return []

    def _call(self, operation: Any, operands: list[Value], scope: _Scope) -> list[Value]:
        key = "callee" if "callee" in operation.attributes else "decomposition"
        callee = self._ir.FlatSymbolRefAttr(operation.attributes[key]).value
        body = self._functions[callee].regions[0].blocks[0]
        # A function sees no values of its caller.
        return self._block(body, replace(scope, values={}).inside(body, operands))

    def _manual(self, operation: Any, operands: list[Value], scope: _Scope) -> list[Value]:
        """Reads a `shard_map`: its body works on the values of one device."""
        attributes, block = operation.attributes, operation.regions[0].blocks[0]
        named = self._sdy.ManualAxesAttr(attributes["manual_axes"])
        inside = self._axes.in_order({*scope.manual, *named})
        entering = self._sdy.TensorShardingPerValueAttr(attributes["in_shardings"]).shardings
        local = [
            self._entering(argument, operand, sharding, inside)
            for argument, operand, sharding in zip(block.arguments, operands, entering, strict=True)
        ]
        source = self._sources.of(operation)
        if local:
            self._append(scope.into, _view("enter_manual", operands, local, source))
        returned = self._block(block, replace(scope.inside(block, local), manual=inside))
        leaving = self._sdy.TensorShardingPerValueAttr(attributes["out_shardings"]).shardings
        results = [
            self._value(result, sharding, scope.manual)
            for result, sharding in zip(operation.results, leaving, strict=True)
        ]
        if DIMENSIONS in attributes:
            self._apply_all(attributes, results)
        self._append(scope.into, _view("leave_manual", returned, results, source))
        return results

    def _entering(
        self, argument: Any, operand: Value, sharding: Any, manual: tuple[str, ...]
    ) -> Value:
        """Makes one device's part of `operand`: the same split, now stated by the program."""
        sizes = dict(self._axes.mesh)
        parts = [operand.dimension(index).at(sizes) for index in range(len(operand.shape))]
        inside = self._value(argument, sharding, manual)
        held = [inside.dimension(index).at(sizes) for index in range(len(inside.shape))]
        if parts == held:
            inside.shape, inside.axes = operand.shape, operand.axes
            inside.grown, inside.free = operand.grown, operand.free
        return inside

    def _operation(self, operation: Any, operands: list[Value], scope: _Scope) -> list[Value]:
        name = str(operation.name).split(".", 1)[1]
        made = Operation(
            name="case" if name == "if" else name,
            operands=operands,
            results=self._results(operation, operands, scope.manual),
            source=self._sources.of(operation),
        )
        made.attributes = self._read_attributes.of(operation, made)
        if made.attributes.get("target") == TARGET:
            made.name, made.attributes = "top_k", {"dim": len(operands[0].shape) - 1}
        self._note_fixed(operation)
        if name == "while":
            found = trips(operation, scope.values)
            made.trips, made.attributes["trips_differ"] = found.count, found.differs
            if TRIPS in operation.attributes:
                (made.trip_formula,) = self._formulas(operation, TRIPS)
            condition = operation.regions[0].blocks[0]
            made.bodies = [self._body(operation.regions[1], made, scope)]
            made.attributes["condition_source"] = self._sources.of(
                condition.operations[-1].operation
            )
            if _reads_arrays(condition):
                self._carry_condition(condition, made, scope)
        elif made.name == "case":
            made.bodies = [self._body(region, None, scope) for region in operation.regions]
        elif COST in operation.attributes:
            stated = made.attributes["cost"]
            formulas = self._formulas(operation, COST)
            made.attributes["cost_terms"] = dict(zip(stated, formulas, strict=True))
        self._append(scope.into, made)
        return made.results[: len(operation.results)]

    def _note_fixed(self, operation: Any) -> None:
        if FIXED in operation.attributes:
            named = self._ir.ArrayAttr(operation.attributes[FIXED])
            self._axes.sub_axes.update(self._ir.StringAttr(one).value for one in named)

    def _formulas(self, operation: Any, key: str) -> list[Sum]:
        return read_formulas(self._ir.StringAttr(operation.attributes[key]).value)

    def _body(self, region: Any, loop: Operation | None, scope: _Scope) -> Block:
        block = region.blocks[0]
        arguments = [
            Value(
                shape=like.shape,
                dtype=like.dtype,
                axes=like.axes,
                manual=scope.manual,
                grown=like.grown,
                free=like.free,
            )
            for like in (loop.results if loop else ())
        ]
        body = Block(arguments=arguments)
        body.returned = self._block(block, replace(scope.inside(block, arguments), into=body))
        return body

    def _carry_condition(self, condition: Any, loop: Operation, scope: _Scope) -> None:
        """Computes a loop's condition where it is evaluated: before the first iteration, and behind
        each one. What it computes is then work like any other."""
        body = loop.bodies[0]
        first = self._condition(condition, loop.operands, scope)
        again = self._condition(condition, body.returned, replace(scope, into=body))
        argument, result = (
            Value(shape=first.shape, dtype=first.dtype, axes=first.axes, manual=first.manual)
            for _ in range(2)
        )
        loop.operands.append(first)
        first.users.append(loop)
        body.arguments.append(argument)
        body.returned.append(again)
        loop.results.append(result)
        result.producer = loop

    def _condition(self, condition: Any, carried: Sequence[Value], scope: _Scope) -> Value:
        begun = len(scope.into.operations)
        (found,) = self._block(condition, scope.inside(condition, carried))
        for one in scope.into.operations[begun:]:
            one.attributes[IN_CONDITION] = True
        return found

    def _append(self, into: Block, made: Operation) -> None:
        into.operations.append(made)
        if not made.bodies and made.name not in _NOT_CONSTANT:
            constant = all(operand.is_constant for operand in made.operands)
            for result in made.results:
                result.is_constant = constant


def _reads_arrays(condition: Any) -> bool:
    """Whether a loop's condition computes with more than single numbers."""
    for one in condition.operations:
        operation = one.operation
        values = (*operation.operands, *operation.results)
        if len(operation.regions) and operation.name != "stablehlo.reduce":
            return True
        if any("x" in str(value.type) for value in values):
            return True
    return False


def _view(name: str, operands: list[Value], results: list[Value], source: str) -> Operation:
    return Operation(name=name, operands=operands, results=results, source=source)


def _on_host(entries: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Returns the positions of the arguments or results in host memory."""
    return tuple(
        position
        for position, one in enumerate(entries)
        if "host" in str(one.get("mhlo.memory_kind", ""))
    )
