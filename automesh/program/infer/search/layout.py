"""Makes the search space of a step from its classes: mesh axes, and the axes over which each
dimension of an array may be split (no jax).

The space contains what a specialist would try: the batch over dp and fsdp; the training state
(parameters, the optimizer's state) over fsdp, each array along one dimension; classes of the
parameters over tp; experts over ep; a sequence over sp. Each of these is a logical axis of the
mapping search (`automesh.space.mapping`), so that all mappings are priced like those of a script
that names its axes itself.

`params` and `moments` are two such axes that are no classes: they split each array along the
dimension that suits fsdp best. So ZeRO-1 is `params:none moments:fsdp`, and full fsdp
`params:fsdp`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from automesh.mesh.axes import MAPPING, Plan
from automesh.mesh.mapping import MappedAxes
from automesh.mesh.rules.cover import fewest_patterns
from automesh.mesh.rules.shardings import Shardings, path_of
from automesh.program.infer.nouns import (
    ArrayClasses,
    CautionKind,
    DimensionClass,
    Role,
    StepClasses,
)
from automesh.program.infer.search.nothing import nothing_held, nothing_spans, nothing_to_split
from automesh.program.infer.search.shares import shares_of
from automesh.space.mapping import Shares, SplitArray, SplitDimension, StepMapping
from automesh.space.space import LogicalAxis

Split = tuple[tuple[str, ...], ...]
"""The logical axes that split each dimension, the slowest varying first."""

DP, FSDP, EP, TP, SP = "dp", "fsdp", "ep", "tp", "sp"
PARAMS, MOMENTS = "params", "moments"
# Smaller arrays stay whole on every device: to gather them costs more than it saves.
LEAST_ELEMENTS = 1024
# Most classes that are searched over tp. Classes on different arrays may be split together, so each
# class doubles the number of mappings.
MOST_CLASSES = 5
# Most batches that are searched: each but the first doubles the number of mappings, too.
MOST_BATCHES = 3
# A class in a smaller share of the parameters' elements than this is not worth a mapping.
LEAST_SHARE = 0.002
_EXPERT = "expert"
_SEVERAL = (_EXPERT, "branch")  # Each has weights of its own.
_NAMELESS = re.compile(r"d\d+")
_NUMBERED = re.compile(r"\d+$")  # Classes without a name of their own: `d0`.
_HEADS, _IN_HEADS = "heads", ("head_dim", "group")  # Who splits heads leaves each of them whole.
_SEQUENCE = ("time", "sequence", "length", "examples")
# Rows of a table of which each sequence takes the first ones, and what is taken one by one.
_IN_ORDER = ("positions", "layers", "stack", "modes")
CHANGED = (Role.MOMENT, Role.COPY, Role.STATISTIC)
WEIGHTS = (Role.PARAMETER, Role.FROZEN)
STATE = (*WEIGHTS, *CHANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerSplit:
    """A constraint inside the step; see `nouns.Inner` for its place.

    Attributes:
      leaves_others: whether the compiler decides about dimensions that are not split; else they are
        whole.
      is_gathered: whether it is constrained even if nothing splits it.
    """

    path: tuple[int, ...]
    bodies: tuple[int, ...]
    output: int
    split: Split
    leaves_others: bool = False
    is_gathered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSplit:
    """A leaf of the arguments, with its split by logical axes and the names of its dimensions.

    Attributes:
      name: the user's name: `params['embed']`.
      classes: class of each dimension; empty for none.
      written: the mesh axes over which the script itself splits each dimension; empty for a script
        that makes no mesh.
    """

    name: str
    split: Split
    classes: tuple[str, ...]
    written: Split = ()

    def over(self, mapping: Mapping[str, MappedAxes]) -> Split:
        """Returns the mesh axes that split each dimension under a mapping. An axis that the mapping
        gives to a dimension is taken from the dimension for which the script wrote it."""
        parts = [list(part) for part in self.written or ((),) * len(self.split)]
        for place, names in enumerate(self.split):
            for axis in (axis for name in names for axis in mapping.get(name, ())):
                for part in parts:
                    if axis in part:
                        part.remove(axis)
                parts[place].append(axis)
        return tuple(map(tuple, parts))


def shardings_of(arguments: Sequence[NamedSplit], plan: Plan) -> Shardings:
    """Describes how a plan splits the arguments of a step, in as few patterns of their paths as
    possible. A pattern has the class of each dimension, or mesh axes for a dimension that fsdp
    splits.

    If several arrays have the same name, which should not happen, the first one counts.
    """
    mapping = dict(plan.mapping)

    def named(one: NamedSplit, place: int) -> tuple[str, ...]:
        if one.written:
            return tuple(axis for axis in one.over(mapping)[place] if plan.sizes.get(axis, 1) > 1)
        names: list[str] = []
        for name in one.split[place]:
            over = tuple(axis for axis in mapping.get(name, ()) if plan.sizes.get(axis, 1) > 1)
            names += over if name in (PARAMS, MOMENTS) else (name,) if mapping.get(name) else ()
        said = one.classes[place] if one.classes else ""
        # A class that the mapping splits elsewhere is not named for a dimension that is whole here;
        # and meaningless names would separate arrays that are split alike.
        is_telling = said and not mapping.get(said) and not _NAMELESS.fullmatch(said)
        return (said, *names) if is_telling else tuple(names)

    return fewest_patterns(
        [
            (path_of(one.name), tuple(named(one, place) for place in range(len(one.split))))
            for one in {path_of(one.name): one for one in reversed(arguments)}.values()
        ][::-1]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The search space of a step without shardings.

    Attributes:
      axes: axes of the mesh, in order.
      slow: the axes that may span slices or nodes.
      batch_axes: the axes that split the batch.
      logical: logical axes with their choices, the usual one first.
      arguments: leaves of the arguments, in order.
      inner: constraints inside the step.
      arrays, shares: what makes a mapping illegal; see `StepMapping`.
      batch_parts: number of parts into which the batch may be split; 1 without a batch.
      notices: notices for the user, one sentence each.
      keeps_written: whether the script makes a mesh and splits its arrays itself; the logical axes
        then only change how its state is split, see `around`.
    """

    axes: tuple[str, ...]
    slow: tuple[str, ...]
    batch_axes: tuple[str, ...]
    logical: tuple[LogicalAxis, ...]
    arguments: tuple[NamedSplit, ...]
    inner: tuple[InnerSplit, ...] = ()
    arrays: tuple[SplitArray, ...] = ()
    shares: tuple[Shares, ...] = ()
    batch_parts: int = 1
    notices: tuple[str, ...] = ()
    keeps_written: bool = False

    @property
    def step_mapping(self) -> StepMapping:
        """The facts about the step's logical axes, as an inspection would find them."""
        return StepMapping(arrays=self.arrays, shares=self.shares)

    @property
    def mappings(self) -> int:
        """The number of mappings, legal or not."""
        return math.prod(len(axis.choices) for axis in self.logical)


def lay_out(
    classes: StepClasses,
    *,
    num_devices: int,
    num_granules: int = 1,
    script: str,
    mesh: str = "makes no mesh",
) -> Layout:
    """Makes the layout of a step for a number of devices.

    Args:
      script: its name, for errors.
      mesh: which mesh the script has, as the words after its name.

    Raises:
      UsageError: no dimension of the step can be split over these devices, or none of those that
        can be may span granules (slices or nodes); says why.
    """
    if not classes.arguments:
        raise nothing_held(script, mesh=mesh)
    chosen = ChosenClasses.of(classes, num_devices)
    logical = chosen.logical()
    most = chosen.most_parts() if logical else 1
    if most % num_devices or num_devices < 2:
        raise nothing_to_split(classes, num_devices, script, mesh=mesh, most=most)
    names = frozenset(axis.name for axis in logical)
    arguments = tuple(
        NamedSplit(name=array.name, split=chosen.split_of(number, names), classes=array.dims)
        for number, array in enumerate(classes.arguments)
    )
    inner = inner_splits(classes, names)
    used = {name for one in arguments for part in one.split for name in part}
    used |= {name for one in inner for part in one.split for name in part}
    logical = tuple(axis for axis in logical if axis.name in used)
    over = {axis for one in logical for choice in one.choices for axis in choice}
    slow = tuple(axis for axis in (DP, FSDP) if axis in over)
    if num_granules > 1 and not slow:
        raise nothing_spans(classes, num_granules, script, mesh=mesh)
    return Layout(
        axes=tuple(axis for axis in (DP, FSDP, EP, TP, SP) if axis in over),
        slow=slow,
        batch_axes=tuple(axis for axis in (DP, FSDP, EP) if axis in chosen.batch_over()),
        logical=logical,
        arguments=arguments,
        inner=inner,
        arrays=tuple(chosen.arrays(arguments, inner)),
        shares=shares_of(classes, [one.name for one in chosen.over_tp], axis=TP),
        batch_parts=next((one.parts for one in chosen.rows()), 1),
        notices=tuple(chosen.notices(logical)),
    )


def inner_splits(classes: StepClasses, names: frozenset[str]) -> tuple[InnerSplit, ...]:
    """Returns the constraints inside a step, in terms of the existing logical axes."""
    return tuple(
        InnerSplit(
            path=one.path,
            bodies=one.bodies,
            output=one.output,
            split=_of_classes(classes.split_names(one.dims), len(one.shape), names),
            leaves_others=one.leaves_others,
            is_gathered=one.is_gathered,
        )
        for one in (*classes.inner, *classes.activations)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenClasses:
    """The classes that may be split over each axis.

    Attributes:
      batches: classes over dp and fsdp, the largest first.
      over_tp: classes over tp, those with most elements of the parameters first.
      kept: state that is large enough for a split over fsdp: (number of the leaf, dimension).
    """

    classes: StepClasses
    num_devices: int
    batches: tuple[DimensionClass, ...]
    over_tp: tuple[DimensionClass, ...]
    expert: DimensionClass | None
    sequence: DimensionClass | None
    kept: Mapping[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, classes: StepClasses, num_devices: int) -> ChosenClasses:
        def divides(one: DimensionClass) -> bool:
            return not one.whole and math.gcd(one.parts, num_devices) > 1

        # A batch that no argument and no constraint has, such as rows that the step holds and uses
        # all of, would be split nowhere.
        placed = {
            dim
            for one in classes.arguments
            if one.role not in STATE or one.role is Role.STATISTIC
            for dim in classes.split_names(one.dims)
        }
        placed |= {
            dim
            for one in (*classes.inner, *classes.activations)
            for dim in classes.split_names(one.dims)
        }
        batches = tuple(
            sorted(
                (
                    one
                    for one in classes.batches
                    if divides(one)
                    and one.name in placed
                    and classes.split_names([one.name]) == (one.name,)
                ),
                key=lambda one: -math.gcd(one.parts, num_devices),
            )
        )
        packed = {one.about for one in classes.cautions if one.kind is CautionKind.PACKED}
        of_data = {dim for one in classes.arguments if one.role is Role.DATA for dim in one.dims}
        # A table of learned positions makes a sequence a class of parameters; it is no width.
        rows = {
            one.name
            for one in classes.classes
            if one.name in of_data and any(_is(one, name) for name in _SEQUENCE)
        }
        weights = _weights(classes)
        total = sum(math.prod(one.shape) for one in classes.arguments if _is_split(classes, one))
        several = [c for c in classes.classes if divides(c) and any(_is(c, s) for s in _SEVERAL)]
        expert = min(several, key=lambda c: not _is(c, _EXPERT), default=None)
        has_heads = any(_is(one, _HEADS) and divides(one) for one in classes.classes)
        over_tp = [
            one
            for one in classes.classes
            if divides(one)
            and not one.is_batch
            and one is not expert
            and one.name not in packed
            and one.name not in rows
            and not any(_is(one, name) for name in _IN_ORDER)
            and not (has_heads and any(_is(one, name) for name in _IN_HEADS))
            and weights[one.name] > LEAST_SHARE * total
        ]
        over_tp.sort(key=lambda one: -weights[one.name])
        sequence = next((one for one in classes.classes if one.name in rows and divides(one)), None)
        chosen = cls(
            classes=classes,
            num_devices=num_devices,
            batches=batches,
            over_tp=tuple(over_tp[:MOST_CLASSES]),
            expert=expert,
            sequence=sequence,
        )
        # Without a batch over fsdp, all devices would do the same computation on gathered arrays.
        return replace(chosen, kept=chosen.kept_dimensions()) if batches else chosen

    def kept_dimensions(self) -> dict[int, int]:
        """Chooses the dimension that fsdp splits, for each leaf of the state that is large enough.
        It is the one that most devices divide; among equals the one whose class is in most
        parameters (as `embed`, which leaves the others to tp), then the largest. State of a
        parameter is split like the parameter."""
        found: dict[int, int] = {}
        weights = _weights(self.classes)
        arrays = self.classes.arguments
        for number, array in enumerate(arrays):
            if not self.is_state(array):
                continue
            if math.prod(array.shape) < LEAST_ELEMENTS:
                continue
            best: tuple[int, int, int] | None = None
            for place, (name, size) in enumerate(zip(array.dims, array.shape, strict=True)):
                parts = math.gcd(self.stored_parts(name, size), self.num_devices)
                rank = (parts, weights[name], size)
                if parts > 1 and (best is None or rank > best):
                    best, found[number] = rank, place
        for number, array in enumerate(arrays):
            owner = array.of
            if owner is not None and number in found and arrays[owner].shape == array.shape:
                found[number] = found.get(owner, found[number])
        return found

    def is_state(self, array: ArrayClasses) -> bool:
        """Whether an array is part of the training state. One that is carried with a row for each
        of the batch, as the state of a recurrent network or of environments, is split like data."""
        rows = {one.name for one in self.batches}
        return array.role in STATE and not (
            array.role is Role.STATISTIC and rows.intersection(array.dims)
        )

    def share_an_array(self, one: DimensionClass, others: Sequence[DimensionClass]) -> bool:
        """Whether an array that is no state has this class and one of the others."""
        names = {other.name for other in others}
        arrays = [a.dims for a in self.classes.arguments if not self.is_state(a)]
        arrays += [a.dims for a in self.classes.held]
        arrays += [a.dims for a in (*self.classes.inner, *self.classes.activations)]
        dims = map(self.classes.split_names, arrays)
        return any(one.name in each and names.intersection(each) for each in dims)

    def class_named(self, name: str) -> DimensionClass | None:
        return next((one for one in self.classes.classes if one.name == name), None)

    def stored_parts(self, name: str, size: int) -> int:
        known = self.class_named(name) if name else None
        return 1 if known is None else math.gcd(max(known.stored, known.parts), size)

    def most_parts(self) -> int:
        """Returns a number that is a multiple of the devices of every possible mesh; of
        `num_devices` if a mesh can have them all."""

        def most(those: Iterable[DimensionClass]) -> int:
            return math.lcm(*(math.gcd(one.parts, self.num_devices) for one in those))

        others = [one for one in (self.expert, self.sequence) if one is not None]
        return most(self.batches) * most(self.over_tp) * math.prod(most([one]) for one in others)

    def batch_over(self) -> tuple[str, ...]:
        """Returns the axes that split the batch; empty without a batch."""
        if not self.batches:
            return ()
        more = (EP,) if self.expert is not None else ()
        return (DP, FSDP, *more) if self.kept else (DP, *more)

    def rows(self) -> tuple[DimensionClass, ...]:
        """Returns the batches that are searched as such, the largest first. A sequence is split
        with the batch, over an axis of its own."""
        several = len(self.batches) > 1
        return tuple(one for one in self.batches if not (several and one is self.sequence))

    def logical_batches(self) -> list[LogicalAxis]:
        """Returns the logical axes of the batches, with their choices. The first mapping is that of
        the baseline, so it must be legal if the devices divide the first batch."""
        found: list[LogicalAxis] = []
        over = self.batch_over()
        split: list[DimensionClass] = []
        for one in self.rows()[:MOST_BATCHES]:
            if self.share_an_array(one, split):
                # The same axes cannot split both, such as the images and the pixels of one array.
                if self.sequence is None:
                    found.append(LogicalAxis(name=one.name, choices=((), (SP,))))
                continue
            choices = [tuple(axis for axis in over if axis != EP)]
            choices += [over] if EP in over else []
            # A second batch, as of graphs besides edges, need not divide evenly. One that does is
            # left whole as the last choice: every device computes all of it, and the sum of its
            # gradients goes with those of the first batch anyway.
            if split and one.parts % self.num_devices:
                choices.insert(0, ())
            elif split:
                choices.append(())
            split.append(one)
            found.append(LogicalAxis(name=one.name, choices=tuple(choices)))
        return found

    def logical(self) -> tuple[LogicalAxis, ...]:
        """Returns the logical axes that can be split, with their choices."""
        found = self.logical_batches()
        roles = {self.classes.arguments[number].role for number in self.kept}
        if roles & {*WEIGHTS}:
            has_state = bool(roles & {*CHANGED})
            choices = ((FSDP,), ()) if has_state else ((FSDP,),)
            found.append(LogicalAxis(name=PARAMS, choices=choices))
        if roles & {*CHANGED}:
            found.append(LogicalAxis(name=MOMENTS, choices=((FSDP,),)))
        if self.expert is not None:
            found.append(LogicalAxis(name=self.expert.name, choices=((), (EP,))))
        found += [LogicalAxis(name=one.name, choices=((), (TP,))) for one in self.over_tp]
        if self.sequence is not None and self.sequence.name not in [one.name for one in found]:
            # Over tp, too, activations between products are split as well, along the sequence.
            more = ((TP,),) if self.over_tp else ()
            found.append(LogicalAxis(name=self.sequence.name, choices=((), (SP,), *more)))
        return tuple(found)

    def split_of(self, number: int, names: frozenset[str]) -> Split:
        """Returns how logical axes split a leaf of the arguments."""
        array = self.classes.arguments[number]
        if array.role in (Role.COUNTER, Role.DEAD):
            return tuple(() for _ in array.shape)
        if not self.is_state(array):
            rows = {one.name for one in self.batches}
            # Data of a branch, such as those of one model of several, lie with its parameters.
            rows |= {one.name for one in (self.sequence, self.expert) if one is not None}
            if _is_solved(
                self.classes
            ):  # Data lie where the state does that is computed with them.
                rows |= {one.name for one in self.over_tp}
            dims = self.classes.split_names(array.dims)
            return _of_classes(dims, len(array.shape), names & rows)
        split = _of_classes(
            array.dims, len(array.shape), names - {one.name for one in self.batches}
        )
        place = self.kept.get(number)
        if place is None:
            return split
        more = PARAMS if array.role in WEIGHTS else MOMENTS
        return tuple((*part, more) if at == place else part for at, part in enumerate(split))

    def arrays(
        self, arguments: Sequence[NamedSplit], inner: Sequence[InnerSplit]
    ) -> Iterable[SplitArray]:
        """Returns the arrays that make mappings illegal, by an axis that splits an array twice or
        by sizes that do not divide evenly; each once."""
        seen: dict[tuple[SplitDimension, ...], str] = {}
        shapes = [one.shape for one in self.classes.arguments]
        described = [
            (one.name, shape, one.split, one.classes)
            for one, shape in zip(arguments, shapes, strict=True)
        ]
        described += [
            ("an array inside the step", one.shape, split.split, one.dims)
            for one, split in zip(
                (*self.classes.inner, *self.classes.activations), inner, strict=True
            )
        ]
        for name, shape, split, dims in described:
            whole = tuple(
                SplitDimension(place=place, size=0, names=tuple(MAPPING + one for one in part))
                for place, part in enumerate(split)
                if part
            )
            if len(whole) > 1 or any(len(part.names) > 1 for part in whole):
                seen.setdefault(whole, name)
            for place, part in enumerate(split):
                known = self.class_named(dims[place]) if dims and dims[place] else None
                if not part or known is None:
                    continue
                local = tuple(MAPPING + one for one in part if one not in (PARAMS, MOMENTS))
                sizes = [(local, math.gcd(known.parts, shape[place]))] if local else []
                if len(local) < len(part):
                    every = tuple(MAPPING + one for one in part)
                    sizes.append((every, self.stored_parts(known.name, shape[place])))
                for names, size in sizes:
                    rule = (SplitDimension(place=place, size=size, names=names),)
                    seen.setdefault(rule, name)
        return (SplitArray(name=name, split=parts) for parts, name in seen.items())

    def notices(self, logical: Sequence[LogicalAxis]) -> Iterable[str]:
        """Yields notices on what is searched, and on parameters that stay whole, with cures."""
        over = {
            axis.name: " or ".join("+".join(one) for one in axis.choices if one) for axis in logical
        }
        state = [name for name in (PARAMS, MOMENTS) if name in over]
        said = [f"{self.described(name)} over {axes}" for name, axes in over.items()]
        yield f"the script splits nothing: searched are {', '.join(said)}"
        if state == [PARAMS, MOMENTS]:
            yield (
                f"`{PARAMS}:{FSDP}` splits parameters and the optimizer's state over {FSDP}; "
                "without it the state alone is split"
            )
        if not self.batches:
            yield f"{self._no_batch()}: nothing is split over {DP}"
        if more := self.rows()[MOST_BATCHES:]:
            listed = ", ".join(f"{self.described(one.name)} ({one.size})" for one in more[:3])
            others = f", and {len(more) - 3} more" if more[3:] else ""
            yield f"at most {MOST_BATCHES} batches are searched; whole: {listed}{others}"
        weights = _weights(self.classes)
        whole = [
            one for one in self.classes.classes if one.whole and one.cure and weights[one.name]
        ]
        for one in whole[:3]:
            yield f"`{one.name}` ({one.size}) stays whole: {one.whole}; {one.cure}"

    def _no_batch(self) -> str:
        """Says why no batch is split: there is none, or the devices have no common divisor with
        its size."""
        left = [
            one
            for one in self.classes.batches
            if not one.whole and math.gcd(one.parts, self.num_devices) == 1
        ]
        if not left:
            return "no class of its dimensions is a batch that these devices divide"
        listed = ", ".join(f"`{self.described(one.name)}` ({one.size})" for one in left[:3])
        parts = left[0].parts
        of = f" of {parts} parts" if parts != left[0].size else ""
        near = parts - parts % self.num_devices
        sizes = " or ".join(str(one) for one in (near, near + self.num_devices) if one)
        return f"{self.num_devices} devices do not divide the batch {listed}{of}, {sizes} would do"

    def described(self, name: str) -> str:
        """Describes a logical axis; for a class without a real name it names an array that has
        it."""
        if not _NUMBERED.search(name):
            return name
        arrays = sorted(self.classes.arguments, key=lambda one: one.role is not Role.PARAMETER)
        for array in arrays:
            if name in array.dims:
                return f"{name} (dimension {array.dims.index(name)} of {array.name})"
        return name


def _is_solved(classes: StepClasses) -> bool:
    """Whether a step has no gradient, but carries arrays of floats: a simulation, or factors that
    are solved for in turns. What it carries is split like parameters."""
    return not any(
        one.role in (*WEIGHTS, Role.MOMENT, Role.COPY) for one in classes.arguments
    ) and any(_is_carried(one) for one in classes.arguments)


def _is_carried(one: ArrayClasses) -> bool:
    return one.role is Role.STATISTIC and "float" in one.dtype and bool(one.shape)


def _is_split(classes: StepClasses, one: ArrayClasses) -> bool:
    """Whether the classes of an array may be split over tp: those of parameters, or, in a step
    without a gradient, those of what it carries."""
    return one.role in WEIGHTS or (_is_solved(classes) and _is_carried(one))


def _weights(classes: StepClasses) -> Counter[str]:
    """Counts the elements of parameters that have each class."""
    found: Counter[str] = Counter()
    for one in classes.arguments:
        if _is_split(classes, one):
            for name in {*one.dims} - {""}:
                found[name] += math.prod(one.shape)
    return found


def _is(one: DimensionClass, name: str) -> bool:
    """Whether a class has a name, or a numbered form of it: `expert2`."""
    return one.name.rstrip("0123456789_") == name


def _of_classes(dims: Sequence[str], rank: int, names: frozenset[str]) -> Split:
    """Splits each class in the first of its dimensions: no axis can split two of an array, such as
    the nodes of a matrix of neighbours."""
    if not dims:
        return tuple(() for _ in range(rank))
    return tuple(
        (name,) if name in names and name not in dims[:place] else ()
        for place, name in enumerate(dims)
    )
