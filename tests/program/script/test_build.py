"""What `build` may return, and what a user is told when it returns something else."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh import Workload
from automesh.errors import UsageError
from automesh.mesh.axes import parse_mesh
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on, check_facts
from automesh.program.script.contexts import Ambient, ambient_mesh, entered, no_ambient_mesh

NAMES = ("dp", "tp")


def axes(text="dp:2,tp:2"):
    return parse_mesh(text, NAMES)


def struct(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def add(x, y):
    return x + y


def test_the_three_forms_lower_to_the_same_program():
    args = (struct(8), struct(8))
    forms = [
        lambda mesh: (add, args),
        lambda mesh: (add, list(args)),
        lambda mesh: (jax.jit(add), args),
        lambda mesh: jax.jit(add).trace(*args),
        lambda mesh: Workload(add, args),
    ]
    texts = {lower(build_on(form, axes())).lowered.as_text() for form in forms}
    assert len(texts) == 1


def test_mesh_has_auto_axes_of_the_asked_sizes():
    built = build_on(lambda mesh: (add, (struct(8), struct(8))), axes())
    assert dict(built.mesh.shape) == {"dp": 2, "tp": 2}
    assert built.mesh.axis_types == (AxisType.Auto,) * 2
    assert build_on(lambda mesh: (add, ()), axes("dp:1")).mesh.size == 1


@pytest.mark.parametrize(
    "wanted", ["explicit", AxisType.Explicit, ("Explicit", AxisType.Explicit), {"dp": "explicit"}]
)
def test_build_is_called_again_with_the_axis_types_that_it_asks_for(wanted):
    seen = []

    def build(mesh):
        seen.append(mesh.axis_types)
        return Workload(add, (struct(8), struct(8)), axis_types=wanted)

    built = build_on(build, axes())
    expected = ("explicit", "auto" if isinstance(wanted, dict) else "explicit")
    assert built.axis_types == expected
    assert [kind.name.lower() for kind in built.mesh.axis_types] == list(expected)
    assert len(seen) == 2
    # Later jobs know it from the inspection.
    build_on(build, axes(), axis_types=built.axis_types)
    assert len(seen) == 3


def test_axis_types_that_follow_the_mesh_are_refused():
    def build(mesh):
        auto = mesh.axis_types[0] is AxisType.Auto
        return Workload(add, (struct(8), struct(8)), axis_types="explicit" if auto else "manual")

    with pytest.raises(UsageError, match="once it has them"):
        build_on(build, axes())


FORM = "\nhint: return `step, args`, a `jax.stages.Traced` or an `automesh.Workload`"
BAD_RETURNS = {
    "nothing": (lambda mesh: None, "`<lambda>` returned nothing" + FORM),
    "three": (lambda mesh: (add, 1, 2), "`<lambda>` returned a tuple of 3, not of 2" + FORM),
    "a dict": (lambda mesh: {"step": add}, "`<lambda>` returned a dict" + FORM),
    "the step alone": (lambda mesh: add, "`<lambda>` returned a function" + FORM),
    "no step": (lambda mesh: ("step", ()), "the step is a str, not a function" + FORM),
    "one argument": (
        lambda mesh: (add, struct(8)),
        "the step's arguments are a ShapeDtypeStruct, not a tuple\n"
        "hint: return `step, (state, batch)`; write `(state,)` for a single argument",
    ),
    "lowered": (
        lambda mesh: jax.jit(add).lower(1, 2),
        "`<lambda>` returned a `jax.stages.Lowered`, which cannot be lowered again\n"
        "hint: return what `jax.jit(step).trace(*args)` gives",
    ),
    "traced and arguments": (
        lambda mesh: Workload(jax.jit(add).trace(1, 2), (1, 2)),
        "the workload has a traced step and arguments besides\n"
        "hint: a `Traced` knows its arguments; leave `args` and `kwargs` out",
    ),
    "fact": (
        lambda mesh: Workload(add, (), facts={"heads": 2.5}),
        "the fact `heads` is 2.5, a float; facts are integers\n"
        "hint: constraints divide by facts; leave out what is no count",
    ),
    "flag as fact": (
        lambda mesh: Workload(add, (), facts={"moe": True}),
        "the fact `moe` is True, a bool; facts are integers\n"
        "hint: constraints divide by facts; leave out what is no count",
    ),
    "list of facts": (
        lambda mesh: Workload(add, (), facts=["heads"]),
        "the workload's `facts` are a list, not a dict of integers\n"
        'hint: write for example `facts={"num_kv_heads": 8}`',
    ),
    "axis type": (
        lambda mesh: Workload(add, (), axis_types="ring"),
        "`ring` is not an axis type; use auto, explicit, manual\n"
        "hint: auto lets the compiler choose shardings; it is the default",
    ),
    "axis of axis types": (
        lambda mesh: Workload(add, (), axis_types={"ep": "explicit"}),
        "`axis_types` names the axis `ep`, which is none of: dp, tp",
    ),
    "count of axis types": (
        lambda mesh: Workload(add, (), axis_types=("auto",) * 3),
        "got 3 axis types ['auto', 'auto', 'auto'] for the 2 axes ['dp', 'tp']\n"
        "hint: give one axis type for each axis, or one for all",
    ),
    "baseline": (
        lambda mesh: Workload(add, (), baseline="dp:2,ep:2"),
        "the workload's `baseline` does not fit: mesh `dp:2,ep:2` names the axis `ep`, "
        "which is none of: dp, tp\n"
        "hint: rename the axis, or list it under [axes] of the search space",
    ),
    "baseline with knobs": (
        lambda mesh: Workload(add, (), baseline="dp:2,ep:2 remat=full"),
        "the workload's `baseline` does not fit: mesh `dp:2,ep:2` names the axis `ep`, "
        "which is none of: dp, tp\n"
        "hint: rename the axis, or list it under [axes] of the search space",
    ),
    "baseline as dict": (
        lambda mesh: Workload(add, (), baseline={"dp": 2}),
        "the workload's `baseline` is a dict, not a mesh in text form\n"
        'hint: write for example `baseline="dp:2,tp:4"`',
    ),
    "init": (
        lambda mesh: Workload(add, (), init=(1, 2)),
        "the workload's `init` is a tuple, not a function",
    ),
    "tokens": (
        lambda mesh: Workload(add, (), tokens_per_step=-1),
        "the workload's `tokens_per_step` is -1; it must be an integer, at least 0",
    ),
    "kwargs": (
        lambda mesh: Workload(add, (), {1: 2}),
        "the workload's `kwargs` must be a dict with names as keys",
    ),
}


@pytest.mark.parametrize("case", BAD_RETURNS)
def test_bad_returns_are_told_in_one_sentence(case):
    build, expected = BAD_RETURNS[case]
    with pytest.raises(UsageError) as caught:
        build_on(build, axes())
    assert str(caught.value) == expected


BAD_STEPS = {
    "donation of a jitted step": (
        Workload(jax.jit(add), (struct(8), struct(8)), donate_argnums=0),
        "`donate_argnums` has no effect on a step that is jitted already",
    ),
    "donation of what is not there": (
        Workload(add, (struct(8), struct(8)), donate_argnums=2),
        "`donate_argnums` names the argument 2, but the step has 2",
    ),
    "unhashable static": (
        Workload(add, (struct(8), {"mode": "fast"})),
        "a static argument of the step is a dict, which cannot be hashed",
    ),
    "context": (
        Workload(add, (struct(8), struct(8)), context=3),
        "the workload's `context` is an int, which is no context manager",
    ),
    "context function": (
        Workload(add, (struct(8), struct(8)), context=lambda: 3),
        "the workload's `context` returned an int, which is no context manager",
    ),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_bad_workloads_are_told_when_the_step_is_traced(case):
    workload, expected = BAD_STEPS[case]
    with pytest.raises(UsageError) as caught:
        lower(build_on(lambda mesh: workload, axes()))
    assert caught.value.message == expected


def test_fact_that_depends_on_the_mesh_is_refused_with_both_values():
    check_facts([("batch", 8)], [("batch", 8)], mesh="dp:2")
    with pytest.raises(UsageError) as caught:
        check_facts([("batch", 8), ("heads", 2)], [("batch", 4), ("heads", 2)], mesh="dp:2")
    assert caught.value.message == (
        "the fact `batch` depends on the mesh: it is 8 on one device and 4 on `dp:2`"
    )
    with pytest.raises(UsageError, match="2 on one device and missing on `dp:2`"):
        check_facts([("heads", 2)], [], mesh="dp:2")


def scaled(x, mode, y, *, flag):
    return x * y if mode == "mul" and flag else x + y


STATIC = {
    "seen by their kind": Workload(scaled, (struct(8), "mul", struct(8)), {"flag": "yes"}),
    "stated": Workload(
        lambda x, n, y, *, flag: x * y * n,
        (struct(8), 3, struct(8)),
        {"flag": 1.0},
        static_argnums=1,
    ),
    "stated from the end": Workload(
        lambda x, y, n: x * y * n, (struct(8), struct(8), 3), static_argnums=-1
    ),
    "of a jitted function": Workload(
        jax.jit(lambda x, n, y: x * y * n, static_argnums=1), (struct(8), 3, struct(8))
    ),
    "by name of a jitted function": Workload(
        jax.jit(scaled, static_argnames=("mode", "flag")),
        (struct(8), "mul", struct(8)),
        {"flag": True},
    ),
}


@pytest.mark.parametrize("case", STATIC)
def test_static_arguments_are_left_out_of_the_call(case):
    program = lower(build_on(lambda mesh: STATIC[case], axes()))
    assert [leaf.shape for leaf in program.args] == [(8,), (8,)]
    compiled = program.lowered.compile()
    call = compiled(jnp.full(8, 2.0), jnp.full(8, 3.0), **dict.fromkeys(program.kwargs, 1.0))
    assert set(np.asarray(call).tolist()) <= {6.0, 18.0}


def test_static_arguments_of_a_wrapped_jit_are_told_from_the_trace():
    inner = jax.jit(lambda x, n, y: x * y * n, static_argnums=1)
    # A wrapper without jax's private description of the function.
    outer = SimpleNamespace(trace=inner.trace, lower=inner.lower)
    outer_call = type("Step", (), {"__call__": lambda self, *a: inner(*a), **vars(outer)})()
    outer_call.trace, outer_call.lower = inner.trace, inner.lower
    workload = Workload(outer_call, (struct(8), 3, struct(4, 8)))
    program = lower(build_on(lambda mesh: workload, axes()))
    assert [leaf.shape for leaf in program.args] == [(8,), (4, 8)]


def entries_of(context, times=3):
    for _ in range(times):
        with entered(Ambient(mesh=None, call=None), context):
            pass


def test_every_kind_of_context_can_be_entered_often():
    log = []

    @contextlib.contextmanager
    def generator():
        log.append("in")
        yield
        log.append("out")

    class Own:
        def __enter__(self):
            log.append("in")

        def __exit__(self, *error):
            log.append("out")

    for context in (generator(), generator, Own(), lambda: Own()):
        entries_of(context)
    assert log == ["in", "out"] * 12


def test_mesh_that_build_leaves_in_force_is_in_force_while_tracing_and_not_after():
    seen = []

    def step(x):
        seen.append(jax.sharding.get_abstract_mesh().axis_names)
        return x * 2

    def with_context(mesh):
        return Workload(step, (struct(8),), context=jax.set_mesh(mesh))

    def globally(mesh):
        jax.set_mesh(mesh)
        return step, (struct(8),)

    def later(mesh):
        return Workload(step, (struct(8),), context=lambda: jax.set_mesh(mesh))

    def without(mesh):
        return step, (struct(8),)

    for build in (with_context, globally, later, without):
        built = build_on(build, axes())
        assert ambient_mesh() is None
        for _ in range(2):
            with entered(built.ambient, built.workload.context):
                names = jax.sharding.get_abstract_mesh().axis_names
            lower(built)
            assert names == seen[-1] == (() if build is without else ("dp", "tp"))
        assert ambient_mesh() is None


def test_ambient_mesh_survives_an_error_in_build():
    def build(mesh):
        jax.set_mesh(mesh)
        raise RuntimeError("after set_mesh")

    with pytest.raises(RuntimeError, match="after set_mesh"):
        build_on(build, axes())
    assert ambient_mesh() is None
    with no_ambient_mesh():
        assert ambient_mesh() is None


def zeros_like_init(mesh, traceable=True):
    placed = NamedSharding(mesh, P("dp", "tp"))

    def init(mesh):
        weights = jax.lax.with_sharding_constraint(jnp.ones((8, 8)), placed)
        if not traceable:
            weights = jax.device_put(np.asarray(weights), placed)
        return (weights, jnp.tanh(weights)), jnp.ones((4, 8))

    return Workload(
        lambda state, batch: (state, batch.sum()),
        ((struct(8, 8, sharding=placed), struct(8, 8)), struct(4, 8)),
        init=init,
    )


@pytest.mark.parametrize("traceable", [True, False])
def test_unsharded_leaves_take_the_shardings_of_init(traceable, capfd):
    program = lower(build_on(lambda mesh: zeros_like_init(mesh, traceable), axes()))
    (_, moment), _ = program.args
    assert moment.sharding.is_equivalent_to(program.args[0][0].sharding, 2)
    assert ("calling it for real" in capfd.readouterr().err) is not traceable


BAD_INITS = {
    "structure": (
        lambda mesh: ({"w": 1.0}, 2.0),
        r"argument 0 out of `init` has other leaves than in `args`: `args\[0\]\['w'\]` .* is new",
    ),
    "shape": (
        lambda mesh: ((jnp.ones((8, 8)), jnp.ones(8)), jnp.ones((4, 8))),
        r"`args\[0\]\[1\]` is float32\[8, 8\], but `init` gives float32\[8\]",
    ),
    "count": (
        lambda mesh: ((jnp.ones((8, 8)),) * 2, jnp.ones((4, 8)), 3),
        "`init` returned 3 arguments, but the step has 2",
    ),
}


@pytest.mark.parametrize("case", BAD_INITS)
def test_init_that_does_not_fit_is_told(case):
    init, expected = BAD_INITS[case]
    workload = Workload(
        lambda s, b: b.sum(), ((struct(8, 8), struct(8, 8)), struct(4, 8)), init=init
    )
    with pytest.raises(UsageError, match=expected):
        lower(build_on(lambda mesh: workload, axes()))
