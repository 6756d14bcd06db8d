"""Arguments whose trees differ between calls in all but their leaves, or hold more than arrays."""

import dataclasses
import functools
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.errors import UsageError
from automesh.mesh.axes import parse_mesh
from automesh.mesh.layout.devices import create_mesh_for
from automesh.program.execute.arguments import initial_args
from automesh.program.lower.carry_state import default_carry
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on
from automesh.program.script.leaf_forms import (
    difference,
    forms_of,
    repacked,
    same_names,
    same_treedef,
    same_types,
)
from automesh.program.script.pure_step import StepOutputs, TreeParts, pure
from automesh.program.script.workload import Workload
from automesh.worker.handlers import jobs
from tests.support.paths import SCRIPTS
from tests.support.program_jobs import Worker, own_process, script  # noqa: F401

NAMES = ("dp", "tp")
F32 = jnp.float32


def abstract(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def built(workload, mesh="dp:1"):
    return build_on(lambda mesh: workload, parse_mesh(mesh, NAMES))


def train_state(width=4, bias=True, dtype=F32):
    params = {"w": jnp.ones((4, width), dtype)} | ({"b": jnp.ones(width)} if bias else {})
    return TrainState.create(apply_fn=lambda p, x: x @ p["w"], params=params, tx=optax.adam(0.1))


def test_two_calls_give_trees_that_only_differ_beside_their_leaves():
    one, other = train_state(), train_state()
    assert not same_treedef(jax.tree.structure(one), jax.tree.structure(other))
    assert same_types(forms_of(one), forms_of(other))
    assert difference(forms_of(one), forms_of(other)) == ""
    merged = repacked(other, one)
    assert merged.tx is one.tx
    assert merged.params["w"] is other.params["w"]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (lambda: train_state(8), "`args[0].params['b']` is float32[4], was float32[8]"),
        (
            lambda: train_state(dtype=jnp.bfloat16),
            "`args[0].params['w']` is float32[4, 4], was bfloat16[4, 4]",
        ),
        (lambda: train_state(bias=False), "`args[0].params['b']` (float32[4]) is new"),
    ],
)
def test_a_difference_names_the_field(other, expected):
    found = difference(forms_of(train_state()), forms_of(other()), where="args[0]")
    assert found == expected
    back = difference(forms_of(other()), forms_of(train_state()), where="args[0]")
    assert back.startswith("`args[0].params['")
    assert back.endswith("is missing") is expected.endswith("is new")


def test_shardings_count_where_both_are_known():
    mesh = create_mesh_for(parse_mesh("dp:4", NAMES))
    split, whole = (NamedSharding(mesh, P(*spec)) for spec in (("dp",), ()))
    array = jnp.ones((8, 2))
    one, other = ({"w": jax.device_put(array, to)} for to in (split, whole))
    assert "`['w']` is split as" in difference(forms_of(one), forms_of(other))
    assert difference(forms_of(one), forms_of(other), shardings=False) == ""
    assert difference(forms_of(one), forms_of({"w": abstract(8, 2)})) == ""


trees = st.recursive(
    st.sampled_from([abstract(2), abstract(2, 3), abstract(dtype=jnp.int32), 1.0, None]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(one=trees, other=trees)
def test_equal_trees_have_no_difference_and_other_leaves_have_one(one, other):
    assert difference(forms_of(one), forms_of(jax.tree.map(lambda leaf: leaf, one))) == ""
    forms = forms_of(one), forms_of(other)
    assert (difference(*forms) == "") is same_types(*forms)
    if jax.tree.structure(one) == jax.tree.structure(other):
        assert same_names(*forms)


class Uncomparable:
    """What it is equal to is an array of truth values."""

    def __init__(self):
        self.values = np.arange(3.0)

    def __eq__(self, other):
        return self.values == other.values

    __hash__ = object.__hash__


@struct.dataclass
class WithSetting:
    w: jax.Array
    setting: object = struct.field(pytree_node=False)


def test_nodes_that_cannot_be_compared_are_not():
    one, other = (WithSetting(jnp.ones(3), Uncomparable()) for _ in range(2))
    assert same_types(forms_of(one), forms_of(other))
    assert not same_treedef(jax.tree.structure(one), jax.tree.structure(other))
    initial_args((one, jnp.ones(2)), (other, jnp.ones(2)))
    for setting in (one, other):  # jax keeps treedefs in its caches, and compares them.
        workload = Workload(jax.jit(lambda s: s.w.sum()), (setting,))
        lower(built(workload))


def test_a_state_that_the_step_makes_anew_is_carried_in_the_structure_of_the_first():
    state = train_state()
    outputs = (train_state(), jnp.ones(()))
    carry = default_carry((state, jnp.ones(2)), outputs, (False,) * 10)
    assert carry.pairs == ((0, 0),)
    (after, _) = carry.advance(outputs, (state, jnp.ones(2)))
    assert after.tx is state.tx
    assert after.params["w"] is outputs[0].params["w"]


CARRIES = {
    "leading": (("s", "o", "x"), ("s", "o", "l"), "", ((0, 0), (1, 1))),
    "without arrays": (("n", "s", "x"), ("s", "l"), "", ((1, 0),)),
    "last, donated": (("s", "o", "x"), ("l", "s", "o"), "so", ((0, 1), (1, 2))),
    "last, kept": (("s", "o", "x"), ("l", "s", "o"), "", ((0, 1), (1, 2))),
    "last, kept, without integers": (("s", "x"), ("l", "s"), "", ()),
    "after the batch": (("x", "s", "o"), ("l", "s", "o"), "so", ((1, 1), (2, 2))),
    "around the batch": (("s", "x", "o"), ("s", "l", "o"), "o", ((0, 0), (2, 2))),
    "ambiguous": (("x", "s"), ("l", "s", "s"), "s", ()),
    "one of two alike": (("s", "s", "x"), ("l", "s"), "s", ((0, 1),)),
}


@pytest.mark.parametrize("case", CARRIES)
def test_outputs_replace_the_arguments_that_they_look_like(case):
    kinds = {
        "s": {"w": abstract(4, 4)},
        "o": (abstract(4), abstract(dtype=jnp.int32)),
        "x": abstract(8),
        "l": abstract(),
        "n": None,
    }
    given_args, outputs, gone, expected = CARRIES[case]
    args = [kinds[kind] for kind in given_args]
    donated = [kind in gone for kind, arg in zip(given_args, args) for _ in jax.tree.leaves(arg)]
    carry = default_carry(args, [kinds[kind] for kind in outputs], donated)
    assert carry.pairs == expected


@pytest.mark.parametrize(
    ("args", "donated", "expected"),
    [("sx", "", ((0, 0),)), ("sx", "s", ((0, 0),)), ("xs", "s", ((1, 0),)), ("xs", "", ())],
)
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_state_that_is_returned_alone_is_one_output(kind, args, donated, expected):
    """Before, a list of layers that came back as a list was as many outputs as it has layers: no
    argument of the next step, and its donation was told to be lost."""
    kinds = {"s": kind([abstract(4, 4), {"w": abstract(4)}, abstract(4, 4)]), "x": abstract(8)}
    given = [kinds[one] for one in args]
    flags = [one in donated for one, arg in zip(args, given) for _ in jax.tree.leaves(arg)]
    carry = default_carry(given, kinds["s"], flags)
    assert carry.pairs == expected
    if expected:
        new = carry.advance(kinds["s"], tuple(given))
        assert jax.tree.structure(new) == jax.tree.structure(tuple(given))
        assert carry.lost == ()


# Steps that take more than arrays.


class Net(eqx.Module):
    layer: eqx.nn.Linear
    activation: types.FunctionType
    rate: float
    name: str = eqx.field(static=True, default="net")

    def __call__(self, x):
        assert isinstance(self.rate, float)
        return self.rate * self.activation(self.layer(x))


def net(width=4):
    return Net(eqx.nn.Linear(width, width, key=jax.random.key(0)), lambda x: jnp.tanh(x), 0.5)


def test_functions_and_numbers_of_an_equinox_module_stay_what_they_are():
    @eqx.filter_jit
    def step(net, x):
        return eqx.apply_updates(net, eqx.filter_grad(lambda n: n(x).sum())(net)), net(x).sum()

    model = net()
    program = lower(built(Workload(step, (model, abstract(4)))))
    held, _ = program.args
    names = [form.name for form in forms_of(program.args)]
    assert names == ["[0].layer.weight", "[0].layer.bias", "[1]"]
    assert program.carry.pairs == ((0, 0),)
    compiled = program.lowered.compile()
    after = compiled(held, jnp.ones(4))
    (new, _) = program.carry.advance(after, (held, jnp.ones(4)))
    compiled(new, jnp.ones(4))
    expected, _ = step(model, jnp.ones(4))
    np.testing.assert_allclose(new.parts[0], expected.layer.weight, rtol=1e-6)


def test_what_is_static_for_the_jit_inside_of_a_step_is_static():
    @functools.partial(jax.jit, static_argnums=(0, 3), static_argnames="flag", donate_argnums=1)
    def inner(kind, w, x, power, flag=False):
        assert flag
        assert power == 3
        return getattr(jnp, kind)(w * x.sum()) ** power, x.sum()

    step = functools.partial(inner, "sin")
    args = (abstract(4), {"x": abstract(8), "name": "train"}, 3)
    workload = Workload(lambda w, x, power, **more: step(w, x["x"], power, **more), args)
    with pytest.raises(ValueError, match="static"):
        lower(built(dataclasses.replace(workload, kwargs={"flag": True})))
    whole = Workload(step, (abstract(4), abstract(8), 3), {"flag": True})
    program = lower(built(whole))
    assert program.split.positions == (2,)
    assert jax.tree.leaves(program.kwargs) == []
    assert program.donated == (True, False)
    assert program.carry.pairs == ((0, 0),)


class Trainer:
    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def train(self, w, x):
        return w - x.sum(), x.sum()

    @functools.partial(jax.jit, static_argnums=0)
    def keep(self, w, x):
        return w - x.sum(), x.sum()


def test_a_method_is_a_step_and_gives_away_what_it_donates():
    for step, donated in ((Trainer().train, True), (Trainer().keep, False)):
        program = lower(built(Workload(step, (abstract(4), abstract(8)))))
        assert program.donated == (donated, False)


def test_what_several_functions_donate_is_given_away_once():
    first = jax.jit(lambda w, x: (w * x.sum(), x.sum()))
    last = jax.jit(lambda w, g: w - g, donate_argnums=(0, 1))

    def step(w, x, unused):
        grad, loss = first(w, x)
        return last(w, grad), loss

    program = lower(built(Workload(step, (abstract(4), abstract(8), abstract(2)))))
    assert program.donated == (True, False, False)


def test_a_part_of_an_argument_that_is_donated_gives_nothing_away():
    def step(state, x):
        a = jax.jit(lambda a: a * 2, donate_argnums=0)(state["a"])
        return {"a": a, "b": state["b"] + x.sum()}, x.sum()

    state = {"a": abstract(4), "b": abstract(4)}
    assert not any(lower(built(Workload(step, (state, abstract(8))))).donated)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.act = lambda x: jnp.tanh(x)

    def __call__(self, x):
        self.calls[...] += 1
        return self.act(self.linear(x))


def changed_in_place(model, optimizer, x):
    def loss_of(model):
        return jnp.mean(model(x) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def nnx_workload(jit, x=None):
    model = Layer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return Workload(jit(changed_in_place), (model, optimizer, jnp.ones((2, 4)) if x is None else x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jit", "donates"),
    [
        (lambda f: f, False),
        (nnx.jit, False),
        (functools.partial(nnx.jit, donate_argnums=(0, 1)), True),
    ],
)
def test_what_nnx_changes_in_place_is_the_state_of_the_next_step(jit, donates):
    workload = nnx_workload(jit)
    program = lower(built(workload))
    assert any(program.donated) is donates
    assert program.carry.pairs == ((0, 0), (1, 1))
    compiled = program.lowered.compile()
    args = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), program.args)
    losses = []
    for _ in range(3):
        outputs = compiled(*args)
        assert isinstance(outputs, StepOutputs)
        losses.append(float(outputs.returned))
        args = program.carry.advance(outputs, args)
    model, optimizer, x = nnx_workload(jit).args
    own = [float(nnx.jit(changed_in_place)(model, optimizer, x)) for _ in range(3)]
    np.testing.assert_allclose(losses, own, rtol=1e-5)
    names = [form.name for form in forms_of(args[0])]
    assert names == ["['calls'].value", "['linear']['bias'].value", "['linear']['kernel'].value"]
    assert int(args[0].parts[0]["calls"][...]) == 3


def test_an_nnx_object_that_is_only_read_is_given_back_by_nobody():
    def step(teacher, model, x):
        model.linear.kernel[...] += teacher.linear(x).sum()
        return x.sum()

    args = (Layer(nnx.Rngs(0)), Layer(nnx.Rngs(1)), jnp.ones((2, 4)))
    program = lower(built(Workload(step, args)))
    assert program.carry.pairs == ((1, 0),)


def test_variables_that_two_arguments_share_stay_one():
    model = Layer(nnx.Rngs(0))
    both = {"model": model, "again": model, "note": "shared"}

    def step(both, model, x):
        assert both["note"] == "shared"
        both["again"].linear.kernel[...] += x.sum()
        return model.linear.kernel[...].sum() - both["model"].linear.kernel[...].sum()

    program = lower(built(Workload(step, (both, model, jnp.ones((2, 4))))))
    assert len(jax.tree.leaves(program.args)) == 4
    outputs = program.lowered.compile()(*program.args)
    assert float(outputs.returned) == 0


def test_a_keyword_argument_must_not_be_changed_in_place():
    def step(x, *, model):
        model.calls[...] += 1
        return x.sum()

    workload = Workload(step, (jnp.ones(2),), {"model": Layer(nnx.Rngs(0))})
    with pytest.raises(UsageError, match="changes a keyword argument in place"):
        lower(built(workload))


def test_init_and_advance_see_the_users_own_objects():
    calls = []

    def init(mesh):
        return net(), jnp.full(4, 2.0)

    def step(net, x):
        return net, (net(x).sum(), "a word")

    def advance(outputs, args):
        model, (_, word) = outputs
        assert isinstance(model, Net)
        assert isinstance(args[0], Net)
        calls.append((word, args[0].name))
        return model, args[1]

    workload = pure(
        Workload(eqx.filter_jit(step), (net(), abstract(4)), init=init, advance=advance)
    )
    start, _ = initial_args(workload.init(None), workload.args)
    assert isinstance(start, TreeParts)
    outputs = workload.step(start, jnp.ones(4))
    again, _ = workload.advance(outputs, (start, jnp.ones(4)))
    assert same_types(forms_of(again), forms_of(workload.args[0]))
    assert calls == [("a word", "net")]


def test_a_single_argument_that_is_a_tuple_comes_out_of_init_whole():
    both = (net(), jnp.ones(4))
    workload = pure(Workload(lambda both: both, (both,), init=lambda mesh: both))
    (start,) = initial_args(workload.init(None), workload.args)
    assert same_types(forms_of(start), forms_of(workload.args[0]))


def test_arguments_of_arrays_alone_are_left_as_they_are():
    workload = Workload(lambda w, x, rate: w, ({"w": abstract(2)}, train_state(), 0.1))
    assert pure(workload) is workload
    jitted = Workload(jax.jit(lambda model: 0), (Layer(nnx.Rngs(0)),))
    assert pure(jitted) is jitted


# In a worker, which calls `build` again for the arrays that it makes.

DRIFTING = """
import jax, jax.numpy as jnp, optax
from flax.training.train_state import TrainState
WIDTH = 4

def build(mesh):
    state = TrainState.create(
        apply_fn=lambda p, x: x @ p["w"], params={"w": jnp.ones((4, WIDTH))}, tx=optax.sgd(0.1)
    )
    def step(state, x):
        grads = jax.grad(lambda p: state.apply_fn(p, x).sum())(state.params)
        return state.apply_gradients(grads=grads), x.sum()
    return jax.jit(step), (state, jnp.ones((2, 4)))
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name",
    [
        "train_state",
        "nnx_objects",
        "equinox_mlp",
        "closed_over",
        "donated_aliases",
        "mixed_batch",
        "trainer_method",
    ],
)
def test_steps_of_any_shape_are_visited_again_and_again(name, own_process):  # noqa: F811
    worker = Worker(script(SCRIPTS / "steps" / f"{name}.py"), own_process / "cache", NAMES)
    assert worker.inspect().used_axes == NAMES
    first = worker.visit("dp:2,tp:2", steps=1, samples=1)
    assert worker.visit("dp:2,tp:2", steps=1, samples=1).losses == first.losses
    np.testing.assert_allclose(worker.visit("dp:1").losses, first.losses, rtol=1e-3, atol=1e-6)
    assert len(set(first.losses)) > 1, "the state goes on from step to step"
    for ready in jobs._MEMORY.ready.values():
        kept = jax.tree.leaves((ready.tree, ready.workload.args))
        assert not any(isinstance(leaf, jax.Array) for leaf in kept)


def test_a_field_that_differs_from_call_to_call_is_named(own_process):  # noqa: F811
    path = own_process / "drifting.py"
    path.write_text(DRIFTING)
    worker = Worker(script(path), own_process / "cache", NAMES)
    expected = (
        "`build` returned other arguments when it was called again on the same mesh: "
        r"`args\[0\].params\['w'\]` is float32\[4, 8\], was float32\[4, 4\]"
    )
    worker.visit("dp:1")
    sys.modules["drifting"].WIDTH = 8
    with pytest.raises(UsageError, match=expected):
        worker.visit("dp:1")
