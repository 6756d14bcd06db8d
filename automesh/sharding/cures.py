"""Tries cures of findings in a lowered copy of the step (jax).

Each function changes a module before it is partitioned, as the user's change of the script would;
`automesh lint` then estimates the saving. `Cure` has what a cure needs to find its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from automesh.cost.terms import Cure
from automesh.outcomes import Failed
from automesh.program.refused import StepRefused
from automesh.sharding.attribute_names import CARRY
from automesh.sharding.mlir.locations import SourceReader
from automesh.sharding.passes import STAGE, Bindings, bindings, functions_of

_SHARDING, _DONOR = "sdy.sharding", "jax.buffer_donor"
_CONSTRAINT, _RESHAPE, _WHILE = "sdy.sharding_constraint", "stablehlo.reshape", "stablehlo.while"
Split = tuple[tuple[str, ...], ...]


def apply_cure(module: Any, cure: Cure) -> None:
    """Applies a cure to a module in place; the caller has entered the module's context.

    Raises:
      StepRefused: the cure finds no place in this program.
    """
    copy = _Copy(bindings(), module)
    applied = [CURES[one.kind](copy, one) for one in (cure, *cure.also)]
    if not any(applied):
        raise StepRefused(Failed(stage=STAGE, reason=f"the cure `{cure.kind}` has no place in it"))


class _Copy:
    """A lowered program that may be changed."""

    def __init__(self, found: Bindings, module: Any) -> None:
        self.ir, self.sdy = found.ir, found.sdy
        self.module = module
        self.main = functions_of(module, found.ir)["main"]
        self.block = self.main.regions[0].blocks[0]
        self.arguments = self._entries("arg_attrs", len(self.block.arguments))
        self.returned = next(
            one.operation
            for one in self.block.operations
            if one.operation.name in ("func.return", "return")
        )
        self.results = self._entries("res_attrs", len(self.returned.operands))
        self._sources = SourceReader(found)
        self._mesh = next(
            found.ir.StringAttr(one.operation.attributes["sym_name"]).value
            for one in module.regions[0].blocks[0].operations
            if one.operation.name == "sdy.mesh"
        )

    def _entries(self, name: str, count: int) -> list[dict[str, Any]]:
        if name not in self.main.attributes:
            return [{} for _ in range(count)]
        entries = self.ir.ArrayAttr(self.main.attributes[name])
        return [{one.name: one.attr for one in self.ir.DictAttr(entry)} for entry in entries]

    def keep_entries(self) -> None:
        """Writes the attributes of arguments and results back."""
        for name, entries in (("arg_attrs", self.arguments), ("res_attrs", self.results)):
            self.main.attributes[name] = self.ir.ArrayAttr.get(
                [self.ir.DictAttr.get(one) for one in entries]
            )

    def note_replaced(self, argument: int, result: int) -> None:
        """Records that a result now replaces an argument in the next step."""
        if CARRY in self.main.attributes:
            noted = json.loads(self.ir.StringAttr(self.main.attributes[CARRY]).value)
            noted["changed"] = [one for one in noted["changed"] if one[0] != argument]
            noted["pairs"].append((argument, result))
            self.main.attributes[CARRY] = self.ir.StringAttr.get(json.dumps(noted))

    def sharding(self, split: Split) -> Any:
        """Makes the Shardy attribute of a sharding."""
        return self.sdy.TensorShardingAttr.get(
            self._mesh,
            [
                self.sdy.DimensionShardingAttr.get(
                    [self.sdy.AxisRefAttr.get(axis) for axis in axes], is_closed=True
                )
                for axes in split
            ],
        )

    def split_of(self, sharding: Any) -> Split:
        """Returns the mesh axes of each dimension; parts of axes count as the whole axis."""
        dimensions = self.sdy.TensorShardingAttr(sharding).dimension_shardings
        return tuple(
            tuple(
                str(self.sdy.AxisRefAttr(axis).name)
                for axis in self.sdy.DimensionShardingAttr(one).axes
            )
            for one in dimensions
        )

    def shape_of(self, value: Any) -> tuple[int, ...]:
        try:
            return tuple(self.ir.RankedTensorType(value.type).shape)
        except ValueError:  # A token.
            return ()

    def source_of(self, operation: Any) -> str:
        return self._sources.of(operation)

    def operations(self, name: str, root: Any = None) -> Iterator[Any]:
        """Lists all operations with a name, including those in loops."""
        for region in (self.main if root is None else root).regions:
            for block in region.blocks:
                for view in list(block.operations):
                    operation = view.operation
                    if operation.name == name:
                        yield operation
                    yield from self.operations(name, operation)

    def behind(self, value: Any) -> Any:
        """Returns the operation of the step in front of which a value is just made."""
        operations = list(self.block.operations)
        if isinstance(value.owner, self.ir.Block):
            return operations[0].operation
        place = next(n for n, one in enumerate(operations) if one.operation == value.owner)
        return operations[place + 1].operation

    def constrained(self, value: Any, split: Split, before: Any) -> Any:
        """Adds a sharding constraint to a value, in front of an operation."""
        with self.ir.InsertionPoint(before), before.location:
            return self.sdy.ShardingConstraintOp(value, self.sharding(split)).result


def _donate(copy: _Copy, cure: Cure) -> bool:
    for argument in cure.arguments:
        copy.arguments[argument][_DONOR] = copy.ir.BoolAttr.get(True)
    copy.keep_entries()
    return True


def _return_as_given(copy: _Copy, cure: Cure) -> bool:
    """Returns arrays as they were given; constraints that ask for the split of the result go."""
    for argument, result, returned in zip(cure.arguments, cure.results, cure.splits, strict=True):
        shape = copy.shape_of(copy.block.arguments[argument])
        whole: Split = ((),) * len(shape)
        stated = copy.arguments[argument].get(_SHARDING)
        given = copy.sharding(whole) if stated is None else stated
        copy.results[result][_SHARDING] = given
        for operation in copy.operations(_CONSTRAINT):
            wanted = copy.split_of(operation.attributes["sharding"])
            if copy.shape_of(operation.results[0]) == shape and wanted == returned:
                operation.attributes["sharding"] = given
    copy.keep_entries()
    return True


def _split_like(copy: _Copy, cure: Cure) -> bool:
    for argument, result, split in zip(cure.arguments, cure.results, cure.splits, strict=True):
        copy.arguments[argument][_SHARDING] = copy.sharding(split)
        if result >= 0:
            copy.results[result][_SHARDING] = copy.sharding(split)
    copy.keep_entries()
    _forget_constraints(copy, cure)
    return True


def _forget_constraints(copy: _Copy, cure: Cure) -> None:
    """Changes constraints in the step that repeat the old sharding of such an array."""
    new = {
        copy.shape_of(copy.block.arguments[argument]): split
        for argument, split in zip(cure.arguments, cure.splits, strict=True)
    }
    for operation in copy.operations(_CONSTRAINT):
        split = new.get(copy.shape_of(operation.results[0]))
        if split is not None:
            operation.attributes["sharding"] = copy.sharding(split)


def _add_constraints_between(copy: _Copy, cure: Cure) -> bool:
    """Adds constraints in between, in both directions, since a backward pass goes the other way."""
    before, *between, after = cure.splits
    done = False
    for operation in copy.operations(_CONSTRAINT):
        if copy.shape_of(operation.results[0]) != cure.shape:
            continue
        wanted = copy.split_of(operation.attributes["sharding"])
        operand = operation.operands[0]
        owner = operand.owner
        given = None
        if not isinstance(owner, copy.ir.Block) and owner.name == _CONSTRAINT:
            given = copy.split_of(owner.attributes["sharding"])
        is_there = copy.source_of(operation) == cure.source
        if wanted == after and (given == before or (given is None and is_there)):
            way: Sequence[Split] = between
        elif wanted == before and given == after:
            way = between[::-1]
        else:
            continue
        value = operand
        for split in way:
            value = copy.constrained(value, split, operation)
        operation.operands[0] = value
        done = True
    return done


def _constrain_carried(copy: _Copy, cure: Cure) -> bool:
    """Splits all values of a shape that a loop constrains or carries as wanted."""
    (wanted,) = cure.splits
    done = False
    for operation in copy.operations(_CONSTRAINT):
        if copy.shape_of(operation.results[0]) == cure.shape:
            operation.attributes["sharding"] = copy.sharding(wanted)
            done = True
    for loop in copy.operations(_WHILE):
        body = loop.regions[1].blocks[0]
        returned = body.operations[len(body.operations) - 1].operation
        for place, value in enumerate(returned.operands):
            if copy.shape_of(value) == cure.shape and not isinstance(value.owner, copy.ir.Block):
                returned.operands[place] = copy.constrained(value, wanted, returned)
                done = True
    return done


def _interleave(copy: _Copy, cure: Cure) -> bool:
    """Reshapes (batch, ...) to (examples, microbatches, ...), and swaps these two."""
    done = False
    for operation in copy.operations(_RESHAPE):
        before = copy.shape_of(operation.operands[0])
        after = copy.shape_of(operation.results[0])
        if copy.source_of(operation) != cure.source or len(after) != len(before) + 1:
            continue
        place = next(
            (
                d
                for d, size in enumerate(before)
                if after[d] * after[d + 1] == size
                and (*after[:d], *after[d + 2 :]) == (*before[:d], *before[d + 1 :])
            ),
            None,
        )
        if place is None:
            continue
        swapped = list(after)
        swapped[place], swapped[place + 1] = after[place + 1], after[place]
        order = list(range(len(after)))
        order[place], order[place + 1] = place + 1, place
        element = copy.ir.RankedTensorType(operation.results[0].type).element_type
        with copy.ir.InsertionPoint(operation), operation.location:
            made = copy.ir.Operation.create(
                _RESHAPE,
                results=[copy.ir.RankedTensorType.get(swapped, element)],
                operands=[operation.operands[0]],
            )
            turned = copy.ir.Operation.create(
                "stablehlo.transpose",
                results=[operation.results[0].type],
                operands=[made.results[0]],
                attributes={"permutation": copy.ir.DenseI64ArrayAttr.get(order)},
            )
        operation.results[0].replace_all_uses_with(turned.results[0])
        done = True
    return done


def _convert_back(copy: _Copy, cure: Cure) -> bool:
    """Converts results with the shape of a donated argument to the argument's type."""
    ir = copy.ir
    taken: set[int] = set()
    for argument in cure.arguments:
        given = copy.block.arguments[argument]
        place = next(
            (
                n
                for n, value in enumerate(copy.returned.operands)
                if n not in taken
                and copy.shape_of(value) == copy.shape_of(given)
                and value.type != given.type
            ),
            None,
        )
        if place is None:
            return False
        taken.add(place)
        wide = copy.returned.operands[place]
        behind = copy.behind(wide)
        with ir.InsertionPoint(behind), behind.location:
            converted, back = (
                ir.Operation.create("stablehlo.convert", results=[kind], operands=[wide])
                for kind in (given.type, wide.type)
            )
        back.operands[0] = converted.results[0]
        # What else reads the array reads it as it is returned.
        wide.replace_all_uses_except(back.results[0], [converted])
        copy.returned.operands[place] = converted.results[0]
        copy.arguments[argument][_DONOR] = ir.BoolAttr.get(True)
        copy.note_replaced(argument, place)
    kind = ir.FunctionType.get(
        [one.type for one in copy.block.arguments], [one.type for one in copy.returned.operands]
    )
    copy.main.attributes["function_type"] = ir.TypeAttr.get(kind)
    copy.keep_entries()
    return True


CURES: Mapping[str, Callable[[_Copy, Cure], bool]] = {
    "donate": _donate,
    "return-as-given": _return_as_given,
    "split-like": _split_like,
    "hops": _add_constraints_between,
    "constrain-carried": _constrain_carried,
    "interleave": _interleave,
    "convert-back": _convert_back,
}
