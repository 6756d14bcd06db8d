"""`python -m benchmarks.pipeline`: what counts as the same order, and a small run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.pipeline import SCHEDULES, Row, _noise, _ordered
from tests.support.paths import ROOT


def row(simulated_s, measured_s, noise_s):
    return Row(
        schedule="1f1b",
        simulated_s=simulated_s,
        measured_s=measured_s,
        noise_s=noise_s,
        bubble=0.0,
        peak_live=(1,),
        peak_held=(1.0,),
    )


def test_pairs_that_differ_by_more_than_the_noise_are_compared():
    rows = [row(1.0, 2.0, 0.01), row(1.01, 1.9, 0.01), row(2.0, 3.0, 0.01), row(3.0, 2.5, 0.01)]
    assert _ordered(rows) == {"pairs": 5, "pairs_in_order": 4}
    assert _ordered([row(1.0, 2.0, 1.0), row(2.0, 1.0, 1.0)]) == {"pairs": 0, "pairs_in_order": 0}


def test_more_rounds_have_less_noise():
    times = [1.0, 1.1, 1.2, 1.3, 1.4]
    assert _noise(times * 16) < _noise(times) < max(times) - min(times)


@pytest.mark.long
def test_a_small_run_holds_less_with_1f1b_than_with_gpipe():
    command = "--ranks 2 --width 64 --rows 8 --layers 2 --rounds 3"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.pipeline", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=True,
    )
    told = json.loads(ended.stdout.splitlines()[-1])
    assert set(told["schedules"]) == set(SCHEDULES)
    assert told["dispatch_us"] > 0
    for one in told["schedules"].values():
        assert {"simulated_s", "measured_s", "bubble", "peak_live"} <= set(one)
        assert all(
            held <= live + 1 for held, live in zip(one["peak_held"], one["peak_live"], strict=True)
        )
    gpipe, steady = (told["schedules"][name]["peak_held"] for name in ("gpipe", "1f1b"))
    assert all(some < other for some, other in zip(steady, gpipe, strict=True))
