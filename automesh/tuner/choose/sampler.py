"""A sampler (Optuna's TPE, ask and tell) that chooses plans if there are too many to rank one by
one.

The sampler has sizes of axes and settings as parameters. A point that it asks for need not be
legal, so the nearest legal plan is used instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from automesh.mesh.axes import Plan

LIMIT = 4000  # plans; up to this number the ranking alone decides
_MOST_KNOWN = 300  # more plans help a sampler little and make it slower
_OTHER_SETTING = 2  # distance of another value of a setting, in steps of a size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Space:
    """Plans as points of a parameter space.

    Attributes:
      names: names of the parameters: `ici.dp`, `dcn.dp`, `knob.remat`, `option.x`.
      points: [plans, parameters] index of each plan's value among the occurring values.
      ordered: [parameters] True for sizes, False for settings.
      counts: [parameters] number of occurring values.
    """

    names: tuple[str, ...]
    points: NDArray[np.int64]
    ordered: NDArray[np.bool_]
    counts: tuple[int, ...]

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {
            name: IntDistribution(0, count - 1)
            if ordered
            else CategoricalDistribution(list(range(count)))
            for name, ordered, count in zip(self.names, self.ordered, self.counts, strict=True)
        }

    def params(self, row: int) -> dict[str, int]:
        return dict(zip(self.names, map(int, self.points[row]), strict=True))

    def nearest(self, params: Mapping[str, int], is_free: NDArray[np.bool_]) -> int | None:
        """Returns the free plan nearest to a point; None if none is free."""
        if not is_free.any():
            return None
        steps = np.abs(self.points - np.array([params[name] for name in self.names]))
        away = np.where(self.ordered, steps, _OTHER_SETTING * (steps > 0)).sum(axis=1)
        return int(np.argmin(np.where(is_free, away, np.iinfo(np.int64).max)))


def propose(
    plans: Sequence[Plan],
    known: Mapping[Plan, float],
    *,
    number: int,
    excluded: Collection[Plan] = (),
    seed: int = 0,
) -> tuple[Plan, ...]:
    """Asks the sampler for plans that are worth trying.

    Args:
      plans: all legal plans of a search.
      known: measured or predicted seconds per step of some plans, which the sampler learns from.
      number: how many to propose; fewer if no more are free.
      excluded: plans not to propose; those of `known` may be proposed.
    """
    space = _space_of(plans)
    rows = {plan: row for row, plan in enumerate(plans)}
    is_free = np.ones(len(plans), np.bool_)
    is_free[[rows[plan] for plan in excluded if plan in rows]] = False
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=0)
    with _quiet():
        study = optuna.create_study(direction="minimize", sampler=sampler)
        study.add_trials(
            [
                create_trial(
                    params=dict(space.params(rows[plan])),
                    distributions=space.distributions,
                    value=known[plan],
                )
                for plan in _best_and_spread(known, rows)
            ]
        )
        chosen: list[Plan] = []
        while len(chosen) < number:
            trial = study.ask(space.distributions)
            row = space.nearest(trial.params, is_free)
            # This trial only proposes. The nearest plan is added as a trial of its own when its
            # time is known.
            study.tell(trial, state=TrialState.FAIL)
            if row is None:
                break
            is_free[row] = False
            chosen.append(plans[row])
    return tuple(chosen)


def _best_and_spread(known: Mapping[Plan, float], rows: Mapping[Plan, int]) -> list[Plan]:
    """Returns the best plans and an even choice of the others, since a sampler learns from the
    contrast."""
    ranked = sorted((plan for plan in known if plan in rows), key=lambda plan: known[plan])
    if len(ranked) <= _MOST_KNOWN:
        return ranked
    half = _MOST_KNOWN // 2
    places = np.unique(np.linspace(half, len(ranked) - 1, half).astype(int))
    return [*ranked[:half], *(ranked[place] for place in places.tolist())]


def _space_of(plans: Sequence[Plan]) -> _Space:
    columns: dict[str, list[object]] = {}
    for row, plan in enumerate(plans):
        values: dict[str, object] = {}
        for axis in plan.axes:
            values[f"ici.{axis.name}"] = axis.ici
            values[f"dcn.{axis.name}"] = axis.dcn
        values |= {f"mapping.{name}": repr(axes) for name, axes in plan.mapping}
        values |= {f"knob.{name}": repr(value) for name, value in plan.knobs}
        values |= {f"option.{name}": repr(value) for name, value in plan.compiler_options}
        for name, value in values.items():
            columns.setdefault(name, [""] * row).append(value)
        for name in columns.keys() - values.keys():
            columns[name].append("")
    names: list[str] = []
    points: list[NDArray[np.int64]] = []
    counts: list[int] = []
    for name, values_of in columns.items():
        # Sizes are sorted; values of a setting have no natural order, so any order will do.
        distinct = sorted(set(values_of), key=lambda one: (not isinstance(one, int), one))
        if len(distinct) > 1:
            place = {value: index for index, value in enumerate(distinct)}
            names.append(name)
            points.append(np.array([place[value] for value in values_of], np.int64))
            counts.append(len(distinct))
    return _Space(
        names=tuple(names),
        points=np.array(points, np.int64).reshape(len(points), len(plans)).T,
        ordered=np.array([name.startswith(("ici.", "dcn.")) for name in names], np.bool_),
        counts=tuple(counts),
    )


class _quiet:  # noqa: N801 - a context, used as a verb
    """Silences Optuna's log, whose lines would appear between automesh's own."""

    def __enter__(self) -> None:
        self._verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)

    def __exit__(self, *_: object) -> None:
        optuna.logging.set_verbosity(self._verbosity)
