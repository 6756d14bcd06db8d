"""What the scoring benchmark is about: the plans that it counts are those that it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from automesh.cost.unique_rows import distinct
from automesh.hardware import parse_target
from automesh.space.spec import read_space
from benchmarks.scoring import command as scoring
from benchmarks.scoring import plans as scoring_plans


@pytest.mark.parametrize(
    "example", [scoring.DENSE, scoring.MOE, scoring.LONG], ids=lambda e: e.name
)
def test_five_axes_may_cross_dcn_and_the_shipped_constraints_hold(
    example: scoring.Example, tmp_path: Path
) -> None:
    space = read_space(
        str(scoring.spaced(example, tmp_path, '[knobs]\nremat = ["full", "dots"]\n'))
    )
    shipped = read_space(example.name)
    assert space.names == ("dp", "fsdp", "ep", "tp", "sp")
    assert all(axis.dcn for axis in space.axes)
    assert {str(one).replace("*microbatches", "") for one in shipped.constraints} == {
        str(one) for one in space.constraints
    }
    assert example.script.is_file()


def test_a_million_distinct_plans() -> None:
    batch = scoring_plans.every_plan(("dp", "fsdp", "tp", "sp"))
    assert len(distinct([*batch.ici.T, *batch.dcn.T], len(batch))) == len(batch) >= 1_000_000
    assert (batch.ici.prod(axis=1) == np.prod(scoring_plans.TORUS)).all()


def test_the_target_is_512_chips_in_4_granules() -> None:
    absent = parse_target(scoring.TARGET, {}).absent
    assert absent is not None
    assert (absent.fabric.num_devices, absent.fabric.num_granules) == (512, 4)
