"""What products send and compute whose operands have to move to other devices first.

The figures are those of programs that jaxlib 0.12 compiles for CPUs: MB of each kind of collective,
and FLOPs of a device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import Terms, flops, value_of
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

AXES = ("dp", "ep")
# To the idle devices, and of the gradient back from them.
MOVED = {"all-gather ep": 8.39, "collective-permute dp ep": 8.39, "all-reduce dp": 4.19}


def _array(mesh: Any, shape: tuple[int, ...], *spec: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def experts(mesh: Any) -> Any:
    """The gradient of experts' weights: tokens come from all devices, and go to their experts."""

    def step(w: Any, tokens: Any, d: Any) -> Any:
        return w - jnp.einsum("gecd,gecf->edf", jnp.tanh(tokens), jnp.tanh(d))

    w = _array(mesh, (8, 256, 512), "ep")
    tokens = _array(mesh, (16, 8, 128, 256), ("dp", "ep"))
    return jax.jit(step), (w, tokens, _array(mesh, (16, 8, 128, 512), "dp", "ep"))


def blocks(mesh: Any) -> Any:
    """A gradient whose rows all devices split, of columns that some of them split."""

    def step(m: Any, x: Any, d: Any) -> Any:
        return 0.9 * m + jnp.einsum("bd,bf->df", jnp.tanh(x), jnp.tanh(d))

    m = _array(mesh, (1024, 2048), ("dp", "ep"))
    x, d = _array(mesh, (1024, 1024), "dp"), _array(mesh, (1024, 2048), "dp", "ep")
    return jax.jit(step), (m, x, d)


def idle(mesh: Any) -> Any:
    """Rows and weights that the same devices split; the weights move to idle ones first."""

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    w, x = _array(mesh, (1024, 2048), "dp"), _array(mesh, (4096, 1024), "dp")
    return jax.jit(step), (w, x)


def _terms(build: Any, sizes: dict[str, int]) -> Terms:
    programs = Programs(build=lambda mesh: build_on(build, mesh), axis_names=AXES, platform="cpu")
    return propagate(programs, sizes=tuple(sizes.items()), probes=(), enter=lambda _: None).terms


def _flops(terms: Terms, sizes: dict[str, int]) -> float:
    return sum(value_of(one.count, sizes) * flops(one.matmuls, sizes) for one in terms.kernels)


def _sent(terms: Terms, sizes: dict[str, int]) -> dict[tuple[str, tuple[str, ...]], float]:
    sent: dict[tuple[str, tuple[str, ...]], float] = {}
    for one in terms.collectives:
        many = value_of(one.payload_bytes, sizes) * value_of(one.count, sizes)
        sent[one.kind, one.axes] = sent.get((one.kind, one.axes), 0.0) + many / 1e6
    return {kind: round(many, 2) for kind, many in sent.items() if many > 0.01}


@pytest.mark.parametrize(
    ("build", "sizes", "sent", "gflops"),
    [
        (experts, (2, 4), {"all-gather dp": 8.39, "all-gather dp ep": 16.78}, 1.07),
        (experts, (4, 2), {"all-gather dp": 16.78, "all-gather dp ep": 16.78}, 2.15),
        (blocks, (4, 2), {"all-gather ep": 2.1, "all-reduce dp": 8.39}, 1.07),
        (blocks, (2, 4), {"all-gather ep": 4.19, "all-reduce dp": 8.39}, 2.15),
        (idle, (2, 2), MOVED, 12.9),
        (idle, (4, 2), {"all-gather dp": 8.39, "all-reduce dp": 8.39}, 8.59),
    ],
)
def test_an_operand_that_fits_no_group_is_gathered(
    build: Any, sizes: tuple[int, int], sent: dict[str, float], gflops: float
) -> None:
    mesh: dict[str, int] = dict(zip(AXES, sizes, strict=True))
    terms = _terms(build, mesh)
    found = {f"{kind} {' '.join(axes)}": many for (kind, axes), many in _sent(terms, mesh).items()}
    assert found == sent
    assert _flops(terms, mesh) / 1e9 == pytest.approx(gflops, rel=0.01)


@pytest.mark.parametrize(("build", "is_found"), [(experts, True), (blocks, False)])
def test_a_full_gather_in_front_of_a_product_is_found(build: Any, is_found: bool) -> None:
    found = [
        one
        for one in _terms(build, {"dp": 2, "ep": 4}).findings
        if one.rule == "full-rematerialization"
    ]
    assert bool(found) is is_found
    for one in found:
        assert one.array == "f32[16,8,128,256]"
        assert one.source.startswith("test_moved_operands.py:")
