"""Distinct rows and formulas as arrays, against the plain way to find them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.cost.formulas import Formulas, Sums, added
from automesh.cost.kernels import total
from automesh.cost.terms import Sum, value_of
from automesh.cost.unique_rows import distinct, products, ranked
from tests.support.samples.cost_samples import mono

AXES = ("a", "b", "c")
columns = st.integers(1, 30).flatmap(
    lambda rows: st.lists(
        st.lists(
            st.one_of(st.integers(0, 3), st.integers(0, 1 << 40)), min_size=rows, max_size=rows
        ),
        max_size=4,
    ).map(lambda found: (rows, found))
)
sums = st.lists(
    st.builds(
        lambda coefficient, powers: mono(float(coefficient), **powers),
        st.integers(-9, 99),
        st.dictionaries(st.sampled_from([*AXES, "absent"]), st.sampled_from([-2, -1, 1, 3])),
    ),
    max_size=4,
).map(tuple)
sizes = st.lists(st.tuples(*[st.integers(1, 64)] * 3), min_size=2, max_size=6).map(np.array)


@given(columns)
def test_distinct_rows(case: tuple[int, list[list[int]]]) -> None:
    rows, values = case
    found = distinct([np.array(column, np.int64) for column in values], rows)
    table = np.array(values, np.int64).reshape(len(values), rows).T
    np.testing.assert_array_equal(table[found.first][found.inverse], table)
    expected = np.unique(table, axis=0) if values else table[:1]
    np.testing.assert_array_equal(table[found.first], expected)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_products_of_columns(pairs: list[tuple[int, int]]) -> None:
    one, other = np.array(pairs).T
    both = products(ranked(one), ranked(other))
    np.testing.assert_array_equal(both.found[both.codes], one * other)
    assert (np.diff(both.found) > 0).all()


@given(st.lists(sums, min_size=1, max_size=5), sizes)
def test_sums_as_arrays(formulas_of: list[Sum], where: np.ndarray) -> None:
    formulas = Formulas(AXES)
    together = Sums(formulas, formulas_of)
    matrix = formulas.matrix(formulas_of)
    values = formulas.values(where)
    expected = [
        [value_of(one, dict(zip(AXES, row.tolist()))) for row in where] for one in formulas_of
    ]
    np.testing.assert_allclose(together.at(values), expected, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(matrix @ values, expected, rtol=1e-12, atol=1e-9)
    assert len(set(formulas.powers)) == len(formulas.powers)


@given(sums, sums, sizes)
def test_added_sums(one: Sum, other: Sum, where: np.ndarray) -> None:
    at = dict(zip(AXES, where[0].tolist()))
    both = added(one, other)
    assert value_of(both, at) == pytest.approx(
        value_of(one, at) + value_of(other, at), rel=1e-9, abs=1e-6
    )
    assert len({term.powers for term in both}) == len(both)


def test_a_total_needs_two_columns() -> None:
    with pytest.raises(ValueError, match="two columns"):
        total(np.ones((3, 1)))
