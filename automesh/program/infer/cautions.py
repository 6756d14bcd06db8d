"""Finds what users should know before a step is split (no jax)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from automesh.program.infer.dimensions import DimensionMark, Dimensions, Dims
from automesh.program.infer.facts import (
    Facts,
    born_inside,
    is_apart,
    is_factorized_by_optimizer,
    is_of_optimizer,
    outer,
    roots,
)
from automesh.program.infer.nouns import (
    ArrayClasses,
    Caution,
    CautionKind,
    Inner,
    Role,
)
from automesh.program.infer.operation import ArrayOrigin, Draw, Events, Lookup

_SMALL = 2**17
# Nobody would split a smaller array, such as a table of noise levels.
_TABLE = 2**12
_LARGE_OUTPUT = 2**22
_WEIGHTS = frozenset({Role.PARAMETER, Role.FROZEN})


def cautions_of(
    every: Dimensions,
    events: Events,
    facts: Facts,
    names: Mapping[int, str],
    inputs: Sequence[tuple[ArrayClasses, Dims]],
    results: Sequence[ArrayClasses],
    *,
    turns: int,
) -> tuple[Caution, ...]:
    """Returns all cautions about a step, each once.

    Args:
      inputs: held arrays and arguments.
      turns: training steps in a call; 0 if only a run shows it.
    """
    found = [
        *_of_batches(every, events, facts, names, inputs),
        *_of_inner_rows(every, events, facts, names),
        *_of_groups(every, facts, names, inputs),
        *_of_packed(every, names, inputs),
        *_of_gradients(every, events, facts, names, inputs),
        *_of_optimizer(every, events, facts),
        *_of_uses(every, events, inputs),
        *_of_whole_step(events, inputs, results, turns),
    ]
    return tuple({(one.kind, one.about): one for one in reversed(found)}.values())[::-1]


def _of_batches(
    every: Dimensions,
    events: Events,
    facts: Facts,
    names: Mapping[int, str],
    inputs: Sequence[tuple[ArrayClasses, Dims]],
) -> Iterator[Caution]:
    batches = [root for root in facts.batches if root not in facts.edges]
    edges = [root for root in facts.batches if root in facts.edges]
    if not batches and edges:
        root = edges[0]
        yield Caution(
            kind=CautionKind.NO_BATCH,
            text=f"there is no batch dimension: graphs lie end to end, and "
            f"{names.get(root, 'edges')} ({every.size(root):,}) are what can be split; sums over "
            "them are an all-reduce",
            about=names.get(root, ""),
        )
    elif not batches:
        yield Caution(
            kind=CautionKind.NO_BATCH,
            text="no dimension of the data is a batch: the elements of each meet before they are "
            "summed up",
        )
    if batches and names.get(batches[0], "").startswith("sequence"):
        yield Caution(
            kind=CautionKind.NO_BATCH,
            text=f"there is no batch dimension: the elements of {names[batches[0]]} "
            f"({every.size(batches[0]):,}) attend to each other; if they are split, keys and "
            "values are gathered in every layer",
            about=names[batches[0]],
        )
    in_arguments = {root for _, dims in inputs for root in roots(every, dims)}
    within = [dim for root in batches if root in in_arguments for _, dim in every.packed(root)]
    for root in batches[:1]:
        put_together = roots(every, [dim for _, dim in every.packed(root)])
        is_of_arguments = bool(put_together) and put_together <= in_arguments
        if root not in in_arguments | roots(every, within) and not is_of_arguments:
            yield Caution(
                kind=CautionKind.BATCH_INSIDE,
                text=f"{names[root]} ({every.size(root):,}) is in no argument: it is taken or "
                "drawn inside the step, and without a constraint there every device does all of it",
                about=names[root],
            )
    taken = [root for root in facts.data_sets if _elements(every, inputs, root) >= _TABLE]
    if taken:
        sets = ", ".join(
            f"{names.get(root, 'a data set')} ({every.size(root):,})"
            for root in sorted(taken, key=lambda root: (-every.size(root), names.get(root, "")))
        )
        yield Caution(
            kind=CautionKind.GATHERS_DATA_SET,
            text=f"the step takes its rows from {sets}: to split that gathers all of it; split "
            "what is taken",
            about=names.get(taken[0], ""),
        )
    cut = roots(every, [one.dim for one in events.moves if one.marks & DimensionMark.CUT])
    yield from _of_stacked(every, names, batches, in_arguments, cut)


def _of_stacked(
    every: Dimensions,
    names: Mapping[int, str],
    batches: Sequence[int],
    in_arguments: set[int],
    cut: set[int],
) -> Iterator[Caution]:
    """Warns of batches that lie end to end in the data, or that the step puts end to end."""
    together: dict[int, list[int]] = {}
    for root in every.roots():
        pieces = [outer(every, dim) for _, dim in every.packed(root)]
        own = [one for one in pieces if one is not None and one in batches]
        if not own or len(own) < len(pieces):
            continue
        one, size = own[0], every.size(root)
        if root in batches or root not in in_arguments:
            if len(set(own)) == 1:
                together.setdefault(one, []).append(root)
            continue
        is_even = len(set(own)) == 1
        rows = f"{len(own)} slices of {every.size(one):,}"
        if not is_even:
            rows = f"slices of {', '.join(f'{every.size(part):,}' for part in own)}"
        cure = f"({len(own)}, {every.size(one):,}, ...)" if is_even else "of their own"
        yield Caution(
            kind=CautionKind.STACKED_BATCHES,
            text=f"the step takes {rows} from the {size:,} rows of its data, which stay whole on "
            f"every device; give it arrays {cure} to split them",
            about=names[one],
        )
    for one, those in together.items():
        counts = [len(every.packed(root)) for root in those]
        sizes = " and ".join(f"{every.size(root):,}" for root in those)
        shapes = " and ".join(f"({number}, {every.size(one):,}, ...)" for number in counts)
        ways = (
            " and taken apart again: an all-to-all each way"
            if cut.intersection(those)
            else ": an all-to-all"
        )
        yield Caution(
            kind=CautionKind.STACKED_BATCHES,
            text=f"{' and '.join(map(str, counts))} batches of {every.size(one):,} are put end to "
            f"end ({sizes}){ways} if they are split; stack them instead, {shapes}",
            about=names[one],
        )


def _of_inner_rows(
    every: Dimensions, events: Events, facts: Facts, names: Mapping[int, str]
) -> Iterator[Caution]:
    """Warns of a batch that is the inner part of the rows that parameters are multiplied with."""
    for one in events.meetings:
        own_dims = () if one.is_table else one.dims
        # Rows may lie end to end with others, such as those of queries behind their support.
        parts = [piece for root in roots(every, own_dims) for _, piece in every.packed(root)]
        for dim in (*own_dims, *parts):
            outside, *inside = every.factors(dim) or (0,)
            own = [root for root in inside if root in facts.batches]
            if not own or outside in facts.weights or outside in facts.batches:
                continue
            name, size = names[own[0]], every.size(own[0])
            rows = every.size_of(every.factors(dim))
            yield Caution(
                kind=CautionKind.INNER_BATCH,
                text=f"{name} ({size:,}) is the inner part of {rows:,} rows that parameters are "
                f"multiplied with: a split of it crosses them, and the compiler may gather all of "
                "them; put it first (`jnp.repeat` keeps it there, `jnp.tile` and a reshape of "
                "(copies, batch) do not)",
                about=name,
            )


def _of_groups(
    every: Dimensions,
    facts: Facts,
    names: Mapping[int, str],
    inputs: Sequence[tuple[ArrayClasses, Dims]],
) -> Iterator[Caution]:
    """Warns of rows that the step takes in few groups, as for a statistic of each, though each row
    goes through the network alone."""
    for array, dims in inputs:
        for dim in dims if array.role is Role.DATA else ():
            first, *inside = every.factors(dim) or (0,)
            rows = every.size_of(tuple(inside))
            if first not in facts.batches or not inside or rows <= every.size(first):
                continue
            if not all(is_apart(every, facts, one) for one in inside):
                continue
            size = every.size(first)
            yield Caution(
                kind=CautionKind.GROUPED_BATCH,
                text=f"the step takes the {size * rows:,} rows of {array.name} as {size:,} times "
                f"{rows:,}: at most {size:,} devices split them; if it does not matter which rows "
                f"are a group, take those side by side, as by a reshape to ({rows:,}, {size:,}, "
                "...)",
                about=names[first],
            )


def _of_optimizer(every: Dimensions, events: Events, facts: Facts) -> Iterator[Caution]:
    """Matrices that an optimizer multiplies or factorizes to precondition gradients."""
    products = sum(one.loop.turns for one in events.products if is_of_optimizer(every, facts, one))
    said: list[str] = []
    # Without a gradient there is no optimizer: a step that solves for its state is one itself.
    factorized = [
        one.matrix
        for one in events.factorized
        if is_factorized_by_optimizer(every, events, facts, one)
    ]
    if factorized:
        sizes = [every.size(root) for dims in factorized for root in roots(every, dims)]
        said.append(
            f"factorizes {len(factorized):,} matrices (of up to {max(sizes, default=1):,} rows): "
            "each device gathers and factorizes all of them, unless they are stacked and the stack "
            "is split"
        )
    if products:
        said.append(
            f"multiplies matrices {products:,} times: where a parameter is split, each product "
            "gathers or sums up its parts"
        )
    if said:
        yield Caution(
            kind=CautionKind.OPTIMIZER_MATRICES,
            text=f"the optimizer {'; it '.join(said)}",
        )


def _elements(every: Dimensions, inputs: Sequence[tuple[ArrayClasses, Dims]], root: int) -> int:
    """Returns the size of the largest array that has a factor."""
    sizes = [math.prod(array.shape) for array, dims in inputs if root in roots(every, dims)]
    return max(sizes, default=every.size(root))


def _of_packed(
    every: Dimensions,
    names: Mapping[int, str],
    inputs: Sequence[tuple[ArrayClasses, Dims]],
) -> Iterator[Caution]:
    for array, dims in inputs:
        if array.role not in _WEIGHTS:
            continue
        for place, dim in enumerate(dims):
            root = outer(every, dim)
            if root is None or not every.packed(root) or every.size(root) % 2:
                continue  # An odd number of rows is split over no devices.
            if names.get(root, "").startswith("head_dim"):
                continue  # Halves for rotary embeddings; no head is split inside.
            pieces = [size for (_, size), _ in every.packed(root)]
            if len(set(pieces)) == 1:
                what = f"{len(pieces)} pieces of {pieces[0]:,} lie end to end"
                shape = f"keep them as a dimension of their own, (..., {len(pieces)}, {pieces[0]})"
            else:
                what = f"pieces of {', '.join(f'{size:,}' for size in pieces)} lie end to end"
                shape = "keep them as arrays of their own"
            yield Caution(
                kind=CautionKind.PACKED,
                text=f"in dimension {place} of {array.name} {what}: parts of it cross them, which "
                f"costs collectives wherever they are taken apart; {shape}",
                about=names.get(root, ""),
            )


def _of_gradients(
    every: Dimensions,
    events: Events,
    facts: Facts,
    names: Mapping[int, str],
    inputs: Sequence[tuple[ArrayClasses, Dims]],
) -> Iterator[Caution]:
    batches = set(facts.batches)
    numbers = turns = 0
    for product, size, count in events.in_loops:
        if roots(every, product.summed) & batches and count > 1:
            numbers += size
            turns = max(turns, count)
    if numbers:
        yield Caution(
            kind=CautionKind.GRADIENT_IN_LOOP,
            text=f"gradients of {numbers:,} numbers are summed over the batch in each of {turns:,} "
            "turns of a loop: split over the batch, that is an all-reduce in every turn, "
            "unless it is moved out of the loop",
        )
    shapes = {
        tuple(outer(every, dim) for dim in dims if dim): array
        for array, dims in inputs
        if array.role == Role.PARAMETER and len([dim for dim in dims if dim]) > 1
    }
    adapted = _adapted(every, events, facts, shapes)
    if adapted:
        one = facts.batches[0]
        numbers = sum(math.prod(array.shape) for array in adapted) * every.size(one)
        yield Caution(
            kind=CautionKind.INNER_STEPS,
            text=f"each of the {every.size(one):,} tasks of the batch trains weights of its own "
            f"in inner steps ({numbers:,} numbers in all, and what a gradient through these steps "
            "keeps): a split of it makes that less on each device, and gradients of the parameters "
            "are summed over the devices once, after all inner steps",
            about=names[one],
        )
        return
    multiplied = _multiplied(every, events)
    summed_up = _summed_up(every, events, batches)
    for product in events.products:
        if product.is_forward or not product.batch:
            continue
        first = roots(every, product.batch) & batches
        # Left and right are in the order of the product's operands, which a transpose may change
        # later.
        left, right = product.left, product.right
        for rest in ((*left, *right), (*right, *left)):
            key = tuple(outer(every, dim) for dim in rest if dim)
            array = shapes.get(key) if frozenset(key) in multiplied - summed_up else None
            if first and array is not None and not product.batch[1:]:
                size = every.size(next(iter(first)))
                yield Caution(
                    kind=CautionKind.PER_EXAMPLE_GRADIENTS,
                    text=f"the gradient of {array.name} is held for each of {size:,} examples "
                    f"({math.prod(array.shape) * size:,} numbers): a split of the batch makes "
                    "that less, or one of its own dimensions that is not gathered; a norm over all "
                    "parameters of an example is then summed over the devices",
                    about=array.name,
                )


def _adapted(
    every: Dimensions,
    events: Events,
    facts: Facts,
    parameters: Mapping[tuple[int | None, ...], ArrayClasses],
) -> list[ArrayClasses]:
    """Returns the parameters that a forward pass multiplies with as each of a batch has changed
    them: with dimensions of the parameter and the batch, and made of gradients, or carried by a
    loop."""
    forms = {frozenset(key): array for key, array in parameters.items()}
    copies = {frozenset(outer(every, dim) for dim in dims if dim) for dims in events.copies}
    found: dict[str, ArrayClasses] = {}
    for one in events.products:
        if not one.is_forward or not one.is_product or not one.summed:
            continue
        batch = [outer(every, dim) for dim in one.batch if dim]
        if len(batch) != 1 or batch[0] not in facts.batches[:1]:
            continue
        for made, side in zip(one.made, (one.left, one.right), strict=False):
            form = frozenset(outer(every, dim) for dim in (*one.summed, *side) if dim)
            array = forms.get(form)
            is_changed = made & ArrayOrigin.GRADIENT or form.union(batch) in copies
            if array is not None and made & ArrayOrigin.STATE and is_changed:
                found[array.name] = array
    return list(found.values())


def _multiplied(every: Dimensions, events: Events) -> set[frozenset[int | None]]:
    """Returns, for each forward product with a parameter, the classes of the parameter's
    dimensions. A gradient of the state that a scan carries may have classes that no parameter has
    in a product, such as those of the rates of its decay."""
    found: set[frozenset[int | None]] = set()
    for one in events.products:
        if one.is_forward and one.is_product and one.summed:
            for made, side in zip(one.made, (one.left, one.right), strict=False):
                if made == ArrayOrigin.STATE:
                    found.add(frozenset(outer(every, dim) for dim in (*one.summed, *side) if dim))
    return found


def _summed_up(every: Dimensions, events: Events, batches: set[int]) -> set[frozenset[int | None]]:
    """Returns the classes of each gradient that a backward pass sums over a batch at once. What has
    them for each example, too, is a gradient of something else, such as of the slots of experts."""
    return {
        frozenset(outer(every, dim) for dim in (*one.left, *one.right) if dim)
        for one in events.products
        if not one.is_forward and one.is_product and roots(every, one.summed) & batches
    }


def _of_uses(
    every: Dimensions,
    events: Events,
    inputs: Sequence[tuple[ArrayClasses, Dims]],
) -> Iterator[Caution]:
    tables: set[tuple[int | None, ...]] = set()
    for one in events.lookups:
        if one.is_forward and one.made == ArrayOrigin.STATE and not one.is_held_whole:
            for looked in one.looked_up:
                for window in one.window:
                    tables.add((outer(every, looked), outer(every, window)))
    products: set[tuple[int | None, int | None]] = set()
    for one in events.products:
        if one.is_forward and one.is_product and not one.batch:
            for summed in one.summed:
                for kept in (*one.left, *one.right):
                    products.add((outer(every, kept), outer(every, summed)))
    for array, dims in inputs:
        key = tuple(outer(every, dim) for dim in dims)
        if array.role in _WEIGHTS and len(key) == 2 and key in tables and key in products:
            others = [
                other.name
                for other, theirs in inputs
                if other is not array
                and other.role in _WEIGHTS
                and {outer(every, dim) for dim in theirs} == set(key)
            ]
            if not others:
                yield Caution(
                    kind=CautionKind.TIED,
                    text=f"{array.name} is looked up in and multiplied with: one split for both; "
                    "over the dimension that products sum over their result is summed over the "
                    "devices",
                    about=array.name,
                )


def _of_whole_step(
    events: Events,
    inputs: Sequence[tuple[ArrayClasses, Dims]],
    results: Sequence[ArrayClasses],
    turns: int,
) -> Iterator[Caution]:
    for name, count in sorted(events.unknown.items()):
        yield Caution(
            kind=CautionKind.UNKNOWN_OPERATION,
            text=f"what `{name}` does along its dimensions is not known (used {count} times): they "
            "stay whole",
            about=name,
        )
    if not any(array.role == Role.LOSS for array in results):
        if any(array.role != Role.OUTPUT for array in results):
            said = "no loss comes out: numerics are compared by the state"
        elif any("float" in array.dtype for array in results):
            said = "no loss comes out: numerics are compared by what is returned"
        else:
            said = "no loss comes out, and no other number by which numerics could be compared"
        yield Caution(kind=CautionKind.NO_LOSS, text=said)
    if turns != 1:
        how_many = f"{turns:,}" if turns else "an unknown number of"
        yield Caution(
            kind=CautionKind.MANY_STEPS,
            text=f"one call is {how_many} steps of training",
        )
    # An optimizer has placeholders of one element, which nobody can leave out.
    untrained = [
        array
        for array, _ in inputs
        if array.role == Role.DEAD and array.state_of is not None and math.prod(array.shape) > 1
    ]
    if untrained:
        more = f" and {len(untrained) - 1} more" if len(untrained) > 1 else ""
        numbers = sum(math.prod(array.shape) for array in untrained)
        yield Caution(
            kind=CautionKind.UNTRAINED,
            text=f"no gradient reaches {untrained[0].name}{more} ({numbers:,} numbers): the loss "
            "is not computed from it; leave it out of the state, or use it",
            about=untrained[0].name,
        )
    weights = sum(math.prod(array.shape) for array, _ in inputs if array.role == Role.PARAMETER)
    if 0 < weights < _SMALL:
        yield Caution(
            kind=CautionKind.SMALL,
            text=f"the step has {weights:,} parameters: one device may be right",
        )
    for array in results:
        if array.role == Role.OUTPUT and math.prod(array.shape) >= _LARGE_OUTPUT:
            yield Caution(
                kind=CautionKind.KEPT_BY_NOBODY,
                text=f"{array.name} ({math.prod(array.shape):,} numbers) does not come back: leave "
                "it out of the results if nobody reads it",
                about=array.name,
            )


def inner_of(
    every: Dimensions,
    events: Events,
    facts: Facts,
    names: Mapping[int, str],
) -> tuple[Inner, ...]:
    """Finds arrays that begin inside the step and have a dimension of the batch."""
    batches = set(facts.batches)
    found: list[Inner] = []
    for one, dims in born_inside(every, events, facts):
        own = [root if (root := outer(every, dim)) in batches else None for dim in dims]
        if one.place is None or not any(root is not None for root in own):
            continue
        if isinstance(one, Draw) and math.prod(one.shape) <= max(map(every.size, batches)):
            continue  # One number per row, such as its start.
        found.append(
            Inner(
                path=one.place.path,
                bodies=one.place.bodies,
                output=0 if not _is_generator(one) else 1,
                shape=one.shape,
                dims=tuple(names.get(root, "") if root is not None else "" for root in own),
                why=_why(one),
            )
        )
    return tuple(found)


def divided_of(
    every: Dimensions, events: Events, facts: Facts, names: Mapping[int, str]
) -> tuple[Inner, ...]:
    """Finds places where the step divides a batch into micro-batches that a loop walks over, or
    into slices. If the undivided dimension were split, each device would hold whole micro-batches,
    and each of them would be gathered."""
    batches = set(facts.batches)
    found: list[Inner] = []
    for one in events.divisions:
        own = [outer(every, dim) for dim in one.dims]
        walked = [root for root in own[:1] if root is not None]
        is_walked = any(every.marks(root) & DimensionMark.WALKED for root in walked)
        if (is_walked or one.is_slice) and batches.intersection(own):
            found.append(
                Inner(
                    path=one.place.path,
                    bodies=one.place.bodies,
                    output=one.output,
                    shape=one.shape,
                    dims=tuple(
                        names.get(root, "") if root is not None and root in batches else ""
                        for root in own
                    ),
                    why="the step takes rows of the batch from a longer array here"
                    if one.is_slice
                    else "the batch is divided into micro-batches here",
                )
            )
    return tuple(found)


def _is_generator(one: Lookup | Draw) -> bool:
    return isinstance(one, Draw) and one.output == 1


def _why(one: Lookup | Draw) -> str:
    if isinstance(one, Lookup):
        return "the batch is taken from an array that stays whole"
    if one.is_random:
        return "random numbers of the batch are drawn here"
    return "a loop carries it, and it begins as equal numbers"
