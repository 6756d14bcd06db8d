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
from benchmarks.support.paths import ROOT


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


def test_phases_add_up_and_follow_what_the_search_says() -> None:
    said = [
        (100.4, "... looking at dense_lm.py, 1 s elapsed"),
        (103.0, "enumerate 2160/2160, 1728 legal"),
        (104.0, "estimate 1/12, about 21 s left"),
        (109.0, "estimate 90/90"),
        (110.0, "... tracing the step on dp:2, 10 s elapsed"),
    ]
    found = scoring.phases(said, 100.0, 11.5)
    assert found == {"start_inspect_enumerate": 3, "propagate_price": 6, "build_rank_print": 2.5}
    assert sum(scoring.phases(said[:1], 100.0, 2.0).values()) == 2.0


def test_the_counts_of_readme_are_read_off_its_table() -> None:
    printed = (ROOT / "README.md").read_text()
    counted = {"enumerated": 2160, "ruled_out": 432, "ranked": 1728}
    assert scoring.read_table(printed) == counted
    assert f"{scoring.TARGET} --space {scoring.README.name} --dry-run" in printed
    with pytest.raises(RuntimeError, match="no table"):
        scoring.read_table("error: it was lost\n")
    funnel = {"enumerated": 5, "ruled_out": [{"count": 1}, {"count": 2}], "estimated": 2}
    assert scoring.read_result({"funnel": funnel, "notices": ["n"]}) == {
        "enumerated": 5,
        "ruled_out": 3,
        "ranked": 2,
        "notices": ["n"],
    }


def test_a_million_distinct_plans() -> None:
    batch = scoring_plans.every_plan(("dp", "fsdp", "tp", "sp"))
    assert len(distinct([*batch.ici.T, *batch.dcn.T], len(batch))) == len(batch) >= 1_000_000
    assert (batch.ici.prod(axis=1) == np.prod(scoring_plans.TORUS)).all()


def test_the_target_is_512_chips_in_4_granules() -> None:
    absent = parse_target(scoring.TARGET, {}).absent
    assert absent is not None
    assert (absent.fabric.num_devices, absent.fabric.num_granules) == (512, 4)
