"""A race over finalists as pure logic: which one is visited next, which ones are out, and the
standings.

The test compares all pairs of finalists at once, by their pooled spread, and estimates the
correlation of neighbouring rounds from the rounds (`statistics.means_of`). It was chosen by
simulated races, which `python -m benchmarks.race_errors` runs again. Tests that were tried and
rejected:
* t of a trimmed mean for each pair by itself, with a union bound over all ordered pairs: it needs
  five to ten rounds until the variance of a pair is known;
* Wilcoxon, sign flips, betting on signs: they cannot drop even a finalist that is twice as slow
  before round 12, since a shorter run of equal signs is not rare enough.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np

from automesh.tuner.measure.statistics import (
    Floats,
    Ratio,
    means_of,
    median_interval,
    paired_ratio,
)

K = TypeVar("K", bound=Hashable)
# Before this round two disturbed visits could decide: only a difference that they cannot explain
# counts.
_FIRST_LOOK = 5
_HOPELESS_LOOK = 4
_HOPELESS = 0.3
# of the error: in no noise that was tried does one of equal plans look so slow
_HOPELESS_SHARE = 0.02
_EQUIVALENCE_ROUNDS = 6  # a correlation that is estimated from fewer rounds is mostly chance


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRules:
    """The conditions under which a finalist is called slower, and under which a race stops.

    Attributes:
      error: chance, over the whole race, that any finalist is wrongly called slower.
      margin: a loser is slower by more than this share.
      equivalence: the race ends when all remaining finalists are within this share of the best.
      max_rounds: the race ends after so many rounds.
      keep: the race ends when so many finalists are left: fresh processes decide among them.
    """

    error: float = 0.03
    margin: float = 0.01
    equivalence: float = 0.02
    max_rounds: int = 40
    keep: int = 1

    @property
    def looks(self) -> tuple[int, ...]:
        """Completed rounds after which the test is applied: an early one that only hopeless
        finalists fail, then each round until the twelfth, then intervals that grow by a sixth."""
        rounds = [_FIRST_LOOK]
        while rounds[-1] < self.max_rounds:
            rounds.append(rounds[-1] + max(1, rounds[-1] // 6))
        whole = [look for look in rounds if look < self.max_rounds]
        early = (_HOPELESS_LOOK,) if self.max_rounds > _HOPELESS_LOOK else ()
        return (*early, *whole, self.max_rounds)

    def allowed(self, done: int) -> float:
        """Returns the chance of error that the look after round `done` may spend.

        Over the looks the error is spent by Pocock's spending function (Lan and DeMets, Biometrika
        70, 1983), which gives the early looks enough to drop a clearly slower finalist; the looks
        add up by the union bound. The early look that only hopeless finalists fail has a share of
        its own.
        """
        if done < _FIRST_LOOK:
            return _HOPELESS_SHARE * self.error
        previous = max((look for look in self.looks if _FIRST_LOOK <= look < done), default=0)
        spent = [math.log1p((math.e - 1) * look / self.max_rounds) for look in (previous, done)]
        return (1 - _HOPELESS_SHARE) * self.error * (spent[1] - spent[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class NextVisit(Generic[K]):
    """Visit `finalist` for its value number `round_index`, counted from 0."""

    finalist: K
    round_index: int


RaceState = Literal["winner", "open", "slower", "left"]
Ending = Literal["", "few left", "equivalent", "all rounds", "none left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing(Generic[K]):
    """The standing of one finalist.

    Attributes:
      state: `slower` by the sequential test; `left` if a visit failed; otherwise `open`: not shown
        to be slower than the winner, although it may be.
      rounds_s: seconds per step, one per round.
      step_s: median of `rounds_s`; 0 if it was never visited.
      interval_s: 95 % interval of `step_s`; (0, inf) below two rounds.
      to_winner: ratio to the winner over the rounds that both ran, with a 95 % interval for this
        pair alone (only `state` allows for all the other comparisons). None without a common round.
    """

    finalist: K
    state: RaceState
    rounds_s: tuple[float, ...]
    step_s: float
    interval_s: tuple[float, float]
    to_winner: Ratio | None


class Race(Generic[K]):
    """Rounds over the finalists, in shuffled order, until few are left or all remaining ones are
    equal.

    The rounds are the whole state: a race that is built again from `rounds` and `left` continues as
    if it had never stopped. A round that was cut short is completed.

    Args:
      finalists: at least one, all different, in an order that is the same when the race is resumed.
      seed: the seed of the shuffling.
      rounds: values of an earlier run, per finalist; other plans are ignored.
      left: finalists that failed in an earlier run.

    Raises:
      ValueError: finalists repeat, or `rounds` cannot come from one race (a finalist lags by more
        than the last round, or a value is not a positive number).
    """

    def __init__(
        self,
        finalists: Sequence[K],
        *,
        rules: RaceRules,
        seed: int,
        rounds: Mapping[K, Sequence[float]] | None = None,
        left: Collection[K] = (),
    ) -> None:
        if not finalists or len(set(finalists)) != len(finalists):
            raise ValueError(f"finalists must be different and at least one, got {len(finalists)}")
        self.rules = rules
        self._seed = seed
        self._finalists = tuple(finalists)
        self._values: dict[K, list[float]] = {finalist: [] for finalist in finalists}
        self._beaten_by: dict[K, K] = {}
        self._left: set[K] = set()
        self._ending: Ending = ""
        self._replay(rounds or {}, left)

    @property
    def ending(self) -> Ending:
        """The reason why the race is over; empty while it is not."""
        return self._ending

    @property
    def survivors(self) -> tuple[K, ...]:
        """Finalists that are neither slower nor left, in the given order."""
        return tuple(
            finalist
            for finalist in self._finalists
            if finalist not in self._beaten_by and finalist not in self._left
        )

    @property
    def rounds_completed(self) -> int:
        """The rounds that all survivors have run; when none is left, the most that any finalist has
        run."""
        lengths = [len(self._values[finalist]) for finalist in self.survivors]
        return min(lengths) if lengths else max(map(len, self._values.values()))

    @property
    def leader(self) -> K | None:
        """The best finalist so far, without the intervals; None before the first round is
        complete."""
        return self._best() if self.survivors and self.rounds_completed else None

    def values_of(self, finalist: K) -> tuple[float, ...]:
        """Returns the round values so far, in seconds per step."""
        return tuple(self._values[finalist])

    def next_visit(self) -> NextVisit[K] | None:
        """Returns the next visit; None when the race is over."""
        rest = self.rest_of_round()
        return NextVisit(finalist=rest[0], round_index=self.rounds_completed) if rest else None

    def rest_of_round(self) -> tuple[K, ...]:
        """Returns the finalists that are still to be visited in this round, in order; none when the
        race is over."""
        if self._ending:
            return ()
        done = self.rounds_completed
        # Shuffles all finalists, so that the order of the others does not depend on which ones are
        # out.
        order = list(self._finalists)
        random.Random(f"{self._seed} {done}").shuffle(order)
        waiting = set(self.survivors)
        return tuple(one for one in order if one in waiting and len(self._values[one]) == done)

    def record(self, finalist: K, value_s: float) -> None:
        """Records a round's value; the last value of a round may end the race for some finalists.

        Raises:
          ValueError: the finalist is no survivor or already has a value of this round, the value is
            not a positive number, or the race is over.
        """
        if self._ending:
            raise ValueError(f"the race is over: {self._ending}")
        if finalist not in self.survivors:
            raise ValueError(f"`{finalist}` is not in the race")
        if len(self._values[finalist]) > self.rounds_completed:
            raise ValueError(f"`{finalist}` already has a value in this round")
        if not 0.0 < value_s < float("inf"):
            raise ValueError(f"a round takes a positive time, got {value_s}")
        self._values[finalist].append(value_s)
        self._close_round()

    def leave(self, finalist: K) -> None:
        """Takes a survivor that failed out of the race.

        Raises:
          ValueError: the finalist is no survivor.
        """
        if finalist not in self.survivors:
            raise ValueError(f"`{finalist}` is not in the race")
        before = self.rounds_completed
        self._left.add(finalist)
        if self.rounds_completed > before or len(self.survivors) < 2:
            self._close_round()

    def standings(self) -> tuple[Standing[K], ...]:
        """Returns the present standings of all finalists, in the given order."""
        winner = self.leader
        return tuple(self._standing(finalist, winner) for finalist in self._finalists)

    def _standing(self, finalist: K, winner: K | None) -> Standing[K]:
        values = tuple(self._values[finalist])
        if finalist in self._left:
            state: RaceState = "left"
        elif finalist in self._beaten_by and self._victor(finalist) not in self._left:
            state = "slower"
        else:
            state = "winner" if finalist == winner else "open"
        return Standing(
            finalist=finalist,
            state=state,
            rounds_s=values,
            step_s=float(np.median(values)) if values else 0.0,
            interval_s=median_interval(values) if values else (0.0, float("inf")),
            to_winner=(
                paired_ratio(values, self._values[winner])
                if values and winner is not None
                else None
            ),
        )

    def _victor(self, finalist: K) -> K:
        """Returns the finalist at the end of the chain of losses: it beat the one that beat this
        one, and so on."""
        while finalist in self._beaten_by:
            finalist = self._beaten_by[finalist]
        return finalist

    def _replay(self, rounds: Mapping[K, Sequence[float]], left: Collection[K]) -> None:
        stored = {finalist: tuple(rounds.get(finalist, ())) for finalist in self._finalists}
        for index in range(max(map(len, stored.values()))):
            for finalist in self.survivors:
                if len(stored[finalist]) > index and not self._ending:
                    self.record(finalist, stored[finalist][index])
            # Ranked behind the others of its round, since some of these were visited before it
            # failed.
            for finalist in self.survivors:
                if finalist in left and len(stored[finalist]) <= index:
                    self.leave(finalist)
        for finalist in self.survivors:
            if finalist in left:
                self.leave(finalist)

    def _close_round(self) -> None:
        done, survivors = self.rounds_completed, self.survivors
        lengths = {len(self._values[finalist]) for finalist in survivors}
        if len(lengths) == 1 and done in self.rules.looks and len(survivors) > 1:
            self._look(done)
        if not self.survivors:
            self._ending = "none left"
        elif len(lengths) == 1 and done and self._are_few(done):
            self._ending = "few left"
        elif len(lengths) == 1 and done >= self.rules.max_rounds:
            self._ending = self._ending or "all rounds"

    def _are_few(self, done: int) -> bool:
        """Whether so few are left that they need no race; a race that began with few is over after
        one round."""
        begun_with_few = 1 < len(self._finalists) <= self.rules.keep
        return len(self.survivors) <= self.rules.keep and (done >= _FIRST_LOOK or begun_with_few)

    def _look(self, done: int) -> None:
        """Applies the test after round `done`.

        Each look allows for all pairs of the finalists that started (the studentized range).
        """
        allowed = self.rules.allowed(done)
        least = self.rules.margin if done >= _FIRST_LOOK else max(_HOPELESS, self.rules.margin)
        survivors = self.survivors
        means = means_of(self._logs(survivors))
        best = int(np.argmin(means.values))
        tied: list[tuple[float, float]] = []
        for row, finalist in enumerate(survivors):
            if row == best:
                continue
            if means.is_above(
                row,
                best,
                margin=float(np.log1p(least)),
                allowed=allowed,
                among=len(self._finalists),
            ):
                self._beaten_by[finalist] = survivors[best]
            else:
                tied.append(means.interval(row, best, 0.95))
        reach = float(np.log1p(self.rules.equivalence))
        equal = all(-reach <= low and high <= reach for low, high in tied)
        if tied and equal and done >= _EQUIVALENCE_ROUNDS:
            self._ending = "equivalent"

    def _best(self) -> K:
        survivors = self.survivors
        logs = self._logs(survivors)
        if min(logs.shape) > 1:
            return survivors[int(np.argmin(means_of(logs).values))]
        return survivors[int(np.argmin(logs.mean(axis=1)))]

    def _logs(self, finalists: Sequence[K]) -> Floats:
        done = self.rounds_completed
        return np.log(np.asarray([self._values[finalist][:done] for finalist in finalists]))
