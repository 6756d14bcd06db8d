"""Estimates of steps that are no language models, and what the CPU compiler makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.support.paths import ROOT
from benchmarks.truth.command import OTHER_STEPS

# The CPU compiler multiplies grouped convolutions as dense ones.
GROUPED = "state_space"


def figures(*options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.terms", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])["cpu"]["by_example"]


def check(name: str, found: dict[str, float]) -> None:
    if name != GROUPED:
        assert found["flops_max_error"] < 0.05
    assert found["bytes_median_error"] <= 0.25
    assert found["bytes_max_error"] <= 0.6
    assert found["memory_median_error"] <= 0.25
    assert found["memory_max_error"] <= 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [pytest.param("rnn", "4", marks=pytest.mark.long), ("unet", "2")]
)
def test_products_and_halos_are_those_of_xla(name: str, devices: str) -> None:
    """Weights that are split over the axis of the batch were taken for products in parts, whose
    results are reduced (118 % too many bytes), and halos for nothing (98 % too few)."""
    (found,) = figures("--example", name, "--devices", devices).values()
    check(name, found)
    assert found["bytes_median_error"] < 0.01
    assert found["flops_max_error"] < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(OTHER_STEPS))
def test_a_step_is_partitioned_as_xla_does(name: str) -> None:
    (found,) = figures("--example", name).values()
    check(name, found)
