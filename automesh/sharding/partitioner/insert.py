"""Makes Shardy split products, gathers and scatters where XLA's partitioner does (jax).

XLA runs Shardy's propagation alone; its own partitioner then decides which operand is gathered,
sliced or moved, and what is reduced. Between propagation and `sdy-insert-explicit-reshards`,
`reshard_as_partitioner` brings the operands of every such operation to the splits that `products`
and `lookups` find, and its result from there to the split that was propagated: Shardy then only
adds the reductions of operations that sum over parts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from automesh.ir.graph import element_bytes
from automesh.sharding.attribute_names import AS_PRODUCT, FIXED
from automesh.sharding.partitioner import lookups, products
from automesh.sharding.partitioner.calls import batch_dimensions
from automesh.sharding.partitioner.concatenations import make_whole_along
from automesh.sharding.partitioner.own_rules import alike
from automesh.sharding.partitioner.parts import Part, PartitionedArray, Parts, count
from automesh.sharding.partitioner.products import Split
from automesh.sharding.partitioner.reshards import (
    depends_on_sizes,
    gathers_all,
    kept_dimensions,
    tiling_of,
)

_RULE = re.compile(r"op_sharding_rule<\((.*)\)->\((.*?)\) \{")
# As in `need_replication={l}`.
_WHOLE = re.compile(r"need_replication=\{([^}]*)\}")
# As in `#sdy.sharding<@mesh, [{"dp"}, {}]>`.
_MESH = re.compile(r"<@([^,]+),")
_TENSOR = re.compile(r"\[([^\]]*)\]")
_NUMBER = re.compile(r"\d+")
# As in `[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]`.
_LABELS = re.compile(r"\[([^\]]*)\]")
_KERNEL = re.compile(r"x\[([^\]]*)\]")
_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_CONVOLUTION = "stablehlo.convolution"
_PRODUCTS = frozenset(("stablehlo.dot_general", _CONVOLUTION))
_LOOKUPS = frozenset(("stablehlo.gather", "stablehlo.scatter"))
_CONSTANTS = frozenset(("stablehlo.constant", "sdy.constant"))
_SHARDING, _OWN_RULE = "sdy.sharding", "sdy.sharding_rule"
# An operation of MLIR with its name.
Named = tuple[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A sharding rule: the factor of each dimension, and the factors that may not be split."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    whole: tuple[str, ...]


def reshard_as_partitioner(module: Any, ir: Any, sdy: Any, operations: Iterable[Named]) -> None:
    """Inserts `sdy.reshard` around the operations that XLA's partitioner splits itself.

    These are products, convolutions, gathers, scatters, dynamic slices and updates, concatenations,
    Fourier transforms, gradients of maxima over windows, and custom calls.

    Args:
      module: the operation of a module whose shardings are propagated and closed, with sharding
        rules kept; changed in place.
      ir: MLIR's Python classes.
      sdy: those of the Shardy dialect.
      operations: all of the module; operations that are inserted meanwhile are not visited.
    """
    inserter = _Inserter(module, ir, sdy)
    if inserter.mesh:
        for name, operation in operations:
            if name in _PRODUCTS or name in _LOOKUPS:
                inserter.visit(operation)
            elif name == "stablehlo.dynamic_slice":
                inserter.visit_slice(operation)
            elif name == "stablehlo.dynamic_update_slice":
                inserter.visit_update(operation)
            elif name == "stablehlo.fft":
                inserter.visit_transform(operation)
            elif name == "stablehlo.concatenate":
                make_whole_along(operation, ir)
            elif name == "stablehlo.select_and_scatter":
                inserter.visit_windows(operation)
            elif name == "stablehlo.custom_call":
                inserter.visit_call(operation)


def gather_as_partitioner(module: Any, ir: Any, sdy: Any, operations: Iterable[Named]) -> None:
    """Gathers the whole array in every reshard for which XLA's partitioner has no other method.

    Args:
      module: as for `reshard_as_partitioner`, with all reshards explicit; changed in place.
      ir, sdy: as there.
      operations: all of the module.
    """
    inserter = _Inserter(module, ir, sdy)
    for name, operation in operations:
        if name == "sdy.reshard":
            inserter.visit_reshard(operation)
    if inserter.dependent:
        names = [ir.StringAttr.get(axis) for axis in sorted(inserter.dependent)]
        module.attributes[FIXED] = ir.ArrayAttr.get(names)


def has_several_ways(module: Any, sdy: Any) -> bool:
    """Whether the mesh has several axes; with a single one, no reshard gathers the whole array."""
    meshes = [
        sdy.MeshAttr(view.operation.attributes["mesh"])
        for view in module.regions[0].blocks[0].operations
        if view.operation.name == "sdy.mesh"
    ]
    return any(
        sum(int(sdy.MeshAxisAttr(axis).size) > 1 for axis in mesh.axes) > 1 for mesh in meshes
    )


class _Inserter:
    def __init__(self, module: Any, ir: Any, sdy: Any) -> None:
        self._ir, self._sdy = ir, sdy
        self.mesh: dict[str, int] = {}
        # Axes whose sizes decide how an array is resharded.
        self.dependent: set[str] = set()
        self._name = ""
        for view in module.regions[0].blocks[0].operations:
            operation = view.operation
            if operation.name == "sdy.mesh":
                axes = [
                    sdy.MeshAxisAttr(one) for one in sdy.MeshAttr(operation.attributes["mesh"]).axes
                ]
                sizes = {str(one.name): int(one.size) for one in axes}
                if len(sizes) > len(self.mesh):
                    self.mesh = sizes
                    self._name = ir.StringAttr(operation.attributes["sym_name"]).value

    def visit(self, operation: Any) -> None:
        """Reshards around one operation with known operands and result; leaves others to Shardy."""
        if self._is_grouped(operation):
            self._gather_around(operation, batch=0)
            return
        rule = _rule_of(operation)
        manual = _manual_axes(operation, self._sdy)
        devices = tuple(
            Part(axis=axis, before=1, size=size)
            for axis, size in self.mesh.items()
            if size > 1 and axis not in manual
        )
        if rule is None or len(rule.results) != 1 or not devices:
            return
        operands = [
            self._split(value, factors, manual)
            for value, factors in zip(operation.operands, rule.operands, strict=True)
        ]
        result = self._split(operation.results[0], rule.results[0], manual)
        known = [one for one in operands if one is not None]
        if result is None or len(known) != len(operands):
            return
        if not any(one.every for one in (*known, result)):
            return
        for factor in rule.whole:
            known = [one.having(factor, ()) for one in known]
        for dimension in _windows_with_holes(operation):
            # A window that slides over a dilated image cannot be cut.
            factor = known[1].factors[dimension]
            known = [one.having(factor, ()) for one in known]
        wanted = _wanted(operation.name, tuple(known), result, devices)
        if wanted is None:
            return
        *before, (after,) = wanted
        moved = _moved((*known, result), wanted)
        if moved:
            names = [self._ir.StringAttr.get(axis) for axis in sorted(moved)]
            operation.attributes[FIXED] = self._ir.ArrayAttr.get(names)
        for place, (split, stated, steps) in enumerate(zip(operands, known, before, strict=True)):
            last = None if split is None else split.parts
            # As long as it stays as it is stated, it does not move.
            moves = [*(parts for parts in steps[:-1] if parts != stated.parts), steps[-1]]
            for parts in moves if last is not None else ():
                if parts == last:
                    continue
                last = parts
                with self._ir.InsertionPoint(operation), operation.location:
                    operation.operands[place] = self._sdy.ReshardOp(
                        operation.operands[place], self._attribute(parts)
                    ).result
        if after != result.parts:
            self._bring_result(operation, after, result.parts)

    def visit_slice(self, operation: Any) -> None:
        """Reshards around a dynamic slice (`HandleDynamicSlice`).

        The operand is gathered along the dimensions that are cut; all others are split like the
        result's.
        """
        manual = _manual_axes(operation, self._sdy)
        operand, result = operation.operands[0], operation.results[0]
        before, after = self._parts(operand, manual), self._parts(result, manual)
        if before is None or after is None:
            return
        whole, part = (self._ir.RankedTensorType(one.type).shape for one in (operand, result))
        cut = [size != kept for size, kept in zip(whole, part, strict=True)]
        if not any(is_cut and before[d] for d, is_cut in enumerate(cut)):
            return
        wanted = [() if is_cut else after[d] for d, is_cut in enumerate(cut)]
        with self._ir.InsertionPoint(operation), operation.location:
            operation.operands[0] = self._sdy.ReshardOp(operand, self._attribute(wanted)).result
        if list(after) != wanted:
            self._bring_result(operation, wanted, after)

    def visit_update(self, operation: Any) -> None:
        """Reshards around a dynamic update of several rows (`HandleDynamicUpdateSlice`).

        The array is gathered along the dimensions that are partly written. A single row is always
        inside one part.
        """
        manual = _manual_axes(operation, self._sdy)
        array, update, *starts = operation.operands
        before, after = (self._parts(one, manual) for one in (array, operation.results[0]))
        if before is None or after is None:
            return
        whole, part = (self._ir.RankedTensorType(one.type).shape for one in (array, update))
        cut = [
            1 < kept < size and not _is_constant(start, self._ir)
            for size, kept, start in zip(whole, part, starts, strict=True)
        ]
        if not any(is_cut and (before[d] or after[d]) for d, is_cut in enumerate(cut)):
            return
        wanted = [() if is_cut else after[d] for d, is_cut in enumerate(cut)]
        with self._ir.InsertionPoint(operation), operation.location:
            for place, one in enumerate((array, update)):
                moved = self._sdy.ReshardOp(one, self._attribute(wanted))
                operation.operands[place] = moved.result
        if list(after) != wanted:
            self._bring_result(operation, wanted, after)

    def visit_call(self, operation: Any) -> None:
        """Reshards around a custom call.

        Its operands are gathered along all dimensions but those of a batch; every device does all
        of the call, and keeps its part of the results.
        """
        batch = batch_dimensions(operation, self._ir)
        if batch is not None and all(map(_is_array, (*operation.operands, *operation.results))):
            self._gather_around(operation, batch=batch)

    def visit_transform(self, operation: Any) -> None:
        """Reshards around a Fourier transform (`HandleFft` in xla/service/spmd/fft_handler.cc).

        It is done on each device where the dimensions that it transforms are whole. A plain one
        over a last dimension that all devices split is done in parts; see
        `ir.passes.transforms`. For any other one every device gathers all of the array.

        The TPU's compiler makes it products with matrices first: their operand is gathered along
        the dimensions that are summed, and each device makes its part of the result.
        """
        manual = _manual_axes(operation, self._sdy)
        before, after = (
            self._parts(one, manual) for one in (operation.operands[0], operation.results[0])
        )
        if before is None or after is None:
            return
        lengths = self._ir.DenseI64ArrayAttr(operation.attributes["fft_length"])
        rest = len(after) - len(lengths)
        if AS_PRODUCT in operation.attributes:
            self._state_rule(operation, operation.operands[0], made=rest)
            after = _kept(after[:rest], len(after))
        elif any(after[rest:]):
            if not self._is_in_parts(operation, after):
                self._gather_around(operation, batch=0)
                return
            self._state_rule(operation, operation.operands[0])
        if before != after:
            with self._ir.InsertionPoint(operation), operation.location:
                operation.operands[0] = self._sdy.ReshardOp(
                    operation.operands[0], self._attribute(after)
                ).result

    def _is_in_parts(self, transform: Any, split: Sequence[Parts]) -> bool:
        """Whether the partitioner lets each device do a part of each transform."""
        shape = self._ir.RankedTensorType(transform.operands[0].type).shape
        devices = math.prod(self.mesh.values())
        is_plain = re.search(r"\bFFT\b", str(transform.attributes["fft_type"]))
        return bool(
            len(shape) > 2 and is_plain and count(split[-1]) == devices and shape[-1] % devices == 0
        )

    def visit_windows(self, operation: Any) -> None:
        """Keeps the gradient of a maximum over windows split along them
        (`HandleSelectAndScatter`), if there are as many rows for each window on all devices."""
        operand, source, _ = operation.operands
        manual = _manual_axes(operation, self._sdy)
        known = [self._parts(one, manual) for one in (operand, source, operation.results[0])]
        rows, windows = (self._ir.RankedTensorType(one.type).shape for one in (operand, source))
        is_even = all(
            not one or (size % made == 0 and made % count(one) == 0)
            for one, size, made in zip(known[2] or (), rows, windows, strict=False)
        )
        if None in known or not is_even:
            return
        self._state_rule(operation, operand, source)
        with self._ir.InsertionPoint(operation), operation.location:
            for place, value in enumerate((operand, source)):
                if known[place] != known[2]:
                    moved = self._sdy.ReshardOp(value, self._attribute(known[2] or ()))
                    operation.operands[place] = moved.result

    def _state_rule(self, operation: Any, *operands: Any, made: int | None = None) -> None:
        """States a rule in place of Shardy's own, which wants some dimensions whole."""
        shapes = [self._ir.RankedTensorType(one.type).shape for one in operands]
        result = self._ir.RankedTensorType(operation.results[0].type).shape
        scalars = len(operation.operands) - len(operands)
        operation.attributes[_OWN_RULE] = self._ir.Attribute.parse(
            alike(shapes, result, scalars=scalars, made=made)
        )

    def _is_grouped(self, operation: Any) -> bool:
        """Whether a convolution has groups that no axis splits.

        XLA splits it along its groups or not at all (`HandleConvolution`): axes of its batch do not
        split it. One with a group for each feature is rewritten before the partitioner comes to it.
        """
        if operation.name != _CONVOLUTION:
            return False
        groups, batches = (
            int(self._ir.IntegerAttr(operation.attributes[name]).value)
            for name in ("feature_group_count", "batch_group_count")
        )
        if groups == batches == 1:
            return False
        image, kernel, made = (
            [label.strip() for label in labels.split(",")]
            for labels in _LABELS.findall(str(operation.attributes["dimension_numbers"]))
        )
        sizes = [self._ir.RankedTensorType(one.type).shape for one in operation.operands]
        features = sizes[1][kernel.index("i")]
        if (groups > 1 and features == 1) or batches == sizes[0][image.index("b")]:
            return False
        manual = _manual_axes(operation, self._sdy)
        grouped = (
            (operation.operands[0], image.index("f" if groups > 1 else "b")),
            (operation.operands[1], kernel.index("o")),
            (operation.results[0], made.index("f")),
        )
        return not any((self._parts(one, manual) or {d: ()})[d] for one, d in grouped)

    def _gather_around(self, operation: Any, *, batch: int) -> None:
        """Gathers operands along all but their first `batch` dimensions, and cuts the results."""
        manual = _manual_axes(operation, self._sdy)
        before = [self._parts(one, manual) for one in operation.operands]
        after = [self._parts(one, manual) for one in operation.results]
        known = [one for one in (*after, *before) if one is not None]
        if len(known) < len(before) + len(after) or not known:
            return
        kept = known[0][:batch]
        with self._ir.InsertionPoint(operation), operation.location:
            for place, (one, operand) in enumerate(
                zip((*known[len(after) :],), list(operation.operands), strict=True)
            ):
                wanted = _kept(kept, len(one))
                if wanted != one:
                    moved = self._sdy.ReshardOp(operand, self._attribute(wanted))
                    operation.operands[place] = moved.result
        results = known[: len(after)]
        stated = [_kept(kept, len(one)) for one in results]
        if stated != results:
            self._bring_results(operation, stated, results)

    def visit_reshard(self, operation: Any) -> None:
        """Handles a reshard between two known shardings."""
        manual = _manual_axes(operation, self._sdy)
        operand, result = operation.operands[0], operation.results[0]
        before, after = self._parts(operand, manual), self._parts(result, manual)
        if before is None or after is None or before == after:
            return
        devices = math.prod(size for axis, size in self.mesh.items() if axis not in manual)
        if depends_on_sizes(before, after, tuple(self.mesh.items())):
            self.dependent.update(part.axis for parts in (*before, *after) for part in parts)
        tilings = tiling_of(before, devices), tiling_of(after, devices)
        if gathers_all(*tilings):
            kept = kept_dimensions(*tilings)
            whole = self._attribute([one if kept[d] else () for d, one in enumerate(before)])
            with self._ir.InsertionPoint(operation), operation.location:
                operation.operands[0] = self._sdy.ReshardOp(operand, whole).result

    def _bring_result(
        self, operation: Any, after: Sequence[Parts], wanted: Sequence[Parts]
    ) -> None:
        self._bring_results(operation, [after], [wanted])

    def _bring_results(
        self,
        operation: Any,
        after: Sequence[Sequence[Parts]],
        wanted: Sequence[Sequence[Parts]],
    ) -> None:
        """States how an operation splits its results, and reshards them behind it."""
        operation.attributes[_SHARDING] = self._sdy.TensorShardingPerValueAttr.get(
            [self._attribute(one) for one in after]
        )
        for value, mine, target in zip(operation.results, after, wanted, strict=True):
            if list(mine) == list(target):
                continue
            with self._ir.InsertionPoint(operation), operation.location:
                moved = self._sdy.ReshardOp(value, self._attribute(target))
            moved.operation.move_after(operation)
            value.replace_all_uses_except(moved.result, [moved.operation])

    def _split(
        self, value: Any, factors: tuple[str, ...], manual: frozenset[str]
    ) -> PartitionedArray | None:
        try:
            tensor = self._ir.RankedTensorType(value.type)
            element = element_bytes(str(tensor.element_type))
        except (ValueError, KeyError):  # A token, or elements of a type without a known size.
            return None
        parts = self._parts(value, manual)
        if parts is None or len(parts) != len(factors):
            return None
        return PartitionedArray(
            factors=factors, parts=parts, bytes=element * math.prod(tensor.shape)
        )

    def _parts(self, value: Any, manual: frozenset[str]) -> tuple[Parts, ...] | None:
        """Returns what splits each dimension of a value; None if that is not stated."""
        rank = self._ir.RankedTensorType(value.type).rank
        sharding = _sharding_of(value, self._ir, self._sdy)
        if sharding is _UNKNOWN:
            return None
        if sharding is None:
            return ((),) * rank
        named = _MESH.search(str(sharding))
        if named is None or named.group(1) != self._name:
            return None
        dimensions = self._sdy.TensorShardingAttr(sharding).dimension_shardings
        return tuple(self._of_dimension(one, manual) for one in dimensions)

    def _of_dimension(self, dimension: Any, manual: frozenset[str]) -> Parts:
        parts: list[Part] = []
        for one in self._sdy.DimensionShardingAttr(dimension).axes:
            reference = self._sdy.AxisRefAttr(one)
            name = str(reference.name)
            if name in manual:
                continue
            if reference.sub_axis_info is None:
                parts.append(Part(axis=name, before=1, size=self.mesh[name]))
            else:
                sub = self._sdy.SubAxisInfoAttr(reference.sub_axis_info)
                parts.append(Part(axis=name, before=int(sub.pre_size), size=int(sub.size)))
        return tuple(part for part in parts if part.size > 1)

    def _attribute(self, parts: Sequence[Parts]) -> Any:
        sdy = self._sdy
        return sdy.TensorShardingAttr.get(
            self._name,
            [
                sdy.DimensionShardingAttr.get([self._axis(one) for one in each], is_closed=True)
                for each in parts
            ],
        )

    def _axis(self, part: Part) -> Any:
        if part.size == self.mesh[part.axis]:
            return self._sdy.AxisRefAttr.get(part.axis)
        return self._sdy.AxisRefAttr.get(
            part.axis, self._sdy.SubAxisInfoAttr.get(part.before, part.size)
        )


@functools.lru_cache(maxsize=1 << 12)  # A cache, since equal layers need the same result.
def _wanted(
    name: str, operands: tuple[PartitionedArray, ...], result: PartitionedArray, devices: Parts
) -> tuple[tuple[Split, ...], ...] | None:
    """Returns the splits to which each operand is brought, one after the other, and the split of
    the result; None for any other operation."""
    if name in _PRODUCTS and len(operands) == 2:
        way = products.way_of(
            products.PartitionedProduct(
                left=operands[0],
                right=operands[1],
                result=result,
                devices=devices,
                is_convolution=name == _CONVOLUTION,
            )
        )
        return (
            (*way.left_before, way.left),
            (*way.right_before, way.right),
            (way.result,),
        )
    is_scatter = name == "stablehlo.scatter"
    if name in _LOOKUPS and len(operands) == (3 if is_scatter else 2):
        operand, indices = operands[:2]
        slices = operands[2] if is_scatter else result
        alone = set(operand.factors) - set(indices.factors) - set(slices.factors)
        lookup = lookups.PartitionedLookup(
            operand=operand,
            indices=indices,
            slices=slices,
            looked_up=tuple(one for one in operand.factors if one in alone),
            scatters=is_scatter,
            devices=devices,
        )
        found = lookups.way_of(lookup)
        if is_scatter:
            return (found.operand,), (found.indices,), (found.slices,), (found.operand,)
        return (found.operand,), (found.indices,), (found.slices,)
    return None


def _moved(before: Sequence[PartitionedArray], after: Sequence[Sequence[Split]]) -> set[str]:
    """Returns the axes that an array leaves, and the free axes that it then uses instead, if only
    on its way.

    Which axes are free depends on the sizes of all of them.
    """
    known: dict[str, set[str]] = {}
    for split in before:
        for factor, parts in zip(split.factors, split.parts, strict=True):
            known.setdefault(factor, set()).update(part.axis for part in parts)
    found: set[str] = set()
    for split, steps in zip(before, after, strict=True):
        for factor, parts in (
            one for wanted in steps for one in zip(split.factors, wanted, strict=True)
        ):
            new = {part.axis for part in parts} - known[factor]
            if new:
                found |= new | known[factor]
    return found


def _windows_with_holes(operation: Any) -> list[int]:
    """Returns a convolution's spatial kernel dimensions along which the image is dilated."""
    if operation.name != _CONVOLUTION or "lhs_dilation" not in operation.attributes:
        return []
    dilation = str(operation.attributes["lhs_dilation"]).partition(":")[2]
    labels = _KERNEL.findall(str(operation.attributes["dimension_numbers"]))[0].split(",")
    places = {label.strip(): place for place, label in enumerate(labels)}
    return [
        places[str(number)]
        for number, size in enumerate(_NUMBER.findall(dilation))
        if int(size) > 1
    ]


def _rule_of(operation: Any) -> _Rule | None:
    """Returns the sharding rule that propagation left; None if there is none."""
    if _OWN_RULE not in operation.attributes:
        return None
    text = str(operation.attributes[_OWN_RULE])
    found, whole = _RULE.search(text), _WHOLE.search(text)
    if found is None:
        return None
    operands, results = found.groups()
    return _Rule(
        operands=_factors(operands),
        results=_factors(results),
        whole=tuple(_FACTOR.findall(whole.group(1))) if whole else (),
    )


def _factors(text: str) -> tuple[tuple[str, ...], ...]:
    """Returns the first (major) factor of each tensor's dimensions."""
    return tuple(
        tuple(_FACTOR.findall(one)[0] if one.strip() else "" for one in tensor.split(","))
        if tensor.strip()
        else ()
        for tensor in _TENSOR.findall(text)
    )


def _kept(batch: Sequence[Parts], rank: int) -> tuple[Parts, ...]:
    """Keeps the splits of batch dimensions only."""
    return (*batch[:rank], *((),) * (rank - len(batch)))


def _is_array(value: Any) -> bool:
    return str(value.type).startswith("tensor<")


def _is_constant(value: Any, ir: Any) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner.name in _CONSTANTS


_UNKNOWN = object()


def _sharding_of(value: Any, ir: Any, sdy: Any) -> Any:
    """Returns the sharding of a value, as stated where it is made.

    Returns:
      The attribute; None if it is whole; `_UNKNOWN` if it is not stated.
    """
    owner = value.owner
    if not isinstance(owner, ir.Block):
        attributes = owner.attributes
        if _SHARDING in attributes:
            shardings = sdy.TensorShardingPerValueAttr(attributes[_SHARDING]).shardings
            return list(shardings)[ir.OpResult(value).result_number]
        return attributes["sharding"] if owner.name == "sdy.reshard" else None
    parent, place = owner.owner, ir.BlockArgument(value).arg_number
    name = parent.operation.name
    attributes = parent.operation.attributes
    if name == "func.func":
        given = ir.ArrayAttr(attributes["arg_attrs"]) if "arg_attrs" in attributes else None
        own = ir.DictAttr(given[place]) if given is not None else None
        return own[_SHARDING] if own is not None and _SHARDING in own else None
    if name == "stablehlo.while":
        if _SHARDING not in attributes:
            return None
        return list(sdy.TensorShardingPerValueAttr(attributes[_SHARDING]).shardings)[place]
    if name == "sdy.manual_computation":
        return list(sdy.TensorShardingPerValueAttr(attributes["in_shardings"]).shardings)[place]
    return _UNKNOWN


def _manual_axes(operation: Any, sdy: Any) -> frozenset[str]:
    """Returns the mesh axes of the manual regions around an operation."""
    found: set[str] = set()
    parent = operation.parent
    while parent is not None:
        if parent.name == "sdy.manual_computation":
            found.update(sdy.ManualAxesAttr(parent.attributes["manual_axes"]))
        parent = parent.operation.parent
    return frozenset(found)
