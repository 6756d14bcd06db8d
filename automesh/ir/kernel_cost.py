"""Finds the cost of one operation as a kernel: its multiplications and the bytes it moves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from automesh.cost.terms import Matmul, Monomial, Near, Sum
from automesh.hlo.nouns import WindowDimension
from automesh.hlo.work.flops import window_positions
from automesh.ir.fusion import Fusion, Reads
from automesh.ir.graph import Operation, Value, added, element_bytes, times
from automesh.ir.op_kinds import PRODUCTS, VIRTUAL

ONE = Monomial(coefficient=1.0)
# FLOPs that a custom call states are priced as multiplications of this size, since their shape is
# unknown: large enough to keep the device busy.
_TILE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTraffic:
    """The memory traffic of one kernel.

    Attributes:
      buffers: the value behind each part, and the bytes of the part; kernels do not move values in
        host memory.
      epilogue: for a product, what it writes, or reads in addition to its operands.
      stated: bytes that a custom call states, in any memory.
    """

    buffers: tuple[tuple[Value, Monomial], ...] = ()
    stated: Sum = ()
    epilogue: Sum = ()

    @property
    def bytes(self) -> Sum:
        """Returns all bytes in device memory."""
        return added(*(size for value, size in self.buffers if not value.on_host), *self.stated)

    def near(self, settled: Collection[Value]) -> tuple[Near, ...]:
        """Returns traffic that may stay on the chip: parts of buffers that are not in `settled`."""
        parts: dict[Monomial, list[Monomial]] = {}
        for value, size in self.buffers:
            if value not in settled and not value.on_host:
                parts.setdefault(value.bytes, []).append(size)
        return tuple(
            Near(buffer_bytes=whole, bytes=added(*sizes)) for whole, sizes in parts.items()
        )


def moved(operation: Operation, fusion: Fusion) -> KernelTraffic | None:
    """Finds what the operation's kernel reads and writes; None if it has no kernel of its own.

    As in xla/service/hlo_cost_analysis.cc: slices read what they take, and an update in place
    touches only the part that it replaces.
    """
    name, operands, results = operation.name, operation.operands, operation.results
    if name in VIRTUAL:
        kept = [result for result in results if result in fusion.inputs]
        if not kept or kept[0] in fusion.ends.values():
            return None
        return _through(fusion.inputs[kept[0]], kept[:1])
    if name in PRODUCTS:
        end, beside = fusion.written(operation)
        every = _through({**beside, **fusion.reads(operands)}, [end])
        return replace(every, epilogue=added(*beside.values(), end.bytes))
    if name == "dynamic_update_slice":
        read = _through(fusion.reads(operands[1:2]), [])
        return KernelTraffic(buffers=(*read.buffers, (results[0], operands[1].bytes)))
    if name == "gather":
        size = results[0].bytes
        buffers = ((operands[0], size), (results[0], size), (operands[1], operands[1].bytes))
        return KernelTraffic(buffers=buffers)
    if name == "scatter":
        return _scatter_traffic(operation)
    if name == "custom_call" and "bytes_accessed" in cost_of(operation):
        return KernelTraffic(stated=cost_of(operation)["bytes_accessed"])
    return _through(fusion.reads(operands), results)


def _through(reads: Reads, results: Sequence[Value]) -> KernelTraffic:
    return KernelTraffic(buffers=(*reads.items(), *((value, value.bytes) for value in results)))


def _scatter_traffic(operation: Operation) -> KernelTraffic:
    """Counts a scatter: updates are read, and the changed places are read and written."""
    arrays = len(operation.operands) // 2
    updates = operation.operands[arrays + 1 :]
    changed = [*operation.operands[:arrays], *operation.results]
    places = [(value, update.bytes) for value, update in zip(changed, updates * 2)]
    indices = operation.operands[arrays]
    read = [(value, value.bytes) for value in (*updates, indices)]
    return KernelTraffic(buffers=(*read, *places))


def matmuls_of(operation: Operation) -> tuple[Matmul, ...]:
    """Lists the matrix multiplications of one operation on one device."""
    if operation.name == "dot_general":
        return (_dot(operation),)
    if operation.name == "ragged_dot":
        return (_ragged_dot(operation),)
    if operation.name == "convolution":
        return (_convolution(operation),)
    if operation.name == "custom_call" and cost_of(operation).get("flops"):
        return _stated_products(operation)
    return ()


def cost_of(operation: Operation) -> dict[str, Sum]:
    """Returns the cost that a custom call states."""
    return operation.attributes.get("cost_terms") or {}


def extent(value: Value, dimensions: Iterable[int]) -> Monomial:
    """Multiplies some dimensions of a value on one device."""
    total = ONE
    for dimension in dimensions:
        total = times(total, value.dimension(dimension))
    return total


def _rest(value: Value, *taken: Sequence[int]) -> list[int]:
    gone = {dimension for one in taken for dimension in one}
    return [dimension for dimension in range(len(value.shape)) if dimension not in gone]


def _coarsest(values: Iterable[Value]) -> str:
    return max((value.dtype for value in values), key=element_bytes, default="f32")


def _complex_factor(values: Sequence[Value]) -> Monomial:
    """Returns 4 for complex products: a complex multiply-add is four real ones."""
    both = all(value.dtype.startswith("complex") for value in values[:2])
    return Monomial(coefficient=4.0) if both else ONE


def _stated_products(operation: Operation) -> tuple[Matmul, ...]:
    """Returns the products of a custom call: of the size that was counted, else of a usual size."""
    counted = operation.attributes.get("counted", {})
    m, n, k = counted.get("tile", (_TILE, _TILE, _TILE))
    dtype = counted.get("dtype") or _coarsest(operation.operands or operation.results)
    return tuple(
        Matmul(
            batch=replace(one, coefficient=one.coefficient / (2.0 * m * n * k)),
            m=Monomial(coefficient=float(m)),
            n=Monomial(coefficient=float(n)),
            k=Monomial(coefficient=float(k)),
            dtype=dtype,
            is_least=False,
        )
        for one in cost_of(operation)["flops"]
    )


def _dot(operation: Operation) -> Matmul:
    left, right = operation.operands[:2]
    found = operation.attributes
    return Matmul(
        batch=times(extent(left, found["lhs_batch"]), _complex_factor(operation.operands)),
        m=extent(left, _rest(left, found["lhs_batch"], found["lhs_contracting"])),
        n=extent(right, _rest(right, found["rhs_batch"], found["rhs_contracting"])),
        k=extent(left, found["lhs_contracting"]),
        dtype=_coarsest(operation.operands[:2]),
    )


def _ragged_dot(operation: Operation) -> Matmul:
    """Returns the product of a ragged dot: every row of the left side uses one group of the right.

    If the groups share the contracted dimension, each has its own part of it.
    """
    left, right = operation.operands[:2]
    found = operation.attributes
    groups = found["rhs_group"]
    return Matmul(
        batch=extent(left, found["lhs_batch"]),
        m=extent(left, _rest(left, found["lhs_batch"], found["lhs_contracting"])),
        n=extent(right, _rest(right, found["rhs_batch"], found["rhs_contracting"], groups)),
        k=extent(left, found["lhs_contracting"]),
        dtype=_coarsest(operation.operands[:2]),
    )


def _convolution(operation: Operation) -> Matmul:
    """Returns a convolution as a product of patches, without padding and holes."""
    image, kernel = operation.operands[:2]
    result, found = operation.results[0], operation.attributes
    groups = float(found["feature_groups"] * found["batch_groups"])
    met = kernel.dimension(found["rhs_input"])
    spatial = zip(found["lhs_spatial"], found["rhs_spatial"], found["out_spatial"], strict=True)
    for dimensions, window in zip(spatial, found["window"], strict=True):
        met = times(met, _window_elements(image, kernel, result, dimensions, window))
    is_plain = all(size.size == 1 for size in found["window"])
    return Matmul(
        batch=times(Monomial(coefficient=groups), _complex_factor(operation.operands)),
        m=extent(result, (found["out_batch"], *found["out_spatial"])),
        n=times(extent(result, (found["out_feature"],)), Monomial(coefficient=1.0 / groups)),
        k=met,
        dtype=_coarsest((image, kernel)),
        is_least=is_plain,
    )


def _window_elements(
    image: Value,
    kernel: Value,
    result: Value,
    spatial: tuple[int, int, int],
    window: WindowDimension,
) -> Monomial:
    """Counts the real elements that one result uses along a spatial dimension, on average.

    Along a split dimension halos are exchanged, and padding is multiplied like everything else
    (xla/service/spmd/convolution_handler.cc); the holes of a dilated image stay.
    """
    of_image, of_kernel, of_result = spatial
    results = max(result.shape[of_result], 1)
    elements = kernel.shape[of_kernel]
    if image.axes[of_image] or kernel.axes[of_kernel] or result.axes[of_result]:
        each = elements / window.base_dilation
    else:
        pairs = window_positions(image.shape[of_image], results, replace(window, size=elements))
        each = pairs / results
    return Monomial(coefficient=each, powers=kernel.dimension(of_kernel).powers)
