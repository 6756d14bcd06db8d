"""When it is certain that the first ten plans are those of the complete ranking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from automesh.cost.pricing import Least, least_of, price_on
from automesh.cost.terms import Terms, Uncounted
from automesh.mesh.axes import Plan
from automesh.mesh.plan_arrays import Batch
from automesh.outcomes import Estimated
from automesh.program.nouns import Propagation
from automesh.program.script.build import build_on
from automesh.report.progress import Silent
from automesh.report.so_far import SETTLED, SoFar
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from automesh.tuner.choose.ranking import estimated_candidates
from automesh.tuner.estimate.propagations import Sizes
from automesh.tuner.estimate.rung import EstimateRung
from automesh.tuner.estimate.standings import ROWS, Standings
from automesh.worker.messages import MOST_CALLS, PropagateJob
from tests.support.fakes.estimate_pool import AXES, FakePool, propagation, rung
from tests.support.samples.cost_samples import PlainSpeeds, mono, simple_routes, times
from tests.tuner.estimate.test_interrupted import Stopped
from tests.tuner.estimate.test_rung import all_plans

DEVICES = 16
SPEEDS = PlainSpeeds()


@dataclass
class Heard(Silent):
    said: list[SoFar] = field(default_factory=list)

    def ranking(self, so_far: SoFar) -> None:
        self.said.append(so_far)


def watched(made: EstimateRung, **options: object) -> Heard:
    """Shows every table, however soon after the last one it comes."""
    heard, ticks = Heard(), iter(range(10**6))
    made.standings = Standings(progress=heard, clock=lambda: float(next(ticks)), **options)  # pyright: ignore
    return heard


def first_ten(rows: object) -> list[Plan]:
    return [one.plan for one in rows][:ROWS]  # pyright: ignore


# A step whose calls of `build` differ in what they do, and in the memory that they take.


def build(mesh, remat="none", copies=1):
    def loss(w, x):
        for _ in range(copies):
            x = jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.mean(x**2)

    def step(w, x):
        value, grads = jax.value_and_grad(jax.checkpoint(loss) if remat == "full" else loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w = {"up": struct((1024, 4096), None, "tp"), "down": struct((4096, 1024), "tp", None)}
    return jax.jit(step, donate_argnums=0), (w, struct((8192, 1024), ("dp", "sp"), None))


CALLS = (
    {"remat": "none", "copies": 1},
    {"remat": "full", "copies": 1},
    {"remat": "none", "copies": 8},
)


Knobs = tuple[tuple[str, bool | int | float | str], ...]


@cache
def programs(knobs: Knobs) -> Programs:
    return Programs(
        build=lambda axes: build_on(partial(build, **dict(knobs)), axes),
        axis_names=AXES,
        platform="tpu",
    )


@cache
def propagated(knobs: Knobs, sizes: Sizes, probes: tuple[Sizes, ...]) -> Propagation:
    return propagate(programs(knobs), sizes=sizes, probes=probes, enter=lambda _: None)


def real_rung(order: tuple[int, ...], workers: int) -> EstimateRung:
    plans = [one for number in order for one in all_plans(DEVICES, **CALLS[number])]
    pool = FakePool(answers=lambda job: propagated(job.knobs, job.sizes, job.probes))
    made = rung(plans, pool, workers=workers)
    made.price = lambda terms, batch, layouts: price_on(
        terms, batch, routes_of=simple_routes, speeds=SPEEDS
    )
    return made


def least(terms: Terms) -> Least | None:
    return least_of(terms, speeds=SPEEDS, devices=DEVICES)


def test_no_estimate_is_below_the_least_by_the_terms_of_any_other_mesh() -> None:
    made = real_rung((0, 1, 2), 2)
    found = made.run().found
    for knobs in CALLS:
        mine = {plan: one for plan, one in found.items() if dict(plan.knobs) == knobs}
        fastest = min(one.step_s for one in mine.values())
        smallest = min(one.memory_interval[0] for one in mine.values())
        for (_, active), one in made._terms.items():
            if dict(_[1]) != knobs:
                continue
            bound = least(one.terms)
            assert bound is not None, active
            assert 0.2 * fastest < bound.step_s <= fastest
            assert 0.2 * smallest < bound.memory_bytes <= smallest


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("limit_mib", [0, 40, 200])
def test_what_is_settled_stays(order: tuple[int, ...], limit_mib: int) -> None:
    made = real_rung(order, 1)
    heard = watched(made, least=least, device_memory_bytes=limit_mib * 2**20)
    found = made.run()
    whole = estimated_candidates(found.found, baseline=(), device_memory_bytes=limit_mib * 2**20)
    for one in heard.said:
        if one.is_settled and one.missing:
            assert first_ten(one.rows) == first_ten(whole)
    assert found.found == real_rung(order, 1).run().found
    if order[0] == 0 and not limit_mib:
        assert 0 < found.settled_at < len(found.found)
        assert found.settled_detail in found.details


# Any prices, and any bounds that are true.


@dataclass(frozen=True)
class Drawn:
    """Prices of one call of `build`: seconds and bytes of each mesh."""

    batch: Batch
    table: Mapping[tuple[int, ...], tuple[float, int]]
    open_ended: bool

    @property
    def needs_own(self) -> NDArray[np.bool_]:
        return np.zeros(len(self.batch), np.bool_)

    @property
    def step_s(self) -> NDArray[np.float64]:
        return np.array([self._of(row)[0] for row in range(len(self.batch))])

    def _of(self, row: int) -> tuple[float, int]:
        return self.table[tuple(map(int, self.batch.sizes[row]))]

    def estimated(self, row: int) -> Estimated:
        step_s, memory_bytes = self._of(row)
        return Estimated(
            step_s=step_s,
            bracket_s=(step_s, step_s),
            bound_s=0.0,
            memory_bytes=memory_bytes,
            memory_interval=(memory_bytes, 2 * memory_bytes),
            causes=(),
            uncounted=("loop of unknown length counted once",) if self.open_ended else (),
        )


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    calls=st.integers(2, MOST_CALLS + 1),
    limit=st.sampled_from([0, 50, 80]),
    workers=st.integers(1, 3),
)
def test_with_true_bounds_what_is_settled_is_final(
    data: st.DataObject, calls: int, limit: int, workers: int
) -> None:
    plans = [one for call in range(calls) for one in all_plans(8, k=call)]
    meshes = list(dict.fromkeys(tuple(one.sizes.values()) for one in plans))
    tables, bounds, odd = [], [], []
    for _ in range(calls):
        slowest = data.draw(st.integers(1, 6))
        draw = st.tuples(st.integers(1, 4).map(lambda t, s=slowest: float(t * s)), BYTES)
        table = dict(zip(meshes, data.draw(st.lists(draw, min_size=10, max_size=10))))
        tables.append(table)
        share = data.draw(st.sampled_from([1.0, 0.9, 0.5]))
        bounds.append(
            Least(
                step_s=share * min(step_s for step_s, _ in table.values()),
                memory_bytes=share * min(size for _, size in table.values()),
            )
        )
        odd.append(data.draw(st.integers(0, 9)) == 0)

    def number(terms: Mapping[tuple[str, ...], Terms]) -> int:
        return int(next(iter(terms.values())).window_threshold_bytes)

    pool = FakePool(
        answers=lambda job: propagation(job, window_threshold_bytes=float(dict(job.knobs)["k"]))  # pyright: ignore
    )
    made = rung(plans, pool, workers=workers)
    made.price = lambda terms, batch, layouts: Drawn(
        batch, tables[number(terms)], odd[number(terms)]
    )
    heard = watched(
        made, device_memory_bytes=limit, least=lambda terms: bounds[number({(): terms})]
    )
    found = made.run()
    whole = estimated_candidates(found.found, baseline=(), device_memory_bytes=limit)
    for one in heard.said:
        if one.is_settled:
            assert first_ten(one.rows) == first_ten(whole)
    assert set(found.found) == set(plans)


BYTES = st.integers(1, 100)


def bounded(answer=propagation, *, calls: int = 3, pool=None) -> tuple[EstimateRung, Heard]:
    """A rung of calls of which each takes a second more than the one before."""
    plans = [one for call in range(calls) for one in all_plans(8, k=call)]

    def answered(job: PropagateJob) -> Propagation:
        return answer(job, window_threshold_bytes=float(dict(job.knobs)["k"]))  # pyright: ignore

    made = rung(plans, pool or FakePool(), workers=1)
    made.propagator.pool.answers = answered  # pyright: ignore
    table = {tuple(one.sizes.values()): (1.0, 1) for one in plans}
    made.price = lambda terms, batch, layouts: Drawn(
        batch,
        {
            mesh: (step_s + next(iter(terms.values())).window_threshold_bytes, size)
            for mesh, (step_s, size) in table.items()
        },
        open_ended=any(one.uncounted for one in terms.values()),
    )
    heard = watched(
        made, least=lambda terms: Least(step_s=1.0 + terms.window_threshold_bytes, memory_bytes=0.0)
    )
    return made, heard


def test_it_is_said_as_soon_as_one_propagation_of_each_call_is_done() -> None:
    made, heard = bounded()
    found = made.run()
    assert [one.is_settled for one in heard.said].index(True) == 8  # 7 sets and 2 calls
    assert found.settled_at == heard.said[8].estimated
    assert heard.said[8].extent.endswith(f"{SETTLED}: none of these can come among them")
    assert found.settled_detail in found.details


@pytest.mark.parametrize(
    ("behind", "order"),
    [
        ((1, 2), [1, 2, *[1] * 6, *[2] * 6]),
        ((1,), [1, *[2] * 7, *[1] * 6]),
        ((), [1] * 7 + [2] * 7),
    ],
)
def test_calls_that_may_come_among_the_first_ten_are_estimated_first(
    behind: tuple[int, ...], order: list[int]
) -> None:
    made, _ = bounded()
    assert made.standings is not None
    made.standings.least = lambda terms: Least(
        step_s=9.0 if terms.window_threshold_bytes in behind else 0.5, memory_bytes=0.0
    )
    pool = made.propagator.pool
    assert isinstance(pool, FakePool)
    made.run()
    assert [dict(job.knobs)["k"] for job in pool.propagated] == [0] * 7 + order


def test_with_many_calls_none_is_begun_twice() -> None:
    made, _ = bounded(calls=MOST_CALLS + 1)
    pool = made.propagator.pool
    assert isinstance(pool, FakePool)
    made.run()
    order = [dict(job.knobs)["k"] for job in pool.propagated]
    assert order == sorted(order, key=order.index)


LOOP = Uncounted(what="loop of unknown length counted once", why="")


@pytest.mark.parametrize(
    ("fails", "changes"), [(True, {}), (False, {"uncounted": (LOOP,)}), (False, {"fixed": ("dp",)})]
)
def test_programs_that_differ_or_are_partly_counted_are_never_settled(
    fails: bool, changes: dict[str, tuple[object, ...]]
) -> None:
    def answer(job: PropagateJob, **terms: object) -> Propagation:
        is_at_home = "dp" not in dict(job.sizes) or not job.probes
        made = propagation(job, **terms, **({} if "fixed" in changes and is_at_home else changes))
        return replace(made, failed_probes=job.probes[:1] if fails else ())

    made, heard = bounded(answer)
    found = made.run()
    assert not found.settled_at and not any(one.is_settled for one in heard.said)


def test_who_stops_is_told_that_nothing_else_can_come_among_the_first_ten() -> None:
    made, _ = bounded(pool=Stopped(at=11))
    found = made.run()
    assert found.is_interrupted and found.settled_at
    assert found.missing_notice.endswith(f"but {SETTLED}: none of these can come among them")


def test_terms_of_one_mesh_alone_bound_no_other() -> None:
    knobs = tuple(CALLS[0].items())
    made = propagated(knobs, (("dp", 2), ("tp", 2)), ((("dp", 4), ("tp", 4)),)).terms
    assert least(replace(made, fixed=("dp",))) is None
    assert least(replace(made, uncounted=(LOOP,))) is None
    assert least(made) is not None


def test_what_shrinks_faster_than_an_axis_grows_has_no_bound() -> None:
    """A device attends to its own block alone: with twice the blocks, all do half of it."""
    knobs = tuple(CALLS[0].items())
    made = propagated(knobs, (("dp", 2), ("tp", 2)), ((("dp", 4), ("tp", 4)),)).terms
    assert made.kernels and least(made) != Least(step_s=0.0, memory_bytes=0.0)
    (matmul,) = next(one.matmuls for one in made.kernels if one.matmuls)
    square = mono(64.0, sp=-1)
    block = replace(matmul, batch=mono(1.0), m=square, n=square, k=mono(8.0))
    kernel = replace(made.kernels[0], count=times(1.0), matmuls=(block,))
    assert least(replace(made, kernels=(kernel,))) == Least(step_s=0.0, memory_bytes=0.0)
    ring = replace(kernel, count=times(1.0, sp=1))
    bound = least(replace(made, kernels=(ring,)))
    assert bound is not None and bound.step_s > 0.0
