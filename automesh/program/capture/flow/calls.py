"""The log of the jitted functions that a script calls: their variants, and which function made each
of their arguments (jax).

An array is followed by its identity, from the function that returns it to the one that takes it.
Where a function returns an argument unchanged, the maker of the argument is the maker of the
output.
"""

from __future__ import annotations

import difflib
import math
import statistics
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from automesh.errors import UsageError
from automesh.program.capture.abstract.arrays import without_data
from automesh.program.capture.abstract.trace import is_without_arrays
from automesh.program.capture.flow.host_copies import HostLeaf, copied, without_leaves
from automesh.program.capture.flow.names import (
    describe_call,
    parameter_names,
    variables_like,
)
from automesh.program.capture.flow.program import FunctionFacts, facts_of, opened_jaxpr
from automesh.program.capture.frames import asking_line
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import SourceLine
from automesh.program.capture.step_call import TracedCall, place_of, taken_as, trace
from automesh.program.lower.static_args import (
    Split,
    is_array_like,
    is_ref,
    leaf_dtype,
    leaf_shape,
    static_of_jit,
)
from automesh.program.script.workload import Workload
from automesh.program.spec_entries import entries_of

# Entries of the table of arrays after which the entries of deleted arrays are dropped.
_MOST_FOLLOWED = 100_000
# Bytes of arguments of all functions that are kept on the host.
_LARGEST_KEPT_BYTES = 2**28
# Number of the latest calls that are kept one by one: enough for several rounds of micro-batches.
_MOST_RECENT = 100
# A function with so many variants, none of which is called often, has another one for nearly every
# call.
_MANY_VARIANTS = 8
_OFTEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The maker of an array: one output of a variant of a function in the log.

    Attributes:
      output: its position; -1 for a reference that the function has changed.
      call: place of the call in the order of the log; -1 if it is not known.
    """

    function: int
    variant: int
    output: int
    call: int = -1


@dataclass(slots=True, kw_only=True)
class Variant:
    """The calls of a function that run one program: their arguments have the same shapes and types,
    and static values that are equal or make no difference to the program.

    Attributes:
      number: its place among the variants of its function.
      key: the shapes, types and static values; where calls with several keys run the same program,
        the key of the last call.
      static_names: names of the parameters whose static values are in the key.
      first: of the function's calls, counted from 0, the first of this variant.
      facts: what its program tells; None if it cannot be traced apart from its call.
      refusal: why it cannot be traced.
      described: its second call (the first one until there is a second), without data and with the
        user's names.
      kept: the arguments of that call with their values, on the host; None if they are too large,
        or have none.
      source: the call itself without its arrays, see `host_copies.without_leaves`; None if they
        have no values.
      placed: the placement of each argument of its first call, see `step_call.place_of`.
      leaf_bytes: per leaf of the arguments of one call, its bytes unsharded, at the type that jax
        gives it.
      origins: per leaf, its maker; None where no jitted function made it. They belong to the call
        that got the most arguments from the call before it.
      unchanged: per leaf, whether it was the same array in the call before.
      outside: variables of the script that have the shapes of parameters whose gradient is taken,
        change from call to call, and are made by no jitted function.
    """

    number: int
    key: Any
    static_names: tuple[str, ...] = ()
    first: int
    facts: FunctionFacts | None = None
    refusal: UsageError | None = None
    described: TracedCall | None = None
    kept: tuple[HostLeaf, ...] | None = field(default=None, repr=False)
    source: Call | None = field(default=None, repr=False)
    calls: int = 0
    placed: tuple[Any, ...] = ()
    leaf_bytes: tuple[int, ...] = ()
    origins: list[Origin | None] = field(default_factory=list[Origin | None])
    unchanged: list[bool] = field(default_factory=list[bool])
    outside: tuple[str, ...] = ()
    # Weak references to the arrays of each variable.
    like_it: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]], repr=False)
    # Weak references to the leaves of the first call, and to those of the second one.
    begun: list[list[Any]] = field(default_factory=list[list[Any]], repr=False)
    # Weak references to the leaves of the last call, and the maker of each.
    last: list[Any] = field(default_factory=list[Any], repr=False)
    last_origins: list[Origin | None] = field(default_factory=list[Origin | None], repr=False)

    @property
    def bytes(self) -> int:
        return sum(self.leaf_bytes)

    def trains(self, function: int) -> bool:
        """Whether an argument comes back to the function with an update that was made from its
        gradient."""
        facts = self.facts
        if facts is None:
            return False
        return bool(facts.trained_references) or any(
            output < len(facts.trained_by) and facts.trained_by[output] >> argument & 1
            for argument, output in self.own_pairs(function)
        )

    def own_pairs(self, function: int) -> list[tuple[int, int]]:
        """Returns pairs (leaf of the arguments, output of the call before that is this leaf)."""
        return _own_pairs(self.origins, function, self.number)


@dataclass(slots=True, kw_only=True)
class Function:
    """A jitted function that is called from one line.

    Attributes:
      number: its place in the log.
      calls: all of them, also those that are left out.
      first_s: when it was called first, on a clock of this process.
      is_over: whether no more calls will come.
    """

    number: int
    name: str
    defined_at: SourceLine
    called_at: SourceLine
    first_s: float
    calls: int = 0
    is_over: bool = False
    variants: list[Variant] = field(default_factory=list[Variant])

    @property
    def usual(self) -> Variant:
        """The variant with the most calls; the earliest of several. If nearly every call has a
        variant of its own, it is the latest one that is no smaller than half of them."""
        if not self.is_restless:
            return max(self.variants, key=lambda variant: variant.calls)
        counted = [variant for variant in self.variants if variant.calls]
        least = statistics.median_low([variant.bytes for variant in counted])
        return next(variant for variant in reversed(counted) if variant.bytes >= least)

    @property
    def is_restless(self) -> bool:
        """Whether nearly every call has a variant of its own, as with batches that are padded to
        their own longest row, or with the number of the step as a static argument."""
        counted = [variant.calls for variant in self.variants if variant.calls]
        if self.is_over:
            return len(counted) > 1 and max(counted) == 1
        return len(counted) >= _MANY_VARIANTS and max(counted) < _OFTEN

    @property
    def counted(self) -> int:
        """The number of its calls, without those that are left out."""
        return sum(variant.calls for variant in self.variants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A call that is about to be run."""

    function: Function
    variant: Variant


@dataclass(slots=True)
class CallLog:
    """All calls of jitted functions that lines of the script make.

    Attributes:
      order: numbers of the functions, as they were called.
      recent: the last calls, each with its position in `order` and the makers of its arguments.
    """

    functions: list[Function] = field(default_factory=list[Function])
    order: list[int] = field(default_factory=list[int])
    recent: deque[tuple[int, list[Origin | None]]] = field(
        default_factory=lambda: deque(maxlen=_MOST_RECENT)
    )
    _by_place: dict[tuple[str, SourceLine], Function] = field(
        default_factory=dict[tuple[str, SourceLine], Function]
    )
    # From the `id` of an array to a weak reference to it, which keeps nothing alive, and its maker.
    _made: dict[int, tuple[Any, Origin]] = field(default_factory=dict[int, tuple[Any, Origin]])
    _kept_bytes: int = 0

    def note(self, call: Call) -> Noted:
        """Notes a call down before it is run; a new variant is traced, which the run needs
        anyway."""
        name, defined_at = describe_call(call)
        place = asking_line()
        function = self._by_place.get((name, place))
        if function is None:
            function = Function(
                number=len(self.functions),
                name=name,
                defined_at=defined_at,
                called_at=place,
                first_s=time.monotonic(),
            )
            self._by_place[name, place] = function
            self.functions.append(function)
        split = static_of_jit(call.jitted, Workload(call.jitted, call.args, call.kwargs)) or Split()
        key, leaves = _key(call, split)
        variant = next((one for one in function.variants if _equal(one.key, key)), None)
        variant = variant or _same_program(function, key, call)
        if variant is None:
            variant = Variant(
                number=len(function.variants),
                key=key,
                static_names=_static_names(call, split),
                first=function.calls,
            )
            variant.leaf_bytes = tuple(map(leaf_bytes, leaves))
            # The call may fail before its arguments are followed: an array was deleted.
            variant.unchanged, variant.origins = [False] * len(leaves), [None] * len(leaves)
            variant.placed = _as_stated(function, [place_of(leaf) for leaf in leaves], leaves)
            function.variants.append(variant)
        function.calls += 1
        variant.calls += 1
        if variant.calls <= 2:
            self._describe(variant, call)
        self._follow(function, variant, leaves)
        if variant.calls <= 2:
            self._look_outside(variant)
        self.recent.append((len(self.order), variant.last_origins))
        self.order.append(function.number)
        return Noted(function=function, variant=variant)

    def _describe(self, variant: Variant, call: Call) -> None:
        try:
            traced = trace(call, with_names=True)
        except UsageError as error:
            variant.refusal = error
            return
        if variant.facts is None:
            constants = len(traced.settings.constants)
            variant.facts = facts_of(traced.traced.jaxpr, num_constants=constants)
        args = jax.tree.map(lambda leaf: leaf if is_ref(leaf) else without_data(leaf), traced.args)
        # The call itself is dropped, as it would keep its arrays alive.
        variant.described = replace(traced, args=args, source=None)
        if not is_without_arrays():
            variant.kept = self._kept(variant, traced.leaves)
            variant.source = without_leaves(call, traced.leaves)

    def _kept(self, variant: Variant, leaves: Sequence[Any]) -> tuple[HostLeaf, ...] | None:
        """Copies the arguments of a call to the host, as the script may end before it is stopped at
        a later one."""
        self._kept_bytes -= variant.bytes if variant.kept is not None else 0
        kept = copied(leaves, _LARGEST_KEPT_BYTES - self._kept_bytes)
        self._kept_bytes += variant.bytes if kept is not None else 0
        return kept

    def _follow(self, function: Function, variant: Variant, leaves: Sequence[Any]) -> None:
        """Notes down the maker of each argument, and which arguments are the same arrays as
        before."""
        origins = [_as_own(function, variant, self._origin(leaf)) for leaf in leaves]
        before = variant.last or [None] * len(leaves)
        variant.unchanged = [
            _is_same(old, leaf) and not (is_ref(leaf) and origin is not None)
            for old, leaf, origin in zip(before, leaves, origins, strict=True)
        ]
        variant.last = [_reference(leaf) for leaf in leaves]
        variant.last_origins = origins
        if variant.calls <= 2:
            variant.begun.append(variant.last)
        pairs = _own_pairs(origins, function.number, variant.number)
        if not variant.origins or len(pairs) >= len(variant.own_pairs(function.number)):
            variant.origins = origins

    def _look_outside(self, variant: Variant) -> None:
        """Notes down the variables of the script that have the shapes of arrays whose gradient is
        taken, and that change from call to call."""
        facts, call = variant.facts, variant.described
        if facts is None or not facts.has_gradient or call is None or any(variant.origins):
            return
        pairs = zip(mirrored(variant), mirroring(variant), strict=True)
        if any(facts.updated_by[output] >> place & 1 for place, output in pairs):
            return
        forms = [form_of(call.leaves[place]) for place in mirrored(variant)]
        before, variant.like_it = variant.like_it, {}
        for name, leaves in variables_like(forms):
            if not all(self._origin(leaf) is not None for leaf in leaves):
                variant.like_it[name] = list(map(_reference, leaves))
        variant.outside = tuple(
            name
            for name, leaves in variant.like_it.items()
            if name in before and not all(map(_is_same_reference, before[name], leaves))
        )

    def replaced(self, variant: Variant) -> list[int]:
        """Returns the leaves that have the shapes of outputs and change from call to call, though
        no jitted function makes them: parameters of a script that jits nothing but their
        gradients. A function that updates them itself, as of several models in turn, is no such
        one: its outputs come back later."""
        facts = variant.facts
        pairs = list(zip(mirrored(variant), mirroring(variant), strict=True))
        if facts is None or any(facts.updated_by[output] >> place & 1 for place, output in pairs):
            return []
        return [
            place
            for place, _ in pairs
            if variant.origins[place] is None and not variant.unchanged[place]
        ]

    def takes_back(self, function: Function) -> bool:
        """Whether a function that was called once trains: it computes outputs from a gradient of
        arguments of the same shapes. Notes these outputs down as the ones that would come back to
        it."""
        variant = function.usual
        facts, call = variant.facts, variant.described
        if function.counted != 1 or facts is None or not facts.has_gradient or call is None:
            return False
        arguments, outputs = mirrored(variant), mirroring(variant)
        pairs = list(zip(arguments, outputs, strict=True))
        if not any(facts.trained_by[output] >> argument & 1 for argument, output in pairs):
            return False
        for argument, output in pairs:
            variant.origins[argument] = Origin(
                function=function.number, variant=variant.number, output=output
            )
        return True

    def ran(self, noted: Noted, outputs: Any) -> None:
        """Notes down the outputs of a call."""
        made = jax.tree.leaves(outputs)
        variant, function = noted.variant, noted.function.number
        facts = variant.facts
        forwarded = facts.forwarded if facts is not None else ()
        if len(forwarded) != len(made):
            forwarded = (None,) * len(made)
        call = len(self.order) - 1
        for position, (leaf, source) in enumerate(zip(made, forwarded, strict=True)):
            origin = Origin(function=function, variant=variant.number, output=position, call=call)
            if source is not None and source < len(variant.last_origins):
                origin = variant.last_origins[source]
            if origin is not None:
                self._remember(leaf, origin)
        for position in facts.written if facts is not None else ():
            if position < len(variant.last):
                origin = Origin(function=function, variant=variant.number, output=-1, call=call)
                self._remember(_referred(variant.last[position]), origin)
        if len(self._made) > _MOST_FOLLOWED:
            alive = {key: one for key, one in self._made.items() if _referred(one[0]) is not None}
            self._made = alive

    def _remember(self, leaf: Any, origin: Origin) -> None:
        if isinstance(leaf, jax.Array) or is_ref(leaf):
            self._made[id(leaf)] = (_reference(leaf), origin)

    def _origin(self, leaf: Any) -> Origin | None:
        found = self._made.get(id(leaf))
        return found[1] if found is not None and _referred(found[0]) is leaf else None

    def end(self) -> None:
        """Notes down that no more calls will come."""
        for function in self.functions:
            function.is_over = True

    def leave_out(self) -> None:
        """Leaves all calls so far out of the counts: the next call of each function begins a new
        variant."""
        for function in self.functions:
            for variant in function.variants:
                variant.key, variant.calls = (object(), (), ()), 0

    def last_iteration(self, number: int) -> list[int]:
        """Returns the functions that were called since the last but one call of a function, this
        function first; only this function if it was called once."""
        places = [place for place, called in enumerate(self.order) if called == number]
        return self.order[places[-2] : places[-1]] if len(places) > 1 else [number]


def _as_stated(function: Function, placed: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns where the arguments of a new variant are. Where an earlier variant states the same
    placement with more axes, its statement is returned: a compiler often leaves out axes of size 1,
    which matter on other meshes."""
    found = list(placed)
    for earlier in function.variants:
        if len(earlier.placed) != len(found):
            continue
        for place, (before, now, leaf) in enumerate(
            zip(earlier.placed, placed, leaves, strict=True)
        ):
            if (
                isinstance(before, NamedSharding)
                and isinstance(now, NamedSharding)
                and before.mesh == now.mesh
                and before.is_equivalent_to(now, len(leaf_shape(leaf)))
                and _named_axes(before) > _named_axes(now)
            ):
                found[place] = before
    return tuple(found)


def _named_axes(sharding: NamedSharding) -> int:
    parts = [part if isinstance(part, tuple) else (part,) for part in entries_of(sharding.spec)]
    return sum(isinstance(name, str) for part in parts for name in part)


def _same_program(function: Function, key: Any, call: Call) -> Variant | None:
    """Finds the variant that has the program of a call whose static values differ, and gives it the
    key of the call. An example is a counter in the structure of a state: jax compiles the same
    program anew at every call."""
    alike = [
        one
        for one in function.variants
        if one.described is not None
        and len(one.key[2]) == len(key[2])
        and all(map(_alike, one.key[2], key[2]))
    ]
    if not alike:
        return None
    try:
        program = str(trace(call).traced.jaxpr)
    except UsageError:
        return None  # The new variant says why in its `refusal`.
    for one in alike:
        if one.described is not None and str(one.described.traced.jaxpr) == program:
            one.key = key
            return one
    return None


def _as_own(function: Function, variant: Variant, origin: Origin | None) -> Origin | None:
    """Returns a maker of an array as a maker of the same variant, if it is another variant of the
    same function, and their outputs have the same shapes and types there."""
    if origin is None or (origin.function, origin.variant) == (function.number, variant.number):
        return origin
    if origin.function != function.number or origin.output < 0:
        return origin
    mine, other = output_forms(variant), output_forms(function.variants[origin.variant])
    place = slice(origin.output, origin.output + 1)
    is_same = len(mine) == len(other) > origin.output and mine[place] == other[place]
    return replace(origin, variant=variant.number) if is_same else origin


def _own_pairs(
    origins: Sequence[Origin | None], function: int, variant: int
) -> list[tuple[int, int]]:
    return [
        (place, origin.output)
        for place, origin in enumerate(origins)
        if origin is not None
        and (origin.function, origin.variant) == (function, variant)
        and origin.output >= 0
    ]


def mirrored(variant: Variant) -> range:
    """Returns a run of leaves that has the shapes and types of a run of outputs, in a function that
    takes gradients: most likely the leaves whose gradients it takes."""
    return _mirror(variant)[0]


def mirroring(variant: Variant) -> range:
    """Returns the outputs that have the shapes and types of the `mirrored` leaves, in their
    order."""
    return _mirror(variant)[1]


def _mirror(variant: Variant) -> tuple[range, range]:
    facts, call = variant.facts, variant.described
    if facts is None or not facts.has_gradient or call is None:
        return range(0), range(0)
    mine = [form_of(leaf) for leaf in call.leaves]
    outputs = output_forms(variant)
    matcher = difflib.SequenceMatcher(a=mine, b=outputs, autojunk=False)
    found = matcher.find_longest_match()
    longest = range(found.a, found.a + found.size), range(found.b, found.b + found.size)
    # Data may have the shape of a parameter: of runs of the same length, that of what is updated.
    updated = _updated_run(mine, outputs, facts.updated_by)
    return updated if len(updated[0]) >= found.size else longest


def _updated_run(
    leaves: Sequence[Any], outputs: Sequence[Any], updated_by: Sequence[int]
) -> tuple[range, range]:
    """Returns the longest run of leaves with the forms of a run of outputs that is placed as most
    outputs are to the leaves that they are the updates of; both are empty without such outputs.

    Args:
      leaves, outputs: the form of each.
      updated_by: see `FunctionFacts`.
    """
    apart: Counter[int] = Counter()
    for output, mask in enumerate(updated_by):
        if mask.bit_count() == 1:  # Else it is made of several, as with their common norm.
            leaf = mask.bit_length() - 1
            apart[leaf - output] += leaves[leaf] == outputs[output]
    if not any(apart.values()):
        return range(0), range(0)
    ((offset, _),) = apart.most_common(1)
    best, start = range(0), 0
    for output in range(len(outputs) + 1):
        leaf = output + offset
        is_same = (
            output < len(outputs) and 0 <= leaf < len(leaves) and leaves[leaf] == outputs[output]
        )
        if not is_same:
            if output - start > len(best):
                best = range(start, output)
            start = output + 1
    return range(best.start + offset, best.stop + offset), best


def parameters_in(variant: Variant, function: int) -> set[int]:
    """Returns the leaves that are state and not data: they come back, are changed in place, or have
    the shapes of leaves whose gradients are taken."""
    written = variant.facts.written if variant.facts is not None else ()
    back = {argument for argument, _ in variant.own_pairs(function)}
    return back | set(written) | set(mirrored(variant))


def avals_out(call: TracedCall) -> list[Any]:
    """Returns the shapes and types of the outputs of a call."""
    return [variable.aval for variable in opened_jaxpr(call.traced.jaxpr).outvars]


def output_forms(variant: Variant) -> list[tuple[tuple[int, ...], str]]:
    """Returns the shapes and types of the outputs of a variant; empty if it could not be traced."""
    if variant.described is None:
        return []
    return [(tuple(one.shape), str(one.dtype)) for one in avals_out(variant.described)]


def form_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the type of an argument, as jax takes it."""
    return leaf_shape(leaf), str(taken_as(leaf_dtype(leaf)))


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes of an argument at the type that jax gives it: 64 bits become 32 unless
    `jax_enable_x64` is set."""
    if not is_array_like(leaf):
        return 0
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        dtype = jax.dtypes.result_type(leaf)
    return math.prod(leaf_shape(leaf)) * taken_as(dtype).itemsize


def _key(call: Call, split: Split) -> tuple[Any, list[Any]]:
    """Returns the key that two calls of one program share, and the leaves of the arguments."""
    dynamic = split.dynamic(call.args, call.kwargs)
    leaves, tree = jax.tree.flatten(dynamic)
    static = [call.args[place] for place in split.positions if place < len(call.args)]
    static += [(name, call.kwargs[name]) for name in split.names]
    static += call.loop[1] if call.loop is not None else ()
    forms = [_form(leaf) for leaf in leaves]
    return (tree, tuple(static), tuple(forms)), [leaf for leaf in leaves if is_array_like(leaf)]


def _static_names(call: Call, split: Split) -> tuple[str, ...]:
    """Returns the names of the static arguments, in the order in which `_key` has their values."""
    names = parameter_names(call.function, len(call.args))
    places = [place for place in split.positions if place < len(call.args)]
    of_loop = [name for name, _ in call.loop[1]] if call.loop is not None else []
    return (*(names[place] for place in places), *split.names, *of_loop)


def _form(leaf: Any) -> Any:
    if not is_array_like(leaf):
        return leaf
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return type(leaf)
    is_weak = bool(getattr(leaf, "weak_type", False))
    return leaf_shape(leaf), str(taken_as(dtype)), is_weak, is_ref(leaf)


def _equal(one: Any, other: Any) -> bool:
    """Whether two keys stand for the same program, as far as they can be compared."""
    same_forms = len(one[2]) == len(other[2]) and all(map(_alike, one[2], other[2]))
    same_static = len(one[1]) == len(other[1]) and all(map(_alike, one[1], other[1]))
    return same_forms and same_static and _alike(one[0], other[0])


def _alike(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other)
    except Exception:  # noqa: BLE001 - equality is the user's, or jax refuses to compare trees
        return type(one) is type(other)


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:
        return leaf


def _referred(reference: Any) -> Any:
    return reference() if isinstance(reference, weakref.ref) else reference


def _is_same_reference(one: Any, other: Any) -> bool:
    return _referred(one) is not None and _referred(one) is _referred(other)


def _is_same(reference: Any, leaf: Any) -> bool:
    before = _referred(reference)
    if before is None:
        return False
    if hasattr(leaf, "shape"):
        return before is leaf
    return _alike(before, leaf)
