"""Searches logical axes: all mappings of the space, and the plans that each makes illegal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import MAPPING, Knobs
from automesh.mesh.mapping import LogicalAxes, MappedAxes, check_mapped_axes, format_mapped
from automesh.mesh.plan_arrays import Sizes
from automesh.space.conditions import SpaceRule
from automesh.space.space import LogicalAxis, SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDimension:
    """A dimension of an array that is split by name.

    Attributes:
      place: number of the dimension, from 0.
      size: 0 for one that the step pads until it divides evenly.
      names: in the order of the split: mesh axes, and logical axes as `mapping.NAME`.
    """

    place: int
    size: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitArray:
    """An array of the step with dimensions that are split by name.

    Attributes:
      name: of the array, for messages.
    """

    name: str
    split: tuple[SplitDimension, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The share of a step's parameters that logical axes split over one mesh axis.

    All devices along the axis compute the other parameters alike.

    Attributes:
      axis: of the mesh.
      parts: logical axes that split the same arrays, and the number of elements of these.
      total: elements of all parameters.
      most: elements that the best legal mapping splits.
    """

    axis: str
    parts: tuple[tuple[tuple[str, ...], int], ...]
    total: int
    most: int

    def split(self, mapping: LogicalAxes) -> int:
        """Counts the elements of the arrays that a mapping splits over the axis."""
        mine = {name for name, axes in mapping if self.axis in axes}
        return sum(count for names, count in self.parts if mine.intersection(names))

    def why_never(self, mapping: LogicalAxes) -> str:
        """Says why a mapping cannot be the best one on any mesh; empty if it may be.

        It cannot if it splits less than half of the elements that another mapping splits over the
        axis.
        """
        mine = self.split(mapping)
        if not 0 < 2 * mine < self.most:
            return ""
        return (
            f"{mine / self.total:.0%} of the parameters are split over {self.axis}, and "
            f"{self.most / self.total:.0%} can be: the devices along it compute the rest alike"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobArrays:
    """The arrays that logical axes split at some values of knobs.

    Attributes:
      knobs: knobs that change arrays, with their values.
      arrays, unseen: as in `StepMapping`.
    """

    knobs: Knobs
    arrays: tuple[SplitArray, ...] = ()
    unseen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMapping:
    """The use of logical axes in a step.

    Attributes:
      defaults: of `build`'s keyword `mapping`.
      arrays: those that logical axes split, one for each kind of split; at the default knobs.
      unseen: why the arrays are unknown, in words; empty if they are known.
      by_knobs: the arrays at every inspected combination of the knobs that change them; empty if no
        knob does.
      shares: of mesh axes that are only useful if they split much.
    """

    defaults: LogicalAxes = ()
    arrays: tuple[SplitArray, ...] = ()
    unseen: str = ""
    by_knobs: tuple[KnobArrays, ...] = ()
    shares: tuple[Shares, ...] = ()

    @property
    def telling(self) -> frozenset[str]:
        """Returns the knobs that change arrays."""
        return frozenset(name for knob in self.by_knobs for name, _ in knob.knobs)

    def at(self, knobs: Knobs) -> StepMapping:
        """Returns the mapping facts at the knobs of a plan.

        Arrays are unknown for combinations that were not inspected, so that no plan is ruled out by
        the arrays of another.
        """
        if not self.by_knobs:
            return self
        said = _in_words(knobs)
        for knob in self.by_knobs:
            if _in_words(knob.knobs) <= said:
                return StepMapping(defaults=self.defaults, arrays=knob.arrays, unseen=knob.unseen)
        return StepMapping(defaults=self.defaults, unseen="there are too many values of knobs")

    @property
    def logical(self) -> frozenset[str]:
        """Returns the logical axes that split some array, at some value of the knobs."""
        arrays = [*self.arrays, *(array for knob in self.by_knobs for array in knob.arrays)]
        names = {name for one in arrays for part in one.split for name in part.names}
        return frozenset(name[len(MAPPING) :] for name in names if name.startswith(MAPPING))


def _in_words(knobs: Knobs) -> frozenset[tuple[str, str]]:
    return frozenset((name, repr(value)) for name, value in knobs)  # True == 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class Never:
    """A condition that no plan of one mapping meets, whatever its mesh.

    Attributes:
      name: stable, for counting.
      reason: why, with an example.
    """

    name: str
    reason: str
    factors: tuple[str, ...] = ()

    def holds(self, values: Mapping[str, Sizes]) -> NDArray[np.bool_]:
        """Returns False for all rows of `values`."""
        return np.zeros(next(iter(values.values())).shape, np.bool_)

    def detail(self, _: Mapping[str, int]) -> str:
        """Returns the reason, which does not depend on the sizes of a plan."""
        return self.reason


def known_logical(
    space: SearchSpace, step: StepMapping | None, notices: list[str]
) -> tuple[LogicalAxis, ...]:
    """Lists the logical axes of a search with their choices, those of `build` first, in its order.

    An axis that the space leaves out keeps the mapping of `build`. An axis that the step lacks
    becomes a notice (shipped space) or an error (own).

    Raises:
      UsageError: `build` takes no mapping, or maps an axis to none of the space's axes; in a user's
        own space, a logical axis that splits nothing.
    """
    if not space.mapping:
        return ()
    if step is None:
        problem = f"the search space `{space.name}` maps logical axes, which `build` does not take"
        if space.shipped:
            notices.append(f"[mapping] left out: {problem}")
            return ()
        raise UsageError(
            problem,
            hint="give `build` a keyword `mapping={}`: a dict of logical axes, and for each a mesh "
            "axis, a list of them, or None",
        )
    choices = dict(_kept(space, step, notices))
    try:
        left = [(name, axes) for name, axes in step.defaults if name not in choices]
        check_mapped_axes(left, space.names)
    except UsageError as error:
        raise UsageError(
            f"{error.message} of the search space `{space.name}`: that is the default of `build`",
            hint="list the logical axis under [mapping], or change the default",
        ) from None
    defaults = dict(step.defaults)
    order = dict.fromkeys([*defaults, *choices])
    return tuple(
        LogicalAxis(name=name, choices=_default_first(choices.get(name), defaults.get(name)))
        for name in order
    )


def _kept(
    space: SearchSpace, step: StepMapping, notices: list[str]
) -> list[tuple[str, tuple[MappedAxes, ...]]]:
    """Returns the logical axes of the space that split something, with their choices."""
    kept: list[tuple[str, tuple[MappedAxes, ...]]] = []
    if step.unseen:
        notices.append(
            f"combinations of [mapping] are not checked before they are built: {step.unseen}"
        )
    unseen = [knob for knob in step.by_knobs if knob.unseen]
    if unseen:
        values = " ".join(f"{name}={value}" for name, value in unseen[0].knobs)
        notices.append(
            f"at {len(unseen)} combinations of knobs, combinations of [mapping] are not checked "
            f"before they are built: {values}: {unseen[0].unseen}"
        )
    for axis in space.mapping:
        if step.unseen or unseen or axis.name in step.logical:
            kept.append((axis.name, axis.choices))
        elif space.shipped:
            notices.append(f"logical axis `{axis.name}` left out: the step splits nothing by it")
        else:
            named = sorted(step.logical)
            raise UsageError(
                f"the search space `{space.name}` maps the logical axis `{axis.name}`, by which "
                f"the step splits nothing{did_you_mean(axis.name, named)}",
                hint=f"its logical axes are: {', '.join(named)}"
                if named
                else "use the keyword `mapping` of `build` for the shardings of the step",
            )
    return kept


def _default_first(
    choices: tuple[MappedAxes, ...] | None, default: MappedAxes | None
) -> tuple[MappedAxes, ...]:
    if choices is None:
        return (default or (),)
    return tuple(sorted(choices, key=lambda choice: default is not None and choice != default))


def used_axes_of(mapping: Iterable[tuple[str, MappedAxes]], step: StepMapping) -> frozenset[str]:
    """Returns the mesh axes that a mapping makes the step use."""
    return frozenset(
        axis for name, axes in mapping if step.unseen or name in step.logical for axis in axes
    )


def conditions_of(mapping: LogicalAxes, step: StepMapping) -> list[SpaceRule | Never]:
    """Makes the conditions of one mapping: no axis twice on an array, useful axes, even division.

    jax refuses an axis twice even if its size is 1.
    """
    targets = {f"{MAPPING}{name}": axes for name, axes in mapping}
    twice: dict[str, Never] = {}
    divides: dict[tuple[tuple[str, ...], int], SpaceRule] = {}
    for array in step.arrays:
        taken: dict[str, str] = {}
        for part in array.split:
            pairs = [(name, axis) for name in part.names for axis in targets.get(name, (name,))]
            for name, axis in pairs:
                said = _said(name, targets)
                if axis in taken and (name in targets or taken[axis] != axis):
                    reason = (
                        f"`{array.name}` is split over {axis} twice, by {taken[axis]} and {said}"
                    )
                    twice.setdefault(axis, Never(name=f"{axis} twice on an array", reason=reason))
                taken.setdefault(axis, said)
            logical = [name for name in part.names if targets.get(name)]
            if logical and part.size:
                rule = _divides(array, part, logical, tuple(axis for _, axis in pairs))
                divides.setdefault((rule.factors, rule.bound), rule)
    idle = [
        Never(name=f"{one.axis} splits little of the step", reason=reason)
        for one in step.shares
        if (reason := one.why_never(mapping))
    ]
    return [*twice.values(), *idle, *divides.values()]


def _said(name: str, targets: Mapping[str, MappedAxes]) -> str:
    if name not in targets:
        return name
    return format_mapped(name[len(MAPPING) :], targets[name])


def _divides(
    array: SplitArray, part: SplitDimension, logical: Sequence[str], axes: tuple[str, ...]
) -> SpaceRule:
    names = "*".join(name[len(MAPPING) :] for name in logical)
    over = "*".join(dict.fromkeys(axes))
    return SpaceRule(
        name=f"{over} divides {names} of {part.size}",
        factors=tuple(dict.fromkeys(axes)),
        relation="divides",
        bound=part.size,
        fact=f"{names} (dimension {part.place} of `{array.name}`)",
    )


class Repeats:
    """Finds plans whose mapping equals another one on their mesh: axes of size 1 split nothing.

    Args:
      axes: of the meshes, in order.
      sizes: [meshes, axes].
    """

    def __init__(self, axes: Sequence[str], sizes: Sizes) -> None:
        self._axes = axes
        self._number = len(sizes)
        self._patterns, row_pattern = np.unique(sizes > 1, axis=0, return_inverse=True)
        self._row_pattern = row_pattern.reshape(-1)
        self._ids: dict[LogicalAxes, int] = {}
        self._seen: dict[object, set[int]] = {}

    def fresh(
        self, mapping: LogicalAxes, others: object, rows: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Says which rows have a new effect of the mapping, and remembers all of them.

        Args:
          others: the rest of the setting.
          rows: rows of the table of meshes.
        """
        effects = np.array([self._effect(mapping, pattern) for pattern in self._patterns], np.int64)
        keys = (effects[self._row_pattern[rows]] * self._number + rows).tolist()
        seen = self._seen.setdefault(others, set())
        is_fresh = np.array([key not in seen for key in keys], np.bool_)
        seen.update(keys)
        return is_fresh

    def _effect(self, mapping: LogicalAxes, pattern: NDArray[np.bool_]) -> int:
        active = {axis for axis, is_active in zip(self._axes, pattern.tolist()) if is_active}
        effect = tuple(
            (name, tuple(axis for axis in axes if axis in active)) for name, axes in mapping
        )
        return self._ids.setdefault(effect, len(self._ids))


def explain_repeat(mapping: LogicalAxes) -> str:
    """Says why a plan repeats another one."""
    text = " ".join(format_mapped(name, axes) for name, axes in mapping)
    return f"{text} splits arrays as an earlier mapping does: axes of size 1 split nothing"
