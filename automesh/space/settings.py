"""Finds the knobs and compiler options that apply to a step, and combines their values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import Knobs, Scalar
from automesh.mesh.mapping import LogicalAxes
from automesh.space.knob_types import fitting_knob
from automesh.space.mapping import StepMapping
from automesh.space.space import DEFAULT_OPTION, Knob, LogicalAxis, SearchSpace

MAX_SETTINGS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The results of inspecting the user's step that matter for legality.

    Attributes:
      facts: named integers that constraints may refer to.
      used_axes: mesh axes over which the step splits arrays, except by its mapping.
      mapping: its use of logical axes; None if `build` takes no mapping.
      knobs: `build`'s keyword parameters with their defaults.
      takes_any_knob: True if `build` has `**kwargs`.
      is_captured: whether the mesh is one that a script makes, without `build`.
    """

    facts: tuple[tuple[str, int], ...] = ()
    used_axes: tuple[str, ...] = ()
    mapping: StepMapping | None = None
    knobs: Knobs = ()
    takes_any_knob: bool = False
    is_captured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSetting:
    """One combination of mapping, knobs and compiler options, as in a plan."""

    mapping: LogicalAxes
    knobs: Knobs
    compiler_options: Knobs


def known_knobs(space: SearchSpace, step: StepFacts, notices: list[str]) -> list[Knob]:
    """Returns the knobs that `build` takes, with values of the types of their defaults.

    The others become notices (shipped space) or an error (own space).

    Raises:
      UsageError: a user's own space has a knob that `build` does not take, or a value of another
        type than the default in `build`.
    """
    taken = dict(step.knobs)
    known: list[Knob] = []
    for knob in space.knobs:
        if knob.name in taken:
            fitting = fitting_knob(
                knob,
                taken[knob.name],
                space=space.name,
                shipped=space.shipped,
                notices=notices,
            )
            known += [fitting] if fitting is not None else []
        elif step.takes_any_knob:
            known.append(knob)
        elif space.shipped:
            notices.append(f"knob `{knob.name}` left out: `build` does not take it")
        else:
            raise UsageError(
                f"the search space `{space.name}` has the knob `{knob.name}`, "
                f"which `build` does not take{did_you_mean(knob.name, taken)}",
                hint="add it to `build` as a keyword parameter with a default, or drop it there",
            )
    return known


def combine_settings(
    logical: Sequence[LogicalAxis],
    knobs: Sequence[Knob],
    options: Sequence[Knob],
    defaults: Mapping[str, Scalar],
) -> list[PlanSetting]:
    """Lists all combinations: defaults first, then few changes before many.

    Args:
      logical: with the default choice of each first.
      defaults: of `build`'s parameters.

    Raises:
      UsageError: more than `MAX_SETTINGS` combinations.
    """
    choices: list[Sequence[Any]] = [axis.choices for axis in logical]
    choices += [default_first(knob, defaults.get(knob.name, knob.values[0])) for knob in knobs]
    choices += [default_first(option, DEFAULT_OPTION) for option in options]
    count = math.prod(len(values) for values in choices)
    if count > MAX_SETTINGS:
        raise UsageError(
            f"the settings of the search space combine in {count} ways, "
            f"more than the {MAX_SETTINGS} that can be listed",
            hint="give logical axes, knobs and compiler options fewer values",
        )
    combined = sorted(
        itertools.product(*(enumerate(values) for values in choices)),
        key=lambda pairs: (sum(i > 0 for i, _ in pairs), [i for i, _ in pairs]),
    )
    names = [one.name for one in (*logical, *knobs, *options)]
    first, second = len(logical), len(logical) + len(knobs)

    def setting(values: Sequence[Any]) -> PlanSetting:
        named = tuple(zip(names, values, strict=True))
        chosen = named[second:]
        return PlanSetting(
            mapping=named[:first],
            knobs=named[first:second],
            compiler_options=tuple((name, one) for name, one in chosen if one != DEFAULT_OPTION),
        )

    return [setting([value for _, value in pairs]) for pairs in combined]


def default_first(knob: Knob, default: Scalar) -> list[Scalar]:
    """Returns the values of a knob, its default first."""

    # True == 1: types are compared as well.
    def is_other(value: Scalar) -> bool:
        return type(value) is not type(default) or value != default

    return sorted(knob.values, key=is_other)


def integers_of(knobs: Iterable[tuple[str, Scalar]]) -> dict[str, int]:
    """Selects the knobs that are integers (and not booleans)."""
    return {
        name: value
        for name, value in knobs
        if isinstance(value, int) and not isinstance(value, bool)
    }
