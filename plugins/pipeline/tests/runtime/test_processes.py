"""Stages on two real processes of 4 devices train like all of them on one process of 8."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from plugins.pipeline.tests.support.pipeline_process import CHECKS
from tests.support.processes import ProcessesFailed, free_ports, run_together

CLOSE = 1e-5


def run(checks, directory, *, timeout_s, count=2):
    """What the checks gave on each process; when it returns or raises, no process is left."""
    # The first for the coordinator, the others for transfers.
    port = free_ports(1 + count)
    results = [directory / f"result_{index}.json" for index in range(count)]
    commands = [
        [
            "-m",
            "plugins.pipeline.tests.support.pipeline_process",
            str(port),
            str(count),
            str(index),
            str(path),
            *checks,
        ]
        for index, path in enumerate(results)
    ]
    run_together(commands, directory, timeout_s=timeout_s)
    return [json.loads(path.read_text()) for path in results]


def check_like_one_process(names, told):
    for name in names:
        alone = CHECKS[name]()
        for one in told:
            assert set(one[name]) == set(alone)
            for schedule, wanted in alone.items():
                for what in ("loss", "grad_norm"):
                    np.testing.assert_allclose(
                        one[name][schedule][what],
                        wanted[what],
                        rtol=CLOSE,
                        err_msg=f"{name} {schedule} {what}",
                    )
            assert one[name] == told[0][name]


def test_two_processes_train_like_one_and_say_what_they_cannot(tmp_path):
    names = ["stages_on_processes", "stages_in_processes", "layouts_that_change"]
    told = run([*names, "refusals"], tmp_path, timeout_s=200)
    check_like_one_process(names, told)
    for index, one in enumerate(told):
        refusals = one["refusals"]
        wanted = "process 1 has no device of the pipeline's mesh" if index else "nothing"
        assert refusals["half"].startswith(wanted)
        assert "neither none in common nor the same for each pair" in refusals["crossed"]
        assert "is spread over several processes" in refusals["spread"]
        no_address, any_port = refusals["addresses"]
        assert "no address is given for it" in no_address
        assert "the address is '127.0.0.1:0'" in any_port
        assert "jax_cross_host_transfer_socket_address" in no_address


@pytest.mark.long
def test_two_processes_train_the_dense_example_and_other_schedules_like_one(tmp_path):
    names = ["dense_lm", "more_schedules"]
    check_like_one_process(names, run(names, tmp_path, timeout_s=500))


@pytest.mark.long
def test_when_one_process_fails_all_end_by_themselves(tmp_path):
    begun = time.monotonic()
    with pytest.raises(ProcessesFailed, match=r"process \d ended with"):
        run(["fails_on_one_process"], tmp_path, timeout_s=100)
    assert time.monotonic() - begun < 90
    assert "RuntimeError: a stage of process 1 fails" in (tmp_path / "log_1.txt").read_text()
