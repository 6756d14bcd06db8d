"""What slices, pads, windows, rolls and reversals along a split dimension send.

The figures are those of programs that jaxlib 0.12 compiles for CPUs: KiB of all permutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import flops, value_of
from automesh.program.nouns import Propagation
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

KIB = 1 << 10


def _gated(x: Any) -> Any:
    gate, up = jnp.split(x, 2)
    return jax.nn.silu(gate) * up


def _packed(x: Any) -> Any:
    query, key, value = jnp.split(x, 3)
    return jax.nn.silu(query) * key + value


def _propagated(
    work: Callable[[Any], Any], rows: int, parts: int, platform: str = "cpu"
) -> Propagation:
    def build(mesh: Any) -> Any:
        x = jax.ShapeDtypeStruct((rows, 512), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
        return jax.jit(work), (x,)

    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("tp",), platform=platform
    )
    return propagate(programs, sizes=(("tp", parts),), probes=(), enter=lambda _: None)


def _sent_kib(found: Propagation, parts: int) -> dict[str, float]:
    sent: dict[str, float] = {}
    for one in found.terms.collectives:
        sizes = {"tp": parts}
        many = value_of(one.payload_bytes, sizes) * value_of(one.count, sizes) / KIB
        sent[one.kind] = sent.get(one.kind, 0.0) + many
    return sent


@pytest.mark.parametrize(
    ("work", "rows", "parts", "expected"),
    [
        (_gated, 1024, 2, 1024),
        (_gated, 1024, 4, 1280),
        (_gated, 1024, 8, 640),
        (_packed, 1536, 4, 2560),
        (_packed, 1536, 8, 2048),
        (jax.grad(lambda x: jnp.sum(jnp.sin(x[:512]))), 1024, 8, 640),
        (lambda x: jnp.tanh(jnp.pad(x, ((512, 512), (0, 0)))), 1024, 8, 1536),
        (lambda x: jnp.tanh(x[::-1]), 1024, 8, 256),
        (lambda x: jnp.roll(x, 300, axis=0), 1024, 8, 256),
        (lambda x: jnp.roll(x, 1, axis=0) + jnp.roll(x, -1, axis=0) - 2 * x, 1024, 8, 4),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"), 1024, 8, 4),
        (lambda x: jnp.tanh(x[::2]), 1024, 8, 0),
    ],
)
def test_rows_move_as_in_the_compiled_program(
    work: Callable[[Any], Any], rows: int, parts: int, expected: float
) -> None:
    sent = _sent_kib(_propagated(work, rows, parts), parts)
    assert sent.get("collective-permute", 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", 2048), ("tpu", 0)])
def test_a_running_sum_along_a_split_dimension_gathers_on_cpus(
    platform: str, expected: float
) -> None:
    def work(x: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.cumsum(x, axis=0)))

    sent = _sent_kib(_propagated(work, 1024, 8, platform), 8)
    assert sent.get("all-gather", 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", 2048), ("tpu", 0)])
def test_a_top_k_of_whole_rows_gathers_on_cpus(platform: str, expected: float) -> None:
    def work(x: Any) -> Any:
        return jnp.sum(jnp.sin(lax.top_k(x, 5)[0]))

    found = _propagated(work, 1024, 8, platform)
    assert _sent_kib(found, 8).get("all-gather", 0.0) == pytest.approx(expected)
    if platform == "cpu":  # The array gathered, and the first places alone.
        most = max(value_of(point.bytes, {"tp": 8}) for point in found.terms.points)
        assert most == pytest.approx(2048 * KIB, rel=0.05)


def test_a_top_k_along_the_dimension_that_is_split_gathers_on_cpus() -> None:
    def work(x: Any) -> Any:
        return jnp.sum(jnp.sin(lax.top_k(x.T, 8)[0]))

    sent = _sent_kib(_propagated(work, 4096, 8), 8)
    assert sent["all-gather"] == pytest.approx(8192)
    assert not {"all-to-all", "collective-permute"} & set(sent)


@pytest.mark.parametrize(("platform", "is_divided"), [("cpu", False), ("tpu", True)])
def test_the_places_that_a_top_k_keeps_are_not_split_like_what_it_looks_at(
    platform: str, is_divided: bool
) -> None:
    """Before, experts that choose their tokens were taken to share them out among the devices: an
    eighth of the multiplications."""

    def build(mesh: Any) -> Any:
        def loss(weights: Any, x: Any) -> Any:
            gate, up = weights
            scores, chosen = lax.top_k(jax.nn.softmax(x @ gate).T, 256)
            return jnp.mean((jnp.einsum("ecd,edf->ecf", x[chosen], up) * scores[..., None]) ** 2)

        def array(shape: Any, *spec: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

        weights = array((256, 8)), array((8, 256, 512))
        return jax.jit(jax.value_and_grad(loss)), (weights, array((2048, 256), "tp"))

    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("tp",), platform=platform
    )
    terms = propagate(programs, sizes=(("tp", 8),), probes=(), enter=lambda _: None).terms
    sizes = {"tp": 8}
    done = sum(value_of(one.count, sizes) * flops(one.matmuls, sizes) for one in terms.kernels)
    experts = 2 * 2 * 8 * 256 * 256 * 512  # Forwards, and the gradient of the weights.
    assert (done < experts) is is_divided


def test_places_of_an_ascending_sort_are_no_top_k() -> None:
    """Before, the rows were taken to be gathered as for a `lax.top_k`."""

    def work(x: Any) -> Any:
        return jnp.argsort(-x, axis=0)[:8].astype(jnp.float32).sum()

    sent = _sent_kib(_propagated(work, 4096, 8), 8)
    assert "all-gather" not in sent
    # Values and places before the sort, and the places behind it, as jaxlib 0.12 compiles it.
    assert sent["all-to-all"] == pytest.approx(3 * 4096 * 512 * 4 / KIB)


def test_equal_arrays_that_are_computed_apart_move_apart() -> None:
    """As in the program of jaxlib 0.12: the partitioner shares only what moves of one array."""

    def work(x: Any) -> Any:
        return jnp.sin(jnp.abs(x)[::-1]) + jnp.cos(jnp.abs(x)[::-1])

    assert _sent_kib(_propagated(work, 1024, 8), 8)["collective-permute"] == pytest.approx(512)

    def summed(x: Any) -> Any:
        return jnp.sum(jnp.abs(x), 0) * 2 + jnp.tanh(jnp.sum(jnp.abs(x), 0))

    assert _sent_kib(_propagated(summed, 1024, 8), 8)["all-reduce"] == pytest.approx(4)


def test_what_moves_in_another_pattern_at_other_sizes_is_propagated_apart() -> None:
    found = _propagated(_packed, 1536, 4)
    assert any("split over `tp` moves rows between devices" in note for note in found.notes)
    halo = _propagated(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"), 1024, 4
    )
    assert not any("moves rows" in note for note in halo.notes)


def _sent(work: Callable[[Any], Any], shape: Any, spec: Any, platform: str = "cpu") -> Any:
    def build(mesh: Any) -> Any:
        split = NamedSharding(mesh, P(*spec))
        x = jax.ShapeDtypeStruct(shape, jnp.complex64, sharding=split)
        return jax.jit(work, out_shardings=split), (x,)

    sizes = (("dp", 2), ("tp", 4)) if "dp" in spec and "tp" in spec else (("tp", 8),)
    axes = tuple(axis for axis, _ in sizes)
    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=axes, platform=platform
    )
    terms = propagate(programs, sizes=sizes, probes=(), enter=lambda _: None).terms
    known = dict(sizes)
    sent: dict[tuple[str, str], float] = {}
    for one in terms.collectives:
        many = value_of(one.payload_bytes, known) * value_of(one.count, known) / KIB
        key = one.kind, "+".join(one.axes)
        sent[key] = sent.get(key, 0.0) + many
    most = max((value_of(point.bytes, known) for point in terms.points), default=0.0)
    return sent, most / KIB, terms


def _fft(x: Any) -> Any:
    return lax.fft(x, "FFT", (x.shape[-1],))


def _ifft(x: Any) -> Any:
    return lax.fft(x, "IFFT", (x.shape[-1],))


@pytest.mark.parametrize(
    ("work", "spec", "expected"),
    [
        (_fft, ("dp", "tp", None), {}),
        (_ifft, (None, None, "tp"), {("all-gather", "tp"): 8192}),
        (_fft, ("dp", None, "tp"), {("all-gather", "tp"): 4096, ("all-gather", "dp"): 8192}),
        (
            _fft,
            (None, None, "tp"),
            {("all-to-all", "tp"): 8192, ("collective-permute", "tp"): 8192},
        ),
    ],
)
def test_fourier_transforms_as_in_the_compiled_program(
    work: Callable[[Any], Any], spec: Any, expected: dict[tuple[str, str], float]
) -> None:
    """Before, each was two all-to-alls."""
    sent, _, terms = _sent(work, (16, 256, 256), spec)
    assert sent == pytest.approx(expected)
    # The ring puts rows in another order by a product.
    assert any(kernel.matmuls for kernel in terms.kernels) is ("collective-permute" in str(sent))


def test_a_tpu_gathers_a_fourier_transform_along_its_dimension_alone() -> None:
    sent, _, _ = _sent(_fft, (16, 256, 256), ("dp", None, "tp"), "tpu")
    assert sent == pytest.approx({("all-gather", "tp"): 4096})


def test_a_running_sum_gathers_along_its_dimension_alone() -> None:
    """Before, the other axis gathered its batch, too."""

    def work(x: Any) -> Any:
        return jnp.cumsum(x, axis=1)

    sent, memory, _ = _sent(work, (8, 1024, 64), ("dp", "tp", None))
    assert sent == pytest.approx({("all-gather", "tp"): 2048})
    # As compiled: the gathered rows, and those that the windows of one device see.
    assert memory == pytest.approx(2048 + 2048 + 512, rel=0.1)


def test_windows_that_a_maximum_was_taken_of_stay_split() -> None:
    """Before, what comes back to them was gathered first."""

    def work(x: Any) -> Any:
        def pooled(y: Any) -> Any:
            return jnp.sum(
                lax.reduce_window(y, -jnp.inf, lax.max, (1, 4, 1), (1, 4, 1), "VALID") ** 2
            )

        return jax.grad(pooled)(jnp.abs(x)).astype(jnp.complex64)

    sent, _, _ = _sent(work, (8, 1024, 64), (None, "tp", None))
    assert "all-gather" not in {kind for kind, _ in sent}
