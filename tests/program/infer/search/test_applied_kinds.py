"""`MeshConfig.apply` takes whatever a script calls as its step, and gives what one device gives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from automesh import MeshConfig
from automesh.errors import UsageError
from automesh.program.infer.search.replaced import carried_of

X = np.random.RandomState(0).randn(16, 8).astype(np.float32)
PATTERNS = {
    "w": ["", "tp"],
    "m": ["", "tp"],
    "state/**": ["", "tp"],
    "**/kernel": ["", "tp"],
    "**/weight": ["tp", ""],
    "**/bias": [""],
    "**/step": [],
    "**/count": [],
    "x": ["batch", ""],
    "rest/*": ["batch", ""],
    "scale": [],
}
CONFIG = MeshConfig(
    mesh_shape=(2, 2),
    mesh_axis_names=("dp", "tp"),
    mapping={"batch": "dp"},
    sharding_patterns=PATTERNS,
)
MESH = CONFIG.create_device_mesh(jax.devices()[:4])
SPLIT = P(None, "tp")


def weights() -> Any:
    return jnp.asarray(np.random.RandomState(1).randn(8, 4), jnp.float32)


def updated(w: Any, m: Any, x: Any, rate: float = 0.1) -> Any:
    m = 0.9 * m + jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    return w - rate * m, m


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float


class State(NamedTuple):
    w: Any
    m: Any


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, w: Any, m: Any, x: Any) -> Any:
        return updated(w, m, x, self.rate)


@functools.partial(jax.jit, static_argnums=3, static_argnames="kind")
def with_static(w: Any, m: Any, x: Any, settings: Settings, kind: str = "") -> Any:
    return updated(w, m, x, settings.rate * (2 if kind == "fast" else 1))


@jax.jit
def with_rest(w: Any, m: Any, *rest: Any) -> Any:
    return updated(w, m, rest[0])


def of(step: Callable[..., Any], *more: Any, **keywords: Any) -> Callable[..., Any]:
    return lambda apply: lambda w, m: apply(step)(w, m, X, *more, **keywords)


CASES: dict[str, Callable[..., Any]] = {
    "static by place": of(with_static, Settings(0.1)),
    "static by name": of(with_static, Settings(0.05), kind="fast"),
    "method": lambda apply: lambda w, m: apply(Trainer(0.1).step)(jnp.array(w), m, X),
    "partial of a jitted one": lambda apply: (
        lambda w, m: apply(functools.partial(with_static, kind="fast"))(w, m, X, Settings(0.1))
    ),
    "jitted partial": of(jax.jit(functools.partial(updated, rate=0.1))),
    "keywords": lambda apply: lambda w, m: apply(jax.jit(updated))(x=X, m=m, w=w),
    "any number of arguments": of(with_rest, X),
    "inside of a jitted function": lambda apply: (
        lambda w, m: jax.jit(lambda w, m: apply(jax.jit(updated))(w, m, X))(w, m)
    ),
    "compiled ahead": lambda apply: (
        lambda w, m: apply(jax.jit(updated)).lower(w, m, X).compile()(w, m, X)
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_step_of_any_kind_gives_what_one_device_gives(kind: str) -> None:
    w = m = weights()
    alone, many = (
        CASES[kind](lambda step: step),
        CASES[kind](lambda step: CONFIG.apply(step, mesh=MESH)),
    )
    expected = alone(*alone(w, m))
    found = many(*many(w, m))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert one.sharding.is_equivalent_to(jax.NamedSharding(MESH, SPLIT), 2)


def test_static_values_are_told_apart() -> None:
    @functools.partial(jax.jit, static_argnums=1)
    def step(x: Any, times: int) -> Any:
        return jnp.concatenate([x] * times)

    applied = CONFIG.apply(step, mesh=MESH)
    assert [applied(X, times).shape for times in (1, 3, 2)] == [(16, 8), (48, 8), (32, 8)]


def test_a_method_gives_up_what_it_donates() -> None:
    step = CONFIG.apply(Trainer(0.1).step, mesh=MESH)
    w, m = step(weights(), weights(), X)
    step(w, m, X)
    assert w.is_deleted() and not m.is_deleted()


def test_a_class_has_an_applied_step() -> None:
    class Own:
        step = CONFIG.apply(Trainer.step, mesh=MESH)
        rate = 0.1

    assert Own().step(weights(), weights(), X)[0].sharding.spec == SPLIT


class Net(eqx.Module):
    layer: eqx.nn.Linear
    act: Callable[..., Any]


@eqx.filter_jit
def eqx_step(model: Any, opt: Any, x: Any) -> Any:
    def loss(model: Any) -> Any:
        return jnp.mean((jax.vmap(lambda row: model.act(model.layer(row)))(x) - 1) ** 2)

    value, slope = eqx.filter_value_and_grad(loss)(model)
    change, opt = optax.adam(1e-2).update(slope, opt)
    return eqx.apply_updates(model, change), opt, value


def test_a_step_of_equinox() -> None:
    model = Net(layer=eqx.nn.Linear(8, 4, key=jax.random.key(0)), act=jnp.tanh)
    opt = optax.adam(1e-2).init(eqx.filter(model, eqx.is_array))
    applied = CONFIG.apply(eqx_step, mesh=MESH)
    one: Any = (model, opt)
    many: Any = (model, opt)
    step: Any = eqx_step
    for _ in range(2):
        *one, expected = step(*one, X)
        *many, value = applied(*many, X)
        assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert many[0].layer.weight.sharding.spec == P("tp")
    assert many[1][0].mu.layer.weight.sharding.spec == P("tp")
    assert many[0].act is jnp.tanh


@nnx.jit
def nnx_step(model: Any, optimizer: Any, x: Any) -> Any:
    value, slope = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, slope)
    return value


def test_a_step_of_nnx() -> None:
    def made() -> Any:
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    step: Any = nnx_step
    applied = CONFIG.apply(step, mesh=MESH)
    one, many = made(), made()
    for _ in range(2):
        assert float(applied(*many, X)) == pytest.approx(float(step(*one, X)), rel=1e-5)
    kernel = many[0].kernel[...]
    assert kernel.sharding.spec == SPLIT
    np.testing.assert_allclose(kernel, one[0].kernel[...], rtol=1e-5, atol=1e-6)


def test_what_one_applied_step_gives_another_keeps_its_sharding() -> None:
    def grads(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)

    def change(w: Any, slope: Any) -> Any:
        return w - 0.1 * slope

    first, second = CONFIG.apply(grads, mesh=MESH), CONFIG.apply(change, mesh=MESH)
    w = weights()
    found = second(w, first(w, X))
    np.testing.assert_allclose(found, change(w, grads(w, X)), rtol=1e-5)
    with pytest.raises(UsageError, match="covers `slope`") as refused:
        CONFIG.apply(change, mesh=MESH)(w, weights())
    assert '"slope" = ["", ""]' in str(refused.value.hint)


def test_results_are_paired_with_what_they_replace_by_name_and_by_structure() -> None:
    w, m = {"a": weights()}, {"a": weights()}
    pairs = [(one.argument, one.output) for one in carried_of((w, m), (m, w), ("w", "m"))]
    assert pairs == [(0, 0), (1, 1)]  # Nothing tells them apart.
    pairs = [(r.argument, r.output) for r in carried_of((w, m), {"m": m, "w": w}, ("w", "m"))]
    assert pairs == [(0, 1), (1, 0)]
    whole = State(w=w, m=m)
    pairs = [(r.argument, r.output, r.count) for r in carried_of((whole,), (w, m), ("state",))]
    assert pairs == [(0, 0, 1), (1, 1, 1)]
    assert carried_of((1.0,), (2.0,), ("rate",)) == ()
