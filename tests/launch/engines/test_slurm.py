"""Agents under a real SLURM of two nodes, which these tests start and stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from automesh.errors import UsageError
from automesh.launch import wire
from automesh.launch.engines.slurm import SlurmLauncher, command_of
from automesh.launch.fleet import Fleet
from automesh.launch.launcher import AgentOrder
from automesh.launch.secret import new_token
from automesh.worker.pool import Pool
from tests.support.paths import SCRIPTS
from tests.support.slurm import MISSING, WHY_NOT, slurm_cluster
from tests.support.worker_jobs import ROOT, answer_of, job, living, surroundings

LIMIT_BYTES = 400 * 2**20
Environ = dict[str, str]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environ]:
    if MISSING:
        pytest.skip(WHY_NOT)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


@pytest.fixture
def allocation(slurm: Environ) -> Iterator[Environ]:
    """Both nodes, as `salloc` gives them to a shell."""
    said = subprocess.run(
        ["salloc", "--nodes=2", "--no-shell"], env=slurm, capture_output=True, text=True, check=True
    )
    number = said.stderr.partition("Granted job allocation ")[2].split()[0]
    yield {**slurm, "SLURM_JOB_ID": number}
    subprocess.run(["scancel", number], env=slurm, check=True)
    wait_until_empty(slurm)


def queue(slurm: Environ) -> str:
    shown = ["squeue", "--noheader", "--format=%j %T"]
    return subprocess.run(shown, env=slurm, capture_output=True, text=True, check=True).stdout


def wait_until_empty(slurm: Environ) -> None:
    deadline = time.monotonic() + 300
    while queue(slurm):
        assert time.monotonic() < deadline, queue(slurm)
        time.sleep(0.2)


def fleet_of(launcher: SlurmLauncher) -> Fleet:
    return Fleet(
        token=new_token(),
        listen=("127.0.0.1", 0),
        hosts=2,
        launcher=launcher,
        memory_limit_bytes=LIMIT_BYTES,
    )


def pool_of(fleet: Fleet, folder: Path) -> Pool:
    return Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=folder / "logs",
        memory_limit_bytes=LIMIT_BYTES,
        handler="tests.support.handlers.in_gang",
        start=fleet.start_gang,
    )


def test_from_a_login_node_a_gang_runs_is_lost_comes_back_and_goes(
    slurm: Environ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "LOST_S", 8.0)  # Of the search alone; its agents say more often.
    launcher = SlurmLauncher(tmp_path, slurm)
    with fleet_of(launcher) as fleet, pool_of(fleet, tmp_path) as pool:
        fleet.wait(60)
        assert queue(slurm).split() == ["automesh", "RUNNING"]
        assert [one.order for one in fleet.facts] in ([0, 1], [1, 0])
        assert answer_of(pool.run(job("agree", "all"), 60)).fingerprint == "4"
        os.kill(fleet.facts[0].pid, signal.SIGKILL)
        assert answer_of(pool.run(job("agree", "all"), 60)).fingerprint == "4"
        stopped = fleet.facts[0].pid
        os.kill(stopped, signal.SIGSTOP)
        assert answer_of(pool.run(job("agree", "all"), 60)).fingerprint == "4"
        assert stopped not in {one.pid for one in fleet.facts}
    launcher.close()
    wait_until_empty(slurm)
    assert living() == []


@pytest.mark.long  # The others in CI show the same launcher, and an allocation that is there.
def test_in_an_allocation_it_is_a_step_of_it(allocation: Environ, tmp_path: Path) -> None:
    launcher = SlurmLauncher(tmp_path, allocation)
    with fleet_of(launcher) as fleet, pool_of(fleet, tmp_path) as pool:
        fleet.wait(60)
        assert queue(allocation).count("RUNNING") == 1
        assert answer_of(pool.run(job("agree", "all"), 60)).fingerprint == "4"
    launcher.close()
    assert living() == []


def test_who_waits_in_the_queue_leaves_it_with_the_search(
    allocation: Environ, slurm: Environ, tmp_path: Path
) -> None:
    launcher = SlurmLauncher(tmp_path, slurm)
    with (
        fleet_of(launcher) as fleet,
        pytest.raises(UsageError, match="none of 2 agents has connected"),
    ):
        fleet.wait(1.0)
    assert "automesh PENDING" in queue(slurm)
    launcher.close()
    deadline = time.monotonic() + 300
    while "automesh" in queue(slurm) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "automesh" not in queue(slurm)


def test_what_slurm_refuses_is_a_sentence(slurm: Environ, tmp_path: Path) -> None:
    launcher = SlurmLauncher(tmp_path, {**slurm, "SLURM_PARTITION": "nowhere"})
    with fleet_of(launcher) as fleet, pytest.raises(UsageError) as caught:
        fleet.wait(60)
    assert "srun has ended with code 1: srun: error: " in caught.value.message
    assert "partition" in caught.value.message
    launcher.close()


def test_started_alike_on_all_nodes_number_0_searches(slurm: Environ) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = [sys.executable, "-m", "tests.support.rank_program", address]
    done = subprocess.run(
        ["srun", "--nodes=2", "--ntasks=2", *program],
        env={**slurm, "AUTOMESH_TOKEN": new_token(), "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fingerprint 4\n"), done.stderr
    wait_until_empty(slurm)
    assert living() == []


def test_the_token_is_in_no_command() -> None:
    order = AgentOrder(search="10.0.0.1:8600", token="a" * 32, hosts=4)
    for environ in ({}, {"SLURM_JOB_ID": "7"}):
        words = command_of(order, environ)
        assert not any(order.token in word for word in words)
        assert ("--overlap" in words) == bool(environ)


def test_with_an_agent_that_hangs_all_of_them_are_started_again(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "srun").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    launcher = SlurmLauncher(tmp_path, environ)
    launcher.start(AgentOrder(search="127.0.0.1:1", token="a" * 32, hosts=2))
    first = launcher.pid
    try:
        assert launcher.refill()
        assert launcher.pid == first
        launcher.give_up("n1")
        deadline = time.monotonic() + 300
        while launcher.pid == first and time.monotonic() < deadline:
            assert launcher.refill()
            time.sleep(0.05)
        assert launcher.pid != first
    finally:
        os.kill(launcher.pid, signal.SIGKILL)  # It would be waited for.
        launcher.close()


SEARCH = ("search", "train.py", "--target", "cpu:2*2", "--space", "space.toml")
MORE = ("--budget", "20m", "--top", "2", "--baseline", "dcn.dp:2,dp:2", "--json")


@pytest.mark.long
@pytest.mark.parametrize("way", ["alike", "launch"])
def test_a_search(slurm: Environ, way: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SCRIPTS / "gang", tmp_path / "work"))
    command = [sys.executable, "-m", "automesh", *SEARCH, *MORE]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    if way == "alike":
        command = ["srun", "--nodes=2", "--ntasks=2", *command, "--listen", address]
    else:
        command += ["--launch", "slurm", "--hosts", "2", "--listen", "127.0.0.1"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**slurm, "AUTOMESH_TOKEN": new_token(), "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"] == "cpu-2-2"
    assert 'kind = "measured"' in (folder / "mesh_rules.toml").read_text()
    wait_until_empty(slurm)
    assert living() == []
