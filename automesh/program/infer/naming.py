"""Gives classes readable names, by the operations along them (no jax)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from automesh.program.infer.dimensions import DimensionMark, Dimensions, Dims
from automesh.program.infer.facts import Facts, outer, param_products, roots
from automesh.program.infer.nouns import Role
from automesh.program.infer.operation import ArrayOrigin, Events

_WEIGHTS = frozenset({Role.PARAMETER, Role.FROZEN})


@dataclass(slots=True)
class _Signs:
    """The factors with evidence for each name."""

    vocab: set[int] = field(default_factory=set[int])
    embed: Counter[int] = field(default_factory=Counter[int])
    heads: set[int] = field(default_factory=set[int])
    of_keys: set[int] = field(default_factory=set[int])
    beside_keys: set[int] = field(default_factory=set[int])
    of_values: set[int] = field(default_factory=set[int])
    along_heads: set[int] = field(default_factory=set[int])
    head_dim: set[int] = field(default_factory=set[int])
    group: set[int] = field(default_factory=set[int])
    experts: set[int] = field(default_factory=set[int])
    branches: set[int] = field(default_factory=set[int])
    modes: set[int] = field(default_factory=set[int])
    stacked: set[int] = field(default_factory=set[int])
    features: set[int] = field(default_factory=set[int])
    made: set[int] = field(default_factory=set[int])
    scored: set[int] = field(default_factory=set[int])
    hidden: set[int] = field(default_factory=set[int])
    channels: set[int] = field(default_factory=set[int])
    patches: set[int] = field(default_factory=set[int])
    slid: set[int] = field(default_factory=set[int])
    chosen: set[int] = field(default_factory=set[int])
    weights: Counter[int] = field(default_factory=Counter[int])
    matrices: Counter[int] = field(default_factory=Counter[int])
    beside: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    in_data: set[int] = field(default_factory=set[int])
    with_batch: set[int] = field(default_factory=set[int])
    twice: set[int] = field(default_factory=set[int])
    narrow: set[int] = field(default_factory=set[int])
    mixed: set[int] = field(default_factory=set[int])
    kept: set[int] = field(default_factory=set[int])
    microbatches: set[int] = field(default_factory=set[int])
    lengths: set[int] = field(default_factory=set[int])
    positions: set[int] = field(default_factory=set[int])
    tasks: set[int] = field(default_factory=set[int])
    layers: set[int] = field(default_factory=set[int])
    forms: set[frozenset[int]] = field(default_factory=set[frozenset[int]])


def names_of(
    every: Dimensions,
    events: Events,
    facts: Facts,
    arrays: Sequence[tuple[Dims, Role]],
    wanted: Iterable[int],
) -> dict[int, str]:
    """Returns a unique name for each of the wanted factors.

    Args:
      arrays: dimensions and roles of the inputs.
      wanted: factors in the order of their numbers.
    """
    signs = _signs(every, events, facts, arrays)
    taken: Counter[str] = Counter()
    named: dict[int, str] = {}
    plain: list[int] = []
    wanted = list(wanted)
    # Pieces first, since a class that contains them is named after them.
    for root in sorted(wanted, key=lambda root: bool(every.packed(root))):
        packed = "" if root in signs.head_dim else _of_packed(every, named, root)
        base = packed or _base(every, facts, signs, root)
        if not base:
            plain.append(root)
            continue
        taken[base] += 1
        join = "_" if base[-1].isdigit() else ""
        named[root] = base if taken[base] == 1 else f"{base}{join}{taken[base]}"
    for number, root in enumerate(plain):
        named[root] = f"d{number}"
    return named


def join_labels(
    every: Dimensions, events: Events, facts: Facts, arrays: Sequence[tuple[Dims, Role]]
) -> None:
    """Joins scores, from which labels choose that are an array of their own, with the rows of the
    only table, if they are as many: both are the tokens of one vocabulary, and no array has both.

    Args:
      arrays: dimensions and roles of the inputs.
    """
    signs = _signs(every, events, facts, arrays)
    others = signs.vocab | signs.experts | signs.branches
    tables, scores = signs.vocab, signs.chosen & signs.made - others
    if len(tables) != 1 or len(scores) != 1:
        return
    both = tables | scores
    is_apart = all(len(both & roots(every, dims)) < 2 for dims, _ in arrays)
    if is_apart and len({every.size(root) for root in both}) == 1:
        every.join(tuple(tables), tuple(scores))


def _of_packed(every: Dimensions, named: Mapping[int, str], root: int) -> str:
    """Names a class that is several pieces of another one end to end: `hidden_x4` for four."""
    pieces = every.packed(root)
    if not pieces:
        return ""
    inside = {outer(every, dim) for _, dim in pieces}
    one = next(iter(inside))
    name = named.get(one, "") if len(inside) == 1 and one is not None else ""
    return f"{name}_x{len(pieces)}" if name else "packed"


def _signs(
    every: Dimensions, events: Events, facts: Facts, arrays: Sequence[tuple[Dims, Role]]
) -> _Signs:
    signs = _Signs()
    _read_arrays(every, facts, arrays, signs)
    _read_products(every, events, facts, signs)
    _read_lookups(every, events, facts, signs)
    _read_cut_tables(every, facts, signs)
    for dims in events.carried:
        own = roots(every, dims)
        if own & set(facts.batches):  # State of the batch, no parameters.
            signs.hidden |= own & facts.weights
    for source, dims in events.chosen.items():
        own = roots(every, dims) & facts.weights
        signs.chosen |= own
        if source in events.ranked:  # Each expert has a matrix of its own, and a score.
            signs.experts |= own & signs.stacked & signs.scored & signs.mixed
    for walk in events.walks:
        if walk.sums_gradients:
            signs.microbatches |= roots(every, (walk.dim,))
    for inside, out, _ in events.kernels:
        signs.channels |= roots(every, (inside, out))
    for dims in events.spatial:
        # A window over one dimension slides along tokens, samples of sound or another sequence.
        (signs.patches if sum(map(bool, dims)) > 1 else signs.slid).update(roots(every, dims))
    for dims in events.transformed:
        own = roots(every, dims)
        pieces = [dim for root in own for dim in every.pieces(root).values()]
        signs.modes |= roots(every, pieces) & facts.weights
        if len(dims) > 1:  # Of an image or a field.
            signs.patches |= own - facts.weights
    signs.experts -= signs.modes
    signs.heads -= signs.experts
    # Scores of a router choose among experts; others are trained side by side, as two critics are.
    signs.branches = signs.experts - signs.scored
    signs.experts -= signs.branches
    for root in list(signs.features):  # What lies end to end in what is summed over.
        signs.features |= {factor for _, dim in every.packed(root) for factor in every.factors(dim)}
    for dims, role in arrays:
        own = roots(every, dims) if role in _WEIGHTS else set[int]()
        if own & signs.heads:  # Both are parts of the same weights; a sequence is not.
            signs.head_dim |= own & (signs.of_keys | signs.of_values - signs.beside_keys)
            beside = own & signs.beside_keys - signs.heads
            # Queries of a group have keys; values that weigh keys have none.
            (signs.group if own & signs.of_keys else signs.head_dim).update(beside)
    signs.head_dim -= signs.group
    return signs


def _read_lookups(every: Dimensions, events: Events, facts: Facts, signs: _Signs) -> None:
    weights = facts.weights
    of_data = {*facts.batches, *facts.edges, *facts.nodes, *facts.graphs, *facts.data_sets}
    for one in events.lookups:
        if not one.is_forward:
            continue
        looked, by = roots(every, one.looked_up), roots(every, one.by)
        is_state = bool(one.made & ArrayOrigin.STATE) or bool(looked & weights)
        window = {root for dim in one.window if (root := outer(every, dim)) in weights}
        if looked <= weights and not by and one.made == ArrayOrigin.STATE:
            # One layer out of a stack of matrices, or one row out of a table of positions.
            (signs.layers if len(window) > 1 else signs.positions).update(looked)
        elif looked and looked <= signs.experts & signs.scored:
            continue  # The bias of the expert of each row.
        elif looked <= signs.with_batch and window:
            continue  # Rows of data with learned positions, such as some of the patches.
        elif is_state and by and looked <= weights and (window or one.made == ArrayOrigin.STATE):
            # Positions may be an array of the step; without a batch, tokens have no other sign.
            is_by_data = one.chosen_by and not (
                facts.batches and one.is_by_held and not by & of_data
            )
            (signs.vocab if is_by_data else signs.positions).update(looked)
            signs.embed.update(window)
        else:
            # Tokens that are sent to experts are chosen out of rows that have a sequence in them.
            signs.chosen |= looked if looked <= weights else set[int]()
    signs.layers -= signs.vocab
    signs.positions -= signs.vocab | signs.layers


def _read_cut_tables(every: Dimensions, facts: Facts, signs: _Signs) -> None:
    """Reads tables of learned positions that are longer than the sequence, which takes a slice."""
    rows = signs.with_batch | signs.lengths
    rows |= roots(every, [dim for root in rows for dim in every.pieces(root).values()])
    for root in facts.weights - signs.vocab - signs.with_batch - signs.made:
        if every.is_cut(root) and roots(every, every.pieces(root).values()) & rows:
            signs.positions.add(root)


@dataclass(frozen=True, slots=True)
class _Product:
    """The factors of a product.

    Attributes:
      single: those of an operand that has one dimension beside what is summed over.
    """

    batch: frozenset[int]
    summed: frozenset[int]
    left: frozenset[int]
    right: frozenset[int]
    single: frozenset[int]
    made: tuple[ArrayOrigin, ...]

    @property
    def sides(self) -> frozenset[int]:
        return self.left | self.right


def _products(every: Dimensions, events: Events, facts: Facts) -> list[_Product]:
    """Returns the different products of the forward pass, in order."""
    found: dict[_Product, None] = {}
    for one in param_products(every, events, facts):
        batch, left, right = (
            frozenset(roots(every, dims)) for dims in (one.batch, one.left, one.right)
        )
        # The two halves that a rotation puts end to end, or beside each other, are no factor of
        # parameters, but they lie in a dimension that is one.
        summed = frozenset(
            root
            for dim in one.summed
            for root in roots(every, (dim,)) & facts.weights or roots(every, (dim,))
        )
        single = frozenset(
            root
            for side in (one.left, one.right)
            if sum(map(bool, side)) == 1
            for root in roots(every, side)
        )
        found[_Product(batch, summed, left, right, single, one.made)] = None
    return list(found)


def _read_products(every: Dimensions, events: Events, facts: Facts, signs: _Signs) -> None:
    weights = facts.weights
    chosen = {root for dims in events.chosen.values() for root in roots(every, dims)}
    products = _products(every, events, facts)
    signs.lengths |= _lengths(products, weights)
    # Latents attend to rows of data, which have learned positions.
    lengths = signs.lengths | signs.with_batch
    for one in products:
        batch, summed, left, right = one.batch, one.summed, one.left, one.right
        if summed and summed <= chosen & weights:  # A lookup by a product with ones.
            for made, other in zip(one.made, (right, left), strict=False):
                if not made & ArrayOrigin.STATE:
                    signs.embed.update(other & weights)
        is_of_weights = any(side <= weights for side in (left, right))
        is_inside = any(side and side <= weights for side in (left, right))
        # Queries and keys are made of parameters; rows of data have features.
        is_of_rows = any(not made & ArrayOrigin.STATE for made in one.made)
        is_scores = not is_of_rows and _is_scores(one, products, weights)
        signs.kept |= _kept(one)
        if ArrayOrigin.STATE in one.made:  # Summed over with a width, or one product for each.
            signs.mixed |= batch | (summed if len(summed) > 1 else frozenset[int]())
        if batch and summed and batch | summed <= weights and is_inside and not is_scores:
            signs.experts |= batch
        elif summed and batch & weights and (batch - weights or is_scores or _attends(one)):
            signs.heads |= batch & weights
            sides = one.sides & weights - lengths
            if summed <= weights - lengths:  # Queries with keys.
                signs.of_keys |= summed
                signs.beside_keys |= sides
            else:  # What is looked up with values.
                signs.of_values |= sides
                signs.along_heads |= summed & weights
        if batch | summed <= weights and is_of_weights and not is_scores:
            signs.features |= summed
            sides = [side for side in (left, right) if side <= weights]
            signs.made |= {root for side in sides for root in side}
            # Experts that are chosen in groups are several factors.
            signs.scored |= {root for side in sides if side <= one.single for root in side}
    _read_own_weights(every, events, facts, products, signs)
    for one in products:  # A learned query of each head.
        if one.batch & signs.heads - signs.experts and one.batch | one.summed <= weights:
            signs.of_keys |= one.summed - lengths


def _read_own_weights(
    every: Dimensions,
    events: Events,
    facts: Facts,
    products: Sequence[_Product],
    signs: _Signs,
) -> None:
    """Reads products with weights that each of the batch has for itself, as a task after its inner
    steps, or each of a population."""
    batches = set(facts.batches)  # Also several end to end.
    batches |= {
        root
        for root in every.roots()
        if every.packed(root) and roots(every, [dim for _, dim in every.packed(root)]) <= batches
    }
    copies = {frozenset(roots(every, dims)) for dims in events.copies}
    for one in products:
        if not one.batch <= batches or not one.summed <= facts.weights:
            continue
        for made, side in zip(one.made, (one.left, one.right), strict=False):
            own = side - batches
            if own < one.batch | side and own <= facts.weights and own | one.summed in signs.forms:
                signs.features |= one.summed
                signs.made |= own
                if made & ArrayOrigin.GRADIENT or one.batch | own | one.summed in copies:
                    signs.tasks |= one.batch & set(facts.batches[:1])


def _is_scores(one: _Product, products: Sequence[_Product], weights: set[int]) -> bool:
    """Whether another product weighs rows by the results of this one, and keeps its queries, which
    have no batch: latents, learned queries, the only sequence."""
    return any(
        side
        and side <= weights
        and other.batch >= one.batch
        and other.summed
        and other.summed <= one.sides
        and side <= other.sides <= weights
        and other.left != other.right  # Else a matrix of an array with itself.
        for side in (one.left, one.right)
        for other in products
    )


def _attends(one: _Product) -> bool:
    """Whether a product is of a sequence with itself: its scores, or values weighed by them."""
    return bool(one.left & one.right or _kept(one))


def _kept(one: _Product) -> frozenset[int]:
    """Returns what is summed over and also stays, without parameters from a width to the same."""
    sides = zip(one.made, (one.left, one.right), strict=False)
    return one.summed & frozenset(
        root for made, side in sides if made != ArrayOrigin.STATE for root in side
    )


def _lengths(products: Iterable[_Product], weights: set[int]) -> set[int]:
    """Finds sequences that attend to themselves: weights times values sum over one, and another one
    of the same class stays. A table of learned positions makes such a class one of parameters."""
    found: set[int] = set()
    for one in products:
        if one.batch & weights:
            found |= one.summed & one.sides if one.batch - weights else _kept(one)
    return found


def _read_arrays(
    every: Dimensions, facts: Facts, arrays: Sequence[tuple[Dims, Role]], signs: _Signs
) -> None:
    for dims, role in arrays:
        own = {root for dim in dims if (root := outer(every, dim)) is not None}
        inside = [piece for root in own for _, piece in every.packed(root)]
        pieces = {root for piece in inside if (root := outer(every, piece)) is not None}
        if role in _WEIGHTS:
            signs.weights.update(own | pieces)
            is_kernel = any(every.marks(root) & DimensionMark.KERNEL for root in own)
            if len(own) > 2 and not is_kernel:
                signs.stacked |= own
            if len(own) > 1 and not is_kernel:
                signs.matrices.update(own)
                signs.forms.add(frozenset(own))
            for root in own:
                signs.beside.setdefault(root, set()).update(own - {root})
        elif role == Role.DATA:
            signs.in_data |= own | pieces
            each = [outer(every, dim) for dim in dims if dim]
            signs.twice |= {root for root in own if each.count(root) > 1}
            if len(dims) == 2:
                signs.narrow |= own
            if own & set(facts.batches[:1]):
                signs.with_batch |= own - set(facts.batches[:1])


def _base(every: Dimensions, facts: Facts, signs: _Signs, root: int) -> str:
    """Returns the name of a class by the evidence; empty without evidence."""
    batches = [one for one in facts.batches if one not in facts.edges]
    of_data = (
        ("envs", facts.acted),
        # The neighbours of a graph are a matrix.
        ("nodes", set(batches) & signs.twice & signs.kept),
        # The only sequence; rows of rows are tokens.
        ("sequence", set(batches) & signs.lengths),
        ("sequence", set(batches[1:]) & signs.with_batch),
        ("tasks", signs.tasks),
        ("batch", set(batches)),
        ("edges", facts.edges),
        ("nodes", facts.nodes),
        ("graphs", facts.graphs),
        ("rows", facts.data_sets),
    )
    if name := _first(of_data, root):
        return name
    marks = every.marks(root)
    if root in facts.weights:
        return _of_weights(every, facts, signs, root)
    if marks & DimensionMark.WALKED:
        return "microbatch" if root in signs.microbatches else "time"
    if root in signs.patches:
        return "space"
    if root in signs.slid:
        return "sequence"
    is_of_step = root in facts.backward or root in signs.with_batch
    meets = every.is_cut(root) or root in facts.mixed | facts.pooled
    if is_of_step and (meets or marks & (DimensionMark.SHIFTED | DimensionMark.ORDERED)):
        return "sequence"
    return ""


def _of_weights(every: Dimensions, facts: Facts, signs: _Signs, root: int) -> str:
    marks, main = every.marks(root), _residual(signs)
    if marks & DimensionMark.KERNEL:
        return "kernel"
    if marks & DimensionMark.WALKED or root in signs.layers:
        return "layers"
    if not facts.is_trained:
        return "space" if every.is_cut(root) or marks & DimensionMark.SHIFTED else ""
    beside = signs.beside.get(root, set())
    # A result of weights and features is no sequence: it may be scores of classes for each row.
    rows = signs.with_batch - signs.features - signs.chosen - signs.made
    rows |= signs.along_heads | signs.beside_keys
    # Rows of learned positions are as wide as what is multiplied; others are compared with data.
    is_compared = (
        root in signs.narrow
        and bool(beside)
        and not beside & (signs.features | signs.made | signs.embed.keys())
    )
    is_narrow = all(every.size(one) > every.size(root) for one in beside)
    # Matrices of layers; or gates that one product makes together.
    stacked = "stack" if root in signs.features | signs.made else "layers"
    is_between = bool(beside & main) and root in signs.features and signs.weights[root] > 1
    # Between two products in a block of an image network, which come from and go to its channels.
    is_in_block = len(beside) == 1 and beside <= signs.channels and root in signs.features
    return _first(
        (
            ("vocab", signs.vocab),
            ("positions", signs.positions),
            ("embed", main),
            ("modes", signs.modes),
            ("expert", signs.experts),
            ("branch", signs.branches),
            ("heads", signs.heads),
            ("head_dim", signs.head_dim),
            ("group", signs.group),
            (stacked, signs.stacked - signs.in_data if every.is_unstacked(root) else set[int]()),
            ("features", {root} & rows if is_compared else set[int]()),
            ("sequence", rows),
            ("channels", signs.channels),
            ("space", signs.patches),
            ("sequence", signs.slid),
            ("features", signs.in_data & signs.features - signs.chosen),
            ("hidden", signs.hidden if marks & DimensionMark.SUMMED else set[int]()),
            ("vocab", signs.chosen & signs.features),
            ("classes", signs.chosen | signs.with_batch & signs.made - signs.features),
            ("bottleneck", {root} if is_between and is_narrow else set[int]()),
            ("mlp", {root} if is_between or is_in_block else set[int]()),
        ),
        root,
    )


def _first(names: Iterable[tuple[str, set[int]]], root: int) -> str:
    """Returns the first name whose factors hold one; empty without."""
    return next((name for name, those in names if root in those), "")


def _residual(signs: _Signs) -> set[int]:
    """Returns the factors that flow from layer to layer: results of a table, or else factors of
    most matrices."""
    known = signs.vocab | signs.heads | signs.experts | signs.branches
    named = {root for root in signs.embed if root not in known}
    known |= signs.hidden
    counts = {
        root: count
        for root, count in signs.matrices.items()
        if root not in known and root in signs.features and count >= 4
    }
    if not named:
        best = max(counts.values(), default=0)
        return {root for root, count in counts.items() if count == best}
    # Another stream, such as that of images beside captions, meets no matrix of the first one.
    for root, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if not signs.beside[root] & named:
            named.add(root)
    return named
