"""Rules that give the dimensions of results from those of operands, for elementwise operations and
those that move, merge, multiply or sum (no jax: parameters of primitives by their names).

A rule joins dimensions that must agree and returns the dimensions of the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from automesh.program.infer.dimensions import Dim, DimensionMark, Dimensions, Dims
from automesh.program.infer.operation import (
    ArrayOrigin,
    Contraction,
    Draw,
    Meeting,
    Rule,
    Shape,
    TracedOperation,
    primitives,
)

# Elementwise operations; operands have the shape of the result or no dimensions.
ELEMENTWISE = primitives(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh copysign device_put digamma div eq
    eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi
    name ne neg nextafter not one_minus_square optimization_barrier or pin polygamma polynomial
    population_count pow pvary pcast random_clone random_fold_in random_gamma real reduce_precision
    reduced_vary_cast reduced_vary_cast_p regularized_incomplete_beta relayout rem reshard round
    rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square stage stop_gradient sub tan tanh threefry2x32 threefry4x32 philox2x32
    philox4x32 tie unpin unstage vary_unreduced_cast vary_unreduced_cast_p
    with_memory_space_constraint xor zeta from_edtype to_edtype pbroadcast preduced
    """
)
_MEETS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "gather"})
_ALONG = primitives("cumsum cumprod cummax cummin cumlogsumexp")
_REDUCERS = primitives(
    """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin
    reduce"""
)


def elementwise(op: TracedOperation) -> list[Dims]:
    """Joins operands and results in every dimension."""
    found: list[Dims] = []
    for number, shape in enumerate(op.shapes):
        # Several results belong to several operands (a barrier), unless all shapes agree.
        if len(op.shapes) > 1 and len(op.ins) == len(op.shapes) and _is_beside(op):
            found.append(op.ins[number])
            continue
        found.append(_broadcast(op, shape))
    if op.name == "eq" and len(op.ins) == 2:
        _note_one_hot(op)
    for dims in found[1:]:
        if len(dims) == len(found[0]) and op.name != "optimization_barrier":
            _join_fitting(op, found[0], dims)
    return found


def _note_one_hot(op: TracedOperation) -> None:
    """Notes that integers which are compared with positions choose among them."""
    for source, mine, theirs in ((op.sources[0], 0, 1), (op.sources[1], 1, 0)):
        if len(source) != 1 or not source[0] or len(op.given[mine]) != len(op.given[theirs]):
            continue
        for dim, own in zip(op.ins[theirs], op.given[mine], strict=True):
            if own == 1 and any(
                op.all.marks(factor) & DimensionMark.POSITIONS for factor in op.all.factors(dim)
            ):
                op.events.chosen.setdefault(source[0], []).append(dim)


def _broadcast(op: TracedOperation, shape: Shape) -> Dims:
    """Returns the result of operands whose dimensions may be 1 where the result's are larger."""
    first: list[Dim | None] = [None] * len(shape)
    for dims, given in zip(op.ins, op.given, strict=True):
        if len(given) != len(shape):
            continue
        for place, (dim, size) in enumerate(zip(dims, given, strict=True)):
            if size != shape[place]:
                continue
            known = first[place]
            if known is None:
                first[place] = dim
            else:
                op.all.join(known, dim)
    return tuple(
        op.all.new(size) if dim is None else dim for dim, size in zip(first, shape, strict=True)
    )


def _is_beside(op: TracedOperation) -> bool:
    return op.name in ("optimization_barrier", "copy", "pvary", "pcast", "device_put", "tie")


def _join_fitting(op: TracedOperation, one: Dims, other: Dims) -> None:
    for mine, yours in zip(one, other, strict=True):
        if op.all.size_of(op.all.factors(mine)) == op.all.size_of(op.all.factors(yours)):
            op.all.join(mine, yours)


def _broadcast_in_dim(op: TracedOperation) -> list[Dims]:
    shape = op.shapes[0]
    found = [op.all.new(size) for size in shape]
    places = op.params["broadcast_dimensions"]
    for place, dim, size in zip(places, op.ins[0], op.given[0], strict=True):
        if size == shape[place]:
            found[place] = dim
    return [tuple(found)]


def _broadcast_to(op: TracedOperation) -> list[Dims]:
    shape = op.shapes[0]
    found = [op.all.new(size) for size in shape]
    start = len(shape) - len(op.given[0])
    for place, (dim, size) in enumerate(zip(op.ins[0], op.given[0], strict=True)):
        if size == shape[start + place]:
            found[start + place] = dim
    return [tuple(found)]


def reshaped(all_dims: Dimensions, dims: Dims, given: Shape, shape: Shape) -> Dims:
    """Returns the dimensions of an array in another shape: a merged dimension has the factors of
    both, and a split one passes its factors on."""
    if math.prod(given) != math.prod(shape) or 0 in shape:
        return all_dims.news(shape)
    found: list[Dim] = []
    i = j = 0
    while i < len(given) or j < len(shape):
        flat: list[int] = []
        sizes: list[int] = []
        a = b = 1
        while True:  # Finds the smallest runs on both sides with equal numbers of elements.
            if a <= b and i < len(given) and (a < b or not sizes or j >= len(shape)):
                flat += dims[i]
                a *= given[i]
                i += 1
            elif j < len(shape):
                sizes.append(shape[j])
                b *= shape[j]
                j += 1
            if a == b and (sizes or i >= len(given) or j >= len(shape)):
                break
        rest: Dim = tuple(flat)
        if len(rest) > 1 and sizes[:1] == [a]:
            rest = all_dims.gathered(rest)
        for place, size in enumerate(sizes):
            if math.prod(sizes[place + 1 :]) == 1 and size > 1:
                found.append(rest)
                rest = ()
            elif size == 1:
                found.append(())
            else:
                outer, rest = all_dims.split(rest, size)
                found.append(outer)
    return tuple(found)


def _reshape(op: TracedOperation) -> list[Dims]:
    # `vmap` of a convolution gives an order in which to transpose before the reshape.
    order = op.params.get("dimensions") or range(len(op.ins[0]))
    dims = tuple(op.ins[0][place] for place in order)
    given = tuple(op.given[0][place] for place in order)
    return [reshaped(op.all, dims, given, op.shapes[0])]


def _transpose(op: TracedOperation) -> list[Dims]:
    return [tuple(op.ins[0][place] for place in op.params["permutation"])]


def _squeeze(op: TracedOperation) -> list[Dims]:
    gone = {place % max(len(op.ins[0]), 1) for place in op.params["dimensions"]}
    return [tuple(dim for place, dim in enumerate(op.ins[0]) if place not in gone)]


def _without(dims: Dims, places: Sequence[int]) -> Dims:
    return tuple(dim for place, dim in enumerate(dims) if place not in set(places))


def _dot_general(op: TracedOperation) -> list[Dims]:
    (left_sum, right_sum), (left_batch, right_batch) = op.params["dimension_numbers"]
    left, right = op.ins[:2]
    for mine, yours in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        op.all.join(left[mine], right[yours])
    batch = tuple(left[place] for place in left_batch)
    ours = _without(left, (*left_sum, *left_batch))
    theirs = _without(right, (*right_sum, *right_batch))
    summed = tuple(left[place] for place in left_sum)
    note_product(op, summed, batch, ours, theirs)
    return [(*batch, *ours, *theirs)]


def note_product(op: TracedOperation, summed: Dims, batch: Dims, left: Dims, right: Dims) -> None:
    """Records a product."""
    for dim in summed:
        op.all.mark(dim, DimensionMark.SUMMED)
    op.events.products.append(
        Contraction(
            summed=summed,
            batch=batch,
            left=left,
            right=right,
            is_forward=not op.is_backward,
            is_product=True,
            made=op.made[:2],
            loop=op.loop,
            result=math.prod(op.shapes[0]),
        )
    )


def _ragged_dot(op: TracedOperation) -> list[Dims]:
    numbers = op.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    ragged = tuple(numbers.lhs_ragged_dimensions)
    groups = tuple(numbers.rhs_group_dimensions)
    left, right = op.ins[:2]
    for mine, yours in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        op.all.join(left[mine], right[yours])
    for place in ragged:
        op.all.mark(left[place], DimensionMark.GROUPED)
    for dim in op.ins[2][-1:]:
        for place in groups:
            op.all.join(right[place], dim)
    batch = tuple(left[place] for place in left_batch)
    ours = _without(left, (*left_sum, *left_batch))
    theirs = _without(right, (*right_sum, *right_batch, *groups))
    summed = tuple(left[place] for place in left_sum)
    # Each group has weights of its own, like each of a batch.
    of_groups = tuple(right[place] for place in groups)
    note_product(op, summed, (*batch, *of_groups), ours, theirs)
    found = (*batch, *ours, *theirs)
    if len(found) < len(
        op.shapes[0]
    ):  # The dimension of groups, each summed for itself, comes first.
        found = (*op.ins[2][-1:], *found)
    return [found]


def _reduce(op: TracedOperation) -> list[Dims]:
    name = op.name
    axes = op.params["dimensions"] if name == "reduce" else op.params["axes"]
    count = len(op.shapes)
    gone = set(axes)
    found: list[Dims] = []
    for dims, given in zip(op.ins[:count], op.given[:count], strict=True):
        if op.given[0] == given:
            op.all.join_all(op.ins[0], dims)
        summed = tuple(dim for place, dim in enumerate(dims) if place in gone)
        left = tuple(dim for place, dim in enumerate(dims) if place not in gone)
        marks = DimensionMark.SUMMED if name == "reduce_sum" else DimensionMark(0)
        for dim in summed if marks else ():
            op.all.mark(dim, marks)
        op.events.products.append(
            Contraction(
                summed=summed,
                left=left,
                is_forward=not op.is_backward,
                is_product=False,
                made=op.made[:1],
                loop=op.loop,
                result=math.prod(op.shapes[0]),
            )
        )
        found.append(left)
    return found


def _collective(op: TracedOperation) -> list[Dims]:
    """Removes the dimensions over which `psum` or a similar collective reduces. Their axes have
    numbers, which remain of a named axis of a `vmap`, as in batch statistics. Axes with names are
    those of a mesh: inside of a `shard_map`, the sum over devices has the same dimensions."""
    axes = [axis for axis in op.params["axes"] if isinstance(axis, int)]
    if not axes:
        return list(op.ins)
    found: list[Dims] = []
    for dims, given in zip(op.ins, op.given, strict=True):
        gone = {axis % len(given) for axis in axes}
        summed = tuple(dim for place, dim in enumerate(dims) if place in gone)
        found.append(tuple(dim for place, dim in enumerate(dims) if place not in gone))
        for dim in summed if op.name == "psum" else ():
            op.all.mark(dim, DimensionMark.SUMMED)
        op.events.products.append(
            Contraction(
                summed=summed,
                left=found[-1],
                is_forward=not op.is_backward,
                is_product=False,
                made=op.made[:1],
                loop=op.loop,
            )
        )
    return found


def _arg(op: TracedOperation) -> list[Dims]:
    """Reduces for `argmax` and `argmin`: the results are positions in the removed dimension."""
    found = _reduce(op)
    _note_places(op, [op.ins[0][axis] for axis in op.params["axes"]])
    return found


def _note_places(op: TracedOperation, dims: Sequence[Dim]) -> None:
    """Notes that the resulting integers are positions in a dimension; see `Events.places`."""
    if len(dims) == 1 and dims[0]:
        op.events.places.append(dims[0])


def _along(op: TracedOperation) -> list[Dims]:
    op.all.mark(op.ins[0][op.params["axis"]], DimensionMark.ORDERED)
    return [op.ins[0]]


def _sort(op: TracedOperation) -> list[Dims]:
    place = op.params["dimension"]
    for dims in op.ins:
        op.all.join_all(op.ins[0], dims)
    op.all.mark(op.ins[0][place], DimensionMark.ORDERED)
    return [op.ins[0] for _ in op.shapes]


def _top_k(op: TracedOperation) -> list[Dims]:
    place = op.params.get("axis", op.params.get("reduction_dimension", -1)) % len(op.ins[0])
    op.all.mark(op.ins[0][place], DimensionMark.ORDERED)
    kept = op.all.new(op.shapes[0][place])
    found = tuple(kept if i == place else dim for i, dim in enumerate(op.ins[0]))
    _note_places(op, [op.ins[0][place]])
    return [found for _ in op.shapes]


def _rev(op: TracedOperation) -> list[Dims]:
    for place in op.params["dimensions"]:
        op.all.mark(op.ins[0][place], DimensionMark.SHIFTED)
    return [op.ins[0]]


def _iota(op: TracedOperation) -> list[Dims]:
    found = list(op.all.news(op.shapes[0]))
    place = op.params["dimension"]
    op.all.mark(found[place], DimensionMark.POSITIONS)
    return [tuple(found)]


def _bitcast(op: TracedOperation) -> list[Dims]:
    """Adds or removes the last dimension, as a bitcast to another width does."""
    both = min(len(op.shapes[0]), len(op.given[0]))
    return [(*op.ins[0][:both], *op.all.news(op.shapes[0][both:]))]


def _stack(op: TracedOperation) -> list[Dims]:
    """Stacks arrays of the same shape along a new dimension."""
    axis = op.params["axis"] % len(op.shapes[0])
    for dims in op.ins:
        op.all.join_all(op.ins[0], dims)
    found = op.ins[0]
    return [(*found[:axis], op.all.new(op.shapes[0][axis]), *found[axis:])]


def _unstack(op: TracedOperation) -> list[Dims]:
    axis = op.params["axis"] % len(op.given[0])
    op.all.mark(op.ins[0][axis], DimensionMark.PICKED)
    return [_without(op.ins[0], (axis,)) for _ in op.shapes]


def _tile(op: TracedOperation) -> list[Dims]:
    """Puts copies end to end: the number of copies is the outer factor."""
    times = op.params.get("reps", op.params.get("repeats", ()))
    if len(times) != len(op.ins[0]):
        return op.fresh()
    copies = zip(times, op.ins[0], strict=True)
    return [tuple((*op.all.new(count), *dim) for count, dim in copies)]


def _random_bits(op: TracedOperation) -> list[Dims]:
    keys = op.ins[0]
    found = (*keys, *op.all.news(op.shapes[0][len(keys) :]))
    op.events.draws.append(Draw(dims=found, shape=op.shapes[0], place=op.place(), is_random=True))
    return [found]


def _random_wrap(op: TracedOperation) -> list[Dims]:
    """Turns the words of random keys into keys, which have one dimension less."""
    count = len(op.shapes[0])
    for dim in op.ins[0][count:]:
        op.all.mark(dim, DimensionMark.KEY)
    return [op.ins[0][:count]]


def _random_unwrap(op: TracedOperation) -> list[Dims]:
    count = len(op.given[0])
    return [(*op.ins[0], *op.all.news(op.shapes[0][count:], DimensionMark.KEY))]


def _random_more(op: TracedOperation) -> list[Dims]:
    """Adds new dimensions behind those of the operand, for `random_seed` and `random_split`."""
    count = len(op.given[0])
    return [(*op.ins[0], *op.all.news(op.shapes[0][count:]))]


def _rng_bit_generator(op: TracedOperation) -> list[Dims]:
    for dim in op.ins[0]:
        op.all.mark(dim, DimensionMark.KEY)
    bits = op.all.news(op.shapes[1])
    op.events.draws.append(
        Draw(dims=bits, shape=op.shapes[1], place=op.place(), is_random=True, output=1)
    )
    return [op.ins[0], bits]


def _new(op: TracedOperation) -> list[Dims]:
    return op.fresh()


def made_of(op: TracedOperation) -> ArrayOrigin:
    """Returns the origin of the results."""
    made = op.together()
    if op.name in ("random_bits", "rng_bit_generator", "rng_uniform", "random_gamma"):
        made = ArrayOrigin.RANDOM
    return made


def meetings_of(op: TracedOperation, made: Dims) -> list[Meeting]:
    """Returns the places where data meet parameters: a result with one operand from parameters only
    and the other also from data; a lookup table; a gradient that is summed into a table."""
    if op.name == "scatter-add" and op.is_backward and not op.made[0]:
        return [_meeting(op, made, is_table=True)]
    if op.name not in _MEETS:
        return []
    one, other = op.made[:2]
    if ArrayOrigin.STATE not in (one, other) or not (one | other) & (
        ArrayOrigin.DATA | ArrayOrigin.RANDOM
    ):
        return []
    found = [_meeting(op, made, is_table=False)]
    if op.name == "gather":
        found.append(replace(found[0], dims=op.ins[0], shape=op.given[0], output=-1, is_table=True))
    return found


def _meeting(op: TracedOperation, dims: Dims, *, is_table: bool) -> Meeting:
    return Meeting(
        dims=dims,
        shape=op.shapes[0],
        place=op.place(),
        is_table=is_table,
        number=op.events.equations,
        loop=op.loop,
        is_forward=not op.is_backward,
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_REDUCERS, _reduce),
    **dict.fromkeys(("psum", "pmax", "pmin"), _collective),
    "broadcast_in_dim": _broadcast_in_dim,
    "broadcast_to": _broadcast_to,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "argmax": _arg,
    "argmin": _arg,
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "rev": _rev,
    "iota": _iota,
    "iota_2x32_shape": _new,
    "bitcast_convert_type": _bitcast,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "random_bits": _random_bits,
    "random_wrap": _random_wrap,
    "random_unwrap": _random_unwrap,
    "random_seed": _random_more,
    "random_split": _random_more,
    "rng_bit_generator": _rng_bit_generator,
    "rng_uniform": _new,
    "empty": _new,
    "empty2": _new,
    "create_token": _new,
    "after_all": _new,
    "dce_sink": _new,
    "axis_index": _new,
    "platform_index": _new,
}
