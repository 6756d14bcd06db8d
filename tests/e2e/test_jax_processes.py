"""Two and four real jax processes with gloo collectives: meshes, batches, shards, training."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.jobs.jax_process import CHECKS, DEVICES
from tests.support.made_once import made_once
from tests.support.processes import ProcessesFailed, run_processes, run_together

# Unique to this test process: others may run on the machine at the same time.
SLEEP_S = f"1001.{os.getpid()}"


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every check gave on each of several processes."""
    return once(request.param, list(CHECKS), tmp_path_factory)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the same training in one process with as many devices."""
    return once(1, ["dense_lm"], tmp_path_factory)[0]["dense_lm"]


def once(count: int, checks: list[str], factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return made_once(
        factory, f"{count} processes", lambda folder: run_processes(count, checks, folder)
    )[1]


def blocks(rows: int, columns: int, along: tuple[int, int]) -> list[list[int]]:
    """Process numbers of a mesh in which process p is the block at `unravel_index(p, along)`."""
    grid = np.empty((rows, columns), int)
    for row, column in np.ndindex(rows, columns):
        block = (row * along[0] // rows, column * along[1] // columns)
        grid[row, column] = np.ravel_multi_index(block, along)
    return grid.tolist()


@pytest.mark.slow
def test_processes_are_granules_in_every_way_to_make_a_mesh(told):
    count, each = len(told), DEVICES // len(told)
    leading = (2, count // 2)
    for index, one in enumerate(told):
        assert one["meshes"] == {
            "default": [device // each for device in range(DEVICES)],
            "leading": blocks(2, 4, leading),
            "outer": blocks(2, 4, (1, count)),
            "hybrid": blocks(count, each, (count, 1)),
            "text": blocks(count, each, (count, 1)),
            "kept": True,
            "hosts": [count, index],
            "host_shape": [1, 4 // leading[1]],
        }
        assert math.prod(one["meshes"]["host_shape"]) == each


@pytest.mark.slow
def test_cpu_helpers_work_on_each_process_by_itself(told):
    for index, one in enumerate(told):
        assert one["cpu_helpers"] == {
            "processes": [index],
            "total": 32.0,
            "forced": True,
            "own": True,
        }


def test_rows_of_all_processes_become_one_batch_and_come_back(told):
    rows = 16 // len(told)
    own = [np.arange(rows * 3).reshape(rows, 3) + 1000 * index for index in range(len(told))]
    whole = np.concatenate(own)
    for one in told:
        batches = one["batches"]
        assert batches["global"] == whole.tolist()
        assert batches["back"]
        assert batches["copies"] == [0, 1, 2, 3, 4]
        assert batches["inside"] == [[4, 3], (2 * whole).tolist()]
        assert batches["same"] == [[2, 3], [[0, 1, 2], [3, 4, 5]]]


def test_a_process_without_a_device_in_the_mesh_is_told(told):
    assert told[0]["elsewhere"] == list(range(8))
    for index, one in enumerate(told[1:], start=1):
        assert one["elsewhere"].startswith(f"the mesh has no device of process {index}, so that")


def test_logical_axes_are_split_over_the_devices_of_all_processes(told):
    for one in told:
        assert one["shard"] == {"shapes": [[2, 2], [2, 2]], "equal": [True, True]}


def test_a_rule_is_selected_without_a_name_for_the_devices_of_all_processes(told):
    count, each = len(told), DEVICES // len(told)
    for one in told:
        assert one["selected"] == {
            "processes": blocks(count, each, (count, 1)),
            "axis_types": ["Explicit", "Explicit"],
        }


@pytest.mark.slow
def test_training_loses_as_in_one_process(told, alone):
    for one in told:
        assert one["dense_lm"] == pytest.approx(alone, rel=1e-5)
    assert len({tuple(one["dense_lm"]) for one in told}) == 1
    assert alone[1] < alone[0]


def test_processes_that_hang_are_killed_in_time_with_their_children(tmp_path):
    child = f"sleep {SLEEP_S}"
    hang = f"import os, time; os.system('{child} &'); time.sleep(600)"
    begun = time.monotonic()
    with pytest.raises(ProcessesFailed, match="process 0 did not end in 3 s"):
        run_together([["-c", hang]] * 2, tmp_path, timeout_s=3)
    assert time.monotonic() - begun < 120
    # A killed grandchild is init's to collect, and runs on until its signal is delivered.
    end = time.monotonic() + 300
    while sleeping():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_when_one_process_fails_the_others_are_not_waited_for(tmp_path):
    commands = [["-c", "import time; time.sleep(600)"], ["-c", "raise SystemExit('lost')"]]
    begun = time.monotonic()
    with pytest.raises(ProcessesFailed, match="process 1 ended with 1: lost"):
        run_together(commands, tmp_path, timeout_s=100)
    assert time.monotonic() - begun < 300


def sleeping() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == ["sleep", SLEEP_S]
        and process.status() != psutil.STATUS_ZOMBIE
    ]
