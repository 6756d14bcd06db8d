"""How many devices a script wants, by how it fails where it has others."""

from __future__ import annotations

import jax
import pytest

from automesh.program.capture.world import told
from automesh.program.capture.world.numbers import note_wanted_devices

SHOWN = jax.device_count()
# What a check of a script says -> the number that it wants; 0: it says none.
CHECKS = {
    f"Number of devices {SHOWN} does not match the product of the parallelism 3": 3,
    f"Expected 3 devices, got {SHOWN}": 3,
    f"mesh (3, 5) does not fit {SHOWN} devices": 15,
    f"{SHOWN} devices: a batch of 5 rows cannot be split into 3": 0,
    f"needs 2.5 GiB on each of {SHOWN} devices": 0,
    f"a batch of 3 rows cannot be split into {SHOWN}": 0,
    f"One of device_put args implies that array axis 0 is partitioned {SHOWN} times, but the "
    "dimension size is 19 (full shape: (19, 64))": 0,
}


@pytest.mark.parametrize("text", CHECKS)
def test_the_one_other_number_beside_that_of_the_devices_is_wanted(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr("automesh.program.capture.world.numbers.want_devices", found.append)
    with pytest.raises(AssertionError) as raised:
        exec(compile(f"assert False, {text!r}", "/home/me/train.py", "exec"))
    note_wanted_devices(raised.value)
    assert found == ([CHECKS[text]] if CHECKS[text] else [])
    assert told.wanted_devices() == 0
