"""How well are compiles spread over the hosts of a search, and what does the spreading cost?

    python -m benchmarks.fleet [--agents 1 2 4 8 16] [--jobs 200] [--memory-agents 64]

Agents are real, with real worker processes and real connections, but all on this machine, in one
process that says for each that it is a host with four cores and memory for two compiles; jobs sleep
for a time that is drawn from a log-normal distribution (sigma 0.5). For each number of agents the
jobs are given once in the order in which they were drawn, as a search gives them that does not know
how long a compile takes, and once longest first. The ratio is that of the time until all are done
to the bound max(total / workers, longest), from when all workers have started; `ideal` is what the
order alone costs, with workers that take the next job at once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from automesh.launch import agent as agent_module
from automesh.launch.agent import Agent
from automesh.launch.fleet import Fleet
from automesh.launch.lending import Lender
from automesh.launch.secret import new_token, read_token
from automesh.mesh.axes import MeshAxis, Plan
from automesh.program.nouns import Entry, Lowered, StepRef
from automesh.worker.environment import TOKEN
from automesh.worker.messages import CompileJob, Surroundings
from automesh.worker.pool import Pool
from benchmarks.support.paths import ROOT

_SIGMA = 0.5
_PER_HOST = 2
_NEEDED_BYTES = 2**30
_WAIT_S = 300.0
_TALK = 2000
_WARM_S = 3.0


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--bound", type=float, default=20.0, help="seconds of each run's bound")
    parser.add_argument("--memory-agents", type=int, default=64)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve, given.agents[0])
        return
    runs = [spread(count, given.jobs, given.bound) for count in given.agents]
    for run in runs:
        print(
            f"{run['agents']:3} agents, {run['workers']:3} workers: as drawn "
            f"{run['as_drawn']:.3f} (ideal {run['as_drawn_ideal']:.3f}), longest first "
            f"{run['longest_first']:.3f} (ideal {run['longest_first_ideal']:.3f}) of the bound"
        )
    found = {
        "runs": runs,
        "overhead_per_job_ms": round(overhead_s() * 1e3, 2),
        "messages_per_s": round(messages_per_s()),
        **memory(given.memory_agents),
    }
    print(json.dumps(found))


# The agents.


def serve(address: str, count: int) -> None:
    """Agents in threads, each of which says that it is a host of its own."""
    own_facts = agent_module.own_facts
    token = read_token(os.environ)

    def facts(*, name: str, search: str) -> Any:
        one = own_facts(name=name, search=search)
        return replace(one, machine=name, cores=4, memory_bytes=_PER_HOST * _NEEDED_BYTES)

    agent_module.own_facts = facts
    threads = [
        threading.Thread(
            target=Agent(search=address, token=token, name=f"host-{number}", wait_s=_WAIT_S).serve
        )
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def agents(count: int, fleet_class: type[Fleet] = Fleet) -> Generator[Fleet]:
    """A search that `count` agents serve, in another process."""
    token = new_token()
    with ExitStack() as stack:
        fleet = stack.enter_context(
            fleet_class(
                token=token, listen=("127.0.0.1", 0), hosts=count, memory_limit_bytes=_NEEDED_BYTES
            )
        )
        serving = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.fleet", "--serve", fleet.address),
                *("--agents", str(count)),
            ],
            env={**os.environ, TOKEN: token},
            cwd=ROOT,
        )
        try:
            fleet.wait(_WAIT_S)
            yield fleet
            fleet.close()
            serving.wait(30)
        finally:
            serving.kill()
            serving.wait()


@contextmanager
def workers(fleet: Fleet) -> Generator[Pool]:
    """All workers that the hosts have room for, started."""
    lender = Lender(fleet, needed_bytes=_NEEDED_BYTES)
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(
            size=lender.room(),
            surroundings=Surroundings(platforms="cpu", variables=(("PYTHONPATH", str(ROOT)),)),
            log_dir=Path(folder),
            memory_limit_bytes=_NEEDED_BYTES,
            handler="benchmarks.support.sleeping",
            start=lender.start_worker,
            room=lender.room,
        ) as pool,
    ):
        # Once so many jobs take little longer than one, each worker has taken one.
        while run_all(pool, [_WARM_S] * lender.room()) > 1.5 * _WARM_S:
            pass
        yield pool


def run_all(pool: Pool, lengths_s: Sequence[float], messages: int = 0) -> float:
    """Does a job of each length; gives the seconds until all are done."""
    began_s = time.perf_counter()
    for length_s in lengths_s:
        entry = Entry(
            kind="script",
            location="/train.py",
            function="build",
            argv=(f"{length_s:.6f}", str(messages)),
        )
        plan = Plan(axes=(MeshAxis(name="dp", ici=2),))
        pool.submit(CompileJob(step=StepRef(entry=entry), plan=plan, cache_dir=""), _WAIT_S)
    while pool.unfinished:
        for finished in pool.wait():
            assert isinstance(finished.result, Lowered), finished.result
    return time.perf_counter() - began_s


# What is measured.


def spread(count: int, jobs: int, bound_s: float) -> dict[str, Any]:
    """Makespans over their bound, for one number of agents."""
    drawn = random.Random(0)
    lengths = [drawn.lognormvariate(0.0, _SIGMA) for _ in range(jobs)]
    with agents(count) as fleet, workers(fleet) as pool:
        slots = count * _PER_HOST
        scale = bound_s / max(sum(lengths) / slots, max(lengths))
        scaled = [length * scale for length in lengths]
        sorted_ = sorted(scaled, reverse=True)
        as_drawn = run_all(pool, scaled) / bound_s
        longest_first = run_all(pool, sorted_) / bound_s
    return {
        "agents": count,
        "workers": slots,
        "jobs": jobs,
        "bound_s": bound_s,
        "as_drawn": round(as_drawn, 3),
        "as_drawn_ideal": round(ideal_s(scaled, slots) / bound_s, 3),
        "longest_first": round(longest_first, 3),
        "longest_first_ideal": round(ideal_s(sorted_, slots) / bound_s, 3),
    }


def ideal_s(lengths_s: Sequence[float], slots: int) -> float:
    """Seconds until all are done by workers that take the next job at once.

    >>> ideal_s([1.0, 1.0, 4.0], 2), ideal_s([4.0, 1.0, 1.0], 2)
    (5.0, 4.0)
    """
    free_s = [0.0] * slots
    for length_s in lengths_s:
        heapq.heapreplace(free_s, free_s[0] + length_s)
    return max(free_s)


def overhead_s(jobs: int = 400) -> float:
    """Seconds that a job costs beside its own, on one worker: jobs that do nothing."""
    with agents(1) as fleet, workers(fleet) as pool:
        return run_all(pool, [0.0] * jobs) / (jobs / _PER_HOST)


class _Counting(Fleet):
    """A fleet that counts what it hears."""

    heard = 0

    def _hear(self, agent: Any, message: Any) -> None:
        type(self).heard += 1
        super()._hear(agent, message)


def messages_per_s() -> float:
    """Messages of workers that reach the search, sealed, from four agents at once."""
    with agents(4, _Counting) as fleet, workers(fleet) as pool:
        before = _Counting.heard
        took_s = run_all(pool, [0.0] * 4 * _PER_HOST, _TALK)
        return (_Counting.heard - before) / took_s


def memory(count: int) -> dict[str, int]:
    """What the process of a search holds without agents and with `count` of them."""
    with agents(1):
        alone = psutil.Process().memory_info().rss
    with agents(count):
        with_all = psutil.Process().memory_info().rss
    return {
        "memory_agents": count,
        "memory_with_one_mib": alone // 2**20,
        "memory_with_all_mib": with_all // 2**20,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
