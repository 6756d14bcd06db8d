"""Enumeration against an independent brute force."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import NoFeasibleMesh, UsageError
from automesh.space.enumerate import (
    count_factorizations,
    enumerate_meshes,
    factorizations,
    prime_exponents,
)
from automesh.space.legal import find_legal
from automesh.space.settings import StepFacts
from automesh.space.space import AxisRange, Constraint, Knob, SearchSpace

FIVE = ("dp", "fsdp", "ep", "tp", "sp")


def space_of(axes, **others):
    names = tuple(axis.name for axis in axes)
    return SearchSpace(name="test", shipped=False, names=names, axes=tuple(axes), **others)


def brute_force(axes, *, num_devices, num_granules):
    """All (ici, dcn) pairs of tuples: every divisor tried for every axis, products compared."""

    def splits(total, allowed):
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        choices = [divisors if is_allowed else [1] for is_allowed in allowed]
        return [sizes for sizes in itertools.product(*choices) if math.prod(sizes) == total]

    inside = splits(num_devices // num_granules, [True] * len(axes))
    across = splits(num_granules, [axis.dcn for axis in axes])
    return set(itertools.product(inside, across))


def within(axes, ici, dcn):
    sizes = [i * d for i, d in zip(ici, dcn, strict=True)]
    return all(
        axis.minimum <= size and (not axis.maximum or size <= axis.maximum)
        for axis, size in zip(axes, sizes, strict=True)
    )


@st.composite
def cases(draw):
    """Devices (any count, primes and 96 alike), granules, and two to four axes with limits."""
    num_granules = draw(st.sampled_from([1, 1, 2, 3, 4, 6]))
    inside = draw(st.integers(1, 64) | st.sampled_from([24, 60, 96, 72]))
    count = draw(st.integers(2, 4 if inside <= 64 else 3))
    axes = []
    for name in FIVE[:count]:
        low = draw(st.sampled_from([1, 1, 1, 2, 3]))
        high = draw(st.sampled_from([0, 0, 4, 6, 16]))
        fixed = draw(st.sampled_from([False] * 5 + [True]))
        axes.append(
            AxisRange(
                name=name,
                minimum=low,
                maximum=low if fixed else high,
                dcn=draw(st.booleans()),
            )
        )
    if not any(axis.dcn for axis in axes):
        axes[0] = AxisRange(
            name=axes[0].name, minimum=axes[0].minimum, maximum=axes[0].maximum, dcn=True
        )
    divides = draw(st.sampled_from([0, 0, 12, 64, 96]))
    return axes, inside * num_granules, num_granules, divides


@settings(max_examples=300, deadline=None)
@given(cases())
def test_plans_are_those_of_brute_force(case):
    axes, num_devices, num_granules, divides = case
    everything = brute_force(axes, num_devices=num_devices, num_granules=num_granules)
    product = tuple(axis.name for axis in axes[:2])
    expected = {
        (ici, dcn)
        for ici, dcn in everything
        if within(axes, ici, dcn)
        and (not divides or divides % (ici[0] * dcn[0] * ici[1] * dcn[1]) == 0)
    }
    space = space_of(
        axes,
        constraints=(Constraint(factors=product, relation="divides", bound=divides),)
        if divides
        else (),
    )
    table = enumerate_meshes(axes, num_devices=num_devices, num_granules=num_granules)
    assert {
        (tuple(ici), tuple(dcn)) for ici, dcn in zip(table.ici.tolist(), table.dcn.tolist())
    } == everything
    assert len(table) == len(everything)
    step = StepFacts(used_axes=space.names)
    arguments = {"num_devices": num_devices, "num_granules": num_granules, "platform": "cpu"}
    if not expected:
        with pytest.raises(NoFeasibleMesh):
            find_legal(space, step, **arguments)
        return
    found = find_legal(space, step, **arguments)
    got = [
        (tuple(axis.ici for axis in plan.axes), tuple(axis.dcn for axis in plan.axes))
        for plan in found.legal
    ]
    assert set(got) == expected
    assert len(got) == len(expected)
    assert found.num_meshes == len(everything)
    assert sum(rejection.count for rejection in found.rejections) == len(everything) - len(expected)
    for rejection in found.rejections:
        reasons = found.reasons_against(rejection.example)
        assert (rejection.rule, rejection.detail) == (reasons[0].rule, reasons[0].detail)
    assert not any(found.reasons_against(plan) for plan in found.legal)


@given(st.integers(1, 3000), st.integers(1, 4))
def test_factorizations_are_counted_without_being_made(total, parts):
    table = factorizations(total, parts)
    assert table.shape == (count_factorizations(total, parts), parts)
    assert (table.prod(axis=1) == total).all()
    assert len({tuple(row) for row in table.tolist()}) == len(table)


@given(st.integers(1, 10**6))
def test_prime_exponents_multiply_back(number):
    assert math.prod(prime**exponent for prime, exponent in prime_exponents(number)) == number


@pytest.mark.parametrize(
    ("num_devices", "num_granules", "expected"),
    [
        # C(7+4, 4) ways for 128 = 2^7 inside a granule, times C(2+4, 4) for 4 = 2^2 granules.
        (512, 4, 330 * 15),
        # 24 = 2^3 * 3: C(7, 4) * 5.
        (24, 1, 35 * 5),
        # 96 = 2^5 * 3: C(9, 4) * 5.
        (96, 1, 126 * 5),
        # 384 = 2^7 * 3.
        (384, 1, 330 * 5),
        # 384 in 3 granules of 128.
        (384, 3, 330 * 5),
        (1, 1, 1),
        (7, 1, 5),
    ],
)
def test_known_counts_over_five_axes(num_devices, num_granules, expected):
    axes = [AxisRange(name=name, dcn=True) for name in FIVE]
    table = enumerate_meshes(axes, num_devices=num_devices, num_granules=num_granules)
    assert len(table) == expected
    assert (table.sizes.prod(axis=1) == num_devices).all()
    assert (table.dcn.prod(axis=1) == num_granules).all()


def test_granules_fall_only_on_axes_that_may_span_them():
    axes = [AxisRange(name="dp", dcn=True), AxisRange(name="tp")]
    table = enumerate_meshes(axes, num_devices=16, num_granules=4)
    assert table.dcn.tolist() == [[4, 1]] * 3
    assert table.ici.tolist() == [[4, 1], [2, 2], [1, 4]]


@pytest.mark.parametrize(
    ("num_devices", "num_granules", "dcn", "said"),
    [
        (0, 1, True, "0 devices in 1 granules cannot form a mesh"),
        (7, 2, True, "7 devices in 2 granules cannot form a mesh"),
        (8, 2, False, "there are 2 granules (slices or nodes), but no axis may span them"),
    ],
)
def test_devices_that_form_no_mesh(num_devices, num_granules, dcn, said):
    axes = [AxisRange(name="dp", dcn=dcn)]
    with pytest.raises(UsageError) as caught:
        enumerate_meshes(axes, num_devices=num_devices, num_granules=num_granules)
    assert said in caught.value.message


def test_too_many_meshes_are_refused_before_they_are_made():
    axes = [AxisRange(name=f"a{i}") for i in range(12)]
    with pytest.raises(UsageError, match="more than the 4000000 that can be listed"):
        enumerate_meshes(axes, num_devices=2**14)


def test_a_large_space_takes_no_time():
    axes = [AxisRange(name=name, dcn=True) for name in FIVE]
    space = space_of(axes, knobs=(Knob(name="remat", values=("none", "dots", "full")),))
    step = StepFacts(used_axes=FIVE, knobs=(("remat", "full"),))
    start = time.perf_counter()
    found = find_legal(space, step, num_devices=8192, num_granules=8, platform="tpu")
    assert len(found.legal) == 3 * math.comb(14, 4) * math.comb(7, 4)
    # 105,105 plans take about a second; the bound leaves room for a busy machine.
    assert time.perf_counter() - start < 20
