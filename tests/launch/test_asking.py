"""What the hosts of a search do is told to whoever has its token, and to nobody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from automesh.errors import UsageError
from automesh.launch import asking
from automesh.launch.agent import HostAgent
from automesh.launch.asking import Hosts, HostStatus, ask
from automesh.launch.fleet import Fleet
from automesh.launch.lending import Lender
from automesh.launch.secret import new_token
from automesh.report.blocks.json import to_json
from automesh.report.blocks.terminal import render
from automesh.report.pages.hosts import report_of
from automesh.worker.pool import Pool
from tests.launch.test_lending import ModuleStore, compile_job
from tests.support.cases import bad_inputs_run
from tests.support.handlers import lent
from tests.support.worker_jobs import surroundings

TOKEN = new_token()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Of two hosts, one of which is there."""
    with Fleet(token=TOKEN, listen=("127.0.0.1", 0), hosts=2, memory_limit_bytes=2**28) as fleet:
        agent = HostAgent(search=fleet.address, token=TOKEN, name="host-a")
        serving = threading.Thread(target=agent.serve, daemon=True)
        serving.start()
        while not fleet.present:
            pass
        yield fleet
        fleet.close()
        serving.join(30)


def test_it_says_who_is_there_and_what_they_do(fleet: Fleet, tmp_path: Path) -> None:
    idle = ask(fleet.address, TOKEN)
    (host,) = idle.present
    assert (idle.wanted, host.name, host.processes, host.does) == (2, "host-a", 0, ())
    lender = Lender(fleet, needed_bytes=2**20)
    with Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path / "logs",
        memory_limit_bytes=2**28,
        handler=lent.__name__,
        start=lender.start_worker,
    ) as pool:
        job = compile_job(2, ModuleStore(tmp_path / "modules"), tmp_path, 600.0)
        pool.submit(job, 600, lambda event: {"go": True} if "fingerprint" in event else None)
        for _ in range(200):
            pool.wait(0.1)
            (host,) = ask(fleet.address, TOKEN).present
            if "compiling" in "".join(host.does):
                break
    assert host.processes == 1
    assert host.does == ("compiling dp:2",)


def test_who_has_another_token_is_told_nothing(fleet: Fleet) -> None:
    with pytest.raises(UsageError, match="has another token"):
        ask(fleet.address, new_token())


def test_where_nobody_listens_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_ANSWER_S", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"nothing answers at {address}"):
            ask(address, TOKEN)


def test_the_command(fleet: Fleet, tmp_path: Path) -> None:
    ran = bad_inputs_run.run(["hosts", fleet.address], tmp_path, {"AUTOMESH_TOKEN": TOKEN})
    assert (ran.code, ran.stderr) == (0, "")
    head, row, end = ran.stdout.splitlines()
    assert head.split() == ["host", "cores", "memory", "load", "processes", "does"]
    assert row.split()[0] == "host-a"
    assert row.split()[-1] == "waits"
    assert end == "1 of 2 agents are there"
    assert bad_inputs_run.run(["hosts", fleet.address], tmp_path).code == 2


def test_the_table() -> None:
    def host(name: str, does: tuple[str, ...], silent_s: float = 0.1) -> HostStatus:
        return HostStatus(
            name=name,
            cores=8,
            memory_bytes=64 * 2**30,
            load=0.5,
            silent_s=silent_s,
            processes=2,
            does=does,
        )

    found = Hosts(
        wanted=2,
        present=(host("a", ("compiling dp:4", "compiling tp:4")), host("b", (), 12.0)),
    )
    assert render(report_of(found), width=80, colour=False) == (
        "host  cores    memory  load  processes  does\n"
        "a         8  64.0 GiB  0.50          2  compiling dp:4\n"
        "                                        compiling tp:4\n"
        "b         8  64.0 GiB  0.50          2  silent for 12 s\n"
    )
    assert to_json(report_of(found))["present"][0]["does"] == ("compiling dp:4", "compiling tp:4")
    nobody = report_of(Hosts(wanted=2, present=()))
    assert render(nobody, width=80, colour=False) == "0 of 2 agents are there\n"
