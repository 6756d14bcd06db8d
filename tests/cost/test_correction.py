"""The residual model: what it learns, how sure it is, and how it says so."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.cost.correction import PredictedPlan, refine


def subjects(count: int, seed: int) -> list[PredictedPlan]:
    draw = np.random.default_rng(seed)
    made: list[PredictedPlan] = []
    for number in range(count):
        compute, memory, network = draw.uniform(0.1, 1.0, 3)
        made.append(
            PredictedPlan(
                predicted_s=float(compute + memory + network),
                causes=(
                    ("compute", float(compute)),
                    ("memory", float(memory)),
                    ("ici tp", float(network)),
                ),
                settings=(("remat", ["none", "dots", "full"][number % 3]),),
            )
        )
    return made


def truth(one: PredictedPlan, seed: int, noise: float = 0.02) -> float:
    """A device on which everything takes twice as long, the network more, and `full` 10 % more."""
    draw = np.random.default_rng(seed)
    network = dict(one.causes)["ici tp"] / one.predicted_s
    knob = 0.1 if one.settings[0][1] == "full" else 0.0
    return one.predicted_s * 2.0 * math.exp(0.4 * network + knob + noise * draw.normal())


def test_a_few_measurements_correct_the_others() -> None:
    plans = subjects(200, 0)
    times = [truth(one, row) for row, one in enumerate(plans)]
    found = refine(plans, {row: times[row] for row in range(0, 120, 10)})
    before = np.median([abs(one.predicted_s / time - 1) for one, time in zip(plans, times)])
    after = np.median(np.abs(found.step_s / np.array(times) - 1))
    assert before > 0.5
    assert after < 0.03
    assert found.sample == 12
    assert found.loo_error is not None
    # The error that it states of itself is the one that it has.
    assert 0.3 * after < found.loo_error < 3 * after


def test_intervals_hold_what_they_claim() -> None:
    held = 0
    for seed in range(5):
        plans = subjects(60, seed)
        times = [truth(one, 100 * seed + row) for row, one in enumerate(plans)]
        found = refine(plans, {row: times[row] for row in range(0, 60, 6)})
        for row in range(60):
            low, high = found.interval_s(row)
            held += low <= times[row] <= high
    assert 0.88 <= held / 300 <= 1.0


def test_without_measurements_nothing_is_corrected_and_little_is_sure() -> None:
    plans = subjects(5, 1)
    found = refine(plans, {})
    assert found.step_s == pytest.approx([one.predicted_s for one in plans])
    assert (found.loo_error, found.sample) == (None, 0)
    low, high = found.interval_s(0)
    assert low < plans[0].predicted_s / 10 and high > plans[0].predicted_s * 10


def test_one_measurement_scales_all() -> None:
    plans = subjects(5, 2)
    found = refine(plans, {0: 3 * plans[0].predicted_s})
    assert found.step_s == pytest.approx([3 * one.predicted_s for one in plans], rel=0.35)


def test_the_two_kinds_of_evidence_are_scaled_apart() -> None:
    estimated = [
        PredictedPlan(predicted_s=1.0 + 0.1 * n, causes=(("compute", 1.0 + 0.1 * n),))
        for n in range(6)
    ]
    compiled = [
        PredictedPlan(predicted_s=5.0 + n, causes=(("compute", 5.0 + n),), evidence="compiled")
        for n in range(6)
    ]
    measured = {row: estimated[row].predicted_s for row in range(4)}
    measured |= {6 + row: compiled[row].predicted_s / 5 for row in range(4)}
    found = refine([*estimated, *compiled], measured)
    assert found.step_s[5] == pytest.approx(1.5, rel=0.1)
    assert found.step_s[11] == pytest.approx(2.0, rel=0.1)


def test_a_value_of_a_knob_that_was_never_measured_is_less_sure() -> None:
    plans = subjects(60, 3)
    measured = {row: truth(plans[row], row) for row in range(60) if row % 3 < 2}
    found = refine(plans, measured)
    widths = [math.log(high / low) for low, high in map(found.interval_s, range(60))]
    known = [widths[row] for row in range(60) if row % 3 < 2]
    unknown = [widths[row] for row in range(60) if row % 3 == 2]
    assert min(unknown) > max(known)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sample=st.integers(0, 8),
    first=st.floats(0.01, 20.0),
    second=st.floats(0.01, 20.0),
)
def test_chances_are_chances(seed: int, sample: int, first: float, second: float) -> None:
    plans = subjects(12, seed)
    found = refine(plans, {row: truth(plans[row], row) for row in range(sample)})
    low, high = found.chance_below(min(first, second)), found.chance_below(max(first, second))
    assert np.all((low >= 0) & (high <= 1 + 1e-12) & (low <= high + 1e-12))
    # The median of the mixture need not be the median of its means, but cannot be far.
    interval = found.interval_s(0)
    assert interval[0] < found.step_s[0] < interval[1]
