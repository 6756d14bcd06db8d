"""Slices as named here, and as the compile-only client of libtpu has them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest

from automesh.hardware import absent_devices_of, parse_target

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs the `tpu` extra: libtpu"
    ),
]

NAMES = (
    "tpu-v4-8",
    "tpu-v4-16",
    "tpu-v4-128",
    "tpu-v4-384",
    "tpu-v4-32-2",
    "tpu-v5litepod-1",
    "tpu-v5litepod-4",
    "tpu-v5litepod-8",
    "tpu-v5litepod-16",
    "tpu-v5litepod-256",
    "tpu-v5litepod-8-2",
    "tpu-v5litepod-64-4",
    "v5e:8x4",
    "tpu-v5p-8",
    "tpu-v5p-64",
    "tpu-v5p-512",
    "tpu-v5p-128-2",
    "tpu-v5p-8960",
    "v5p:8x4x4",
    "tpu-v6e-1",
    "tpu-v6e-8",
    "tpu-v6e-128",
    "tpu-v6e-256-2",
    "tpu-7x-2",
    "tpu-7x-8",
    "tpu-7x-128",
    "tpu-7x-256-2",
)
# In a process of its own: libtpu lets go of nothing, and writes to its own streams.
ASK = """
import json, sys
from jax.experimental import topologies

for one in json.load(sys.stdin):
    devices = topologies.get_topology_desc(
        platform="tpu",
        topology_name=one["topology"],
        chip_config_name=one["chip_config"],
        chips_per_host_bounds=tuple(one["host"]),
        num_slices=one["num_granules"],
    ).devices
    print(json.dumps([
        [d.device_kind, d.id, d.process_index, getattr(d, "slice_index", 0), d.coords,
         d.core_on_chip] for d in devices
    ]))
"""


@pytest.fixture(scope="module")
def clients() -> dict[str, list]:
    """Name -> what libtpu says of each device."""
    told = [absent_devices_of(parse_target(name, {}).absent) for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps([dataclasses.asdict(one) for one in told]),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(zip(NAMES, lines, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_compile_only_client_agrees(name: str, clients: dict[str, list]) -> None:
    one = absent_devices_of(parse_target(name, {}).absent)
    devices = clients[name]
    assert len(devices) == one.num_devices
    assert {device[0] for device in devices} == {one.device_kind}
    assert len({device[2] for device in devices}) == one.num_hosts
    assert {device[3] for device in devices} == set(range(one.num_granules))
    chips = itertools.product(*(range(size) for size in (*one.torus, 1)[:3]))
    places = {(chip, core) for chip in chips for core in range(one.devices_per_chip)}
    for index in range(one.num_granules):
        inside = [device for device in devices if device[3] == index]
        assert len(inside) == one.num_devices // one.num_granules
        assert {(tuple(device[4]), device[5]) for device in inside} == places
    # A host has as many chips as is said, next to each other.
    for _, group in itertools.groupby(sorted(devices, key=lambda d: d[2]), key=lambda d: d[2]):
        coords = [tuple(device[4]) for device in group]
        spans = tuple(max(along) - min(along) + 1 for along in zip(*coords, strict=True))
        assert spans == one.host


@pytest.mark.parametrize("name", NAMES)
def test_devices_come_in_the_order_that_layouts_are_worked_out_with(
    name: str, clients: dict[str, list]
) -> None:
    from automesh.program.absent.layout import fake_devices

    one = absent_devices_of(parse_target(name, {}).absent)
    ours = fake_devices(one.device_kind, one.torus, one.devices_per_chip)
    first = [device for device in clients[name] if device[3] == 0]
    # Of several slices each counts from a hundred thousand of its own.
    assert [(list(one.coords), one.core_on_chip, one.id) for one in ours] == [
        (device[4], device[5], device[1] % 100_000) for device in first
    ]
