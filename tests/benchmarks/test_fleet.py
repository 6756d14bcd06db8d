"""In which orders jobs are given, what these cost, and how real compiles are told of."""

from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks.fleet import command, compiles
from benchmarks.fleet.command import ideal_s, mean_ideal
from benchmarks.fleet.guesses import correlations, in_given_order


def test_who_knows_the_lengths_gives_the_last_ones_longest_first() -> None:
    lengths = [float(one) for one in range(1, 41)]
    known = in_given_order(lengths, 4, correlation=1.0, sigma=1.0)
    assert known[:24] == lengths[:24]
    assert known[24:] == lengths[:23:-1]
    guessed = in_given_order(lengths, 4, correlation=0.0, sigma=1.0)
    assert guessed[:24] == lengths[:24]
    assert sorted(guessed) == lengths
    assert guessed[24:] != known[24:]


def test_a_better_order_costs_less() -> None:
    found = mean_ideal(16, 100, 0.7)
    drawn, given, longest = (
        found[f"{name}_mean_ideal"] for name in ("as_drawn", "as_given", "longest_first")
    )
    assert 1.0 <= longest < given < drawn
    assert ideal_s([1.0] * 8, 4) == 2.0


def test_guesses_of_recorded_searches_are_worth_something() -> None:
    found = correlations()
    assert found.keys() == {"dense_lm", "moe_lm", "long_context"}
    assert all(0.4 < one < 1.0 for one in found.values())


def test_two_agents_are_set_against_one(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = {1: 30.0, 2: 16.0}
    asked: list[list[int]] = []

    def compiled_s(cores: list[int]) -> float:
        asked.append(cores)
        return took_s[len(cores)]

    monkeypatch.setattr(compiles, "_compiled_s", compiled_s)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    found: Any = compiles.two_against_one()
    assert asked == [[3], [3, 5]]
    assert found == {
        "real_compiles": 12,
        "real_1_agents_s": 30.0,
        "real_2_agents_s": 16.0,
        "real_ratio": 1.875,
    }
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert command.two_against_one() == {"real_not_run": "this process may use one core alone"}
