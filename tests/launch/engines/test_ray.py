"""Agents under a real Ray cluster of two nodes on this host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import automesh
from automesh.errors import UsageError
from automesh.launch.engines import ray_driver
from automesh.launch.engines.ray import RayLauncher, variables_to_take
from automesh.launch.fleet import Fleet
from automesh.launch.launcher import AgentOrder
from automesh.launch.secret import new_token
from automesh.worker.pool import Pool
from tests.support.paths import SCRIPTS
from tests.support.ray import IS_MISSING, WHY_NOT, RayCluster, ray_cluster
from tests.support.undecided import GO_ON
from tests.support.worker_jobs import ROOT, answer_of, job, living, surroundings

LIMIT_BYTES = 400 * 2**20
needs_ray = pytest.mark.skipif(IS_MISSING, reason=WHY_NOT)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def ray_address(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set as Ray's users set it, and the path that its processes find automesh by."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    return cluster.address


@pytest.mark.long
@needs_ray
def test_a_gang_runs_is_lost_comes_back_and_goes(ray_address: str, tmp_path: Path) -> None:
    launcher = RayLauncher(tmp_path)
    with (
        Fleet(
            token=new_token(),
            listen=("127.0.0.1", 0),
            hosts=2,
            launcher=launcher,
            memory_limit_bytes=LIMIT_BYTES,
        ) as fleet,
        Pool(
            size=1,
            surroundings=surroundings(),
            log_dir=tmp_path / "logs",
            memory_limit_bytes=LIMIT_BYTES,
            handler="tests.support.handlers.in_gang",
            start=fleet.start_gang,
        ) as pool,
    ):
        fleet.wait(180)
        pids = [one.pid for one in fleet.facts]
        assert answer_of(pool.run(job("agree", "all"), 120)).fingerprint == "4"
        os.kill(pids[0], signal.SIGKILL)
        assert answer_of(pool.run(job("agree", "all"), 120)).fingerprint == "4"
        again = {one.pid for one in fleet.facts}
        assert len(again & set(pids)) == 1, "the other one was left alone"
        os.kill(pids[1], signal.SIGSTOP)
        assert answer_of(pool.run(job("agree", "all"), 180)).fingerprint == "4"
        assert pids[1] not in {one.pid for one in fleet.facts}
    launcher.close()
    assert living() == []


@pytest.mark.slow
@needs_ray
def test_a_search_ends_with_a_measured_rule_and_goes_on(ray_address: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SCRIPTS / "gang", tmp_path / "work"))
    command = [sys.executable, "-m", "automesh", "search", "train.py", "--target", "cpu:2*2"]
    command += ["--space", "space.toml", "--top", "2"]
    command += ["--baseline", "dcn.dp:2,dp:2", "--launch", "ray", "--hosts", "2"]
    command += ["--listen", "127.0.0.1"]  # All nodes are here.

    def search(budget: str) -> list[str]:
        """Returns the kinds of evidence in the rules: none where other work on this machine has
        spread the times of processes too far for a rule."""
        done = subprocess.run(
            [*command, "--budget", budget],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        is_open = any(hint in done.stderr for hint in GO_ON)
        assert done.returncode == 0 or is_open, done.stderr
        assert ended(folder) == [], "its agents and their workers have ended with it"
        rules = folder / "mesh_rules.toml"
        if not rules.exists():
            assert is_open, done.stderr
            return []
        (rule,) = tomllib.loads(rules.read_text())["rule"]
        assert rule["match"] == "cpu-2-2"
        return [rule["evidence"]["kind"]]

    kinds = search("2m")
    assert kinds in ([], ["measured"])
    (study,) = (folder / "results").iterdir()
    logs = [path.name for path in study.glob("logs/*.log")]
    assert any("-rank0-" in name for name in logs)
    assert any("-rank1-" in name for name in logs)
    first = automesh.show(study).found
    assert first.facts.devices.target == "cpu-2-2"
    assert first.funnel.measured >= len(kinds)
    assert search("20s") in ([], ["measured"])  # Its first plans are measured already.
    if kinds:  # Else other work had the machine, and the second search had no time for anything.
        assert automesh.show(study).found.funnel.measured >= first.funnel.measured


def ended(folder: Path) -> list[psutil.Process]:
    """Who still works in a folder a few seconds later: agents under Ray carry no mark of a test."""
    deadline = time.monotonic() + 300
    while (left := working_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def working_in(folder: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_without_a_cluster_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automesh.launch.engines.ray.find_spec", lambda _: object())
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    launcher = RayLauncher(tmp_path)
    with (
        Fleet(token=new_token(), listen=("127.0.0.1", 0), hosts=2, launcher=launcher) as fleet,
        pytest.raises(
            UsageError, match="none of 2 agents has connected: no Ray cluster can be joined"
        ),
    ):
        fleet.wait(120)
    launcher.close()


def test_a_process_for_ray_that_is_stopped_does_not_stop_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("automesh.launch.engines.ray.find_spec", lambda _: object())
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    launcher = RayLauncher(tmp_path)
    launcher.start(AgentOrder(search="127.0.0.1:1", token="x" * 32, hosts=2))
    os.kill(launcher.pid, signal.SIGSTOP)
    asking = threading.Thread(target=lambda: [launcher.refill() for _ in range(10_000)])
    asking.start()
    asking.join(60)
    was_waiting = asking.is_alive()
    os.kill(launcher.pid, signal.SIGCONT)
    asking.join(60)
    launcher.close()
    assert not was_waiting


def test_where_ray_is_not_installed_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("automesh.launch.engines.ray.find_spec", lambda _: None)
    fleet = Fleet(
        token=new_token(), listen=("127.0.0.1", 0), hosts=2, launcher=RayLauncher(tmp_path)
    )
    with pytest.raises(UsageError, match="Ray is not installed here"), fleet:
        pass


def test_an_agent_takes_all_accelerators_of_its_node() -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": {"CPU": 64.0, "memory": 1e9, **resources}}

    head = node()
    assert ray_driver.bundle_of([head]) == {"CPU": 1.0}
    gpus = [head, node(GPU=8.0), node(GPU=8.0), node(alive=False, GPU=16.0)]
    assert ray_driver.bundle_of(gpus) == {"CPU": 1.0, "GPU": 8.0}
    assert ray_driver.bundle_of([head, node(TPU=4.0)]) == {"CPU": 1.0, "TPU": 4.0}


def test_an_agent_that_ends_badly_leaves_its_last_words(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['AUTOMESH_TOKEN'], os.environ['JAX_X'], os.getcwd())"
    said = ray_driver.run_agent(
        [sys.executable, "-c", f"{code}; sys.exit(2)"], "secret", str(tmp_path), {"JAX_X": "1"}
    )
    assert said == f"secret 1 {tmp_path}"
    assert ray_driver.run_agent([sys.executable, "-c", ""], "secret", "/nowhere", {}) == ""


def test_an_agent_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_driver, "LOST_S", 1.0)
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    said = ray_driver.run_agent([sys.executable, "-c", code], "secret", str(tmp_path), {})
    assert said == "the agent was stopped by a signal for 1 s"


def test_of_the_environment_goes_what_devices_need() -> None:
    environ = {
        "XLA_FLAGS": "--x",
        "JAX_PLATFORMS": "cuda",
        "JAX_PROCESS_ID": "3",
        "AUTOMESH_TOKEN": "secret",
        "AUTOMESH_STORAGE_PASSWORD": "secret",
        "HOME": "/home/me",
    }
    assert variables_to_take(environ) == {"XLA_FLAGS": "--x", "JAX_PLATFORMS": "cuda"}
