"""Knobs and compiler options: which apply to a step, and every combination of their values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import Scalar
from automesh.space.space import DEFAULT_OPTION, Knob, SearchSpace

MAX_SETTINGS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What the inspection of the user's step says that bears on legality.

    Attributes:
      facts: named integers that constraints may refer to.
      used_axes: mesh axes that the step shards anything over.
      knobs: `build`'s keyword parameters with their defaults.
      takes_any_knob: True if `build` has `**kwargs`.
    """

    facts: tuple[tuple[str, int], ...] = ()
    used_axes: tuple[str, ...] = ()
    knobs: tuple[tuple[str, Scalar], ...] = ()
    takes_any_knob: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One combination of knobs and compiler options, as a plan holds it."""

    knobs: tuple[tuple[str, Scalar], ...]
    compiler_options: tuple[tuple[str, Scalar], ...]


def known_knobs(space: SearchSpace, step: StepFacts, notices: list[str]) -> list[Knob]:
    """The knobs that `build` takes; the others become notices (shipped space) or an error (own).

    Raises:
      UsageError: a user's own space has a knob that `build` does not take.
    """
    taken = [name for name, _ in step.knobs]
    known: list[Knob] = []
    for knob in space.knobs:
        if knob.name in taken or step.takes_any_knob:
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
    knobs: Sequence[Knob], options: Sequence[Knob], defaults: Mapping[str, Scalar]
) -> list[Setting]:
    """All combinations: defaults first, then few changes before many.

    Args:
      defaults: of `build`'s parameters.

    Raises:
      UsageError: more than `MAX_SETTINGS` combinations.
    """
    choices = [_default_first(knob, defaults.get(knob.name, knob.values[0])) for knob in knobs]
    choices += [_default_first(option, DEFAULT_OPTION) for option in options]
    count = math.prod(len(values) for values in choices)
    if count > MAX_SETTINGS:
        raise UsageError(
            f"the knobs and compiler options of the search space combine in {count} ways, "
            f"more than the {MAX_SETTINGS} that can be listed",
            hint="give fewer values",
        )
    combined = sorted(
        itertools.product(*(enumerate(values) for values in choices)),
        key=lambda pairs: (sum(i > 0 for i, _ in pairs), [i for i, _ in pairs]),
    )
    return [
        Setting(
            knobs=tuple((knob.name, value) for knob, (_, value) in zip(knobs, pairs)),
            compiler_options=tuple(
                (option.name, value)
                for option, (_, value) in zip(options, pairs[len(knobs) :])
                if value != DEFAULT_OPTION
            ),
        )
        for pairs in combined
    ]


def _default_first(knob: Knob, default: Scalar) -> list[Scalar]:
    # True == 1: types are compared as well.
    def is_other(value: Scalar) -> bool:
        return type(value) is not type(default) or value != default

    return sorted(knob.values, key=is_other)


def integers_of(knobs: Iterable[tuple[str, Scalar]]) -> dict[str, int]:
    """Those knobs that are integers (and not booleans)."""
    return {
        name: value
        for name, value in knobs
        if isinstance(value, int) and not isinstance(value, bool)
    }
