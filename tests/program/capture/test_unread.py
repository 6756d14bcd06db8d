"""The nan that a script reads for a number without data."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from automesh.program.capture.unread import UNREAD, counted_as_finite, is_unread, is_unread_number


@pytest.mark.parametrize(
    "number",
    [
        UNREAD,
        -UNREAD,
        (UNREAD + 1) / 3,
        sum([1.0, UNREAD]) / 2,
        math.exp(UNREAD),
        np.float32(UNREAD),
        np.float16(UNREAD),
        np.mean(np.asarray([1, UNREAD], np.float32)),
    ],
)
def test_what_is_computed_of_an_unread_number_is_told_from_other_nan(number: float) -> None:
    assert math.isnan(number)
    assert is_unread_number(number)
    with counted_as_finite():
        assert not math.isnan(number)
        assert math.isfinite(number)
        assert not np.isnan(number)
        assert np.isfinite(number)
    assert math.isnan(number)
    assert np.isnan(number)


@pytest.mark.parametrize("number", [math.nan, math.inf - math.inf, np.float32("nan"), math.inf])
def test_what_the_script_itself_computes_is_not_finite(number: float) -> None:
    assert not is_unread_number(number)
    with counted_as_finite():
        assert math.isnan(number) == np.isnan(number) == (number != math.inf)
        assert not math.isfinite(number)
        assert not np.isfinite(number)


def test_each_element_of_an_array_is_told_by_itself() -> None:
    array = np.asarray([1, UNREAD, math.nan, math.inf])
    assert is_unread(array).tolist() == [False, True, False, False]
    with counted_as_finite():
        assert np.isnan(array).tolist() == [False, False, True, False]
        assert np.isfinite(array).tolist() == [True, True, False, False]
        assert isinstance(math.isnan(1.0), bool)
        assert np.isnan.nin == 1, "it is still the function of NumPy to who looks closer"
        with pytest.raises(TypeError):
            np.isnan("text")
        stored = pickle.dumps([np.isnan, math.isfinite])
    assert pickle.loads(stored) == [np.isnan, math.isfinite]
    assert not is_unread_number([UNREAD])
    assert not is_unread(3)
