"""What is known of a baseline before anything has run."""

from __future__ import annotations

import pytest

from automesh.errors import UsageError
from automesh.tuner.choose.baseline import check_baseline


@pytest.mark.parametrize("devices", [(0, 0), (16, 2)])
def test_one_size_may_be_open_inside_granules_and_one_between(devices: tuple[int, int]) -> None:
    names = ("data", "fsdp")
    check_baseline("dcn.data:-1,fsdp:-1 remat=full", names=names, devices=devices)
    with pytest.raises(UsageError, match="leaves 2 sizes to be inferred"):
        check_baseline("dcn.data:-1,fsdp:-1,data:-1", names=names, devices=devices)
    with pytest.raises(UsageError, match="leaves 2 sizes to be inferred"):
        check_baseline("dcn.data:-1,dcn.fsdp:-1", names=names, devices=devices)
