"""Numbers of a program as functions of axis sizes."""

import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from automesh.cost.terms import value_of
from automesh.sharding.size_dependence import Fit, Sample

POWERS = st.dictionaries(st.sampled_from("abc"), st.integers(-2, 2))
SIZES = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 4, 8, 16]) for axis in "abc"})


def sample(sizes, numbers, elements=np.inf):
    values = np.array(numbers, np.float64)
    return Sample(sizes=sizes, numbers=values, elements=np.full_like(values, elements))


def fitted(base, numbers, elements=np.inf):
    """Fits `numbers`, a function of sizes, by doubling every axis of `base` in turn."""
    fit = Fit(base=sample(base, numbers(base), elements))
    for axis in base:
        more = {**base, axis: base[axis] * 2}
        fit.learn(axis, sample(more, numbers(more), elements))
    return fit


@given(st.lists(st.tuples(st.integers(1, 10**9), POWERS), min_size=1, max_size=5), SIZES, SIZES)
def test_every_product_of_powers_is_found(monomials, base, sizes):
    def numbers(at):
        return [
            coefficient * np.prod([float(at[axis]) ** power for axis, power in powers.items()])
            for coefficient, powers in monomials
        ]

    fit = fitted(base, numbers)
    assert fit.holds(sample(sizes, numbers(sizes)))
    for index, (_, powers) in enumerate(monomials):
        assert dict(fit.powers(index)) == {axis: power for axis, power in powers.items() if power}
        formula = fit.formula(index)
        assert formula is not None
        assert np.isclose(value_of(formula, sizes), numbers(sizes)[index])


@given(st.integers(1, 9), st.integers(-9, 9).filter(bool), st.integers(-1, 1), SIZES, SIZES)
def test_loops_that_grow_linearly_with_one_axis_are_found(slope, offset, power, base, sizes):
    def numbers(at):
        return [(slope * at["a"] + offset) * float(at["b"]) ** power, 7]

    before, after = (slope * base["a"] * twice + offset for twice in (1, 2))
    assume(before > 0 and not math.log2(after / before).is_integer())
    fit = fitted(base, numbers)
    assert fit.holds(sample(sizes, numbers(sizes)))
    formula = fit.formula(0)
    assert formula is not None
    assert np.isclose(value_of(formula, sizes), numbers(sizes)[0])


def test_a_loop_that_does_not_run_at_first_is_found():
    fit = fitted({"a": 1}, lambda at: [at["a"] - 1])
    assert fit.holds(sample({"a": 16}, [15]))
    assert value_of(fit.formula(0), {"a": 16}) == 15


def test_what_is_no_product_of_functions_of_one_axis_does_not_hold():
    fit = fitted({"a": 2, "b": 2}, lambda at: [at["a"] + at["b"]])
    assert not fit.holds(sample({"a": 4, "b": 4}, [8]))
    assert fit.formula(0) is None


def test_a_step_in_the_numbers_does_not_hold():
    fit = fitted({"a": 2}, lambda at: [min(8, 2 * at["a"])])
    assert fit.holds(sample({"a": 4}, [8]))
    assert not fit.holds(sample({"a": 8}, [8]))


def test_tiny_arrays_of_indices_may_grow_as_they_like():
    def numbers(at):
        return [at["a"] * (at["a"] - 1)]

    fit = fitted({"a": 2}, numbers, elements=12)
    assert fit.holds(sample({"a": 16}, [240], 240))
    assert fit.linear_axes(0) == () and fit.powers(0) == ()
    assert not fitted({"a": 2}, numbers, elements=1000).holds(sample({"a": 16}, [240]))


def test_programs_of_other_lengths_do_not_hold():
    fit = fitted({"a": 2}, lambda at: [1, 2])
    assert not fit.holds(sample({"a": 2}, [1, 2, 3]))
