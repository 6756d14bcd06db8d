"""What the rules find in steps, at which line, and that mended steps are silent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import Finding, value_of
from automesh.program.script.build import build_on
from automesh.sharding.mlir.locations import place_of
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from automesh.sharding.silenced import silences

AXES = ("dp", "fsdp", "tp")
MIB = 1 << 20


def found_in(build: Callable[..., Any], platform: str = "tpu", **sizes: int) -> dict[str, Finding]:
    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=AXES, platform=platform
    )
    terms = propagate(programs, sizes=tuple(sizes.items()), probes=(), enter=lambda _: None).terms
    return {one.rule: one for one in terms.findings}


def array(mesh: Any, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def mib(finding: Finding, **sizes: int) -> float:
    return value_of(finding.bytes, sizes) / MIB


def line_of(text: str) -> str:
    """The place of the only line of this file that contains a text, but for its own search."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    (number,) = [n for n, line in enumerate(lines, 1) if text in line and "line_of(" not in line]
    return f"test_findings.py:{number}"


def descend(
    loss: Callable[..., Any], mesh: Any, state: Any, batch: Any, **options: Any
) -> tuple[Any, tuple[Any, Any]]:
    def step(state: Any, batch: Any) -> Any:  # the step of `descend`
        value, g = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, g), value

    return jax.jit(step, **cast(Any, {"donate_argnums": 0, **options})), (state, batch)


def layer(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize(("donated", "expected"), [((), True), ((0,), False)])
def test_state_that_is_not_donated(donated: tuple[int, ...], expected: bool) -> None:
    def build(mesh: Any) -> Any:
        state = array(mesh, (768, 1024), "fsdp")
        batch = array(mesh, (32, 768), "fsdp")
        return descend(layer, mesh, state, batch, donate_argnums=donated)

    found = found_in(build, fsdp=2)
    assert ("undonated-state" in found) is expected
    if expected:
        one = found["undonated-state"]
        assert (one.array, one.source) == ("args[0]", line_of("# the step of `descend`"))
        assert mib(one, fsdp=2) == 1.5


@pytest.mark.parametrize("spec", [(), ("fsdp",)])
def test_a_moment_that_is_whole_although_its_parameter_is_split(spec: tuple[str, ...]) -> None:
    def build(mesh: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            w, m = state
            value, g = jax.value_and_grad(layer)(w, x)
            m = jax.lax.with_sharding_constraint(0.9 * m + g, NamedSharding(mesh, P(*spec)))
            return (w - 0.1 * m, m), value

        w, m = array(mesh, (512, 1024), "fsdp"), array(mesh, (512, 1024), *spec)
        kept = jax.tree.map(lambda one: one.sharding, (w, m))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
        return jitted, ((w, m), array(mesh, (32, 512), "fsdp"))

    found = found_in(build, fsdp=4)
    assert ("replicated-state" in found) is (not spec)
    if not spec:
        one = found["replicated-state"]
        assert (one.array, one.detail, one.axes) == ("args[0][1]", "args[0][0]", ("fsdp",))
        assert mib(one, fsdp=4) == 2.0


def test_a_large_parameter_without_a_twin_that_no_axis_splits() -> None:
    def build(mesh: Any, axis: str = "fsdp") -> Any:
        def loss(state: Any, x: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ state["up"]) @ state["down"] + state["bias"]) ** 2)

        state = {
            "up": array(mesh, (512, 4096), axis),
            "down": array(mesh, (4096, 768)),
            "bias": array(mesh, (768,)),
        }
        return descend(
            loss, mesh, state, array(mesh, (32, 512), axis if axis == "fsdp" else None),
            out_shardings=(jax.tree.map(lambda one: one.sharding, state), None),
        )  # fmt: skip

    # It is the larger half: nothing says that tp was meant to split it, but for fsdp its name does.
    assert "replicated-state" not in found_in(partial(build, axis="tp"), tp=4)
    assert found_in(build, fsdp=4)["replicated-state"].array == "args[0]['down']"

    def mostly_split(mesh: Any) -> Any:
        step, (state, batch) = build(mesh)
        del step
        state |= {"more": array(mesh, (2048, 4096), "fsdp")}

        def loss(state: Any, x: Any) -> Any:
            hidden = jnp.tanh(x @ state["up"]) @ state["more"].T @ state["more"]
            return jnp.mean((hidden @ state["down"] + state["bias"]) ** 2)

        return descend(
            loss, mesh, state, batch,
            out_shardings=(jax.tree.map(lambda one: one.sharding, state), None),
        )  # fmt: skip

    one = found_in(mostly_split, fsdp=4)["replicated-state"]
    assert (one.array, one.axes) == ("args[0]['down']", ("fsdp",))


def test_devices_that_parts_of_an_axis_divide_do_different_work() -> None:
    """Four heads on eight devices: a part of the axis splits the heads, the rest their elements."""

    def build(mesh: Any) -> Any:
        def step(x: Any, w: Any, out: Any) -> Any:
            q, k, v = ((x @ one).reshape(4, 512, 4, 128) for one in w)
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            found = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
            return found.reshape(4, 512, 512) @ out

        w = tuple(array(mesh, (512, 512), None, "tp") for _ in range(3))
        return jax.jit(step), (array(mesh, (4, 512, 512)), w, array(mesh, (512, 512), "tp"))

    assert "repeated-work" not in found_in(build, "cpu", tp=8)


@pytest.mark.parametrize(
    ("scaled", "platform", "narrow", "is_first", "expected"),
    [
        (False, "cpu", jnp.float8_e4m3fn, False, True),
        (False, "tpu", jnp.float8_e4m3fn, False, True),
        (True, "tpu", jnp.float8_e4m3fn, False, True),
        (True, "cpu", jnp.float8_e4m3fn, True, False),
        (False, "cpu", jnp.bfloat16, False, False),  # CPUs send both in 32 bits.
        (False, "tpu", jnp.bfloat16, False, False),  # libtpu converts first.
        (False, "cpu", jnp.bfloat16, True, False),
    ],
)
def test_weights_that_are_gathered_wide_and_narrowed_behind_that(
    scaled: bool, platform: str, narrow: Any, is_first: bool, expected: bool
) -> None:
    def build(mesh: Any) -> Any:
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))

        def quantized(w: Any) -> tuple[Any, Any]:
            scale = 448.0 / jnp.max(jnp.abs(w)) if scaled else 1.0
            return (jnp.clip(w * scale, -448.0, 448.0) if scaled else w).astype(narrow), scale

        def step(w: Any, x: Any) -> Any:
            if is_first:
                kept, scale = quantized(w)
                kept = jax.lax.with_sharding_constraint(kept, split)
                kept = jax.lax.with_sharding_constraint(kept, whole)
            else:
                kept, scale = quantized(jax.lax.with_sharding_constraint(w, whole))
            y = jnp.dot(x.astype(narrow), kept, preferred_element_type=jnp.float32)
            return jnp.mean((y / scale) ** 2)

        x = array(mesh, (256, 1024), "fsdp", dtype=jnp.bfloat16)
        return jax.jit(step), (array(mesh, (1024, 1024), "fsdp"), x)

    found = found_in(build, platform, fsdp=8)
    assert ("wide-gather" in found) is expected
    if expected:
        one = found["wide-gather"]
        assert (one.array, one.axes, mib(one, fsdp=8)) == ("f32[1024,1024]", ("fsdp",), 4.0)


@pytest.mark.parametrize("rows", [1022, 1024])
def test_products_for_which_parts_are_gathered_that_may_be_uneven_are_no_repeated_work(
    rows: int,
) -> None:
    def build(mesh: Any) -> Any:
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))

        def step(w: Any, x: Any) -> Any:
            w = jax.lax.with_sharding_constraint(jnp.tanh(w)[:rows], split)
            return jnp.sin(x @ jax.lax.with_sharding_constraint(w, whole))

        return jax.jit(step), (array(mesh, (1024, 1024), "fsdp"), array(mesh, (512, rows)))

    assert "repeated-work" not in found_in(build, "cpu", fsdp=8)


@pytest.mark.parametrize("rows", [1022, 1024])
def test_wide_gathers_of_one_line_are_told_apart_by_how_often_they_run(rows: int) -> None:
    """Before, the bytes of all stood beside the number of times of the largest, and of parts that
    are not even nothing was said."""

    def build(mesh: Any) -> Any:
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))

        def times_weight(x: Any, w: Any) -> Any:
            w = jax.lax.with_sharding_constraint(jnp.tanh(w)[:rows], split)
            w = jax.lax.with_sharding_constraint(w, whole).astype(jnp.float8_e4m3fn)
            return x[:, :rows].astype(w.dtype) @ w

        def step(w: Any, stack: Any, x: Any) -> Any:
            x = times_weight(x, w)
            for_layers = partial(
                jax.lax.scan, lambda x, w: (times_weight(x, w).astype(x.dtype), None)
            )
            return jnp.mean(for_layers(x, stack)[0].astype(jnp.float32))

        stack = array(mesh, (3, 1024, 1024), None, "fsdp")
        x = array(mesh, (256, 1024), "fsdp", dtype=jnp.bfloat16)
        return jax.jit(step), (array(mesh, (1024, 1024), "fsdp"), stack, x)

    programs = Programs(build=lambda mesh: build_on(build, mesh), axis_names=AXES, platform="tpu")
    sizes = {"fsdp": 8}
    terms = propagate(programs, sizes=tuple(sizes.items()), probes=(), enter=lambda _: None).terms
    found = [one for one in terms.findings if one.rule == "wide-gather"]
    assert sorted(value_of(one.count, sizes) for one in found) == [1, 3]
    assert {mib(one, **sizes) for one in found} == {4.0}


def test_a_wide_array_that_is_also_read_as_it_is_has_to_be_gathered_wide() -> None:
    def build(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
            return jnp.mean((x @ w) ** 2 + (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) ** 2)

        return jax.jit(step), (array(mesh, (1024, 1024), "fsdp"), array(mesh, (256, 1024), "fsdp"))

    assert "wide-gather" not in found_in(build, "cpu", fsdp=8)


def compressed(mesh: Any, *, rank: int, is_stacked: bool = False, old: str = "factor") -> Any:
    """Gradients that are sent as two thin factors, one of which is kept, and what they miss."""

    def loss(w: Any, x: Any) -> Any:
        stack = w if is_stacked else w[None]
        return jnp.mean(jax.lax.scan(lambda h, one: (jax.nn.relu(h @ one), None), x, stack)[0] ** 2)

    def halves(g: Any, q: Any) -> Any:
        p = jnp.linalg.qr(g @ q)[0] if old == "factor" else jnp.linalg.qr(g[:, :rank])[0]
        q = g.T @ p if old == "factor" else 0.9 * q + g.T @ p
        return p @ q.T, q

    def step(state: Any, x: Any) -> Any:
        w, missed, q = state
        g = jax.grad(loss)(w, x) + missed
        if is_stacked:
            _, (sent, q) = jax.lax.scan(lambda _, one: (None, halves(*one)), None, (g, q))
        else:
            sent, q = halves(g, q)
        return (w - 0.1 * sent, g - sent, q), jnp.sum(q)

    layers = (3,) if is_stacked else ()
    split = (None, "fsdp") if is_stacked else ("fsdp",)
    w, missed = (array(mesh, (*layers, 2048, 2048), *split) for _ in range(2))
    state = w, missed, array(mesh, (*layers, 2048, rank))
    kept = jax.tree.map(lambda one: one.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted, (state, array(mesh, (256, 2048), "fsdp"))


@pytest.mark.parametrize("is_stacked", [False, True])
def test_thin_factors_that_products_read_before_and_after_are_whole_on_purpose(
    is_stacked: bool,
) -> None:
    build = partial(compressed, rank=256, is_stacked=is_stacked)
    assert "replicated-state" not in found_in(build, fsdp=8)


@pytest.mark.parametrize("again", ["", "loss", "accepted"])
@pytest.mark.parametrize("columns", [256, 1536])
def test_a_head_that_no_axis_splits_is_named_if_the_loss_is_computed_again(
    again: str, columns: int
) -> None:
    """Before, all weights of a step that evaluates its new parameters were whole on purpose."""

    def build(mesh: Any) -> Any:
        def loss(p: Any, x: Any) -> Any:
            for name in sorted(p.keys() - {"head"}):
                x = jnp.tanh(x @ p[name])
            return jnp.mean((x @ p["head"]) ** 2)

        def step(p: Any, x: Any) -> Any:
            before, grads = jax.value_and_grad(loss)(p, x)
            new = jax.tree.map(lambda a, g: a - 0.1 * g, p, grads)
            after = loss(new, x) if again else 0.0
            if again == "accepted":
                new = jax.tree.map(lambda a, b: jnp.where(after < before, a, b), new, p)
            return new, after

        p = {f"w{number:02}": array(mesh, (1024, 1024), "fsdp") for number in range(14)}
        p["head"] = array(mesh, (1024, columns))
        kept = jax.tree.map(lambda one: one.sharding, p)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
        return jitted, (p, array(mesh, (64, 1024), "fsdp"))

    found = found_in(build, fsdp=8)["replicated-state"]
    assert (found.array, found.axes) == ("args[0]['head']", ("fsdp",))


def test_factors_are_named_if_they_are_most_of_the_state_or_only_added_up() -> None:
    most = found_in(partial(compressed, rank=1024), fsdp=8)["replicated-state"]
    assert (most.array, mib(most, fsdp=8)) == ("args[0][2]", 8.0)
    added = found_in(partial(compressed, rank=256, old="sum"), fsdp=8)["replicated-state"]
    assert (added.array, mib(added, fsdp=8)) == ("args[0][2]", 2.0)


@pytest.mark.parametrize("made", ["on one device", "split"])
def test_state_that_was_made_on_one_device(made: str) -> None:
    def build(mesh: Any) -> Any:
        rows = NamedSharding(mesh, P("fsdp"))
        state = jnp.zeros((1024, 512))
        state = state if made == "on one device" else jax.device_put(state, rows)
        step = descend(layer, mesh, state, None)[0]
        return step, (state, array(mesh, (32, 1024), "fsdp"))

    found = found_in(build, fsdp=2)
    assert ("state-on-one-device" in found) is (made == "on one device")
    if made == "on one device":
        assert mib(found["state-on-one-device"], fsdp=2) == 2.0


def test_a_cache_of_the_examples_does_not_say_how_parameters_are_split() -> None:
    def build(mesh: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            w, cache = state
            value, g = jax.value_and_grad(layer)(w, x)
            return (w - 0.1 * g, 0.9 * cache + jnp.tanh(x @ w)), value

        state = array(mesh, (1024, 1024), None, "tp"), array(mesh, (2048, 1024), "dp", "tp")
        return jax.jit(step, donate_argnums=0), (state, array(mesh, (2048, 1024), "dp"))

    assert "replicated-state" not in found_in(build, "cpu", dp=2, tp=2)


@pytest.mark.parametrize("is_split", [True, False])
def test_a_loop_takes_slices_of_the_batch(is_split: bool) -> None:
    def build(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            def body(i: Any, g: Any) -> Any:
                part = jax.lax.dynamic_slice_in_dim(x, i * 8, 8, int(not is_split))  # rows of some
                return g + jax.grad(layer)(w, part)

            return w - jax.lax.fori_loop(0, 4, body, jnp.zeros_like(w)), jnp.sum(x)

        state = array(mesh, (256, 256), "fsdp")
        return jax.jit(step, donate_argnums=0), (state, array(mesh, (32, 32, 256), "fsdp"))

    found = found_in(build, "cpu", fsdp=4)
    assert ("microbatch-reshape" in found) is is_split
    if is_split:
        one = found["microbatch-reshape"]
        assert (one.array, one.source) == ("f32[32,32,256]", line_of("# rows of some"))


def accumulating(mesh: Any, *, interleaved: bool) -> Any:
    w, x = array(mesh, (256, 512)), array(mesh, (32, 64, 256), ("dp", "fsdp"))

    def step(w: Any, x: Any) -> Any:
        parts = x.reshape(4, 8, 64, 256)  # contiguous
        if interleaved:
            parts = x.reshape(8, 4, 64, 256).swapaxes(0, 1)

        def body(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(layer)(w, part)), None

        (value, g), _ = jax.lax.scan(body, (0.0, jnp.zeros_like(w)), parts)
        return w - 0.1 * g, value

    return jax.jit(step, donate_argnums=0), (w, x)


@pytest.mark.parametrize("sizes", [{"dp": 8}, {"dp": 2}, {"dp": 2, "fsdp": 4}], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_microbatches_that_are_split_instead_of_examples(
    sizes: dict[str, int], platform: str
) -> None:
    one = found_in(lambda mesh: accumulating(mesh, interleaved=False), platform, **sizes)[
        "microbatch-reshape"
    ]
    assert (one.array, one.source) == ("f32[32,64,256]", line_of("# contiguous"))
    assert set(one.axes) == set(sizes)


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_chunks_of_a_sequence_are_no_microbatches(axis: str) -> None:
    """Before, the cure put the rows of chunks in another order, which changes what is computed."""

    def build(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            def chunk(state: Any, one: Any) -> Any:
                y = one @ state
                return 0.9 * state + one.T @ one, y

            _, y = jax.lax.scan(chunk, jnp.zeros_like(w), x.reshape(16, 256, 256))
            return w - jnp.mean(y)

        return jax.jit(step), (array(mesh, (256, 256)), array(mesh, (4096, 256), axis))

    found = found_in(build, **{axis: 4})
    assert "microbatch-reshape" not in found
    assert found["layer-split-stack"].axes == (axis,)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_a_gradient_is_reduced_in_every_microbatch_where_the_compiler_leaves_it_there(
    platform: str,
) -> None:
    found = found_in(lambda mesh: accumulating(mesh, interleaved=True), platform, dp=4)
    # jaxlib 0.12 leaves it in the loop on CPUs; libtpu 0.0.52 and XLA for GPUs move it behind it.
    assert set(found) - {"gradient-per-microbatch", "parts-below-tile"} == set()
    assert ("gradient-per-microbatch" in found) is False  # 512 KiB are not worth a word

    def larger(mesh: Any) -> Any:
        step, (_, x) = accumulating(mesh, interleaved=True)
        return step, (array(mesh, (256, 2048)), x)

    found = found_in(larger, platform, dp=4)
    is_named = "gradient-per-microbatch" in found
    assert is_named is (platform == "cpu")
    if is_named:
        one = found["gradient-per-microbatch"]
        assert one.array == "f32[256,2048]" and value_of(one.count, {"dp": 4}) == 4


@pytest.mark.parametrize(("split", "unroll"), [("layers", 1), ("layers", 2), ("rows", 1)])
def test_a_stack_that_is_split_over_its_layers(split: str, unroll: int) -> None:
    def build(mesh: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            y, _ = jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w, unroll=unroll)
            return jnp.mean(y**2)

        spec = ("fsdp",) if split == "layers" else (None, "fsdp")
        return descend(loss, mesh, array(mesh, (4, 512, 512), *spec), array(mesh, (32, 512)))

    found = found_in(build, fsdp=2)
    assert "microbatch-reshape" not in found
    assert ("layer-split-stack" in found) is (split == "layers")
    if split == "layers":
        one = found["layer-split-stack"]
        assert one.detail == "args[0]" and one.cure is not None
        assert one.cure.splits[0] == ((), ("fsdp",), ())


ALONG = {
    "fft": (lambda y: jnp.abs(jnp.fft.fft(y, axis=0)), lambda y: jnp.abs(jnp.fft.fft(y, axis=1))),
    "sort": (lambda y: jnp.sort(y, axis=0), lambda y: jnp.sort(y, axis=1)),
}


@pytest.mark.parametrize("name", ALONG)
def test_operations_along_a_split_dimension(name: str) -> None:
    across, inside = ALONG[name]

    def build_of(function: Any) -> Any:
        def build(mesh: Any) -> Any:
            def loss(w: Any, x: Any) -> Any:
                return jnp.mean(function(jnp.tanh(x @ w)) ** 2)

            return descend(loss, mesh, array(mesh, (64, 512)), array(mesh, (64, 128, 64), "dp"))

        return build

    one = found_in(build_of(across), dp=4)["undivided-operation"]
    assert one.axes == ("dp",) and one.detail.startswith(name)
    assert "undivided-operation" not in found_in(build_of(inside), dp=4)


@pytest.mark.parametrize("spec", [(None, "dp"), ("dp",)], ids=["whole", "stacked"])
def test_factorizations_that_every_device_repeats(spec: tuple[str | None, ...]) -> None:
    def build(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            g = jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.einsum("bd,ldf->lbf", x, w)) ** 2))(w)
            return w - 0.1 * jax.vmap(jnp.linalg.qr)(g)[0], jnp.sum(x)  # on all of them

        w = array(mesh, (4, 512, 256), *spec)
        return jax.jit(step, donate_argnums=0), (w, array(mesh, (16, 512)))

    found = found_in(build, "cpu", dp=2)
    assert ("undivided-operation" in found) is (spec[0] is None)
    if spec[0] is None:
        one = found["undivided-operation"]
        assert one.source == line_of("# on all of them") and one.detail.endswith("repeated")


def test_what_each_device_computes_by_itself_is_no_constant_of_the_program() -> None:
    def build(mesh: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            y = x @ w
            return jnp.mean(jnp.abs(y - jnp.median(y, axis=0, keepdims=True)))

        return descend(loss, mesh, array(mesh, (64, 256)), array(mesh, (4096, 64), "dp"))

    assert "baked-constant" not in found_in(build, "cpu", dp=4)


@pytest.mark.parametrize("spec", [(), ("fsdp",)])
def test_a_batch_that_is_not_split_makes_all_devices_do_the_same(spec: tuple[str, ...]) -> None:
    def build(mesh: Any) -> Any:
        return descend(
            lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2),
            mesh,
            array(mesh, (512, 1024), "fsdp"),
            array(mesh, (64, 256, 512), *spec),
        )

    assert ("undivided-operation" in found_in(build, fsdp=4)) is (spec == ())


@pytest.mark.parametrize("size", [10, 16])
def test_padding_of_what_an_axis_does_not_divide(size: int) -> None:
    def build(mesh: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp")))
            return layer(w, x)

        return descend(loss, mesh, array(mesh, (512, 512)), array(mesh, (size, 512, 512)))

    found = found_in(build, dp=8)
    assert ("padding-waste" in found) is (size == 10)
    if size == 10:
        one = found["padding-waste"]
        assert (one.array, one.detail, one.axes) == ("f32[10,512,512]", "10 as 16", ("dp",))
        # Six of sixteen rows, two of them on each device.
        assert mib(one, dp=8) == 0.75


@pytest.mark.parametrize("constrained", [True, False])
def test_a_gradient_that_a_loop_adds_up_whole(constrained: bool) -> None:
    def build(mesh: Any) -> Any:
        w, x = array(mesh, (512, 1024), "fsdp"), array(mesh, (4, 16, 512), None, "fsdp")
        whole, like = NamedSharding(mesh, P()), w.sharding

        def step(w: Any, x: Any) -> Any:
            def body(total: Any, part: Any) -> Any:
                g = total + jax.grad(layer)(w, part)
                kept = like if constrained else whole
                return jax.lax.with_sharding_constraint(g, kept), None  # as it is kept

            kept = like if constrained else whole
            first = jax.lax.with_sharding_constraint(jnp.zeros((512, 1024)), kept)
            g, _ = jax.lax.scan(body, first, x)
            return w - 0.1 * g

        return jax.jit(step, donate_argnums=0), (w, x)

    found = found_in(build, fsdp=4)
    assert ("replicated-gradient" in found) is not constrained
    if not constrained:
        one = found["replicated-gradient"]
        assert (one.detail, one.axes, mib(one, fsdp=4)) == ("args[0]", ("fsdp",), 2.0)
        assert one.source == line_of("# as it is kept")


def test_a_comment_at_the_line_silences_a_rule() -> None:
    def build(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:  # automesh: ignore[undonated-state]
            return w - jax.grad(layer)(w, x)

        return jax.jit(step), (array(mesh, (1024, 1024), "fsdp"), array(mesh, (32, 1024)))

    assert "undonated-state" not in found_in(build, fsdp=2)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = 1  # automesh: ignore", True),
        ("x = 1  # automesh: ignore[padding-waste]", False),
        ("x = 1  # automesh:ignore[padding-waste, lost-donation]", True),
        ("x = 'ignore[lost-donation]'", False),
        ("x = 1  # automesh: allow lost-donation", True),
        ("x = 1  # automesh: allow padding-waste, lost-donation  (as measured)", True),
        ("x = 1  # automesh: allow padding-waste", False),
        ("x = 1  # automesh: allow", True),
        ("x = 1  # automesh: allow[padding-waste]", False),
    ],
)
def test_comments_name_rules(line: str, expected: bool) -> None:
    assert silences(line, "lost-donation") is expected


def test_code_of_libraries_has_no_place() -> None:
    assert place_of(str(jnp.__file__), 3) == "" and place_of("/home/me/train.py", 3) == "train.py:3"


def test_what_is_packed_into_one_dimension_is_moved_where_it_is_taken_apart() -> None:
    def gated(w: Any, x: Any) -> Any:
        gate, up = jnp.split(x @ w, 2, axis=1)
        return jnp.mean((jax.nn.silu(gate) * up) ** 2)

    def apart(w: Any, x: Any) -> Any:
        both = jnp.einsum("bd,dgf->bgf", x, w)
        return jnp.mean((jax.nn.silu(both[:, 0]) * both[:, 1]) ** 2)

    def build(mesh: Any, *, loss: Any = gated) -> Any:
        shape, spec = ((256, 4096), (None, "tp"))
        if loss is apart:
            shape, spec = (256, 2, 2048), (None, None, "tp")
        return descend(loss, mesh, array(mesh, shape, *spec), array(mesh, (1024, 256)))

    found = found_in(build, tp=4)["slice-across-parts"]
    assert found.array == "f32[1024,4096]" and found.axes == ("tp",)
    assert "slice-across-parts" not in found_in(partial(build, loss=apart), tp=4)


def test_random_bits_of_one_counter_are_nothing_that_is_packed() -> None:
    """Without partitionable threefry, jax takes the counter of the bits apart into halves."""

    def dropped(w: Any, x: Any) -> Any:
        hidden = x @ w
        keep = jax.random.bernoulli(jax.random.key(0), 0.9, hidden.shape)
        return jnp.mean(jnp.where(keep, hidden, 0) ** 2)

    def build(mesh: Any, *, is_counted: bool = False) -> Any:
        def counted(w: Any, x: Any) -> Any:
            split = NamedSharding(mesh, P("dp"))
            places = jax.lax.with_sharding_constraint(jnp.arange(2**21), split)
            first, second = jnp.split(places, 2)
            return jnp.mean((x @ w) ** 2) + jnp.sum(first * second)

        loss = counted if is_counted else dropped
        return descend(loss, mesh, array(mesh, (512, 512)), array(mesh, (4096, 512), "dp"))

    with jax.threefry_partitionable(False):
        found = found_in(build, "cpu", dp=4)
    assert "slice-across-parts" not in found
    assert found["moved-random-bits"].axes == ("dp",)
    assert "ui32[" in found["moved-random-bits"].array
    with jax.threefry_partitionable(True):
        found = found_in(build, "cpu", dp=4)
    assert not {"slice-across-parts", "moved-random-bits"} & found.keys()
    found = found_in(partial(build, is_counted=True), "cpu", dp=4)
    assert not {"slice-across-parts", "moved-random-bits"} & found.keys()


@pytest.mark.parametrize("name", ["one part", "shifted stages"])
def test_one_part_of_an_array_is_nothing_that_is_packed(name: str) -> None:
    """The words of the cure speak of queries, keys and values."""

    def taken(w: Any, x: Any) -> Any:
        y = x @ w
        if name == "one part":
            return jnp.mean(y[:, :1536] ** 2)
        return jnp.mean(jnp.concatenate([y[:, :1024] ** 2, y[:, :-1024]], 1) ** 2)

    def build(mesh: Any) -> Any:
        w = array(mesh, (256, 4096), None, "tp")
        return descend(taken, mesh, w, array(mesh, (1024, 256)))

    assert "slice-across-parts" not in found_in(build, tp=4)


def test_parts_are_below_a_tile_on_the_meshes_alone_where_they_are() -> None:
    def build(mesh: Any) -> Any:
        return descend(layer, mesh, array(mesh, (4096, 256), None, "tp"), array(mesh, (4096, 4096)))

    found = found_in(build, tp=8)["parts-below-tile"]
    assert found.is_on({"tp": 8}) and found.is_on({"tp": 4})
    assert not found.is_on({"tp": 2})  # 128 in each part.
    assert "parts-below-tile" not in found_in(build, platform="gpu", tp=8)


@pytest.mark.parametrize("is_widened", [True, False])
def test_products_of_operands_that_were_widened_for_them(is_widened: bool) -> None:
    def build(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            q = x @ w
            if is_widened:
                q = q.astype(jnp.float32)
            scores = jnp.einsum("btd,bsd->bts", q, q)  # most of the work
            return jnp.mean(scores.astype(jnp.float32) ** 2)

        x = array(mesh, (8, 1024, 128), "dp", dtype=jnp.bfloat16)
        return jax.jit(step), (array(mesh, (128, 128), dtype=jnp.bfloat16), x)

    found = found_in(build, "cpu", dp=2)
    assert ("wide-product" in found) is is_widened
    if is_widened:
        assert found["wide-product"].source == line_of("# most of the work")


def test_a_split_that_elementwise_operations_move_forward_has_the_line_that_asks_for_it() -> None:
    def build(mesh: Any) -> Any:
        def split(x: Any, *spec: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

        def step(w: Any, x: Any) -> Any:
            def body(h: Any, a: Any) -> Any:
                h = split(jnp.tanh(h * a), None, ("tp", "dp"), None)  # turned
                return split(jnp.sin(h), "tp", None, "dp"), None

            return jnp.mean(jax.lax.scan(body, x, w)[0])

        return jax.jit(step), (array(mesh, (4, 128)), array(mesh, (64, 64, 128), "tp", None, "dp"))

    programs = Programs(build=lambda mesh: build_on(build, mesh), axis_names=AXES, platform="cpu")
    sizes = (("dp", 4), ("tp", 2))
    terms = propagate(programs, sizes=sizes, probes=(), enter=lambda _: None).terms
    places = {one.source for one in terms.findings if one.rule == "full-rematerialization"}
    assert line_of("# turned") in places


def test_a_narrow_step_with_narrow_products_is_silent() -> None:
    def narrow(w: Any, x: Any) -> Any:
        y = jnp.dot(x, w, preferred_element_type=jnp.bfloat16)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def build(mesh: Any) -> Any:
        w, x = (array(mesh, (1024, 1024), *spec, dtype=jnp.bfloat16) for spec in ((), ("dp", None)))
        return descend(narrow, mesh, w, x)

    assert not {"wide-product", "wide-reduction"} & set(found_in(build, dp=8))


@pytest.mark.parametrize("spec", [(), ("fsdp",)])
def test_a_moment_that_is_split_along_another_dimension(spec: tuple[str, ...]) -> None:
    def build(mesh: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            p, m = state["p"], state["m"]
            m = {"w": 0.9 * m["w"] + jax.grad(lambda w: layer(w, x))(p["w"])}
            return {"p": {"w": p["w"] - 0.1 * m["w"]}, "m": m}, jnp.sum(x)

        other = spec or (None, "fsdp")
        state = {
            "m": {"w": array(mesh, (768, 1024), "fsdp")},
            "p": {"w": array(mesh, (768, 1024), *other)},
        }
        kept = jax.tree.map(lambda one: one.sharding, state)
        step = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
        return step, (state, array(mesh, (32, 768), "fsdp"))

    found = found_in(build, "cpu", fsdp=2)
    assert ("state-split-otherwise" in found) is (spec == ())
    if spec == ():
        one = found["state-split-otherwise"]
        assert (one.array, one.detail) == ("args[0]['p']['w']", "args[0]['m']['w']")
        assert one.cure is not None and one.cure.splits == ((("fsdp",), ()),)
        assert mib(one, fsdp=2) >= 1.5


def test_equal_parameters_may_be_split_along_different_dimensions() -> None:
    def build(mesh: Any) -> Any:
        def loss(p: Any, x: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

        p = {
            "up": array(mesh, (768, 768), None, "tp"),
            "down": array(mesh, (768, 768), "tp"),
        }
        return descend(loss, mesh, p, array(mesh, (32, 768)))

    assert "state-split-otherwise" not in found_in(build, tp=2)


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_count_that_was_made_on_one_device_is_compiled_for_again(is_placed: bool) -> None:
    def build(mesh: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            w = state["w"] - 0.1 * jax.grad(layer)(state["w"], x)
            return {"w": w, "count": state["count"] + 1}, jnp.sum(x)

        count = array(mesh, (), dtype=jnp.int32) if is_placed else jnp.zeros((), jnp.int32)
        state = {"w": array(mesh, (512, 512), "fsdp"), "count": count}
        kept = {"w": state["w"].sharding, "count": NamedSharding(mesh, P())}
        step = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
        return step, (state, array(mesh, (32, 512), "fsdp"))

    found = found_in(build, fsdp=2)
    assert ("second-compile" in found) is not is_placed
    if not is_placed:
        assert found["second-compile"].array == "args[0]['count']"


@pytest.mark.parametrize("donated", [(), (1,)])
def test_a_cache_that_is_returned_behind_the_logits(donated: tuple[int, ...]) -> None:
    def build(mesh: Any) -> Any:
        def step(w: Any, cache: Any, x: Any, place: Any) -> Any:
            key = (x @ w)[:, None]
            cache = [jax.lax.dynamic_update_slice(cache[0], key, (0, place, 0)), cache[1] * 2]
            return x @ w, cache

        cache = [array(mesh, (16, 256, 256), "dp"), array(mesh, (8, 8))]
        arguments = (array(mesh, (256, 256)), cache, array(mesh, (16, 256), "dp"))
        place = array(mesh, (), dtype=jnp.int32)
        return jax.jit(step, donate_argnums=donated), (*arguments, place)

    found = found_in(build, dp=2)
    assert ("undonated-state" in found) is (donated == ())
    if not donated:
        assert found["undonated-state"].array == "args[1][0]"


@pytest.mark.parametrize("is_static", [True, False])
def test_rows_that_are_replaced_in_a_split_array(is_static: bool) -> None:
    def build(mesh: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            h = jnp.tanh(x @ w)
            if is_static:
                h = h.at[:64].set(1.0)  # of a split array
            else:
                h = jnp.where(jnp.arange(len(h))[:, None] < 64, 1.0, h)
            return jnp.mean(jnp.tanh(h @ w) ** 2)

        return descend(loss, mesh, array(mesh, (512, 512)), array(mesh, (1024, 512), "dp"))

    found = found_in(build, "cpu", dp=4)
    assert ("undivided-operation" in found) is is_static
    if is_static:
        assert found["undivided-operation"].source == line_of("# of a split array")


@pytest.mark.parametrize(("rows", "expected"), [(256, True), (1, False)])
def test_rows_that_are_written_into_a_split_cache(rows: int, expected: bool) -> None:
    """Several rows may lie on several devices; a single one is written where it lies."""

    def build(mesh: Any) -> Any:
        def step(cache: Any, x: Any, place: Any) -> Any:
            cache = jax.lax.dynamic_update_slice(cache, x, (place, 0))  # into a cache
            return cache, jnp.sum(cache, 0)

        place = jax.ShapeDtypeStruct((), jnp.int32)
        args = array(mesh, (4096, 512), "dp"), array(mesh, (rows, 512)), place
        return jax.jit(step, donate_argnums=0), args

    found = found_in(build, "cpu", dp=4)
    assert ("undivided-operation" in found) is expected
    if expected:
        one = found["undivided-operation"]
        assert (one.array, one.source) == ("f32[4096,512]", line_of("# into a cache"))


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_an_array_that_the_script_asks_for_whole(axis: str) -> None:
    """Before, the keys of fewer heads than devices were named, which are meant to be whole."""

    def build(mesh: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            h = jnp.tanh(x @ w["a"])
            h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P()))
            return jnp.mean(jnp.tanh(h @ w["b"]) ** 2)

        w = {"a": array(mesh, (512, 512), None, "tp"), "b": array(mesh, (512, 512))}
        return descend(loss, mesh, w, array(mesh, (1024, 512), "dp"))

    found = found_in(build, "cpu", dp=1 if axis == "tp" else 4, tp=4 if axis == "tp" else 1)
    assert ("undivided-operation" in found) is (axis == "dp")


def test_what_the_compiler_narrows_is_no_type_of_the_script() -> None:
    """Before, float32 reductions were said to become bfloat16, which a TPU does by itself."""

    def build(mesh: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            h = jax.lax.with_sharding_constraint(x @ w["a"], NamedSharding(mesh, P(None, "tp")))
            h = jax.lax.with_sharding_constraint(h @ w["b"], NamedSharding(mesh, P("tp")))
            return jnp.mean((h @ w["c"]) ** 2)

        w = {
            "a": array(mesh, (512, 1024), None, "tp"),
            "b": array(mesh, (1024, 512), "tp"),
            "c": array(mesh, (512, 512), None, "tp"),
        }
        return jax.jit(step), (w, array(mesh, (1024, 512)))

    assert "wide-reduction" not in found_in(build, "tpu", tp=4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_loop_that_runs_longer_on_later_devices_is_uneven(is_causal: bool) -> None:
    def build(mesh: Any) -> Any:
        def attend(q: Any, k: Any) -> Any:
            parts = jax.lax.axis_index("tp") + 1 if is_causal else mesh.shape["tp"]

            def turn(number: Any, total: Any) -> Any:
                rows = jax.lax.dynamic_slice_in_dim(k, number * q.shape[0], q.shape[0])
                return total + jnp.exp(q @ rows.T) @ rows

            return jax.lax.fori_loop(0, parts, turn, jnp.zeros_like(q))  # as long as it is causal

        mapped = jax.shard_map(
            attend, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=False
        )
        rows = array(mesh, (4096, 512), "tp")
        return jax.jit(lambda q, k: mapped(q, k)), (rows, array(mesh, (4096, 512)))

    found = found_in(build, tp=4)
    assert ("uneven-work" in found) is is_causal
    if is_causal:
        assert found["uneven-work"].source == line_of("# as long as it is causal")
