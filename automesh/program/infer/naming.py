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
    features: set[int] = field(default_factory=set[int])
    made: set[int] = field(default_factory=set[int])
    scored: set[int] = field(default_factory=set[int])
    hidden: set[int] = field(default_factory=set[int])
    channels: set[int] = field(default_factory=set[int])
    patches: list[set[int]] = field(default_factory=list[set[int]])
    chosen: set[int] = field(default_factory=set[int])
    weights: Counter[int] = field(default_factory=Counter[int])
    matrices: Counter[int] = field(default_factory=Counter[int])
    beside: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    in_data: set[int] = field(default_factory=set[int])
    with_batch: set[int] = field(default_factory=set[int])
    microbatches: set[int] = field(default_factory=set[int])


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
    tables, scores = signs.vocab, signs.chosen & signs.made - signs.vocab
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
    _read_lookups(every, events, facts, signs)
    _read_products(every, events, facts, signs)
    for dims in events.carried:
        own = roots(every, dims)
        if own & set(facts.batches):  # State of the batch, no parameters.
            signs.hidden |= own & facts.weights
    for dims in events.chosen.values():
        signs.chosen |= roots(every, dims) & facts.weights
    for walk in events.walks:
        if walk.sums_gradients:
            signs.microbatches |= roots(every, (walk.dim,))
    for inside, out, _ in events.kernels:
        signs.channels |= roots(every, (inside, out))
    for dims in events.spatial:
        signs.patches.append(roots(every, dims))
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
            signs.group |= own & signs.beside_keys - signs.heads
    return signs


def _read_lookups(every: Dimensions, events: Events, facts: Facts, signs: _Signs) -> None:
    for one in events.lookups:
        if not one.is_forward:
            continue
        looked = roots(every, one.looked_up)
        is_table = bool(one.made & ArrayOrigin.STATE) or bool(looked & facts.weights)
        window = {outer(every, dim) for dim in one.window} - {None}
        is_table = is_table and bool(one.by)  # Else a layer is taken out of a stack.
        if is_table and window & facts.weights and looked <= facts.weights:
            signs.vocab |= looked
            signs.embed.update(root for root in window if root in facts.weights)
        else:
            # Tokens that are sent to experts are chosen out of rows that have a sequence in them.
            signs.chosen |= looked if looked <= facts.weights else set[int]()


def _read_products(every: Dimensions, events: Events, facts: Facts, signs: _Signs) -> None:
    seen: set[tuple[object, ...]] = set()
    chosen = {root for dims in events.chosen.values() for root in roots(every, dims)}
    # Latents attend to rows of data, which have learned positions.
    lengths = _lengths(every, events, facts) | signs.with_batch
    for one in param_products(events):
        batch, summed, left, right = (
            frozenset(roots(every, dims)) for dims in (one.batch, one.summed, one.left, one.right)
        )
        key = (batch, summed, left, right, one.made)
        if key in seen:
            continue
        seen.add(key)
        if summed and summed <= chosen & facts.weights:  # A lookup by a product with ones.
            for made, other in zip(one.made, (right, left), strict=False):
                if not made & ArrayOrigin.STATE:
                    signs.embed.update(other & facts.weights)
        is_of_weights = any(side <= facts.weights for side in (left, right))
        is_inside = any(side and side <= facts.weights for side in (left, right))
        if batch and summed and batch | summed <= facts.weights and is_inside:
            signs.experts |= batch
        elif summed and batch & facts.weights and batch - facts.weights:
            signs.heads |= batch & facts.weights
            sides = (left | right) & facts.weights - lengths
            if summed <= facts.weights - lengths:  # Queries with keys.
                signs.of_keys |= summed
                signs.beside_keys |= sides
            else:  # What is looked up with values.
                signs.of_values |= sides
                signs.along_heads |= summed & facts.weights
        if batch | summed <= facts.weights and is_of_weights:
            signs.features |= summed
            sides = [side for side in (left, right) if side <= facts.weights]
            signs.made |= {root for side in sides for root in side}
            signs.scored |= {root for side in sides if len(side) == 1 for root in side}


def _lengths(every: Dimensions, events: Events, facts: Facts) -> set[int]:
    """Finds sequences that attend to themselves: a product sums weights times values over one
    class, and a dimension of the same class stays in the result. With a table of learned positions
    such a class also belongs to parameters."""
    found: set[int] = set()
    for one in param_products(events):
        batch, summed = roots(every, one.batch), roots(every, one.summed)
        if batch & facts.weights and batch - facts.weights:
            found |= summed & roots(every, (*one.left, *one.right))
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
            if len(own) > 1 and not is_kernel:
                signs.matrices.update(own)
            for root in own:
                signs.beside.setdefault(root, set()).update(own - {root})
        elif role == Role.DATA:
            signs.in_data |= own | pieces
            if own & set(facts.batches[:1]):
                signs.with_batch |= own - set(facts.batches[:1])


def _base(every: Dimensions, facts: Facts, signs: _Signs, root: int) -> str:
    """Returns the name of a class by the evidence; empty without evidence."""
    batches = [one for one in facts.batches if one not in facts.edges]
    of_data = (
        ("envs", facts.acted),
        # Rows of rows are tokens.
        ("sequence", set(batches[1:]) & signs.with_batch),
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
    if any(root in patch for patch in signs.patches):
        return "space"
    is_of_step = root in facts.backward or root in signs.with_batch
    meets = every.is_cut(root) or root in facts.mixed | facts.pooled
    if is_of_step and (meets or marks & (DimensionMark.SHIFTED | DimensionMark.ORDERED)):
        return "sequence"
    return ""


def _of_weights(every: Dimensions, facts: Facts, signs: _Signs, root: int) -> str:
    marks, main = every.marks(root), _residual(signs)
    if marks & DimensionMark.KERNEL:
        return "kernel"
    if marks & DimensionMark.WALKED:
        return "layers"
    if not facts.is_trained:
        return "space" if every.is_cut(root) or marks & DimensionMark.SHIFTED else ""
    beside = signs.beside.get(root, set())
    # A result of weights and features is no sequence: it may be scores of classes for each row.
    rows = signs.with_batch - signs.features - signs.chosen - signs.made
    rows |= signs.along_heads | signs.beside_keys
    is_narrow = all(every.size(one) > every.size(root) for one in beside)
    is_between = bool(beside & main) and root in signs.features and signs.weights[root] > 1
    return _first(
        (
            ("vocab", signs.vocab),
            ("embed", main),
            ("expert", signs.experts),
            ("branch", signs.branches),
            ("heads", signs.heads),
            ("head_dim", signs.head_dim),
            ("group", signs.group),
            ("sequence", rows),
            ("channels", signs.channels),
            ("space", {one for patch in signs.patches for one in patch}),
            ("features", signs.in_data & signs.features - signs.chosen),
            ("hidden", signs.hidden if marks & DimensionMark.SUMMED else set[int]()),
            ("vocab", signs.chosen & signs.features),
            ("classes", signs.chosen | signs.with_batch & signs.made - signs.features),
            ("bottleneck", {root} if is_between and is_narrow else set[int]()),
            ("mlp", {root} if is_between else set[int]()),
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
