"""Several processes on each host: their numbers, and which devices each takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.hardware import Target, parse_target
from automesh.launch import agent as agent_module
from automesh.launch.cluster import Cluster, hosts_for, ranked, spread
from automesh.launch.facts import local_devices, shares_of
from automesh.launch.fleet import Fleet
from automesh.launch.ranks import Rank
from automesh.worker.pool import Pool
from tests.launch.test_agent import TOKEN, Serving
from tests.support.worker_jobs import answer_of, job, surroundings

LOCAL = Target(name="local", selector="", platforms="cuda,cpu")


def test_the_processes_are_those_of_all_hosts() -> None:
    assert spread(LOCAL, Cluster(hosts=4, processes_per_host=8)).processes == 32
    assert spread(LOCAL, Cluster(hosts=1, processes_per_host=8)).processes == 8
    assert spread(LOCAL, Cluster(hosts=1, processes_per_host=8, launch="local")).processes == 8
    four = parse_target("cpu:2*4", {})
    assert hosts_for(four, Cluster(processes_per_host=2)) == 2
    assert hosts_for(four, Cluster(processes_per_host=4)) == 1
    assert hosts_for(four, Cluster(hosts=2, processes_per_host=2)) == 2


@pytest.mark.parametrize(
    ("target", "cluster", "why"),
    [
        ("cpu:2*4", Cluster(processes_per_host=3), "cannot be spread over hosts with 3 on each"),
        ("cpu:2*4", Cluster(processes_per_host=8), "cannot be spread over hosts with 8 on each"),
        ("cpu:2*4", Cluster(hosts=2, processes_per_host=4), "with --processes-per-host 4 are 8"),
        ("cpu:8", Cluster(processes_per_host=2), "is searched on this host alone"),
        ("local", Cluster(processes_per_host=2), "needs their number, got --hosts 0"),
        ("local", Cluster(hosts=1, processes_per_host=1), "--processes-per-host 1"),
        ("local", Cluster(hosts=1, processes_per_host=2**17), "65536 are the most"),
        ("gpu-h100-16", Cluster(hosts=2, processes_per_host=8), "leave|room for"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(
    target: str, cluster: Cluster, why: str
) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        spread(parse_target(target, {"JAX_PLATFORMS": "cuda,cpu"}), cluster)
    assert caught.value.hint


def test_an_engine_has_its_own_way_to_say_it() -> None:
    rank = Rank(number=1, count=8, host="host-a", port=8476)
    with pytest.raises(UsageError, match="this is process 1 of 8 that were started") as caught:
        ranked(Cluster(processes_per_host=8), rank)
    assert "--launch" in caught.value.hint


def test_the_gpus_of_a_host_are_those_that_jax_would_number(tmp_path: Path) -> None:
    assert local_devices("cuda,cpu", {"CUDA_VISIBLE_DEVICES": "4,6,7"}) == (0, 1, 2)
    assert local_devices("cuda", {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert local_devices("rocm", {"ROCR_VISIBLE_DEVICES": "GPU-1,GPU-2"}) == (0, 1)
    named = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "JAX_LOCAL_DEVICE_IDS": "2,3"}
    assert local_devices("cuda,cpu", named) == (2, 3)
    assert local_devices("cuda", {"JAX_LOCAL_DEVICE_IDS": "all"}) == ()
    assert local_devices("cpu", named) == ()
    assert local_devices("tpu,cpu", named) == ()


def test_devices_are_dealt_in_order_and_evenly() -> None:
    assert shares_of((0, 1, 2, 3, 4, 5), 3) == ((0, 1), (2, 3), (4, 5))
    for devices in ((), (0, 1, 2)):
        with pytest.raises(ValueError, match="cannot be split evenly among 2 processes"):
            shares_of(devices, 2)


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own_facts = agent_module.own_facts

    def facts(*, name: str, search: str) -> Any:
        count = int(name.rpartition("-")[2])
        found = own_facts(name=name, search=search)
        return replace(found, platforms="cuda,cpu", devices=tuple(range(count)))

    monkeypatch.setattr(agent_module, "own_facts", facts)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(
        token=TOKEN,
        listen=("127.0.0.1", 0),
        hosts=2,
        processes=4,
        is_virtual=False,
        memory_limit_bytes=2**28,
    ) as fleet:
        yield fleet


@pytest.mark.usefixtures("with_gpus")
def test_each_process_takes_its_share_of_the_gpus_of_its_host(fleet: Fleet, tmp_path: Path) -> None:
    agents = [Serving(fleet, name=name) for name in ("a-4", "b-6")]
    fleet.wait(60)
    with Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path / "logs",
        memory_limit_bytes=2**28,
        handler="tests.support.handlers.in_gang",
        start=fleet.start_gang,
    ) as pool:
        answer = answer_of(pool.run(job("devices", "all", str(tmp_path)), 60))
    assert answer.fingerprint == ""
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(4)]
    assert said == ["0,1 cuda,cpu", "2,3 cuda,cpu", "0,1,2 cuda,cpu", "3,4,5 cuda,cpu"]
    fleet.close()
    for agent in agents:
        agent.ends_well()


@pytest.mark.usefixtures("with_gpus")
def test_a_host_whose_gpus_cannot_be_dealt_is_named(fleet: Fleet) -> None:
    agents = [Serving(fleet, name=name) for name in ("a-4", "b-3")]
    with pytest.raises(UsageError, match="b-3 cannot have 2 processes: on `cuda`, 3 devices") as no:
        fleet.wait(60)
    assert "--processes-per-host" in no.value.hint
    fleet.close()
    for agent in agents:
        agent.ends_well()
