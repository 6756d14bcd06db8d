"""Synthetic arguments: the same on every mesh, never zero, positive where a sign would break."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.mesh.axes import parse_mesh
from automesh.mesh.layout.devices import create_mesh_for
from automesh.program.execute.arguments import maker, plan_leaves, values
from automesh.program.execute.value_domains import Domain, domains

NAMES = ("dp", "tp")
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64")
DTYPES = (*FLOATS, "int32", "int8", "int4", "uint8", "uint32", "bool")


def made(tree, mesh, spec, positive):
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, P(*spec[: len(leaf.shape)])), tree)
    leaves = plan_leaves(
        tree, shardings, [Domain(positive=positive)] * len(jax.tree.leaves(tree)), mesh
    )
    return maker(leaves)()


def bits(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("positive", [True, False])
def test_values_are_bitwise_equal_on_every_mesh(positive):
    tree = {name: jax.ShapeDtypeStruct((8, 24), name) for name in DTYPES}
    tree["key"] = jax.ShapeDtypeStruct((8,), jax.random.key(0).dtype)
    tree["scalar"] = jax.ShapeDtypeStruct((), jnp.bfloat16)
    seen = []
    for text in ("dp:1", "dp:8", "tp:8", "dp:2,tp:4", "dp:4,tp:2"):
        mesh = create_mesh_for(parse_mesh(text, NAMES))
        arrays = made(tree, mesh, NAMES, positive)
        assert all(array.sharding.device_set == set(mesh.devices.flat) for array in arrays)
        seen.append([bits(array) for array in arrays])
    assert all(one == seen[0] for one in seen)
    assert len(set(seen[0])) == len(seen[0]), "no two leaves are alike"


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 5000),
    shape=st.lists(st.sampled_from([1, 3, 64]), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    positive=st.booleans(),
)
def test_values_are_small_and_never_zero(seed, shape, dtype, positive):
    array = np.asarray(values(seed, shape, jnp.dtype(dtype), Domain(positive=positive)))
    assert array.shape == shape
    assert array.dtype == jnp.dtype(dtype)
    wide = array.astype(np.complex128 if dtype == "complex64" else np.float64)
    assert np.all(np.isfinite(wide))
    assert np.all(wide != 0)
    assert np.all(np.abs(wide) <= 7)
    if positive or not shape or dtype.startswith(("int", "uint", "bool")):
        assert np.all(wide.real > 0)


def test_floats_are_scaled_like_weights():
    array = np.asarray(values(3, (1024, 256), jnp.dtype("float32"), Domain()))
    assert abs(array.mean()) < 1e-3
    assert 0.5 / 32 < array.std() < 2 / 32
    assert np.unique(array).size > 200_000


def test_leaves_that_live_on_one_device_stay_there():
    mesh = create_mesh_for(parse_mesh("dp:4", NAMES))
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = [jax.ShapeDtypeStruct((8,), jnp.float32)] * 3
    leaves = plan_leaves(tree, [NamedSharding(mesh, P("dp")), single, None], [Domain()] * 3, mesh)
    arrays = maker(leaves)()
    assert [len(array.sharding.device_set) for array in arrays] == [4, 1, 4]


def positive(traced):
    return tuple(domain.positive for domain in domains(traced))


def signs(step, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return positive(jax.jit(step).trace(*args))


V, M = (8,), (8, 8)


def adam(weights, mean, square, x):
    grad = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(weights)
    square = 0.99 * square + 0.01 * grad**2
    return weights - mean / (jnp.sqrt(square / (1 - 0.99**2.0)) + 1e-8), mean, square


def scanned(weights, square):
    def body(carry, w):
        return carry * 0.9 + w @ w, jnp.sqrt(carry).sum()

    return jax.lax.scan(body, square, weights)


def looped(x, y, n):
    return jax.lax.while_loop(lambda c: c[0].sum() < 3, lambda c: (jnp.log(c[0]), c[1] * 2), (x, y))


def masked_mean(x, mask):
    return (x * mask).sum() / jnp.maximum(mask.sum(), 1.0)


CASES = {
    "adam": (adam, (M, M, M, M), (False, False, True, False)),
    "normalization": (
        lambda x, s: x * jax.lax.rsqrt(jnp.mean(x**2) + 1e-6) * s,
        (V, V),
        (False,) * 2,
    ),
    "variance": (lambda x: jnp.sqrt(jnp.mean((x - x.mean()) ** 2)), (V,), (False,)),
    "softmax": (lambda w, x: jnp.log(jax.nn.softmax(w @ x)), (M, V), (False, False)),
    "log likelihood": (lambda w, x: jax.nn.log_softmax(w @ x).mean(), (M, V), (False, False)),
    "denominator": (masked_mean, (V, V), (False, True)),
    "power": (lambda x, y: (x + y) ** 0.5 + y, (V, V), (True, True)),
    "branches": (
        lambda x, y: jax.lax.cond(x[0] > 0, jnp.log, lambda v: v, y),
        (V, V),
        (False, True),
    ),
    "carried": (scanned, ((3, 8, 8), M), (False, True)),
    "loop": (looped, (V, V, V), (True, False, False)),
    "remat": (lambda x: jax.grad(lambda v: jax.checkpoint(jnp.sqrt)(v).sum())(x), (V,), (True,)),
    "square": (lambda x: jnp.sqrt(x * x + jnp.abs(x) + jnp.exp(x)), (V,), (False,)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_must_be_positive_is_found(case):
    step, shapes, expected = CASES[case]
    assert signs(step, *shapes) == expected


def test_what_is_written_to_a_reference_and_read_under_a_root_is_positive():
    def step(ref, fresh, other):
        root = jnp.sqrt(ref[...])
        ref[...] = fresh
        return root + other

    ref = jax.ShapeDtypeStruct(V, jnp.float32, is_ref=True)
    plain = jax.ShapeDtypeStruct(V, jnp.float32)
    assert positive(jax.jit(step).trace(ref, plain, plain)) == (True, True, False)


def test_shard_map_is_followed():
    mesh = create_mesh_for(parse_mesh("dp:2", NAMES))
    mapped = jax.shard_map(
        lambda x, y: jnp.sqrt(x) + y, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp")
    )
    assert signs(mapped, V, (4,)) == (True, False)


def labels_of(logits, tokens, labels, other):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)
    return picked.sum() + jnp.arange(100.0)[tokens % 3 + tokens].sum() + other.sum()


def embedded(table, tokens):
    def body(carry, token):
        return carry + jax.checkpoint(lambda t: table[t])(token), None

    return jax.grad(lambda s: jax.lax.scan(body, table[0] * s, tokens)[0].sum())(1.0)


def bounds(step, *args):
    args = [jax.ShapeDtypeStruct(*arg) for arg in args]
    return [domain.below for domain in domains(jax.jit(step).trace(*args))]


def test_integers_stay_inside_of_what_they_look_up():
    integers = (8,), jnp.int32
    logits = (8, 50), jnp.float32
    assert bounds(labels_of, logits, integers, integers, integers) == [None, 100, 50, None]
    assert bounds(embedded, ((30, 4), jnp.float32), integers) == [None, 30]
    array = np.asarray(values(1, (4000,), jnp.dtype("int32"), Domain(below=50)))
    assert set(array.tolist()) == set(range(1, 50))
    assert set(np.asarray(values(1, (64,), jnp.dtype("int32"), Domain(below=1))).tolist()) == {1}
