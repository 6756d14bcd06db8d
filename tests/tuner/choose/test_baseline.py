"""What is known of a baseline before anything has run."""

from __future__ import annotations

import pytest

from automesh.errors import UsageError
from automesh.tuner.choose.baseline import check_baseline, parse_plan


@pytest.mark.parametrize("devices", [(0, 0), (16, 2)])
def test_one_size_may_be_open_inside_granules_and_one_between(devices: tuple[int, int]) -> None:
    names = ("data", "fsdp")
    check_baseline("dcn.data:-1,fsdp:-1 remat=full", names=names, devices=devices)
    with pytest.raises(UsageError, match="leaves 2 sizes to be inferred"):
        check_baseline("dcn.data:-1,fsdp:-1,data:-1", names=names, devices=devices)
    with pytest.raises(UsageError, match="leaves 2 sizes to be inferred"):
        check_baseline("dcn.data:-1,dcn.fsdp:-1", names=names, devices=devices)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("fused=maybe", "write for example `fused=false` or `fused=true`"),
        ("layers=many", "write for example `layers=4`"),
        ("rate=inf", "write for example `rate=0.5`"),
    ],
)
def test_a_value_of_another_type_is_refused_with_one_that_fits(setting: str, hint: str) -> None:
    with pytest.raises(UsageError, match="the baseline sets") as caught:
        parse_plan(
            f"dp:8 {setting}",
            names=("dp",),
            num_devices=8,
            num_granules=1,
            knobs={"fused": False, "layers": 4, "rate": 0.5},
            varied=(),
        )
    assert caught.value.hint == hint
