"""Rules for dimensions of convolutions, windows, Fourier transforms, factorizations and solvers (no
jax)."""

from __future__ import annotations

import math

from automesh.program.infer.dimensions import Dim, DimensionMark, Dims
from automesh.program.infer.operation import (
    ArrayOrigin,
    Factorized,
    Rule,
    TracedOperation,
    primitives,
)
from automesh.program.infer.rules.arrays import note_product

_WINDOW_FOR_EACH = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")


def _conv(op: TracedOperation) -> list[Dims]:
    numbers = op.params["dimension_numbers"]
    left_spec, right_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    left, kernel = op.ins[:2]
    groups, batch_groups = op.params["feature_group_count"], op.params["batch_group_count"]
    found: list[Dim] = [()] * len(op.shapes[0])
    batch, features = left[left_spec[0]], left[left_spec[1]]
    out_features, in_features = kernel[right_spec[0]], kernel[right_spec[1]]
    if groups > 1:
        # Features come in groups, outer; each has its own kernels.
        outer, features = op.all.split(features, groups)
        theirs, _ = op.all.split(out_features, groups)
        op.all.join(outer, theirs)
    if batch_groups > 1:
        outer, batch = op.all.split(batch, batch_groups)
        theirs, _ = op.all.split(out_features, batch_groups)
        op.all.join(outer, theirs)
    op.all.join(features, in_features)
    found[out_spec[0]], found[out_spec[1]] = batch, out_features
    spatial: list[Dim] = []
    for number, (ours, theirs, made) in enumerate(
        zip(left_spec[2:], right_spec[2:], out_spec[2:], strict=True)
    ):
        if not op.is_backward:
            op.all.mark(kernel[theirs], DimensionMark.KERNEL)
        found[made] = _slid(op, number, left[ours], op.given[1][theirs], op.shapes[0][made])
        spatial.append(left[ours])
    if not op.is_backward:
        op.events.kernels.append(
            (in_features, out_features, tuple(kernel[place] for place in right_spec[2:]))
        )
        op.events.spatial.append(tuple(spatial))
    summed = (features, *(kernel[place] for place in right_spec[2:]))
    note_product(op, summed if op.is_backward else (features,), (), (batch,), (out_features,))
    return [tuple(found)]


def _slid(op: TracedOperation, number: int, dim: Dim, kernel: int, size: int) -> Dim:
    """Returns the result of a dimension that a kernel slides over: the same dimension if there is a
    result at each of its positions, else a new one."""
    stride = op.params["window_strides"][number]
    dilation = (op.params["lhs_dilation"] or (1,) * (number + 1))[number]
    spread = (op.params["rhs_dilation"] or (1,) * (number + 1))[number]
    low, high = op.params["padding"][number]
    reach = (kernel - 1) * spread
    if size == 1 or not dim:
        return op.all.new(size)
    if stride == 1 and dilation == 1 and low >= 0 and high >= 0 and low + high == reach:
        if kernel > 1:
            op.all.mark_parts(dim, DimensionMark.WINDOWED)
        return dim
    op.all.mark_parts(dim, DimensionMark.WINDOWED)
    if stride == kernel and dilation == 1 and (low, high) == (0, 0) and spread == 1:
        outer, _ = op.all.split(dim, size) if size * stride == _size(op, dim) else (None, None)
        if outer is not None:  # Patches side by side: as a reshape would cut them.
            return outer
    if dilation == kernel and stride == 1 and spread == 1 and size == dilation * _size(op, dim):
        return (*dim, *op.all.new(dilation))
    return op.all.new(size, DimensionMark.WINDOWED)


def _size(op: TracedOperation, dim: Dim) -> int:
    return op.all.size_of(op.all.factors(dim))


def _reduce_window(op: TracedOperation) -> list[Dims]:
    sizes = op.params["window_dimensions"]
    strides = op.params["window_strides"] or (1,) * len(sizes)
    padding = op.params["padding"]
    found: list[Dim] = []
    for place, (dim, given, made) in enumerate(
        zip(op.ins[0], op.given[0], op.shapes[0], strict=True)
    ):
        window, stride, (low, high) = sizes[place], strides[place], padding[place]
        if window == 1 and stride == 1 and (low, high) == (0, 0) and given == made:
            found.append(dim)
            continue
        op.all.mark_parts(dim, DimensionMark.WINDOWED)
        if stride == 1 and low + high == window - 1 and given == made:
            found.append(dim)
        elif window == stride and (low, high) == (0, 0) and made * stride == given:
            found.append(op.all.split(dim, made)[0])
        else:
            found.append(op.all.new(made, DimensionMark.WINDOWED))
    return [tuple(found) for _ in op.shapes]


def _window_back(op: TracedOperation) -> list[Dims]:
    """Handles `select_and_scatter_add(source, operand)`: the gradient of a maximum over windows has
    the dimensions of the operand."""
    source, operand = op.ins[:2]
    sizes, strides = op.params["window_dimensions"], op.params["window_strides"]
    for mine, yours, window, stride, given, back in zip(
        source, operand, sizes, strides, op.given[0], op.given[1], strict=True
    ):
        if window == 1 and stride == 1 and given == back:
            op.all.join(mine, yours)
        elif window == stride and given * stride == back:
            op.all.join(op.all.split(yours, given)[0], mine)
    return [operand]


def _gather_windows(op: TracedOperation) -> list[Dims]:
    """Handles `select_and_gather_add(tangents, operand)`: both have the same dimensions."""
    op.all.join_all(op.ins[0], op.ins[1])
    sizes = op.params["window_dimensions"]
    found = [
        dim if window == 1 and given == made else op.all.new(made, DimensionMark.WINDOWED)
        for dim, window, given, made in zip(
            op.ins[0], sizes, op.given[0], op.shapes[0], strict=True
        )
    ]
    return [tuple(found)]


def _fft(op: TracedOperation) -> list[Dims]:
    count = len(op.params["fft_lengths"])
    start = len(op.ins[0]) - count
    found = list(op.ins[0])
    for place in range(start, len(found)):
        op.all.mark_parts(found[place], DimensionMark.ORDERED)
        if op.given[0][place] != op.shapes[0][place]:
            found[place] = op.all.new(op.shapes[0][place], DimensionMark.ORDERED)
    op.events.transformed += [op.ins[0][start:], tuple(found[start:])]
    return [tuple(found)]


def _matrices(op: TracedOperation) -> list[Dims]:
    """Handles factorizations and solvers: the last two dimensions stay whole, those before are
    independent tasks. What an optimizer factorizes leaves the parameters free."""
    first = max(range(len(op.ins)), key=lambda place: len(op.ins[place]))
    many = op.ins[first][:-2]
    may_be_optimizer = _is_after_gradients(op)
    marks = DimensionMark(0) if may_be_optimizer else DimensionMark.SOLVED
    for dims, given in zip(op.ins, op.given, strict=True):
        if given[: len(many)] == op.given[first][: len(many)]:
            op.all.join_all(many, dims[: len(many)])
        for dim in dims[len(many) :]:
            op.all.mark(dim, marks)
    found: list[Dims] = []
    made: list[Dim] = []
    for shape in op.shapes:
        fits = shape[: len(many)] == op.given[first][: len(many)]
        rest = shape[len(many) :] if fits else shape
        new = op.all.news(rest, marks)
        made += new
        found.append((*many, *new) if fits else new)
    if may_be_optimizer:
        matrix = tuple(dim for dims in op.ins for dim in dims[len(many) :])
        op.events.factorized.append(Factorized(matrix=matrix, many=many, made=tuple(made)))
    return found


def _is_after_gradients(op: TracedOperation) -> bool:
    """Whether an operation may be one of an optimizer: it works on gradients, or on statistics that
    the step keeps, and no gradient is taken through it."""
    is_of_gradients = bool(op.together() & ArrayOrigin.GRADIENT)
    return not op.is_backward and (is_of_gradients or not op.is_differentiated)


def _triangular_solve(op: TracedOperation) -> list[Dims]:
    """Handles `a x = b`: x has the dimensions of b; columns of b are independent tasks."""
    matrix, right = op.ins[:2]
    along = (*matrix[-2:], *(right[-2:-1] if op.params.get("left_side") else right[-1:]))
    if _is_after_gradients(op):
        op.events.solved.append(along)
    else:
        for dim in along:
            op.all.mark(dim, DimensionMark.SOLVED)
    if math.prod(op.given[0][:-2]) == math.prod(op.given[1][:-2]):
        for mine, yours in zip(matrix[:-2], right[:-2]):
            op.all.join(mine, yours)
    return [right]


RULES: dict[str, Rule] = {
    "conv_general_dilated": _conv,
    **dict.fromkeys(_WINDOW_FOR_EACH, _reduce_window),
    "select_and_scatter_add": _window_back,
    "select_and_gather_add": _gather_windows,
    "fft": _fft,
    "triangular_solve": _triangular_solve,
    **dict.fromkeys(
        primitives(
            """
            cholesky cholesky_update eigh eig svd qr geqrf householder_product ormqr lu schur
            lu_pivots_to_permutation tridiagonal tridiagonal_solve hessenberg symmetric_product
            """
        ),
        _matrices,
    ),
}
