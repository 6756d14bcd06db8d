"""Workers that lower the same step do each mesh once."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import value_of
from automesh.program.script.build import build_on
from automesh.sharding.lowerings import Lowering, Lowerings
from automesh.sharding.programs import ENOUGH, Programs
from automesh.sharding.propagate import propagate
from automesh.sharding.size_dependence import Sample
from automesh.tuner.estimate.shared_lowerings import SharedLowerings
from automesh.worker.messages import LOWERINGS

AXES = ("dp", "tp")
CALL = ((), ())
OTHER = ((), (("remat", "full"),))


def array(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def exchange(shared, call=CALL):
    """As between worker and parent: what goes over the channel is JSON."""
    listener = shared.listener(call)

    def ask(news):
        event = json.loads(json.dumps({"event": LOWERINGS, "reply": True, **news}))
        return json.loads(json.dumps(listener(event)))

    return ask


def worker(build, shared=None, call=CALL, axes=AXES):
    known = Lowerings() if shared is None else Lowerings(exchange=exchange(shared, call))
    return Programs(
        build=lambda sizes: build_on(build, sizes),
        axis_names=axes,
        platform="cpu",
        lowerings=known,
    )


def at(programs, sizes, *probes, largest=()):
    given = [tuple(one.items()) for one in (sizes, *probes)]
    return propagate(
        programs,
        sizes=given[0],
        probes=given[1:],
        largest=tuple(dict(largest).items()),
        enter=lambda _: None,
    )


def varying(built):
    """A step whose program states the sizes of one device's part; `built` takes the meshes."""

    def build(mesh):
        built.append(tuple(mesh.shape.values()))

        def body(x):
            return x @ x.T

        def step(x):
            part = P(("dp", "tp"), None)
            return jax.shard_map(body, mesh=mesh, in_specs=part, out_specs=part)(x)

        return step, (array((256, 32)),)

    return build


def plain(built):
    def build(mesh):
        built.append(tuple(mesh.shape.values()))

        def step(x):
            return jax.lax.with_sharding_constraint(x @ x.T, NamedSharding(mesh, P("dp", "tp")))

        return step, (array((256, 32)),)

    return build


NEEDS = [
    ({"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}),
    ({"dp": 2}, {"dp": 4}),
    ({"tp": 2}, {"tp": 4}),
]
LARGEST = {"dp": 8, "tp": 8}


def test_two_workers_lower_no_mesh_twice_and_give_the_terms_of_one():
    built, shared = [], SharedLowerings()
    alone = worker(varying([]))
    expected = [at(alone, *need, largest=LARGEST) for need in NEEDS]
    workers = [worker(varying(built), shared) for _ in range(2)]
    answers = [at(workers[number % 2], *need, largest=LARGEST) for number, need in enumerate(NEEDS)]
    assert [one.terms for one in answers] == [one.terms for one in expected]
    assert all(one.terms.fixed == () == one.failed_probes for one in answers)
    assert len(built) == len(set(built)) == alone.lowered


def test_an_axis_that_another_worker_is_at_is_left_to_it():
    built, shared = [], SharedLowerings()
    one, two = worker(varying(built), shared), worker(varying([]), shared)
    at(one, {"dp": 2, "tp": 2})
    other = shared.listener(CALL)
    double = {"dp": 4, "tp": 2}
    other({"event": LOWERINGS, "new": [], "heard": 0, "claim": double, "state": "open"})
    at(two, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4}, largest={"dp": 4, "tp": 4})
    order = [tuple(one.sizes.values()) for one in two.lowerings]
    assert order.index((2, 4)) < order.index((4, 2))


def test_with_other_knobs_fewer_meshes_are_enough_once_the_step_was_alike_on_four():
    shared, built = SharedLowerings(), []
    usual = worker(plain(built), shared)
    for need in NEEDS:
        at(usual, *need)
    assert len(built) == ENOUGH == usual.witnesses and usual.lowerings.state == "alike"
    again: list[tuple[int, ...]] = []
    other = worker(plain(again), shared, OTHER)
    first, *rest = [at(other, *need) for need in NEEDS]
    # Each axis at 1 and at two larger sizes.
    assert again == [(2, 2), (4, 1), (1, 4)]
    assert first.lower_s > 0 and all(one.lower_s == 0 for one in rest)
    # That is no evidence for a third.
    third = shared.states.get(OTHER, "open")
    assert third == "open"
    # Not so if it varied with the usual ones.
    varied, free = SharedLowerings(), []
    at(worker(varying([]), varied), *NEEDS[0])
    alone = worker(plain(free), varied, OTHER)
    for need in NEEDS:
        at(alone, *need)
    assert len(free) == ENOUGH


@pytest.mark.parametrize("axis", AXES)
def test_what_a_knob_does_to_one_axis_shows_though_the_step_is_alike_without_it(axis):
    """The ring over `tp` is used only where there is more than one part."""

    def build(mesh):
        def step(x):
            turned = P("tp", "dp") if mesh.shape[axis] > 1 else P("dp", "tp")
            y = jax.lax.with_sharding_constraint(x @ x.T, NamedSharding(mesh, turned))
            return jnp.tanh(y) @ x

        spread = NamedSharding(mesh, P("dp", None))
        return step, (jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=spread),)

    shared = SharedLowerings()
    usual = worker(plain([]), shared)
    ring = worker(build, shared, OTHER)
    for need in NEEDS:
        at(usual, *need)
    found = [at(ring, *need).terms for need in NEEDS]
    assert [one.collectives for one in found] == [
        at(worker(build), *need).terms.collectives for need in NEEDS
    ]


def test_an_axis_that_was_never_larger_than_one_is_not_derived():
    """The first meshes with this knob have no `sp`, for which the program is another."""

    def build(mesh):
        def step(x):
            parts = P("sp", "dp") if mesh.shape["sp"] > 1 else P("dp", "tp")
            y = jax.lax.with_sharding_constraint(x @ x.T, NamedSharding(mesh, parts))
            return jnp.tanh(y) @ x

        return step, (array((256, 256)),)

    axes, shared = ("dp", "tp", "sp"), SharedLowerings()
    usual = worker(plain([]), shared, axes=axes)
    other = worker(build, shared, OTHER, axes)
    needs = [*NEEDS, ({"dp": 2, "sp": 2}, {"dp": 4, "sp": 2})]
    for need in needs:
        at(usual, *need)
    found = [at(other, *need).terms.collectives for need in needs]
    assert found == [at(worker(build, axes=axes), *need).terms.collectives for need in needs]


def test_what_the_step_refuses_is_asked_once():
    asked, shared = [], SharedLowerings()

    def build(mesh):
        asked.append(dict(mesh.shape))
        if mesh.shape["dp"] > 2:
            raise ValueError("dp is at most 2")
        return plain([])(mesh)

    one, two = worker(build, shared), worker(build, shared)
    assert at(one, {"dp": 2}, {"dp": 4}).failed_probes == ((("dp", 4),),)
    assert at(two, {"dp": 2}, {"dp": 4}).failed_probes == ((("dp", 4),),)
    assert asked.count({"dp": 4, "tp": 1}) == 1


def test_what_may_go_well_another_time_is_tried_again():
    asked, shared = [], SharedLowerings()

    def build(mesh):
        asked.append(dict(mesh.shape))
        if mesh.shape["dp"] > 2 and len(asked) < 3:
            raise MemoryError
        return plain([])(mesh)

    one, two = worker(build, shared), worker(build, shared)
    at(one, {"dp": 2}, {"dp": 4})
    assert at(two, {"dp": 2}, {"dp": 4}).failed_probes == ()
    assert asked.count({"dp": 4, "tp": 1}) == 2


def least_rows(mesh):
    """A step of which one device has 64 rows at least: other numbers beyond `dp:4`."""

    def body(x):
        rows = max(x.shape[0], 64)
        y = jnp.zeros((rows, 32), x.dtype).at[: x.shape[0]].set(x)
        return (y @ y.T)[: x.shape[0], :8]

    def step(x):
        return jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(x)

    return step, (array((256, 32)),)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_law_does_not_reach_has_a_law_of_its_own(workers):
    shared = SharedLowerings()
    made = [worker(least_rows, shared) for _ in range(workers)]
    far = {"dp": 16}
    below = at(made[0], {"dp": 2}, {"dp": 4}, largest=far)
    assert below.terms.limits == (("dp", 4),) and below.terms.fixed == ()
    beyond = at(made[-1], {"dp": 8}, far, largest=far)
    assert beyond.terms.fixed == () == beyond.failed_probes
    # And the first one is still there.
    again = at(made[-1], {"dp": 2}, {"dp": 4}, largest=far)
    assert again.terms.limits == (("dp", 4),) and again.terms.fixed == ()


def test_what_is_below_a_need_says_nothing_about_it():
    """Of the same kind as beyond the limit, and yet with numbers of its own."""

    def build(mesh):
        def body(x):
            rows = max(256 // mesh.shape["dp"], 64)
            return x + (jnp.zeros((rows, 32), x.dtype) + x[:1]).sum(axis=0)

        def step(x):
            return jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(x)

        return step, (array((1024, 32)),)

    one, far = worker(build), {"dp": 16}
    assert at(one, {"dp": 2}, {"dp": 4}, largest=far).terms.limits == (("dp", 4),)
    beyond = at(one, {"dp": 8}, far, largest=far).terms
    assert beyond.fixed == () == beyond.limits
    assert at(one, {"dp": 2}, {"dp": 4}, largest=far).terms.limits == (("dp", 4),)


def test_a_failure_that_may_not_come_again_says_nothing_about_an_axis():
    failing = [True]

    def build(mesh):
        if tuple(mesh.shape.values()) == (4, 2) and failing:
            raise MemoryError
        return varying([])(mesh)

    one, largest = worker(build), {"dp": 4, "tp": 4}
    assert "dp" in at(one, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4}, largest=largest).terms.fixed
    failing.clear()
    assert at(one, {"dp": 2}, {"dp": 4}, largest=largest).terms.fixed == ()


def test_a_step_that_varies_is_looked_at_once_in_each_worker():
    """Nothing can be compared where all axes are fixed; then nothing is lowered for it again."""
    built, shared = [], SharedLowerings()

    def build(mesh):
        built.append(tuple(mesh.shape.values()))
        rows = {1: 7, 2: 11, 4: 13, 8: 17, 16: 19}

        def body(x):
            more = jnp.zeros((rows[mesh.shape["dp"]] * 100, 32), x.dtype) + x[:1]
            return x + more.sum(axis=0)

        def step(x):
            return jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(x)

        return step, (array((256, 32)),)

    one, two = worker(build, shared), worker(build, shared)
    needs = [({"dp": 2}, {"dp": 4}), ({"dp": 2, "tp": 2}, {"dp": 4, "tp": 2})]
    for need in needs:
        at(one, *need, largest=LARGEST)
    known = set(built)
    built.clear()
    for need in needs:
        at(two, *need, largest=LARGEST)
    # Its own two alone, whose programs it needs.
    assert known.intersection(built) == {(2, 1), (2, 2)}
    assert len(built) == len(set(built))


def test_a_law_that_leans_on_a_mesh_must_explain_it():
    """Another worker has seen that `tp:4` is no power of two; here `sp` cannot be learnt."""
    rows = {1: 1024, 2: 512, 4: 320, 8: 128}

    def build(mesh):
        if mesh.shape["sp"] > 2:
            raise ValueError("sp is at most 2")

        def body(x):
            y = jnp.zeros((rows[mesh.shape["tp"]], 32), x.dtype) + x[:1]
            return x + (y.T @ y)[:1, :32]

        def step(x):
            parts = P(("dp", "tp", "sp"))
            return jax.shard_map(body, mesh=mesh, in_specs=parts, out_specs=parts)(x)

        return step, (array((1024, 32)),)

    shared, axes = SharedLowerings(), ("dp", "tp", "sp")
    one, two = worker(build, shared, axes=axes), worker(build, shared, axes=axes)
    at(one, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}, largest={"dp": 4, "tp": 8})
    need = {"dp": 2, "tp": 2, "sp": 2}, {"dp": 4, "tp": 8, "sp": 2}
    answer = at(two, *need, largest={"dp": 4, "tp": 8, "sp": 2})
    limits = dict(answer.terms.limits)
    assert "tp" in answer.terms.fixed or limits.get("tp", 8) < 4


def test_shardys_answer_is_compared_in_every_worker():
    shared = SharedLowerings()
    for build in (plain, varying):
        workers = [worker(build([]), shared, (build.__name__, ())) for _ in range(2)]
        need = {"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}
        for one in workers:
            at(one, *need, largest=LARGEST)
        assert [one.verified for one in workers] == [1, 1]


def test_garbage_from_another_worker_is_passed_over():
    built, shared = [], SharedLowerings()
    say = exchange(shared)
    garbage = {"text": "t", "signature": "s", "asked": True, "numbers": "?", "elements": "AAAA"}
    record = {"sizes": {"dp": 2, "tp": 2}, **garbage}
    say({"new": [record, None, 3, {"sizes": 7}], "heard": -1, "claim": 5, "state": []})
    say({})
    one = worker(plain(built), shared)
    assert at(one, *NEEDS[0]).terms.fixed == ()
    assert (2, 2) in built


def test_what_another_worker_has_lowered_is_learnt_from():
    """Its largest size will do, where a mesh in between agrees."""
    built, shared = [], SharedLowerings()
    one, two = worker(varying(built), shared), worker(varying(built), shared)
    at(one, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4}, largest={"dp": 8, "tp": 4})
    assert built == [(2, 2), (4, 4), (8, 2), (2, 4)]
    assert at(two, {"dp": 2}, {"dp": 4}, largest={"dp": 4}).terms.fixed == ()
    assert (4, 2) not in built


def test_side_by_side_they_end_with_the_same_terms():
    shared, found = SharedLowerings(), {}
    lock = threading.Lock()

    def ask(call):
        once = exchange(shared, call)

        def locked(news):
            with lock:
                return once(news)

        return locked

    def run(name, needs):
        mine = worker(varying([]))
        mine.lowerings.exchange = ask(CALL)
        found[name] = [at(mine, *need, largest=LARGEST).terms for need in needs]

    threads = [
        threading.Thread(target=run, args=(name, needs))
        for name, needs in (("a", NEEDS[:2]), ("b", NEEDS[2:]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = worker(varying([]))
    for terms, need in zip(found["a"] + found["b"], NEEDS, strict=True):
        expected = at(alone, *need, largest=LARGEST).terms
        assert (terms.active, terms.fixed, terms.limits) == (expected.active, (), ())
        # Axes that are 1 may stand in the one's formulas, and not in the other's.
        for sizes in ({**dict.fromkeys(AXES, 1), **dict(probe)} for probe in need):
            for name in ("argument_bytes", "output_bytes"):
                values = [value_of(getattr(one, name), sizes) for one in (terms, expected)]
                assert values[0] == values[1]
            bytes_ = [
                sum(value_of(kernel.bytes, sizes) for kernel in one.kernels)
                for one in (terms, expected)
            ]
            assert bytes_[0] == bytes_[1]


def test_numbers_survive_the_channel():
    numbers = np.array([0.0, -1.0, 3.0, 1e300, np.inf])
    lowering = Lowering(
        module=object(),
        text="text",
        signature="kind",
        sample=Sample(sizes={"dp": 2, "tp": 1}, numbers=numbers, elements=numbers[::-1]),
        is_asked=True,
    )
    shared = SharedLowerings()
    here, there = (Lowerings(exchange=exchange(shared)) for _ in range(2))
    here.add(lowering)
    there.share()
    (got,) = there
    assert got.module is None and got.is_asked
    assert (got.text, got.signature, got.sizes) == ("text", "kind", {"dp": 2, "tp": 1})
    assert (got.sample.numbers == numbers).all()
    assert (got.sample.elements == numbers[::-1]).all()
