"""Finds the factors that are batches, or belong to parameters, data sets or graphs (no jax).

A batch is a dimension that is summed over and whose elements never meet before. Its size and its
position do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from automesh.program.infer.dimensions import (
    MEETING,
    MOVING,
    Dim,
    DimensionMark,
    Dimensions,
    Dims,
)
from automesh.program.infer.nouns import Role
from automesh.program.infer.operation import (
    ArrayOrigin,
    Contraction,
    Draw,
    Events,
    Factorized,
    Lookup,
    Source,
)

_WEIGHTS = frozenset({Role.PARAMETER, Role.MOMENT, Role.COPY, Role.FROZEN})
# Marks that do not exclude a batch if there is no better one: tokens that are sent to experts meet,
# but are still a batch.
_NOTHING = DimensionMark(0)
_MAY_MEET = DimensionMark.ORDERED | DimensionMark.LOOKED_UP | DimensionMark.GROUPED


@dataclass(slots=True)
class Facts:
    """The facts about representative factors.

    Attributes:
      weights: factors of parameters and their state.
      backward: factors of results of a backward pass.
      batches: batches, the best first.
      edges, nodes, graphs: factors of concatenated graphs: edges are summed into nodes, and these
        into graphs.
      bags: factors of rows, into each of which a bag of elements is summed up.
      data_sets: factors of arrays from which the step takes rows or slices.
      acted: factors of arrays that the step makes itself and takes rows from, such as what it saw
        as it acted in environments.
      shuffled: the lookups that take these rows.
      stacked: factors of all parameters: networks side by side.
      given: factors of each array of data.
      pooled: factors that are summed before a batch is.
      mixed: factors that a forward pass sums products over.
      attending: factors that a product both sums over and keeps, as of rows that attend to others.
      inside: for factors of rows that parameters are multiplied with, the marks of `MOVING` from
        operations between these products; none where the rows only move before or behind them.
      is_trained: whether there are parameters; else all carried arrays count as weights.
    """

    weights: set[int] = field(default_factory=set[int])
    backward: set[int] = field(default_factory=set[int])
    batches: list[int] = field(default_factory=list[int])
    edges: set[int] = field(default_factory=set[int])
    nodes: set[int] = field(default_factory=set[int])
    graphs: set[int] = field(default_factory=set[int])
    bags: set[int] = field(default_factory=set[int])
    data_sets: set[int] = field(default_factory=set[int])
    acted: set[int] = field(default_factory=set[int])
    shuffled: list[Lookup] = field(default_factory=list[Lookup])
    stacked: set[int] = field(default_factory=set[int])
    given: list[set[int]] = field(default_factory=list[set[int]])
    pooled: set[int] = field(default_factory=set[int])
    mixed: set[int] = field(default_factory=set[int])
    attending: set[int] = field(default_factory=set[int])
    inside: dict[int, DimensionMark] = field(default_factory=dict[int, DimensionMark])
    is_trained: bool = True


def facts_of(
    every: Dimensions,
    events: Events,
    inputs: Sequence[Dims],
    roles: Sequence[Role],
    *,
    floats: frozenset[int],
    integers: frozenset[int] = frozenset(),
) -> tuple[Facts, tuple[Role, ...]]:
    """Finds the facts about all factors.

    Args:
      inputs: dimensions of each input of the step.
      roles: role of each input; one that is not carried is data here.
      floats: inputs of floats that are not carried: data, or frozen weights.
      integers: inputs of integers that do not change: data, or frozen weights that are quantized.

    Returns:
      The facts; the roles, with frozen weights separated from data.
    """
    roles = _without_drawn_rows(every, events, inputs, roles)
    has_weights = any(role in _WEIGHTS for role in roles)
    found = Facts(is_trained=has_weights)
    for dims, role in zip(inputs, roles, strict=True):
        if role in _WEIGHTS or (not has_weights and role == Role.STATISTIC):
            found.weights |= roots(every, dims)
    parameters = [
        roots(every, dims)
        for dims, role in zip(inputs, roles, strict=True)
        if role == Role.PARAMETER
    ]
    found.given = [
        roots(every, dims) for dims, role in zip(inputs, roles, strict=True) if role == Role.DATA
    ]
    arrays = [own for own in parameters if own]
    found.stacked = set[int].intersection(*arrays) if len(arrays) > 1 else set()
    _find_solved(every, events, found)
    found.weights |= _pieces_of(every, found.weights)
    found.backward = {root for dim in events.backward for root in every.factors(dim)}
    _find_graphs(every, events, found, inputs)
    _find_data_sets(every, events, found)
    _join_put_together(every, found)
    _join_stacked(every, found)
    _find_meeting(every, events, found)
    _find_inside(every, events, found)
    found.batches = (
        _batches(every, events, inputs, roles, found, of_data=True)
        or _of_carried_sets(every, events, inputs, roles, found)
        or _of_acted(every, events, found)
        or _batches(every, events, inputs, roles, found, of_data=False)
    )
    found.batches += _of_bags(every, found)
    found.batches += _of_arrays_without(every, inputs, roles, found)
    after = _frozen(every, events, inputs, roles, floats, integers, found)
    for dims, role in zip(inputs, after, strict=True):
        if role in _WEIGHTS:
            found.weights |= roots(every, dims)
    return found, after


def _without_drawn_rows(
    every: Dimensions, events: Events, inputs: Sequence[Dims], roles: Sequence[Role]
) -> list[Role]:
    """Returns the roles with arrays as data that come back unchanged and look like frozen weights,
    but of which the step draws rows together, such as the parts of a replay buffer. One array alone
    of which rows are drawn may be a frozen table, and a single draw may choose a frozen layer."""
    drawn: set[int] = set()
    chosen: set[int] = set()  # By tokens, as in a frozen table.
    for one in events.lookups:
        if one.is_forward and one.is_held_whole:
            is_drawn = one.by and one.chosen_by & ArrayOrigin.RANDOM
            (drawn if is_drawn else chosen).update(roots(every, one.looked_up))
    drawn -= chosen
    having = Counter(
        root
        for dims, role in zip(inputs, roles, strict=True)
        if role == Role.FROZEN
        for root in roots(every, dims[:1])
    )
    drawn = {root for root in drawn if having[root] > 1}
    return [
        Role.DATA if role == Role.FROZEN and drawn & roots(every, dims) else role
        for dims, role in zip(inputs, roles, strict=True)
    ]


def _find_solved(every: Dimensions, events: Events, found: Facts) -> None:
    """Finds the matrices that an optimizer factorizes: those of parameters' dimensions alone. Along
    the dimensions of all others nothing is split, except over many that are independent."""
    for one in events.factorized:
        if is_factorized_by_optimizer(every, events, found, one):
            found.weights |= roots(every, one.made)  # Bases that gradients are turned into.
        else:
            for dim in (*one.matrix, *one.made):
                every.mark(dim, DimensionMark.SOLVED)
    for along in events.solved:
        if not events.backward or not roots(every, along) <= found.weights:
            for dim in along:
                every.mark(dim, DimensionMark.SOLVED)


def is_factorized_by_optimizer(
    every: Dimensions, events: Events, found: Facts, one: Factorized
) -> bool:
    """Whether an optimizer factorizes the matrices: they have dimensions of parameters alone."""
    return bool(events.backward) and roots(every, (*one.matrix, *one.many)) <= found.weights


def roots(every: Dimensions, dims: Iterable[Dim]) -> set[int]:
    """Returns all factors of an array."""
    return {root for dim in dims for root in every.factors(dim)}


def _pieces_of(every: Dimensions, those: set[int]) -> set[int]:
    """Returns the pieces of factors of weights; they belong to weights, too."""
    found: set[int] = set()
    rest = list(those)
    while rest:
        for _, dim in every.packed(rest.pop()):
            new = roots(every, (dim,)) - found
            found |= new
            rest += new
    return found


def outer(every: Dimensions, dim: Dim) -> int | None:
    """Returns the outermost factor of a dimension; None for a dimension of size 1."""
    factors = every.factors(dim)
    return factors[0] if factors else None


def _find_graphs(every: Dimensions, events: Events, found: Facts, inputs: Sequence[Dims]) -> None:
    """Finds edges, nodes and graphs. What elements are summed into is nodes only if something is
    given for it: the middle of each class of a batch is none."""
    into: set[int] = set()
    by: set[int] = set()
    sources: set[Source] = set()
    for one in events.segments:
        target = roots(every, one.into)
        # Gradients of a table and inputs of experts are summed into places, too, but are no graphs.
        if not one.is_forward or not target or target & found.weights:
            continue
        into |= target
        by |= roots(every, one.by)
        sources.add(one.source)
    found.edges = by - into - found.weights
    ends = _lookups_of_edges(every, events, found)
    is_of_rows = any(one.is_held_whole for one in ends)
    if len(sources) == 1 and {one.source for one in ends} <= sources - {()} and not is_of_rows:
        ends = []  # Elements that take the sum of their own bag, as in a softmax over each bag.
    into, by = _join_nodes(every, found, ends, into, by)
    found.edges = by - into - found.weights
    found.nodes = into & by
    found.graphs = into - by
    if not found.nodes:
        found.nodes, found.graphs = found.graphs, set()
        _find_bags(every, events, found, ends)
    # Users and products have tables of their own, which lie end to end as nodes.
    nodes = found.nodes | _pieces_of(every, found.nodes)
    if not nodes & {root for dims in inputs for root in roots(every, dims)}:
        found.edges, found.nodes, found.graphs = set(), set(), set()


def _lookups_of_edges(every: Dimensions, events: Events, found: Facts) -> list[Lookup]:
    return [one for one in events.lookups if one.is_forward and roots(every, one.by) & found.edges]


def _find_bags(every: Dimensions, events: Events, found: Facts, ends: Sequence[Lookup]) -> None:
    """Finds that what looks like edges and nodes is the elements of bags, and rows which have a bag
    each: data of their own, and products with parameters. No element looks up anything in a row,
    but for what is summed up over its bag.

    Args:
      ends: lookups of edges.
    """
    read = {root for one in ends for root in roots(every, one.looked_up)}
    met = {root for one in events.meetings if one.is_forward for root in roots(every, one.dims)}
    given = {every.find(root) for own in found.given for root in own}
    if found.nodes and found.nodes <= (met & given) - read:
        found.bags, found.nodes, found.edges = found.nodes, set(), set()


def _join_nodes(
    every: Dimensions, found: Facts, ends: Sequence[Lookup], into: set[int], by: set[int]
) -> tuple[set[int], set[int]]:
    """Joins the nodes that edges are looked up in with those that they are summed into."""
    sizes = {every.size(root): root for root in into}
    for one in ends:
        if len(one.looked_up) == 1:
            root = outer(every, one.looked_up[0])
            if root is not None and root not in found.weights and every.size(root) in sizes:
                every.join((sizes[every.size(root)],), (root,))
                # Edges lead from nodes to nodes.
                by.add(root)
    again = [{every.find(root) for root in those} for those in (into, by)]
    found.weights = {every.find(root) for root in found.weights}
    return again[0], again[1]


def _find_data_sets(every: Dimensions, events: Events, found: Facts) -> None:
    acted = roots(every, [dim for one in _taken(every, events, found) for dim in one.looked_up])
    for one in data_lookups(every, events, found):
        if not one.takes_rows or _is_columns(every, found, one):
            continue
        for root in roots(every, one.looked_up):
            known = found.weights | found.backward | found.nodes | found.edges | found.graphs
            if root not in known | acted and not every.marks(root) & DimensionMark.SUMMED:
                found.data_sets.add(root)


def data_lookups(every: Dimensions, events: Events, found: Facts) -> Iterator[Lookup]:
    """Lists lookups of rows of data in unchanged arguments and held arrays."""
    return (one for one in _row_lookups(every, events, found) if one.is_held_whole)


def _is_columns(every: Dimensions, found: Facts, one: Lookup) -> bool:
    """Whether places that are the same in every call choose features, as in `points[:, [0]]`."""
    chosen = roots(every, one.by) - _weights_in_parts(every, found)
    is_batch = any(
        every.marks(root) & DimensionMark.SUMMED and (root in found.backward or not found.backward)
        for root in chosen
    )
    return bool(one.by) and one.is_by_held and not is_batch


def _weights_in_parts(every: Dimensions, found: Facts) -> set[int]:
    """Returns the factors of weights and those of their slices: three of four outputs."""
    parts = [dim for root in found.weights for dim in every.pieces(root).values()]
    return found.weights | roots(every, parts)


def _row_lookups(every: Dimensions, events: Events, found: Facts) -> Iterator[Lookup]:
    """Lists lookups of rows of data. Floats that tokens choose, which have several dimensions, are
    a table of frozen weights; rows that the step draws, those of a window, and those for each of
    several stacked networks are data."""
    for one in events.lookups:
        by = roots(every, one.by)
        # Places in a window that other data has, too, are positions of tokens.
        is_window = one.is_of_windows and not any(
            by <= {every.find(root) for root in own} for own in found.given
        )
        is_drawn = one.chosen_by == ArrayOrigin.RANDOM or is_window
        stacked = {every.find(root) for root in found.stacked}
        of_rows = [dim for dim in one.by if not roots(every, (dim,)) <= stacked]
        is_table = one.is_float and len(of_rows) > 1 and not is_drawn
        if one.is_forward and not one.made & ArrayOrigin.STATE and not is_table:
            yield one


def _join_put_together(every: Dimensions, found: Facts) -> None:
    """Joins a dimension that is divided with one that is concatenated from the same pieces."""
    first: dict[object, int] = {}
    for root in every.roots():
        pieces = every.packed(root)
        if pieces:
            key = tuple((interval, every.factors(dim)) for interval, dim in pieces)
            every.join((first.setdefault(key, root),), (root,))
    found.weights = roots(every, [(root,) for root in found.weights])
    found.backward = roots(every, [(root,) for root in found.backward])


def _join_stacked(every: Dimensions, found: Facts) -> None:
    """Joins equal pieces that are end to end in a dimension that is not of weights: two batches in
    one array are one class."""
    for root in every.roots():
        pieces = every.packed(root)
        if root in found.weights or len({size for (_, size), _ in pieces}) != 1:
            continue
        dims = [dim for _, dim in pieces]
        inner = [outer(every, dim) for dim in dims]
        if any(one is None or one in found.weights or every.marks(one) & MEETING for one in inner):
            continue
        for dim in dims[1:]:
            every.join(dims[0], dim)


def _find_meeting(every: Dimensions, events: Events, found: Facts) -> None:
    """Finds factors that are summed while others remain: a sequence, or pixels, before the
    batch."""
    seen: set[tuple[bool, frozenset[int], frozenset[int]]] = set()
    for one in events.products:
        if not one.summed:
            continue
        if not one.is_forward:
            found.pooled |= _of_own_gradient(every, found, one)
            continue
        left = _free(every, found, (*one.batch, *one.left, *one.right))
        summed = _free(every, found, one.summed)
        key = (one.is_product, frozenset(summed), frozenset(left))
        if key in seen:
            continue
        seen.add(key)
        found.attending |= summed & left if one.is_product else set[int]()
        for root in summed:
            if left - {root}:
                (found.mixed if one.is_product else found.pooled).add(root)


def _find_inside(every: Dimensions, events: Events, found: Facts) -> None:
    """Finds what moves rows between products with parameters. Rows that are mixed as data, or
    sorted and paired for the loss, go through a network one by one."""
    last: dict[int, int] = {}
    in_loops: set[int] = set()
    for one in events.meetings:
        if one.is_forward and not one.is_table:
            own = roots(every, one.dims)
            last |= dict.fromkeys(own, one.number)
            in_loops |= own if one.loop.number else set()
    found.inside = dict.fromkeys(last, _NOTHING)
    for one in events.moves:
        # A window that parameters are multiplied with is no move behind them.
        is_window = one.marks & DimensionMark.WINDOWED
        for root in roots(every, (one.dim,)) & last.keys():
            is_before = one.number < last[root] or (one.loop.number and root in in_loops)
            if (is_before or is_window) and not one.is_of_data:
                found.inside[root] |= one.marks


def _of_own_gradient(every: Dimensions, found: Facts, one: Contraction) -> set[int]:
    """Returns the rows that are summed up in a gradient that each of a batch has for itself: rows
    of a task, or a sequence."""
    sides = roots(every, (*one.left, *one.right))
    is_of_weights = len(sides) > 1 and sides <= found.weights
    return (
        _free(every, found, one.summed)
        if is_of_weights and _free(every, found, one.batch)
        else set()
    )


def _free(every: Dimensions, found: Facts, dims: Dims) -> set[int]:
    return {
        root
        for root in roots(every, dims) - found.weights
        if not every.marks(root) & DimensionMark.KEY
    }


def born_inside(
    every: Dimensions, events: Events, found: Facts
) -> list[tuple[Lookup | Draw, Dims]]:
    """Lists arrays that begin inside the step: rows of data sets, and random numbers."""
    born: list[tuple[Lookup | Draw, Dims]] = [
        (one, one.result)
        for one in _row_lookups(every, events, found)
        if roots(every, one.looked_up) & found.data_sets
    ]
    born += [(one, one.result) for one in found.shuffled]
    born += [(one, one.dims) for one in events.draws]
    return born


def _batches(
    every: Dimensions,
    events: Events,
    inputs: Sequence[Dims],
    roles: Sequence[Role],
    found: Facts,
    *,
    of_data: bool,
) -> list[int]:
    """Finds the batches, the surest first.

    Args:
      of_data: whether to look in the data, also for a batch that the step divides into parts; else
        in what the step draws, and in what it carries without a gradient, such as the states of
        environments in which it acts.
    """
    inside = born_inside(every, events, found)

    def given(*those: Role) -> list[Dims]:
        return [dims for dims, role in zip(inputs, roles, strict=True) if role in those]

    data = given(Role.DATA, Role.KEY)
    data += [dims for one, dims in inside if isinstance(one, Lookup)]
    drawn = [dims for one, dims in inside if isinstance(one, Draw)]
    attempts = (
        tuple((data, one, False) for one in (_first, _not_walked, _stacks, _put_together))
        if of_data
        else ((drawn, _first, False), (given(Role.STATISTIC), _first, False), (drawn, _first, True))
    )
    for sources, factors_of, is_stacked in attempts:
        alone = _alone(every, sources, found, factors_of, is_stacked=is_stacked)
        if alone:
            after = _with_drawn(every, inside, found, alone)
            return after + _computed_whole(every, events, found, data, after)
    return []


def _alone(
    every: Dimensions,
    sources: Sequence[Dims],
    found: Facts,
    factors_of: Callable[[Dimensions, Dim], list[int]],
    *,
    is_stacked: bool = False,
) -> list[int]:
    """Finds the factors of these arrays that are batches, the surest first.

    Args:
      factors_of: gives the factors of a dimension that may be.
      is_stacked: whether they are summed over as parts of larger dimensions, in which they lie
        several times end to end, such as drawn noise and its mirror image.
    """
    order: Counter[int] = Counter()
    places: dict[int, int] = {}
    for dims in sources:
        for place, dim in enumerate(dims):
            for root in factors_of(every, dim):
                order[root] += 1
                places[root] = min(places.get(root, place), place)
    known = _weights_in_parts(every, found) | found.data_sets | found.nodes | found.graphs
    candidates = [
        root
        for root in order
        if root not in known
        and any(
            every.marks(one) & DimensionMark.SUMMED
            for one in (_stacks(every, (root,)) if is_stacked else (root,))
        )
        and (root in found.backward or not found.backward)
    ]
    ranked = sorted(candidates, key=lambda root: (-order[root], places[root], root))
    attempts = (
        lambda root: is_apart(every, found, root),
        lambda root: _is_apart_inside(every, found, root, found.pooled | found.mixed),
        lambda root: is_apart(every, found, root, _MAY_MEET, True),
        lambda root: _is_apart_inside(every, found, root, found.mixed, _MAY_MEET),
    )
    for is_alone in attempts:
        alone = [root for root in ranked if is_alone(root)]
        if alone:
            inside = [outer(every, dim) for one in alone for _, dim in every.packed(one)]
            more = [one for one in inside if one is not None and one not in alone]
            return alone + list(dict.fromkeys(more))
    return []


def _computed_whole(
    every: Dimensions,
    events: Events,
    found: Facts,
    data: Sequence[Dims],
    batches: Sequence[int],
) -> list[int]:
    """Factors of data in which batches lie end to end, as parameters are multiplied with all of
    them at once: the views of images, of which a network makes one batch. What the step cuts before
    that is none. So are factors that the step makes of batches in another order: without a
    constraint, nothing splits them.
    """
    met = {root for one in events.meetings for root in roots(every, one.dims)}
    moved = {
        root
        for root in met & found.inside.keys()
        if every.marks(root) & DimensionMark.SHIFTED and _is_apart_inside(every, found, root, set())
    }
    return [
        root
        for root in sorted(moved | {root for dims in data for root in roots(every, dims)})
        if root in met - found.weights and root not in batches and _is_made_of(every, root, batches)
    ]


def _is_made_of(every: Dimensions, root: int, batches: Sequence[int]) -> bool:
    """Whether a factor is batches end to end, in one level or several."""
    pieces = [outer(every, dim) for _, dim in every.packed(root)]
    return bool(pieces) and all(
        one is not None and (one in batches or _is_made_of(every, one, batches)) for one in pieces
    )


def _of_carried_sets(
    every: Dimensions,
    events: Events,
    inputs: Sequence[Dims],
    roles: Sequence[Role],
    found: Facts,
) -> list[int]:
    """Finds batches that are rows of arrays which the step carries and changes, such as a replay
    buffer. Such arrays become data sets, unless the step takes rows of what it made from them in
    the same way: the states with which a recurrent policy began to act."""
    known = found.weights | found.backward | found.nodes | found.edges | found.graphs
    rows = {
        root
        for one in _row_lookups(every, events, found)
        if not one.is_held_whole
        for root in roots(every, one.looked_up) - known
        if not every.marks(root) & DimensionMark.SUMMED
    }
    carried = {
        root
        for dims, role in zip(inputs, roles, strict=True)
        if role == Role.STATISTIC
        for root in roots(every, dims)
    }
    acted = roots(every, [dim for one in _taken(every, events, found) for dim in one.looked_up])
    rows = (rows & carried) - acted
    if not rows:
        return []
    found.data_sets |= rows
    return _batches(every, events, inputs, roles, found, of_data=True)


def _of_bags(every: Dimensions, found: Facts) -> list[int]:
    """Returns the rows that are a batch beside the elements of their bags."""
    return [
        root
        for root in sorted(found.bags)
        if found.batches
        and root not in found.batches
        and every.marks(root) & DimensionMark.SUMMED
        and (root in found.backward or not found.backward)
        and is_apart(every, found, root, DimensionMark.LOOKED_UP)
    ]


def _of_arrays_without(
    every: Dimensions, inputs: Sequence[Dims], roles: Sequence[Role], found: Facts
) -> list[int]:
    """Returns the rows of data without any batch that go through a network one by one, and whose
    results are mixed behind it: the support of an episode, which is summed up for each class beside
    the queries that are compared with these sums."""
    if not found.batches or not found.backward:
        return []
    known = _weights_in_parts(every, found) | found.data_sets | found.nodes | found.graphs
    known |= found.edges | found.acted | found.attending
    data = [dims for dims, role in zip(inputs, roles, strict=True) if role == Role.DATA]
    having = [
        bool((own | _pieces_of(every, own)) & {*found.batches})
        for own in (roots(every, dims) for dims in data)
    ]
    for dims, has in zip(data, having, strict=True):
        known |= roots(every, dims) if has else set[int]()
    rows: dict[int, None] = {}
    for dims, has in zip(data, having, strict=True):
        if has or len(dims) < 2:
            continue
        root = outer(every, dims[0])
        if (
            root is not None
            and root in found.inside.keys() & found.backward - known
            and every.marks(root) & DimensionMark.SUMMED
            and not every.marks(root) & MOVING  # A sequence, though only behind the network.
            and _is_apart_inside(every, found, root, set())
        ):
            rows[root] = None
    return list(rows)


def _taken(every: Dimensions, events: Events, found: Facts) -> list[Lookup]:
    """Lists lookups of rows that the step has made itself with its parameters."""
    known = found.weights | found.nodes | found.edges | found.graphs
    return [
        one
        for one in events.lookups
        if one.is_forward
        and len(one.by) == 1
        and one.made & ArrayOrigin.STATE
        and one.made != ArrayOrigin.STATE
        and not roots(every, one.looked_up) & known
    ]


def _of_acted(every: Dimensions, events: Events, found: Facts) -> list[int]:
    """Finds the batches of a step that acts, and then learns from what it saw in another order: the
    rows that it takes, and the environments, whose steps a loop walks over."""
    taken = _taken(every, events, found)
    for factors_of in (_first, _not_walked):
        rows = _alone(every, [one.result for one in taken], found, factors_of)
        if rows:
            found.shuffled = taken
            looked = roots(every, [dim for one in taken for dim in one.looked_up])
            found.acted = {
                root for root in looked - set(rows) if not every.marks(root) & DimensionMark.WALKED
            }
            return rows + sorted(found.acted)
    return []


def _first(every: Dimensions, dim: Dim) -> list[int]:
    """Returns the outermost factor of a dimension, or those of the slices that the step takes of
    it."""
    factors = list(every.factors(dim)[:1])
    pieces = [outer(every, piece) for root in factors for _, piece in every.packed(root)]
    return list(dict.fromkeys(one for one in pieces if one is not None)) or factors


def _stacks(every: Dimensions, dim: Dim) -> list[int]:
    """Finds the factors that consist of one dimension several times end to end, such as two views
    of a batch."""
    own = {every.factors(dim)}
    return [
        stack
        for stack in every.roots()
        if {every.factors(piece) for _, piece in every.packed(stack)} == own
    ]


def _put_together(every: Dimensions, dim: Dim) -> list[int]:
    """Finds the factors in which a dimension lies end to end with others, such as new rows with
    those of a memory, if all are summed up together."""
    own = every.factors(dim)
    return [
        stack
        for stack in every.roots()
        if own and own in [every.factors(piece) for _, piece in every.packed(stack)]
    ]


def _not_walked(every: Dimensions, dim: Dim) -> list[int]:
    """Returns the outermost factor of a dimension; if a loop walks over that one and there is
    another, the next factor: a batch that the step divides into micro-batches is inside of the
    walked factor."""
    factors = every.factors(dim)
    if len(factors) > 1 and every.marks(factors[0]) & DimensionMark.WALKED:
        factors = factors[1:]
    return list(factors[:1])


def _with_drawn(
    every: Dimensions,
    inside: Sequence[tuple[Lookup | Draw, Dims]],
    found: Facts,
    batches: list[int],
) -> list[int]:
    """Adds batches that the step draws itself to those of the data; joins batches of equal size."""
    known = found.weights | found.data_sets | found.nodes | found.graphs
    after = list(batches)
    for _, dims in inside:
        own = [root for dim in dims if (root := outer(every, dim)) is not None]
        if set(own) & set(after):
            continue
        for root in own:
            # Without a gradient, what is drawn for each of a population is summed up.
            is_of_step = root in found.backward or not found.backward
            summed = any(
                every.marks(one) & DimensionMark.SUMMED for one in (root, *_stacks(every, (root,)))
            )
            is_batch = is_of_step and summed
            if root in known or not is_batch or not is_apart(every, found, root):
                continue
            like = next((one for one in after if every.size(one) == every.size(root)), None)
            if like is None:
                after.append(root)
            else:
                every.join((like,), (root,))
                after[after.index(like)] = every.find(root)
            break
    return after


def is_apart(
    every: Dimensions,
    found: Facts,
    root: int,
    allowed: DimensionMark = _NOTHING,
    together: bool = False,
) -> bool:
    """Whether the elements of a factor never meet, except in final sums.

    Args:
      allowed: marks that do not matter.
      together: whether it may be summed over before others are.
    """
    if every.marks(root) & MEETING & ~allowed or every.is_cut(root):
        return False
    return together or root not in found.pooled | found.mixed


def _is_apart_inside(
    every: Dimensions,
    found: Facts,
    root: int,
    together: set[int],
    allowed: DimensionMark = _NOTHING,
) -> bool:
    """Whether the elements of a factor go through a network one by one, though they move or meet
    before it or behind it.

    Args:
      together: factors that are summed over before others are.
      allowed: marks that do not matter inside.
    """
    if root not in found.inside or root in together | found.attending:
        return False
    inside = found.inside[root]
    marks = (every.marks(root) & ~MOVING) | inside
    is_cut = bool(inside & (DimensionMark.CUT | DimensionMark.PUT)) and every.is_cut(root)
    return not marks & MEETING & ~allowed and not is_cut


def _frozen(
    every: Dimensions,
    events: Events,
    inputs: Sequence[Dims],
    roles: Sequence[Role],
    floats: frozenset[int],
    integers: frozenset[int],
    found: Facts,
) -> tuple[Role, ...]:
    """Finds frozen weights: arrays without any dimension of the data. Only what is trained has
    such weights: without a gradient, all that does not change is data."""
    if not found.is_trained:
        return tuple(roles)
    of_data = {*found.batches, *found.edges, *found.nodes, *found.graphs, *found.data_sets}
    after = list(roles)
    left: dict[int, frozenset[int]] = {}
    for place in floats | integers:
        own = frozenset(roots(every, inputs[place]))
        # Rows that are cut into batches are data.
        is_of_data = bool((own | _pieces_of(every, set(own))) & of_data)
        if own and not is_of_data and roles[place] == Role.DATA:
            left[place] = own
    matrices = _matrices(every, events) if left else set[frozenset[int]]()
    known = set(found.weights)
    for place, own in left.items():
        # A loop over stacked layers multiplies with one matrix of them in each turn.
        inside = frozenset(root for root in own if not every.marks(root) & DimensionMark.WALKED)
        # Two vectors are multiplied, too; a square matrix in a residual stream has one class twice.
        dims = [dim for dim in inputs[place] if dim and not roots(every, (dim,)) - inside]
        is_matrix = len(inside) > 1 or (len(dims) > 1 and inside <= found.weights)
        if is_matrix and (own in matrices or inside in matrices):
            after[place] = Role.FROZEN
            known |= own
    for place, own in left.items():
        if own <= known and place in floats:  # A bias or scale with dimensions of weights.
            after[place] = Role.FROZEN
    return tuple(after)


def _matrices(every: Dimensions, events: Events) -> set[frozenset[int]]:
    """Returns the factors of matrices that forward passes multiply with, and of tables that they
    look up in."""
    found: set[frozenset[int]] = set()
    for one in events.products:
        if one.is_forward and one.is_product:
            summed, batch = roots(every, one.summed), roots(every, one.batch)
            for side, other in zip((one.left, one.right), reversed(one.made), strict=True):
                if other != ArrayOrigin.STATE:  # Data are multiplied with parameters alone.
                    found.add(frozenset(summed | batch | roots(every, side)))
    for one in events.lookups:
        if one.is_forward and one.is_float:
            looked = roots(every, one.looked_up)
            # Rows that are trained may stand behind those that are not.
            parts = [
                roots(every, (part,)) for root in looked for part in every.pieces(root).values()
            ]
            found |= {frozenset(rows | roots(every, one.window)) for rows in (looked, *parts)}
    for inside, out, spatial in events.kernels:
        found.add(frozenset(roots(every, (inside, out, *spatial))))
    return found


def param_products(every: Dimensions, events: Events, found: Facts) -> Iterator[Contraction]:
    """Yields the products of the forward pass, without those of an optimizer."""
    for one in events.products:
        if one.is_forward and one.is_product and not is_of_optimizer(every, found, one):
            yield one


def is_of_optimizer(every: Dimensions, found: Facts, one: Contraction) -> bool:
    """Whether a product has gradients in it, and no dimension of the data: an optimizer multiplies
    matrices, such as those that precondition a gradient."""
    if not one.is_product or not one.is_forward:
        return False
    if not any(made & ArrayOrigin.GRADIENT for made in one.made):
        return False
    return roots(every, (*one.batch, *one.summed, *one.left, *one.right)) <= found.weights
