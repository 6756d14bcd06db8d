"""Lengths of compiles that are guessed, and which of the last compiles are begun first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Compiled
from automesh.program.nouns import CompileAnswer
from automesh.report.progress import Silent
from automesh.tuner.compile.lengths import LEAST, expected_s
from automesh.tuner.compile.memory_limit import NO_LIMIT
from automesh.tuner.compile.rung import LAST_PER_WORKER, CompileRung
from automesh.worker.pool import Finished
from tests.regenerate.record_studies import FOLDER, read
from tests.support.fakes.compile_rung import Clock, Memory
from tests.support.samples.results_samples import compiled


def plan(mesh: str, remat: str) -> Plan:
    return Plan(axes=parse_mesh(mesh), knobs=(("remat", remat),))


def test_what_few_compiles_say_is_nothing() -> None:
    known = {plan(f"dp:{2**number}", "none"): 1.0 for number in range(LEAST)}
    wanted = [plan("tp:8", "full")]
    assert expected_s(wanted, dict(list(known.items())[1:]), {}) == {}
    assert expected_s(wanted, known, {}) == {wanted[0]: pytest.approx(1.0)}


def test_what_made_a_compile_long_makes_another_long() -> None:
    known = {
        plan("dp:8", "none"): 2.0,
        plan("dp:4", "none"): 2.0,
        plan("dp:8", "full"): 6.0,
        plan("dp:4", "full"): 6.0,
        plan("tp:8", "none"): 4.0,
    }
    wanted = [
        plan("dp:2", "none"),
        plan("tp:4", "none"),
        plan("dp:2", "full"),
        plan("tp:4", "full"),
    ]
    found = expected_s(wanted, known, {})
    assert sorted(wanted, key=lambda one: found[one]) == wanted


def test_more_collectives_make_a_compile_longer() -> None:
    estimates = dict(read(FOLDER / "long_context.json").estimates)
    in_order = sorted(estimates, key=lambda one: dict(estimates[one].causes).get("latency", 0.0))
    alike = [Plan(axes=parse_mesh(f"dp:{2**number}")) for number in range(6)]
    own = dict(zip(alike, [estimates[in_order[at]] for at in (0, 3, 6, 9, -1, -2)], strict=True))
    known = dict(zip(alike[:4], (1.0, 2.0, 3.0, 4.0), strict=True))
    found = expected_s([*alike[4:], Plan(axes=parse_mesh("dp:64"))], known, own)
    assert found[alike[4]] > 2.0 * known[alike[0]]
    assert found[alike[4]] >= found[alike[5]] > found[Plan(axes=parse_mesh("dp:64"))]


def test_latencies_that_rounding_alone_tells_apart_say_nothing() -> None:
    """The mean of ten equal logarithms need not be that logarithm."""
    example = next(iter(dict(read(FOLDER / "long_context.json").estimates).values()))
    alike = [plan(f"dp:{2**number}", ("none", "full")[number % 2]) for number in range(10)]
    longer = [plan("dp:2048", "none"), plan("tp:8", "full")]
    own = {one: replace(example, causes=(("latency", 1e-4),)) for one in alike}
    own |= {one: replace(example, causes=(("latency", 2e-3),)) for one in longer}
    found = expected_s(longer, {one: 1.0 + at for at, one in enumerate(alike)}, own)
    assert all(1.0 < one < 10.0 for one in found.values())


@pytest.mark.parametrize(
    ("path", "least"),
    [(path, least) for path, least in zip(sorted(FOLDER.glob("*.json")), (0.6, 0.4, 0.35))],
    ids=lambda one: one.stem if isinstance(one, Path) else "",
)
def test_half_of_a_recorded_search_tells_the_other_half(path: Path, least: float) -> None:
    recorded = read(path)
    estimates, took_s = dict(recorded.estimates), lengths_of(recorded.compiled)
    luck, found = random.Random(0), list[float]()
    for _ in range(20):
        mixed = luck.sample(list(took_s), len(took_s))
        known, wanted = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
        guessed = expected_s(wanted, {one: took_s[one] for one in known}, estimates)
        pairs = np.log([[guessed[one], took_s[one]] for one in wanted])
        found.append(float(np.corrcoef(pairs.T)[0, 1]))
    assert np.mean(found) > least


def lengths_of(outcomes: Sequence[tuple[Plan, Any]]) -> dict[Plan, float]:
    return {
        one: outcome.compile_s
        for one, outcome in outcomes
        if isinstance(outcome, Compiled) and outcome.compile_s > 0
    }


# The last compiles of a search, on a clock of its own.

KNOWN = [plan(mesh, remat) for remat in ("full", "none") for mesh in ("dp:8", "dp:4", "dp:2")]
LAST = [*(plan(f"dp:{2**number}", "none") for number in range(4, 7)), plan("dp:16", "full")]


def seconds(one: Plan) -> float:
    return 100.0 if ("remat", "full") in one.knobs else 25.0


@dataclass
class Workers:
    """A pool whose compiles take what `seconds` says."""

    clock: Clock
    began: list[Plan] = field(default_factory=list[Plan])
    running: dict[int, tuple[Plan, float]] = field(default_factory=dict[int, tuple[Plan, float]])

    def submit(
        self, job: Any, timeout_s: float, on_event: Any, *, fresh: bool, patient: bool
    ) -> int:
        self.began.append(job)
        self.running[len(self.began)] = (job, self.clock.now_s + seconds(job))
        return len(self.began)

    def wait(self, timeout_s: float) -> list[Finished]:
        self.clock.now_s += 1.0
        done = [one for one, (_, end_s) in self.running.items() if end_s <= self.clock.now_s]
        return [
            Finished(ticket=one, job=SimpleNamespace(), result=answer(self.running.pop(one)[0]))  # pyright: ignore
            for one in done
        ]


def answer(one: Plan) -> Any:
    made: Any = object.__new__(CompileAnswer)
    object.__setattr__(made, "fingerprint", str(one))
    return made


def compile_all(
    *, deadline_s: float, known: Sequence[Plan] = KNOWN, last: Sequence[Plan] = LAST
) -> Workers:
    clock, memory = Clock(), Memory()
    pool = Workers(clock)
    memory.enqueue(list(known), {})
    for trial in memory.trials():
        outcome = replace(compiled(1.0), compile_s=seconds(trial.plan))
        memory.finish(trial, outcome, fingerprint="")
    rung: Any = CompileRung(
        search=SimpleNamespace(  # pyright: ignore
            preparation=SimpleNamespace(timeout_s=1e9, provenance=(), device_memory=NO_LIMIT),  # pyright: ignore
            notebook=SimpleNamespace(is_current=lambda _: True),  # pyright: ignore
            study=SimpleNamespace(lead=lambda: True, heartbeat=lambda: True),  # pyright: ignore
            progress=Silent(),
            estimates=SimpleNamespace(found={}),
            workers=2,
            clock=clock,
        ),
        pool=pool,  # pyright: ignore
        rung=memory,  # pyright: ignore
        compiling=SimpleNamespace(  # pyright: ignore
            job=lambda one: one,
            keeps=lambda _: True,
            outcome=lambda one, _: replace(compiled(1.0), compile_s=seconds(one)),
        ),
        choose=lambda _: [*known, *last],
        order=lambda plans, _: plans,
        deadline_s=deadline_s,
    )
    rung.run()
    return pool


def test_of_the_last_compiles_the_longest_is_begun_first() -> None:
    in_order = compile_all(deadline_s=1e6, known=())
    assert in_order.began == LAST, "nothing is known of their lengths yet"
    assert in_order.clock.now_s == pytest.approx(125.0, abs=5.0)
    pool = compile_all(deadline_s=1e6)
    assert pool.began == [LAST[3], *LAST[:3]]
    assert pool.clock.now_s == pytest.approx(100.0, abs=5.0)


def test_where_not_all_may_get_their_turn_the_most_promising_is_begun_first() -> None:
    assert compile_all(deadline_s=200.0).began == LAST


def test_before_the_last_the_most_promising_is_begun_first() -> None:
    many = [plan(f"dp:{2**number}", "none") for number in range(4, 4 + 2 * LAST_PER_WORKER)]
    wanted = [*many, plan("dp:16", "full")]
    began = compile_all(deadline_s=1e6, last=wanted).began
    assert began[:2] == many[:2]
    assert began[2] == wanted[-1], "one less than the workers, and these are the last"
