"""How well are compiles spread over the hosts of a search, and what does the spreading cost?

    python -m benchmarks.fleet [--agents 1 2 4 8 16] [--jobs 200] [--memory-agents 64] [--no-real]

Agents are real, with real worker processes and real connections, but all on this machine, in one
process that says for each that it is a host with four cores and memory for two compiles; jobs sleep
for a time that is drawn from a log-normal distribution (sigma 0.5). For each number of agents the
jobs are given three times: in the order in which they were drawn; as a search gives them, which
begins the last four for each worker with those that it guesses to be longest, and guesses as well
as of recorded searches; and longest first, as if it knew them. The ratio is that of the time until
all are done to the bound max(total / workers, longest), from when all workers have started; `ideal`
is what the order alone costs, with workers that take the next job at once, and `mean_ideal` that
over a hundred other draws.

Then twelve meshes of an example are compiled by one agent that has one core, and by two (not with
`--no-real`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from automesh.launch.fleet import Fleet
from automesh.mesh.axes import MeshAxis, Plan
from automesh.program.nouns import Entry, Lowered, StepRef
from automesh.worker.messages import CompileJob
from automesh.worker.pool import Pool
from benchmarks.fleet.agents import PER_HOST, WAIT_S, agents, serve, serve_on, workers
from benchmarks.fleet.compiles import two_against_one
from benchmarks.fleet.guesses import correlations, in_given_order

_SIGMA = 0.5
_DRAWS = 100
_TALK = 2000
_WARM_S = 3.0


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--bound", type=float, default=20.0, help="seconds of each run's bound")
    parser.add_argument("--memory-agents", type=int, default=64)
    parser.add_argument(
        "--real",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile an example, too: by one agent, and by two",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        if given.core >= 0:
            serve_on(given.serve, given.core)
        else:
            serve(given.serve, given.agents[0])
        return
    guessed = correlations()
    correlation = statistics.mean(guessed.values())
    runs = [spread(count, given.jobs, given.bound, correlation) for count in given.agents]
    for run in runs:
        each = [
            f"{name.replace('_', ' ')} {run[name]:.3f} (ideal {run[f'{name}_ideal']:.3f})"
            for name in ("as_drawn", "as_given", "longest_first")
        ]
        print(
            f"{run['agents']:3} agents, {run['workers']:3} workers: {', '.join(each)} of the bound"
        )
    real = two_against_one() if given.real else {}
    if "real_ratio" in real:
        print(
            f"two agents of one core each are {real['real_ratio']:.2f} times as fast as one: "
            f"{real['real_compiles']} compiles in {real['real_2_agents_s']:.1f} s"
        )
    found = {
        "runs": runs,
        "correlation_of_guesses": guessed,
        **real,
        "overhead_per_job_ms": round(overhead_s() * 1e3, 2),
        "messages_per_s": round(messages_per_s()),
        **memory(given.memory_agents),
    }
    print(json.dumps(found))


@contextmanager
def warm_workers(fleet: Fleet) -> Generator[Pool]:
    """All workers that the hosts have room for, started."""
    with workers(fleet) as pool:
        # Once so many jobs take little longer than one, each worker has taken one.
        room = PER_HOST * fleet.hosts
        while run_all(pool, [_WARM_S] * room) > 1.5 * _WARM_S:
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
        pool.submit(CompileJob(step=StepRef(entry=entry), plan=plan, cache_dir=""), WAIT_S)
    while pool.unfinished:
        for finished in pool.wait():
            assert isinstance(finished.result, Lowered), finished.result
    return time.perf_counter() - began_s


# What is measured.


def spread(count: int, jobs: int, bound_s: float, correlation: float) -> dict[str, Any]:
    """Makespans over their bound, for one number of agents.

    Args:
      correlation: of what a search guesses of the lengths, see `guesses`.
    """
    drawn = random.Random(0)
    lengths = [drawn.lognormvariate(0.0, _SIGMA) for _ in range(jobs)]
    slots = count * PER_HOST
    scale = bound_s / max(sum(lengths) / slots, max(lengths))
    given = in_given_order(lengths, slots, correlation=correlation, sigma=_SIGMA)
    orders = {
        "as_drawn": lengths,
        "as_given": given,
        "longest_first": sorted(lengths, reverse=True),
    }
    found: dict[str, Any] = {"agents": count, "workers": slots, "jobs": jobs, "bound_s": bound_s}
    with agents(count) as fleet, warm_workers(fleet) as pool:
        for name, order in orders.items():
            scaled = [length * scale for length in order]
            found[name] = round(run_all(pool, scaled) / bound_s, 3)
            found[f"{name}_ideal"] = round(ideal_s(scaled, slots) / bound_s, 3)
    return {**found, **mean_ideal(slots, jobs, correlation)}


def mean_ideal(slots: int, jobs: int, correlation: float) -> dict[str, float]:
    """What the orders alone cost, over the bound, in the mean of many draws."""
    each: dict[str, list[float]] = {"as_drawn": [], "as_given": [], "longest_first": []}
    for seed in range(1, 1 + _DRAWS):
        drawn = random.Random(seed)
        lengths = [drawn.lognormvariate(0.0, _SIGMA) for _ in range(jobs)]
        bound_s = max(sum(lengths) / slots, max(lengths))
        given = in_given_order(lengths, slots, correlation=correlation, sigma=_SIGMA, seed=seed)
        orders = (lengths, given, sorted(lengths, reverse=True))
        for own, order in zip(each.values(), orders, strict=True):
            own.append(ideal_s(order, slots) / bound_s)
    return {f"{name}_mean_ideal": round(statistics.mean(own), 3) for name, own in each.items()}


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
    with agents(1) as fleet, warm_workers(fleet) as pool:
        return run_all(pool, [0.0] * jobs) / (jobs / PER_HOST)


class _Counting(Fleet):
    """A fleet that counts what it hears."""

    heard = 0

    def _hear(self, agent: Any, message: Any) -> None:
        type(self).heard += 1
        super()._hear(agent, message)


def messages_per_s() -> float:
    """Messages of workers that reach the search, sealed, from four agents at once."""
    with agents(4, _Counting) as fleet, warm_workers(fleet) as pool:
        before = _Counting.heard
        took_s = run_all(pool, [0.0] * 4 * PER_HOST, _TALK)
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
