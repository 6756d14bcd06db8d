"""Workers that lower the same step do each mesh once."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.program.script.build import build_on
from automesh.sharding.lowerings import Lowering, Lowerings
from automesh.sharding.programs import ENOUGH, ENOUGH_AGAIN, Programs
from automesh.sharding.propagate import propagate
from automesh.sharding.size_dependence import Sample
from automesh.tuner.estimate.shared_lowerings import SharedLowerings
from automesh.worker.messages import LOWERINGS

AXES = ("dp", "tp")
CALL = ((), ())


def array(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def exchange(shared, call=CALL):
    """As between worker and parent: what goes over the channel is JSON."""
    listener = shared.listener(call)

    def ask(news):
        event = json.loads(json.dumps({"event": LOWERINGS, "reply": True, **news}))
        return json.loads(json.dumps(listener(event)))

    return ask


def worker(build, shared=None, call=CALL, **more):
    known = Lowerings() if shared is None else Lowerings(exchange=exchange(shared, call))
    return Programs(
        build=lambda axes: build_on(build, axes),
        axis_names=AXES,
        platform="cpu",
        lowerings=known,
        **more,
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


def test_with_other_knobs_two_meshes_are_enough_once_the_step_was_alike_on_four():
    shared, built = SharedLowerings(), []
    usual = worker(plain(built), shared)
    for need in NEEDS:
        at(usual, *need)
    assert len(built) == ENOUGH == usual.witnesses and usual.lowerings.state == "alike"
    again: list[tuple[int, ...]] = []
    other = worker(plain(again), shared, ((), (("remat", "full"),)))
    first, *rest = [at(other, *need) for need in NEEDS]
    assert again == [(2, 2), (4, 2)] and len(again) == ENOUGH_AGAIN
    assert first.lower_s > 0 and all(one.lower_s == 0 for one in rest)
    # Not so if it varied with the usual ones.
    varied, free = SharedLowerings(), []
    at(worker(varying([]), varied), *NEEDS[0])
    alone = worker(plain(free), varied, ((), (("remat", "full"),)))
    for need in NEEDS:
        at(alone, *need)
    assert len(free) == ENOUGH


def test_what_the_step_refuses_is_asked_once():
    asked, shared = [], SharedLowerings()

    def build(mesh):
        asked.append(dict(mesh.shape))
        if mesh.shape["dp"] > 2:
            raise ValueError("dp is at most 2")
        return plain([])(mesh)

    one, two = worker(build, shared), worker(build, shared)
    assert at(one, {"dp": 2}, {"dp": 4}).failed_probes == ((("dp", 4),),)
    assert at(two, {"dp": 2, "tp": 2}, {"dp": 4}).failed_probes == ((("dp", 4),),)
    assert asked.count({"dp": 4, "tp": 1}) == 1


def test_a_worker_whose_step_cannot_be_told_from_where_another_began_starts_anew():
    """From four on the program has another law: what begins below says nothing there."""

    def build(mesh):
        dp = mesh.shape["dp"]

        def body(x):
            chunk = x.shape[0] if dp < 4 else 16
            return jax.lax.map(lambda piece: piece @ piece.T, x.reshape(-1, chunk, 32))

        def step(x):
            return jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(x)

        return step, (array((1024, 32)),)

    shared = SharedLowerings()
    one, two = worker(build, shared), worker(build, shared)
    at(one, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}, largest={"dp": 4, "tp": 2})
    wanted = at(worker(build), {"dp": 8}, {"dp": 16}, largest={"dp": 16}).terms
    assert wanted.fixed == ()
    assert at(two, {"dp": 8}, {"dp": 16}, largest={"dp": 16}).terms == wanted


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
    expected = [at(alone, *need, largest=LARGEST).terms for need in NEEDS]
    assert found["a"] + found["b"] == expected


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
    assert got.module is None and got.is_asked and not got.is_mine
    assert (got.text, got.signature, got.sizes) == ("text", "kind", {"dp": 2, "tp": 1})
    assert (got.sample.numbers == numbers).all()
    assert (got.sample.elements == numbers[::-1]).all()
