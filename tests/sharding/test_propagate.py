"""Steps that are hard to count: each gives terms, or names what it does not count."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import DivisibilityGuard, value_of
from automesh.program.script.build import build_on
from automesh.program.script.workload import Workload
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

AXES = ("dp", "tp")
BYTES = 4


def array(shape, mesh=None, spec=None, dtype=jnp.float32, **more):
    sharding = None if mesh is None else NamedSharding(mesh, P(*(spec or ())), **more)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def propagated(build, sizes, *probes, platform="cpu"):
    programs = Programs(
        build=lambda axes: build_on(build, axes), axis_names=AXES, platform=platform
    )
    given = [tuple(one.items()) for one in (sizes, *probes)]
    return propagate(programs, sizes=given[0], probes=given[1:], enter=lambda _: None)


def collectives(terms, sizes, kind=None):
    """What the step moves on one mesh: (kind, axes, payload bytes) with its count."""
    found = {}
    for one in terms.collectives:
        if kind in (None, one.kind):
            key = (one.kind, one.axes, value_of(one.payload_bytes, sizes))
            found[key] = found.get(key, 0) + value_of(one.count, sizes)
    return found


def flops(terms, sizes):
    return sum(
        2 * value_of(kernel.count, sizes) * one.batch.at(sizes) * one.m.at(sizes)
        * one.n.at(sizes) * one.k.at(sizes)
        for kernel in terms.kernels
        for one in kernel.matmuls
    )  # fmt: skip


def named(terms):
    return " ".join(f"{one.what} {one.why}" for one in terms.uncounted)


def manual(function, mesh, in_specs, out_specs, **more):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)


def test_collectives_of_a_manual_region_follow_the_sizes_of_its_axes():
    def build(mesh):
        def body(x, w):
            gathered = jax.lax.all_gather(w, "dp", tiled=True)
            scattered = jax.lax.psum_scatter(x @ gathered, "tp", scatter_dimension=1, tiled=True)
            swapped = jax.lax.all_to_all(scattered, "dp", split_axis=1, concat_axis=0, tiled=True)
            return jax.lax.psum(swapped.sum(), ("dp", "tp"))

        def step(x, w):
            return manual(body, mesh, (P("dp", None), P("dp", None)), P())(x, w)

        return step, (array((64, 128)), array((128, 256)))

    answer = propagated(build, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4})
    assert answer.failed_probes == () and answer.terms.fixed == ()
    for dp, tp in [(2, 2), (4, 2), (2, 8), (4, 4)]:
        sizes = {"dp": dp, "tp": tp}
        moved = collectives(answer.terms, sizes)
        assert moved[("all-gather", ("dp",), 128 * 256 * BYTES)] == 1
        assert moved[("reduce-scatter", ("tp",), 64 / dp * 256 * BYTES)] == 1
        assert moved[("all-to-all", ("dp",), 64 * 256 / tp * BYTES)] == 1
        assert moved[("all-reduce", ("dp", "tp"), BYTES)] == 1
        assert flops(answer.terms, sizes) == 2 * 64 / dp * 128 * 256


def test_an_untiled_gather_grows_with_its_axis():
    def build(mesh):
        def body(x):
            return jnp.sum(jax.lax.all_gather(x, "tp") ** 2, axis=0)

        def step(x):
            return manual(body, mesh, P("dp"), P("dp"), check_vma=False)(x)

        return step, (array((64, 128)),)

    answer = propagated(build, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4})
    assert answer.terms.fixed == ()
    for dp, tp in [(2, 2), (4, 2), (2, 8)]:
        moved = collectives(answer.terms, {"dp": dp, "tp": tp}, "all-gather")
        assert moved == {("all-gather", ("tp",), tp * 64 / dp * 128 * BYTES): 1}


def ring(mesh, scanned):
    size = mesh.shape["tp"]
    onward = [(one, (one + 1) % size) for one in range(size)]

    def body(x, w):
        def step(held, _):
            total, piece = held
            total = total + piece @ w
            return (total, jax.lax.ppermute(piece, "tp", onward)), None

        total = jax.lax.pcast(jnp.zeros((x.shape[0], w.shape[1])), AXES, to="varying")
        held = (total, x)
        if scanned:
            held, _ = jax.lax.scan(step, held, length=size - 1)
        else:
            for _ in range(size - 1):
                held, _ = step(held, None)
        return held[0] + held[1] @ w

    return manual(body, mesh, (P(("dp", "tp"), None), P()), P(("dp", "tp"), None))


def test_a_scanned_ring_runs_one_time_less_than_the_axis_is_long():
    def build(mesh):
        return ring(mesh, scanned=True), (array((256, 64)), array((64, 32)))

    answer = propagated(build, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 8})
    assert answer.failed_probes == () and answer.terms.fixed == ()
    for dp, tp in [(2, 2), (2, 4), (1, 16)]:
        sizes = {"dp": dp, "tp": tp}
        piece = 256 / dp / tp * 64 * BYTES
        moved = collectives(answer.terms, sizes, "collective-permute")
        assert moved == {("collective-permute", ("tp",), piece): tp - 1}
        assert flops(answer.terms, sizes) == 2 * 256 / dp / tp * 64 * 32 * tp


def test_an_unrolled_ring_holds_at_its_own_size_and_says_so():
    def build(mesh):
        return ring(mesh, scanned=False), (array((256, 64)), array((64, 32)))

    for size in (2, 4):
        answer = propagated(build, {"dp": 2, "tp": size}, {"dp": 2, "tp": 8})
        assert answer.terms.fixed == ("tp",)
        assert answer.failed_probes == ((("dp", 2), ("tp", 8)),)
        assert any("`tp`" in one and "propagated apart" in one for one in answer.notes)
        sizes = {"dp": 4, "tp": size}  # `dp` is none of its troubles.
        moved = collectives(answer.terms, sizes, "collective-permute")
        piece = 256 / 4 / size * 64 * BYTES
        assert moved == {("collective-permute", ("tp",), piece): size - 1}


def kernel(stated):
    from jax.experimental import pallas as pl

    def double(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    def call(x):
        cost = pl.CostEstimate(flops=x.size, bytes_accessed=2 * BYTES * x.size, transcendentals=0)
        return pl.pallas_call(
            double,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            cost_estimate=cost if stated else None,
        )(x)

    return call


@pytest.mark.parametrize("stated", [True, False])
def test_a_pallas_kernel_is_counted_as_it_states_or_named(stated):
    def build(mesh):
        def step(x):
            part = P("dp", "tp")
            return manual(kernel(stated), mesh, part, part, check_vma=False)(x) + 1

        return step, (array((256, 512)),)

    answer = propagated(build, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4}, platform="tpu")
    assert answer.terms.fixed == ()
    assert ("tpu_custom_call" in named(answer.terms)) == (not stated)
    # Stated or counted in its own program: each device reads and writes its part once.
    (one,) = [k for k in answer.terms.kernels if "custom_call" in k.operation]
    for dp, tp in [(2, 2), (4, 2), (8, 4)]:
        sizes = {"dp": dp, "tp": tp}
        assert value_of(one.bytes, sizes) == 2 * BYTES * 256 * 512 / dp / tp


def test_the_products_of_a_pallas_kernel_are_counted_at_other_sizes():
    """The heads of splash attention over tp: causal, so that 10 of 16 blocks are run."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, length, width, block = 8, 1024, 128, 256
    names = ("q", "kv", "kv_compute")
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in names})

    def build(mesh):
        def step(x):
            made = splash.make_splash_mha(
                mask, head_shards=mesh.shape["tp"], q_seq_shards=1, block_sizes=sizes
            )
            spec = made.manual_sharding_spec(NamedSharding(mesh, P("tp", None)))
            part = P("dp", "tp")

            def attend(made, x):
                return jax.vmap(made)(x, x, x)

            return manual(attend, mesh, (spec, part), part, check_vma=False)(made, x)

        return step, (array((8, heads, length, width)),)

    answer = propagated(build, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4}, platform="tpu")
    # Older versions of the kernel are other programs at other sizes, and are lowered for each.
    assert answer.terms.fixed == () or jax.__version_info__ < (0, 11)
    for dp, tp in [(2, 2), (4, 4), (8, 2)] if answer.terms.fixed == () else [(2, 2)]:
        blocks = 8 // dp * heads // tp * 10
        assert flops(answer.terms, {"dp": dp, "tp": tp}) == blocks * 2 * 2 * block**2 * width
    (said,) = [one for one in answer.terms.uncounted if "tpu_custom_call" in one.what]
    assert "elementwise arithmetic left out" in said.why and "skipped no block" not in said.why


def test_a_loop_of_unknown_length_is_named():
    def build(mesh):
        def step(x, w):
            return jax.lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: y @ w, x)

        return step, (array((64, 64), mesh, ("dp",)), array((64, 64), mesh, ()))

    answer = propagated(build, {"dp": 2}, {"dp": 4})
    assert "loop of unknown length" in named(answer.terms)
    assert flops(answer.terms, {"dp": 4}) == 2 * 16 * 64 * 64
    (loop,) = [one for one in answer.terms.uncounted if "loop" in one.what]
    assert loop.source.startswith("test_propagate.py:")


@pytest.mark.parametrize("trips", [1, 7])
def test_a_loop_with_constant_limits_multiplies_its_body(trips):
    def build(mesh):
        def step(x, w):
            return jax.lax.fori_loop(3, 3 + trips, lambda _, y: jnp.tanh(y @ w), x)

        return step, (array((64, 64), mesh, ("dp",)), array((64, 64), mesh, (None, "tp")))

    terms = propagated(build, {"dp": 2, "tp": 2}).terms
    assert terms.uncounted == ()
    assert flops(terms, {"dp": 2, "tp": 2}) == trips * 2 * 32 * 64 * 32


def test_a_ragged_dot_is_counted_or_named():
    def build(mesh):
        def step(x, w, sizes):
            return jax.lax.ragged_dot(x, w, sizes)

        return step, (array((64, 32)), array((4, 32, 16)), array((4,), dtype=jnp.int32))

    for platform in ("cpu", "tpu"):
        terms = propagated(build, {"dp": 2}, platform=platform).terms
        exact = 2 * 64 * 32 * 16
        assert flops(terms, {"dp": 2}) >= exact or "ragged_dot" in named(terms)


def test_routing_by_sorting_has_terms():
    def build(mesh):
        def step(x, w):
            order = jnp.argsort(jnp.argmax(x @ w, axis=-1))
            return jnp.take(x, order, axis=0) @ w

        return step, (array((128, 64), mesh, ("dp",)), array((64, 8), mesh, ()))

    terms = propagated(build, {"dp": 2}, {"dp": 4}).terms
    routed, mixed = 128 / 2 * 64 * 8, 128 * 64 * 8  # Rows in any order are on every device.
    assert flops(terms, {"dp": 2}) == 2 * (routed + mixed)
    assert any("sort" in one.operation for one in terms.kernels)


def test_donated_arguments_are_taken_over():
    def build(mesh):
        state = array((256, 256), mesh, ("dp",))
        return jax.jit(lambda s: s * 2, donate_argnums=0), (state,)

    terms = propagated(build, {"dp": 2}, {"dp": 4}).terms
    assert value_of(terms.alias_bytes, {"dp": 4}) == 256 * 256 * BYTES / 4
    assert value_of(terms.argument_bytes, {"dp": 4}) == 256 * 256 * BYTES / 4


def test_offloaded_arguments_are_not_in_device_memory():
    def build(mesh):
        there = NamedSharding(mesh, P("dp"), memory_kind="pinned_host")
        here = NamedSharding(mesh, P("dp"), memory_kind="device")
        kept = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=there)

        def step(kept, x):
            moments = jax.device_put(kept, here) * 0.9 + x
            return jax.device_put(moments, there)

        return jax.jit(step, out_shardings=there), (kept, array((256, 256), mesh, ("dp",)))

    terms = propagated(build, {"dp": 2}, {"dp": 4}, platform="tpu").terms
    assert value_of(terms.argument_bytes, {"dp": 2}) == 256 * 256 * BYTES / 2


def test_mutable_references_have_terms():
    def build(mesh):
        def step(state, x):
            state[...] = state[...] + x @ x
            return state[...].sum()

        state = jax.new_ref(jax.device_put(jnp.zeros((64, 64)), NamedSharding(mesh, P("dp"))))
        return step, (state, array((64, 64), mesh, ("dp",)))

    terms = propagated(build, {"dp": 2}, {"dp": 4}).terms
    assert flops(terms, {"dp": 4}) == 2 * 16 * 64 * 64


def test_an_unannotated_step_uses_no_axis():
    def build(mesh):
        return lambda x: x @ x, (array((64, 64)),)

    terms = propagated(build, {"dp": 2}, {"dp": 4}).terms
    assert terms.collectives == ()
    assert flops(terms, {"dp": 2}) == flops(terms, {"dp": 8}) == 2 * 64**3


def test_explicit_axis_types_have_terms():
    def build(mesh):
        def step(x, w):
            return jnp.sum(x @ w)

        args = (array((64, 32), mesh, ("dp",)), array((32, 64), mesh, (None, "tp")))
        return Workload(step, args, axis_types="explicit")

    terms = propagated(build, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4}).terms
    assert flops(terms, {"dp": 4, "tp": 2}) == 2 * 16 * 32 * 32
    over = [one.axes for one in terms.collectives]
    assert {one.kind for one in terms.collectives} == {"all-reduce"}
    assert sorted(axis for axes in over for axis in axes) == ["dp", "tp"]


@pytest.mark.parametrize("height", (1, 2, 8))
def test_the_gradient_of_a_pooling_has_terms_whatever_it_leaves(height):
    # Of 1 and 2 rows the pooling leaves one; Shardy's own rule for that fails its verifier.
    def build(mesh):
        def step(w, x):
            def loss(w):
                rows = jnp.einsum("bhwc,cd->bhwd", x, w)
                pooled = jax.lax.reduce_window(
                    rows, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
                )
                return jnp.sum(pooled**2)

            return w - jax.grad(loss)(w)

        x = array((64, height, 8, 16), mesh, ("dp",))
        return step, (array((16, 32), mesh, (None, "tp")), x)

    terms = propagated(build, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}).terms
    assert "select-and-scatter" in named(terms)
    assert ("all-reduce", ("dp",), 16 * 16 * BYTES) in collectives(terms, {"dp": 2, "tp": 2})


def test_branches_have_terms():
    def build(mesh):
        def step(x, w, flag):
            return jax.lax.cond(flag, lambda y: y @ w, lambda y: (y @ w) @ w, x)

        return step, (
            array((64, 64), mesh, ("dp",)),
            array((64, 64), mesh, ()),
            array((), dtype=jnp.bool_),
        )

    terms = propagated(build, {"dp": 2}, {"dp": 4}).terms
    assert flops(terms, {"dp": 2}) in [n * 2 * 32 * 64 * 64 for n in (1, 2, 3)]


def test_a_region_that_is_manual_over_one_axis_leaves_the_other_to_shardy():
    def build(mesh):
        def body(x, w):
            return jax.lax.psum(x @ w, "tp")

        def step(x, w):
            split = (P(None, "tp"), P("tp", None))
            return manual(body, mesh, split, P(), axis_names={"tp"})(x, w)

        return step, (array((64, 128), mesh, ("dp", "tp")), array((128, 32), mesh, ("tp",)))

    answer = propagated(build, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 4})
    assert answer.terms.fixed == ()
    for dp, tp in [(2, 2), (4, 4)]:
        sizes = {"dp": dp, "tp": tp}
        assert flops(answer.terms, sizes) == 2 * 64 / dp * 128 / tp * 32
        assert collectives(answer.terms, sizes) == {
            ("all-reduce", ("tp",), 64 / dp * 32 * BYTES): 1
        }


def test_a_step_that_refuses_a_probe_says_where():
    def build(mesh):
        if mesh.shape["dp"] > 4:
            raise ValueError("too many")
        return lambda x: x * 2, (array((64, 64), mesh, ("dp",)),)

    answer = propagated(build, {"dp": 2}, {"dp": 8}, {"dp": 4})
    assert answer.failed_probes == ((("dp", 8),),)
    assert value_of(answer.terms.argument_bytes, {"dp": 4}) == 64 * 64


def test_a_step_that_is_another_program_at_another_size_is_found_out():
    def build(mesh):
        deep = 2 if mesh.shape["dp"] > 4 else 1

        def step(x):
            for _ in range(deep):
                x = x @ x
            return x

        return step, (array((64, 64), mesh, ("dp",)),)

    answer = propagated(build, {"dp": 2}, {"dp": 8})
    assert answer.failed_probes == ((("dp", 8),),)
    assert answer.terms.fixed == ("dp",)


def test_heads_that_an_axis_cannot_split_whole_get_sub_axes():
    def build(mesh):
        def step(x, w):
            heads = (x @ w).reshape(16, 4, 64)
            return jnp.einsum("bhd,chd->bhc", heads, heads)

        return step, (array((16, 32), mesh, ()), array((32, 256), mesh, (None, "tp")))

    small = propagated(build, {"tp": 2}, {"tp": 4})
    assert small.failed_probes == () and small.terms.fixed == ()
    large = propagated(build, {"tp": 8})
    assert large.terms.fixed == ("tp",)
    assert any("part of `tp`" in one for one in large.notes)
    across = propagated(build, {"tp": 2}, {"tp": 8})
    assert (("tp", 8),) in across.failed_probes or any(
        guard.size % 8 for guard in across.terms.guards
    )


def test_a_minimum_of_a_size_limits_the_terms():
    def build(mesh):
        rows = 256

        def body(x):
            chunk = min(64, x.shape[0])
            pieces = x.reshape(-1, chunk, 32)
            return jax.lax.map(lambda piece: piece @ piece.T, pieces)

        def step(x):
            return manual(body, mesh, P("dp"), P("dp"))(x)

        return step, (array((rows, 32)),)

    answer = propagated(build, {"dp": 2}, {"dp": 4})
    assert answer.terms.limits == (("dp", 4),) and answer.terms.fixed == ()
    assert any("`dp` is larger than 4" in one for one in answer.notes)
    assert flops(answer.terms, {"dp": 4}) == 2 * 256 / 4 * 32 * 64


def chunked(built):
    """A step whose program depends on the size of `dp`, the more so beyond 4; `built` takes the
    sizes that it is built at."""

    def build(mesh):
        built.append(mesh.shape["dp"])

        def body(x):
            chunk = min(64, x.shape[0])
            pieces = x.reshape(-1, chunk, 32)
            return jax.lax.map(lambda piece: piece @ piece.T, pieces)

        def step(x):
            return manual(body, mesh, P("dp"), P("dp"))(x)

        return step, (array((256, 32)),)

    return Programs(build=lambda axes: build_on(build, axes), axis_names=AXES, platform="cpu")


def sized(programs, size, probe, largest):
    given = [(("dp", one),) for one in (size, probe, largest)]
    return propagate(
        programs, sizes=given[0], probes=given[1:2], largest=given[2], enter=lambda _: None
    )


def test_sizes_that_nobody_wants_are_not_tried():
    wanted, unwanted = [], []
    answer = sized(chunked(wanted), 2, 4, 4)
    assert max(wanted) == 4 and answer.terms.limits == ()
    assert sized(chunked(unwanted), 2, 4, 8).terms.limits == (("dp", 4),)
    assert 8 in unwanted


def test_an_axis_is_learnt_from_its_largest_size_where_a_probe_agrees():
    built = []

    def build(mesh):
        built.append(mesh.shape["dp"])

        def step(x):
            return manual(lambda part: part @ part.T, mesh, P("dp"), P("dp"))(x)

        return step, (array((256, 32)),)

    programs = Programs(build=lambda axes: build_on(build, axes), axis_names=AXES, platform="cpu")
    answer = sized(programs, 2, 4, 8)
    assert built == [2, 4, 8]
    assert answer.terms.fixed == () and answer.terms.limits == ()
    assert flops(answer.terms, {"dp": 8}) == 2 * (256 / 8) ** 2 * 32


def test_what_a_probe_contradicts_is_learnt_again_once():
    built = []
    programs = chunked(built)
    assert sized(programs, 2, 8, 8).terms.fixed == ("dp",)
    before = len(built)
    assert sized(programs, 2, 8, 8).terms.fixed == ("dp",)
    assert len(built) - before <= 2


def test_a_dimension_that_does_not_divide_is_counted_with_its_padding():
    def build(mesh):
        def step(x, w):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("tp", None)))
            return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("tp", None)))

        return step, (array((6, 32)), array((32, 64)))

    even = propagated(build, {"tp": 2})
    uneven = propagated(build, {"tp": 4})
    whole = 2 * 6 * 32 * 64
    assert flops(even.terms, {"tp": 2}) == whole / 2
    # Four parts of two rows each, though there are only six.
    assert flops(uneven.terms, {"tp": 4}) == whole / 3
    assert uneven.terms.fixed == ("tp",) and uneven.terms.guards == ()
    assert any("does not divide evenly over `tp`" in one for one in uneven.notes)


def test_a_program_is_not_derived_where_the_step_must_be_asked():
    def build(mesh):
        if mesh.shape["tp"] == 8:
            raise ValueError("tp is at most 4")

        def step(x):
            return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P(None, "tp")))

        return step, (array((16, 16), mesh, ("dp", None)),)

    programs = Programs(build=lambda axes: build_on(build, axes), axis_names=AXES, platform="cpu")

    def at(exact, **sizes):
        given = tuple(sizes.items())
        return propagate(programs, sizes=given, probes=(), exact=exact, enter=lambda _: None)

    for sizes in ({"dp": 2}, {"dp": 4}, {"tp": 2}, {"tp": 4}):
        at(False, **sizes)
    assert at(False, tp=8).terms.active == ("tp",)
    with pytest.raises(ValueError, match="at most 4"):
        at(True, tp=8)


def test_counters_that_grow_anyhow_say_nothing_about_where_the_terms_hold():
    def build(mesh):
        size = mesh.shape["tp"]

        def body(x):
            counters = jnp.arange(size - 1)
            return x * counters.sum(), counters

        def step(x):
            return manual(body, mesh, P("tp"), (P("tp"), P("tp")))(x)

        return step, (array((4096, 32)),)

    answer = propagated(build, {"tp": 2}, {"tp": 8})
    # The counters together are tp * (tp - 1): 2 at the sampled size, but always whole parts.
    assert answer.terms.guards == (DivisibilityGuard(size=4096, axes=("tp",)),)
    assert answer.terms.fixed == () and answer.failed_probes == ()


def search_of_a_solution(mesh):
    """An iteration whose condition multiplies, and gathers weights that never change."""

    def step(w, x, scale):
        def goes_on(carried):
            return jnp.max(jnp.abs(jax.nn.relu(carried[0] @ w))) > 1e-3

        return jax.lax.while_loop(goes_on, lambda c: (c[0] * scale, c[1] + 1), (x, 0))

    x = array((512, 1024), mesh, ("dp", None))
    return step, (array((1024, 1024), mesh, ("tp", None)), x, array(()))


def test_the_condition_of_a_loop_is_work_in_front_of_it_and_in_each_iteration():
    sizes = {"dp": 2, "tp": 4}
    terms = propagated(search_of_a_solution, sizes).terms
    # As XLA runs it: once more than the body, which counts once, and nothing is taken out of it.
    assert flops(terms, sizes) == 2 * 2 * 512 / 2 * 1024 * 1024 / 4
    moved = collectives(terms, sizes)
    assert moved[("all-reduce", ("tp",), 512 / 2 * 1024 * BYTES)] == 2
    assert moved[("all-reduce", ("dp",), BYTES)] == 2
    assert len({one.region for one in terms.kernels if one.matmuls}) == 2


def test_what_only_a_condition_gathers_stays_inside_of_the_loop():
    def build(mesh):
        step, (_, x, scale) = search_of_a_solution(mesh)
        return step, (array((1024, 1024), mesh, ("dp", None)), x, scale)

    sizes = {"dp": 8, "tp": 1}
    gathers = collectives(propagated(build, sizes).terms, sizes, "all-gather")
    assert gathers == {("all-gather", ("dp",), 1024 * 1024 * BYTES): 2}
