"""Agents of a search in other processes on this machine, and workers under them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from automesh.launch import agent as agent_module
from automesh.launch.agent import HostAgent
from automesh.launch.fleet import Fleet
from automesh.launch.lending import Lender
from automesh.launch.secret import new_token, read_token
from automesh.worker.environment import TOKEN
from automesh.worker.messages import Surroundings
from automesh.worker.pool import Pool
from benchmarks.support.paths import ROOT

PER_HOST = 2
NEEDED_BYTES = 2**30
WAIT_S = 300.0


def serve(address: str, count: int) -> None:
    """Agents in threads, each of which says that it is a host of its own, with four cores and
    memory for two compiles."""
    own_facts = agent_module.own_facts

    def facts(*, name: str, search: str) -> Any:
        one = own_facts(name=name, search=search)
        return replace(one, machine=name, cores=4, memory_bytes=PER_HOST * NEEDED_BYTES)

    agent_module.own_facts = facts
    token = read_token(os.environ)
    threads = [
        threading.Thread(
            target=HostAgent(
                search=address, token=token, name=f"host-{number}", wait_s=WAIT_S
            ).serve
        )
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve_on(address: str, core: int) -> None:
    """One agent that has one core of this machine, and all that it starts with it."""
    os.sched_setaffinity(0, {core})
    token = read_token(os.environ)
    HostAgent(search=address, token=token, name=f"core-{core}", wait_s=WAIT_S).serve()


@contextmanager
def agents(
    count: int, fleet_class: type[Fleet] = Fleet, *, cores: Sequence[int] = ()
) -> Generator[Fleet]:
    """A search that `count` agents serve, in another process.

    Args:
      cores: one for each agent, which then has a process of its own; empty: they only say what they
        have.
    """
    token = new_token()
    with ExitStack() as stack:
        fleet = stack.enter_context(
            fleet_class(
                token=token,
                listen=("127.0.0.1", 0),
                hosts=count,
                # What compiles in earnest is not measured by what it holds.
                memory_limit_bytes=0 if cores else NEEDED_BYTES,
            )
        )
        serving = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fleet", "--serve", fleet.address, *more],
                env={**os.environ, TOKEN: token},
                cwd=ROOT,
            )
            for more in ([["--core", str(core)] for core in cores] or [["--agents", str(count)]])
        ]
        try:
            fleet.wait(WAIT_S)
            yield fleet
            fleet.close()
            for one in serving:
                one.wait(30)
        finally:
            for one in serving:
                one.kill()
                one.wait()


@contextmanager
def workers(
    fleet: Fleet,
    *,
    handler: str = "benchmarks.support.sleeping",
    cpu_devices: int = 0,
) -> Generator[Pool]:
    """As many workers as the hosts have room for; they are started when there are jobs."""
    lender = Lender(fleet, needed_bytes=NEEDED_BYTES)
    variables = (("PYTHONPATH", str(ROOT)),)
    around = Surroundings(platforms="cpu", cpu_devices=cpu_devices, variables=variables)
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(
            size=lender.room(),
            surroundings=around,
            log_dir=Path(folder),
            memory_limit_bytes=NEEDED_BYTES,
            handler=handler,
            start=lender.start_worker,
            room=lender.room,
        ) as pool,
    ):
        yield pool
