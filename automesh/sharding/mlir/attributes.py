"""Reads attributes of MLIR operations as plain values (jax); `module` lists them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from automesh.collectives import KINDS, STABLEHLO
from automesh.cost.terms import Monomial
from automesh.hlo.nouns import WindowDimension
from automesh.ir.graph import Operation
from automesh.program.lower.lowered import attribute_of
from automesh.sharding.attribute_names import DECLARED
from automesh.sharding.mlir.axes import MeshReader
from automesh.sharding.passes import Bindings

_NUMBER = re.compile(r"dense<([^<>\"\[\]]+)>")
_LISTS = re.compile(r"(\w+) = \[([\d, ]*)\]")
_COST = ("flops", "bytes_accessed", "transcendentals")
# Shardy's operations that make shardings explicit; a slice moves nothing between devices.
_SHARDY_AXES = {kind.stablehlo: kind.shardy_axes for kind in KINDS if kind.shardy_axes} | {
    "all_slice": "slicing_axes"
}
_Attributes = dict[str, Any]


class AttributeReader:
    """Reads operations of one module."""

    def __init__(self, found: Bindings, axes: MeshReader) -> None:
        self._ir, self._hlo = found.ir, found.stablehlo
        self._axes = axes
        self._readers: dict[str, Callable[[Any], _Attributes]] = {
            "dot_general": self._dot,
            "ragged_dot": self._ragged_dot,
            "convolution": self._convolution,
            "broadcast_in_dim": lambda op: {"dims": self._ints(op, "broadcast_dimensions")},
            "transpose": lambda op: {"perm": self._ints(op, "permutation")},
            "reduce": lambda op: {
                "dims": self._ints(op, "dimensions"),
                "reducer": _reducer(op),
            },
            "reduce_window": lambda op: {
                "window": self._ints(op, "window_dimensions"),
                "stride": self._ints(op, "window_strides"),
                "dilated": any(
                    one != 1
                    for name in ("base_dilations", "window_dilations")
                    for one in self._ints(op, name)
                ),
                "padding": self._padding(op, len(self._ints(op, "window_dimensions"))),
                "reducer": _reducer(op),
            },
            "reverse": lambda op: {"dims": self._ints(op, "dimensions")},
            "scatter": self._scatter,
            "gather": self._gather,
            "dynamic_slice": lambda op: {"sizes": self._ints(op, "slice_sizes")},
            "slice": lambda op: {
                "start": self._ints(op, "start_indices"),
                "limit": self._ints(op, "limit_indices"),
                "stride": self._ints(op, "strides"),
            },
            "pad": lambda op: {
                "low": self._ints(op, "edge_padding_low"),
                "high": self._ints(op, "edge_padding_high"),
                "interior": self._ints(op, "interior_padding"),
            },
            "concatenate": lambda op: {"dim": self._int(op, "dimension")},
            "sort": lambda op: {"dim": self._int(op, "dimension")},
            "iota": lambda op: {"dim": self._int(op, "iota_dimension")},
            "compare": lambda op: {
                "direction": _word(op, "comparison_direction", r"\b(EQ|NE|GE|GT|LE|LT)\b")
            },
            "constant": lambda op: {"splat": _splat(op)},
            "custom_call": self._custom_call,
        }

    def of(self, operation: Any, made: Operation) -> _Attributes:
        """Returns the attributes of `operation`; `made` has its operands and results."""
        dialect, name = str(operation.name).split(".", 1)
        if dialect == "sdy" and "out_sharding" in operation.attributes:
            return self._shardy_collective(operation, name, made)
        if (
            "replica_groups" in operation.attributes
            or "source_target_pairs" in operation.attributes
        ):
            return self._manual_collective(operation, name, made)
        reader = self._readers.get(name)
        return reader(operation) if reader else {}

    def _ints(self, operation: Any, name: str) -> tuple[int, ...]:
        if name not in operation.attributes:
            return ()
        return tuple(int(one) for one in self._ir.DenseI64ArrayAttr(operation.attributes[name]))

    def _int(self, operation: Any, name: str) -> int:
        return int(self._ir.IntegerAttr(operation.attributes[name]).value)

    def _flag(self, operation: Any, name: str) -> bool:
        return "true" in str(operation.attributes[name]) if name in operation.attributes else False

    def _dot(self, operation: Any) -> _Attributes:
        numbers = self._hlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
        return {
            **self._declared(operation),
            **_precision(operation),
            "lhs_batch": tuple(numbers.lhs_batching_dimensions),
            "rhs_batch": tuple(numbers.rhs_batching_dimensions),
            "lhs_contracting": tuple(numbers.lhs_contracting_dimensions),
            "rhs_contracting": tuple(numbers.rhs_contracting_dimensions),
        }

    def _declared(self, operation: Any) -> _Attributes:
        if DECLARED not in operation.attributes:
            return {}
        noted = [self._ir.StringAttr(one).value for one in operation.attributes[DECLARED]]
        return {
            "declared": tuple(
                None if text == "?" else tuple(filter(None, text.split(","))) for text in noted
            )
        }

    def _ragged_dot(self, operation: Any) -> _Attributes:
        text = str(operation.attributes["ragged_dot_dimension_numbers"])
        lists = {
            name: tuple(int(one) for one in numbers.split(",") if one.strip())
            for name, numbers in _LISTS.findall(text)
        }
        return {
            "lhs_batch": lists.get("lhs_batching_dimensions", ()),
            "rhs_batch": lists.get("rhs_batching_dimensions", ()),
            "lhs_contracting": lists.get("lhs_contracting_dimensions", ()),
            "rhs_contracting": lists.get("rhs_contracting_dimensions", ()),
            "lhs_ragged": lists.get("lhs_ragged_dimensions", ()),
            "rhs_group": lists.get("rhs_group_dimensions", ()),
        }

    def _convolution(self, operation: Any) -> _Attributes:
        numbers = self._hlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        return {
            **self._declared(operation),
            **_precision(operation),
            "lhs_batch": numbers.input_batch_dimension,
            "lhs_feature": numbers.input_feature_dimension,
            "lhs_spatial": tuple(numbers.input_spatial_dimensions),
            "rhs_input": numbers.kernel_input_feature_dimension,
            "rhs_output": numbers.kernel_output_feature_dimension,
            "rhs_spatial": tuple(numbers.kernel_spatial_dimensions),
            "out_batch": numbers.output_batch_dimension,
            "out_feature": numbers.output_feature_dimension,
            "out_spatial": tuple(numbers.output_spatial_dimensions),
            "feature_groups": self._int(operation, "feature_group_count"),
            "batch_groups": self._int(operation, "batch_group_count"),
            "window": self._window(operation, tuple(numbers.kernel_spatial_dimensions)),
        }

    def _window(
        self, operation: Any, kernel_spatial: tuple[int, ...]
    ) -> tuple[WindowDimension, ...]:
        count = len(kernel_spatial)
        kernel = self._ir.RankedTensorType(operation.operands[1].type).shape
        strides, base, own = (
            self._ints(operation, name) or (1,) * count
            for name in ("window_strides", "lhs_dilation", "rhs_dilation")
        )
        padding = self._padding(operation, count)
        return tuple(
            WindowDimension(
                size=int(kernel[dimension]),
                stride=strides[place],
                padding_low=padding[place][0],
                padding_high=padding[place][1],
                window_dilation=own[place],
                base_dilation=base[place],
            )
            for place, dimension in enumerate(kernel_spatial)
        )

    def _padding(self, operation: Any, dimensions: int) -> tuple[tuple[int, int], ...]:
        """Returns the rows with which a window pads each dimension, before it and behind it."""
        if "padding" not in operation.attributes:
            return ((0, 0),) * dimensions
        stated = [
            int(one) for one in self._ir.DenseIntElementsAttr(operation.attributes["padding"])
        ]
        return tuple(zip(stated[::2], stated[1::2], strict=True))

    def _scatter(self, operation: Any) -> _Attributes:
        numbers = self._hlo.ScatterDimensionNumbers(
            operation.attributes["scatter_dimension_numbers"]
        )
        return {
            "reducer": _reducer(operation),
            "unique": self._flag(operation, "unique_indices"),
            "sorted": self._flag(operation, "indices_are_sorted"),
            "update_window_dims": tuple(numbers.update_window_dims),
            "inserted_window_dims": tuple(numbers.inserted_window_dims),
            "scatter_dims": tuple(numbers.scattered_dims_to_operand_dims),
        }

    def _gather(self, operation: Any) -> _Attributes:
        numbers = self._hlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
        return {
            "slice_sizes": self._ints(operation, "slice_sizes"),
            "offset_dims": tuple(numbers.offset_dims),
            "collapsed_dims": tuple(numbers.collapsed_slice_dims),
            "start_dims": tuple(numbers.start_index_map),
            "sorted": self._flag(operation, "indices_are_sorted"),
        }

    def _custom_call(self, operation: Any) -> _Attributes:
        attributes = operation.attributes
        config = config_text(self._ir, operation)
        read: _Attributes = {
            "target": self._ir.StringAttr(attributes["call_target_name"]).value,
            "config": config,
        }
        cost = stated_cost(config)
        if cost:
            read["cost"] = cost
            read["cost_terms"] = {
                name: (Monomial(coefficient=value),) if value else ()
                for name, value in cost.items()
            }
        if counted := group_of(config, "counted"):
            read["counted"] = counted
        if "mhlo.frontend_attributes" in attributes:
            placed = _word(
                operation, "mhlo.frontend_attributes", r'_xla_buffer_placement = "([^"]+)"'
            )
            if placed:
                read["placement"] = placed
        aliases = re.findall(
            r"output_tuple_indices = \[([\d, ]*)\],\s*operand_index = (\d+)",
            str(attributes["output_operand_aliases"])
            if "output_operand_aliases" in attributes
            else "",
        )
        if aliases:
            read["aliases"] = tuple((int(output or 0), int(operand)) for output, operand in aliases)
        return read

    def _shardy_collective(self, operation: Any, name: str, made: Operation) -> _Attributes:
        key = _SHARDY_AXES.get(name)
        if key is None or key not in operation.attributes:
            axes = self._axes.in_order(_moved(made))
            return {"axes": axes, "group": self._axes.size(axes), "exact": True}
        attribute = operation.attributes[key]
        axes, group = self._axes.named(attribute)
        read: _Attributes = {"axes": axes, "group": group, "exact": group == self._axes.size(axes)}
        if name == "all_slice" or STABLEHLO[name].resized_along:
            read["per_dimension"] = self._axes.named_by_dimension(attribute)
        return read

    def _manual_collective(self, operation: Any, name: str, made: Operation) -> _Attributes:
        if "source_target_pairs" in operation.attributes:
            pairs = self._groups(operation.attributes["source_target_pairs"])
            axes = self._axes.of_pairs(pairs)
            return {
                "axes": axes,
                "group": self._axes.size(axes),
                "exact": True,
                "manual": True,
                "pairs": tuple((pair[0], pair[1]) for pair in pairs),
            }
        axes, group, exact = self._group_axes(operation.attributes["replica_groups"])
        read: _Attributes = {"axes": axes, "group": group, "exact": exact, "manual": True}
        if len(operation.regions):
            read["reducer"] = _reducer(operation)
        kind = STABLEHLO.get(name)
        if kind is not None and kind.resized_along:
            at = self._int(operation, kind.resized_along)
            read["per_dimension"] = tuple(
                axes if position == at else () for position in range(len(made.results[0].shape))
            )
        if name == "all_to_all":
            read["split_dim"] = self._int(operation, "split_dimension")
            read["concat_dim"] = self._int(operation, "concat_dimension")
        return read

    def _group_axes(self, attribute: Any) -> tuple[tuple[str, ...], int, bool]:
        if "mesh_axes" in str(attribute)[:60]:  # Groups as axes of a mesh, from newer programs.
            axes, group = self._axes.named(attribute)
            return axes, group, group == self._axes.size(axes)
        return self._axes.of_groups(self._groups(attribute))

    def _groups(self, attribute: Any) -> list[list[int]]:
        # A 64-bit integer matrix; if all elements are equal, the number is stored once.
        elements = self._ir.DenseIntElementsAttr(attribute)
        shape = tuple(elements.type.shape)
        if 0 in shape:
            return []
        numbers = np.fromiter((int(element) for element in elements), np.int64)
        return cast(
            "list[list[int]]",
            np.broadcast_to(numbers, shape).tolist()
            if numbers.size == 1
            else numbers.reshape(shape).tolist(),
        )


def _moved(made: Operation) -> set[str]:
    """Returns the axes whose position changes in a permute."""
    before, after = (
        {
            axis: (dimension, place)
            for dimension, axes in enumerate(value.axes)
            for place, axis in enumerate(axes)
        }
        for value in (made.operands[0], made.results[0])
    )
    names = before.keys() | after.keys()
    return {name for name in names if before.get(name) != after.get(name)}


def _reducer(operation: Any) -> str:
    """Returns the operation of the region, or the names of several joined by `+`."""
    inner = [
        str(one.operation.name).split(".", 1)[1]
        for one in operation.regions[0].blocks[0].operations
    ]
    return "+".join(inner[:-1]) or "replace"


def _word(operation: Any, name: str, pattern: str) -> str:
    found = re.search(pattern, str(operation.attributes[name]))
    return found[1] if found else ""


def _splat(operation: Any) -> float | int | bool | None:
    # Shortened, since the text of a large array that is no splat is long.
    found = _NUMBER.match(str(attribute_of(operation, "value")))
    if not found:
        return None
    text = found[1]
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("0x"):  # Infinities and NaNs of a float.
        return float("nan")
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def config_text(ir: Any, operation: Any) -> str:
    """Returns the text that a custom call passes to its backend; may be empty."""
    if "backend_config" not in operation.attributes:
        return ""
    attribute = operation.attributes["backend_config"]
    try:
        return ir.StringAttr(attribute).value
    except (ValueError, UnicodeDecodeError):
        return str(attribute)


def stated_cost(config: str) -> dict[str, float]:
    """Returns the `cost_estimate` in a backend's JSON; empty if there is none."""
    stated = group_of(config, "cost_estimate")
    return {key: float(stated[key]) for key in _COST if key in stated}


def group_of(config: str, name: str) -> dict[str, Any]:
    """Finds the object of this name in a backend's JSON, at any depth; empty if there is none."""
    try:
        read = json.loads(config)
    except ValueError:
        return {}
    stack: list[Any] = [read]
    while stack:
        one = stack.pop()
        if not isinstance(one, dict):
            continue
        known = cast("dict[str, Any]", one)
        found = known.get(name)
        if isinstance(found, dict):
            return cast("dict[str, Any]", found)
        stack.extend(known.values())
    return {}


def _precision(operation: Any) -> _Attributes:
    """Returns `is_precise` if a product asks for more than the platform's usual precision."""
    text = "".join(
        str(operation.attributes[name])
        for name in ("precision_config", "algorithm")
        if name in operation.attributes
    )
    is_usual = not text or not re.search("HIGH|algorithm", text)
    return {} if is_usual else {"is_precise": True}
