"""The comparison of single operations: one of each kind, on two devices."""

import jax
import pytest

from benchmarks.operations.command import agrees, compiled_bytes, estimated_bytes
from benchmarks.operations.samples import SAMPLES


@pytest.mark.parametrize(
    "name",
    [
        "split: gate and up",
        pytest.param("split: query, key, value", marks=pytest.mark.slow),
        pytest.param("roll by one", marks=pytest.mark.slow),
        pytest.param("running sum", marks=pytest.mark.slow),
        pytest.param("pooling", marks=pytest.mark.slow),
    ],
)
def test_an_operation_sends_what_is_estimated(name: str) -> None:
    compiled = compiled_bytes(SAMPLES[name], jax.devices()[:4])
    estimated = estimated_bytes(SAMPLES[name], 4, "cpu")
    assert compiled, "the sample sends nothing"
    assert agrees(estimated, compiled), (estimated, compiled)


def test_a_difference_of_more_than_15_percent_is_one() -> None:
    assert agrees({"all-gather": 1e6}, {"all-gather": 1.1e6})
    assert not agrees({"all-gather": 1e6}, {"all-gather": 1.3e6})
    assert not agrees({}, {"collective-permute": 1e5})
    assert agrees({}, {"collective-permute": 1e3})
