"""What is counted, and how often: loops, branches, traffic, widths, async pairs, axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.collectives import kind_named
from automesh.hlo import count, read_module
from automesh.hlo.nouns import WindowDimension
from automesh.hlo.schedule.read import trip_count
from automesh.hlo.spans import CollectiveSpan, span_of_groups, span_of_pairs
from automesh.hlo.work.flops import window_positions
from automesh.hlo.work.fusion_traffic import fusion_touches
from automesh.ir.terms.collect import collect
from automesh.outcomes import Collective, Counts
from automesh.sharding import passes
from automesh.sharding.mlir.module import read_graph
from tests.support.hlo_oracle import from_text, module_class, serialized
from tests.support.hlo_text import ADD

ONE = [("dp", 1)]
CUBE = [("dp", 2), ("fsdp", 2), ("tp", 2)]
N = 64
MATMUL = 2 * N * N * N
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)


def compiled(function: Callable[..., Any], *arguments: Any) -> bytes:
    return serialized(jax.jit(function).lower(*arguments).compile())


def counted(function: Callable[..., Any], *arguments: Any) -> Counts:
    return count(read_module(compiled(function, *arguments)), ONE)


# Loops.


def scanned(length: int) -> Counts:
    """A row-parallel matmul, scanned over `length` weights stored split over fsdp."""
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2),
        ("dp", "fsdp", "tp"),
        axis_types=(AxisType.Auto,) * 3,
    )

    def pin(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        hidden = pin(jnp.tanh(pin(x, "dp", None)), "dp", "tp")
        return pin(hidden @ pin(w, "tp", None), "dp", None), None

    arguments = [
        jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(mesh, P("dp"))),
        jax.ShapeDtypeStruct(
            (length, N, N), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp", "fsdp"))
        ),
    ]
    function = jax.jit(
        lambda x, w: jax.lax.scan(layer, x, w)[0], out_shardings=NamedSharding(mesh, P("dp"))
    )
    return count(read_module(serialized(function.lower(*arguments).compile())), CUBE)


@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_scan_is_n_times_its_body(length: int) -> None:
    counts = scanned(length)
    assert counts.flops == length * (2 * (N // 2) * (N // 2) * N)
    gathered, reduced = N // 2 * N * 4, N // 2 * N * 4
    assert counts.collectives == (
        Collective(
            kind="all-gather",
            axes=("fsdp",),
            group_size=2,
            count=length,
            payload_bytes=length * gathered,
            wire_bytes=length * gathered // 2,
        ),
        Collective(
            kind="all-reduce",
            axes=("tp",),
            group_size=2,
            count=length,
            payload_bytes=length * reduced,
            wire_bytes=length * reduced,
        ),
    )
    assert counts.uncounted == ()


def test_traffic_of_a_scan_is_linear_in_its_length() -> None:
    four, eight, twelve = (scanned(length).hbm_bytes for length in (4, 8, 12))
    assert eight - four == twelve - eight
    # Each trip reads a matrix product's three matrices at least, and no trip the whole stack.
    per_trip = (eight - four) // 4
    assert 3 * (N * N // 2 * 4) <= per_trip <= 12 * (N * N * 4)


def test_nested_loops_multiply() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(2, 7, lambda _, x: jnp.tanh(x @ x), x)

    def outer(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (inner(x) @ x, None), x, length=3)[0]

    counts = counted(outer, SQUARE)
    assert (counts.flops, counts.uncounted) == (3 * (5 + 1) * MATMUL, ())


def test_loop_of_unknown_length_is_counted_once_and_named() -> None:
    def unknown(x: jax.Array, limit: jax.Array) -> jax.Array:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return state[0] + 1, jnp.tanh(state[1] @ state[1])

        return jax.lax.while_loop(lambda state: state[0] < limit, body, (jnp.int32(0), x))[1]

    counts = counted(unknown, SQUARE, jax.ShapeDtypeStruct((), jnp.int32))
    assert counts.flops == MATMUL
    (text,) = counts.uncounted
    assert text.startswith("loop `while")
    assert text.endswith("of unknown length counted once")
    assert "(test_count.py:" in text


def test_unknown_loop_inside_a_scan_is_named_with_its_multiplicity() -> None:
    def halve(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x @ x / 2, x)

    counts = counted(lambda x: jax.lax.scan(lambda x, _: (halve(x), None), x, length=3)[0], SQUARE)
    assert counts.flops == 3 * MATMUL
    assert [text.endswith("(3 times)") for text in counts.uncounted] == [True]


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 7, 1), (3, 10, 1), (0, 10, 3), (5, 5, 1), (2, 31, 4)]
)
def test_trip_count_is_derived_where_the_compiler_does_not_state_it(
    start: int, stop: int, step: int
) -> None:
    def loop(x: jax.Array) -> jax.Array:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return state[0] + step, jnp.tanh(state[1] @ state[1])

        return jax.lax.while_loop(lambda state: state[0] < stop, body, (jnp.int32(start), x))[1]

    message = module_class().FromString(compiled(loop, SQUARE))
    stated = 0
    for computation in message.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                stated += b"known_trip_count" in instruction.backend_config
                instruction.ClearField("backend_config")
    module = read_module(message.SerializeToString())
    trips = len(range(start, stop, step))
    counts = count(module, ONE)
    assert (counts.flops, counts.uncounted) == (trips * MATMUL, ())
    whiles = [i for i in module.entry_computation.instructions.values() if i.opcode == "while"]
    for instruction in whiles:
        known = trip_count(module, module.entry_computation, instruction)
        assert (known.trips, known.source) == (trips, "derived")
    assert len(whiles) == stated == (1 if trips > 0 else 0)


LOOP = """HloModule m
cond {{
  s = (s32[], s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] get-tuple-element(s), index=1
  limit = s32[] constant({limit})
  ROOT c = pred[] compare({compare}), direction={direction}
}}
body {{
  s = (s32[], s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] get-tuple-element(s), index=1
  step = s32[] constant({step})
  next = s32[] {op}(i, step)
  ROOT t = (s32[], s32[]) tuple(next, n)
}}
ENTRY e {{
  start = s32[] {start}
  carried = s32[] constant(9)
  t = (s32[], s32[]) tuple(start, carried)
  ROOT w = (s32[], s32[]) while(t), condition=cond, body=body
}}"""


@pytest.mark.parametrize(
    ("changes", "trips", "source"),
    [
        ({}, 10, "derived"),
        ({"direction": "LE"}, 11, "derived"),
        ({"direction": "NE"}, 10, "derived"),
        ({"direction": "EQ"}, None, "unknown"),
        ({"compare": "limit, i", "direction": "GT"}, 10, "derived"),
        ({"compare": "limit, i", "direction": "GE"}, 11, "derived"),
        ({"compare": "i, n"}, 9, "derived"),  # A limit that the loop carries along unchanged.
        ({"step": "3"}, 4, "derived"),
        ({"step": "3", "direction": "NE"}, None, "unknown"),
        ({"op": "multiply", "step": "3"}, 10, "assumed"),
        ({"op": "multiply"}, None, "unknown"),  # Never ends.
        ({"start": "parameter(0)"}, 10, "assumed"),
        ({"start": "constant(12)", "op": "subtract", "direction": "GT"}, 2, "derived"),
        ({"start": "constant(12)", "op": "subtract", "direction": "GE"}, 3, "derived"),
        ({"op": "subtract"}, None, "unknown"),  # Never ends.
        ({"step": "0"}, None, "unknown"),
        ({"start": "constant(50)"}, 0, "derived"),
    ],
)
def test_trip_count_from_start_step_and_limit(
    changes: dict[str, str], trips: int | None, source: str
) -> None:
    usual = {
        "limit": "10",
        "compare": "i, limit",
        "direction": "LT",
        "step": "1",
        "op": "add",
        "start": "constant(0)",
    }
    module = read_module(from_text(LOOP.format(**{**usual, **changes})))
    entry = module.entry_computation
    known = trip_count(module, entry, entry.root_instruction)
    assert (known.trips, known.source) == (trips, source)


RUNNING = """HloModule m
cond {
  s = (s32[], s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] get-tuple-element(s), index=1
  ROOT c = pred[] compare(i, n), direction=LT
}
body {
  s = (s32[], s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] get-tuple-element(s), index=1
  step = s32[] constant(2)
  next = s32[] add(i, step)
  ROOT t = (s32[], s32[]) tuple(next, n)
}
ENTRY e {
  start = s32[] parameter(0)
  other = s32[] parameter(1)
  more = s32[] constant(20)
  limit = s32[] add(LIMIT, more)
  t = (s32[], s32[]) tuple(start, limit)
  ROOT w = (s32[], s32[]) while(t), condition=cond, body=body
}"""


@pytest.mark.parametrize(
    ("limit", "trips", "source"), [("start", 10, "derived"), ("other", None, "unknown")]
)
def test_start_and_limit_may_depend_on_data(limit: str, trips: int | None, source: str) -> None:
    module = read_module(from_text(RUNNING.replace("LIMIT", limit)))
    entry = module.entry_computation
    known = trip_count(module, entry, entry.root_instruction)
    assert (known.trips, known.source) == (trips, source)


def test_a_condition_runs_once_more_than_the_body() -> None:
    text = """HloModule m
cond {
  s = (s32[], f32[8,8]{1,0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[8,8]{1,0} get-tuple-element(s), index=1
  d = f32[8,8]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  limit = s32[] constant(5)
  ROOT c = pred[] compare(i, limit), direction=LT
}
body {
  s = (s32[], f32[8,8]{1,0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[8,8]{1,0} get-tuple-element(s), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT t = (s32[], f32[8,8]{1,0}) tuple(next, x)
}
ENTRY e {
  zero = s32[] constant(0)
  x = f32[8,8]{1,0} parameter(0)
  t = (s32[], f32[8,8]{1,0}) tuple(zero, x)
  ROOT w = (s32[], f32[8,8]{1,0}) while(t), condition=cond, body=body
}"""
    counts = count(read_module(from_text(text)), ONE)
    assert (counts.flops, counts.uncounted) == ((5 + 1) * (2 * 8 * 8 * 8), ())


def test_assumed_trips_are_named() -> None:
    text = LOOP.format(
        limit=10, compare="i, limit", direction="LT", step=1, op="add", start="parameter(0)"
    )
    counts = count(read_module(from_text(text)), ONE)
    assert counts.uncounted == ("loop `w` taken to run 10 times from 0 in steps of 1",)


# Branches and calls.


def test_conditional_counts_its_costliest_branch_and_says_so() -> None:
    def branches(x: jax.Array, which: jax.Array) -> jax.Array:
        return jax.lax.switch(which, [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x], x)

    counts = counted(branches, SQUARE, jax.ShapeDtypeStruct((), jnp.int32))
    assert counts.flops == 2 * MATMUL
    (text,) = counts.uncounted
    assert text.startswith("conditional `")
    assert text.endswith("counted as its costliest branch")


def test_branches_of_equal_work_need_no_remark() -> None:
    counts = counted(
        lambda x, p: jax.lax.cond(p, lambda x: x @ x, lambda x: x @ x.T, x),
        SQUARE,
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    assert (counts.flops, counts.uncounted) == (MATMUL, ())


def test_custom_calls_are_named_with_their_number() -> None:
    counts = counted(lambda x: jnp.linalg.cholesky(jnp.linalg.cholesky(x) @ x), SQUARE)
    assert counts.flops == MATMUL
    assert counts.uncounted == ("custom call `lapack_spotrf_ffi` (2 times)",)


VECTOR = jax.ShapeDtypeStruct((1024,), jnp.float32)


def pooled(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME")


# The name of what is not counted, the function, its argument.
MORE_THAN_BYTES: list[tuple[str, Callable[..., Any], jax.ShapeDtypeStruct]] = [
    ("fft", jnp.fft.fft, jax.ShapeDtypeStruct((N,), jnp.complex64)),
    ("sort", jnp.sort, VECTOR),
    ("topk", lambda x: jax.lax.top_k(x, 4), VECTOR),
    ("reduce-window", pooled, SQUARE),
    (
        "rng-bit-generator",
        lambda key: jax.lax.rng_bit_generator(key, (64,)),
        jax.ShapeDtypeStruct((4,), jnp.uint32),
    ),
    ("select-and-scatter", jax.grad(lambda x: pooled(x).sum()), SQUARE),
]


@pytest.mark.parametrize(
    ("name", "function", "argument"), MORE_THAN_BYTES, ids=[one[0] for one in MORE_THAN_BYTES]
)
def test_arithmetic_beyond_bytes_and_products_is_named(
    name: str, function: Callable[..., Any], argument: jax.ShapeDtypeStruct
) -> None:
    """Before, only that of `fft` and two more was: a sort was as good as a copy."""
    lowered = jax.jit(function).lower(argument).compiler_ir("stablehlo")
    traced = collect(read_graph(passes.partitioned(lowered)), active=(), platform="cpu")
    named = {one.what for one in traced.uncounted}
    # JAX writes the largest elements as a part of a sort, which the compiler knows for what it is.
    assert named & {f"arithmetic of `{name}`", "arithmetic of `sort`" if name == "topk" else ""}
    # The CPU compiler writes some of them in simpler operations, which are counted.
    if name not in ("rng-bit-generator", "select-and-scatter"):
        named = [text.partition(" (")[0] for text in counted(function, argument).uncounted]
        assert named == [f"arithmetic of `{name}`"]


def test_a_sort_in_a_fusion_is_named() -> None:
    text = """
HloModule sorted

less {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = pred[] compare(a, b), direction=LT
}

fused {
  x = f32[128]{0} parameter(0)
  s = f32[128]{0} sort(x), dimensions={0}, to_apply=less
  ROOT y = f32[128]{0} negate(s)
}

ENTRY main {
  p = f32[128]{0} parameter(0)
  ROOT f = f32[128]{0} fusion(p), kind=kLoop, calls=fused
}
"""
    assert count(read_module(from_text(text)), ONE).uncounted == ("arithmetic of `sort`",)


# FLOPs.


def test_batched_and_complex_products() -> None:
    left = jax.ShapeDtypeStruct((3, 5, 7, 11), jnp.float32)
    right = jax.ShapeDtypeStruct((3, 5, 11, 13), jnp.float32)
    assert counted(jnp.matmul, left, right).flops == 2 * (3 * 5) * 7 * 13 * 11
    square = jax.ShapeDtypeStruct((N, N), jnp.complex64)
    assert counted(jnp.matmul, square, square).flops == 4 * MATMUL


def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID")


IMAGE = jax.ShapeDtypeStruct((8, 16, 32, 32), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((32, 16, 3, 3), jnp.float32)
CONVOLUTION = 2 * (8 * 30 * 30) * 32 * (16 * 3 * 3)


def test_convolution() -> None:
    assert counted(convolve, IMAGE, KERNEL).flops == CONVOLUTION


def test_gradient_of_a_convolution_is_three_times_it() -> None:
    # Its input gradient is a convolution over padding; its products with zeros are no work.
    gradient = jax.grad(lambda x, k: (convolve(x, k) ** 2).sum(), (0, 1))
    assert counted(gradient, IMAGE, KERNEL).flops == 3 * CONVOLUTION


def test_grouped_convolution() -> None:
    def grouped(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(image, kernel, (2, 2), "VALID", feature_group_count=4)

    kernel = jax.ShapeDtypeStruct((32, 4, 3, 3), jnp.float32)
    assert counted(grouped, IMAGE, kernel).flops == 2 * (8 * 15 * 15) * 32 * (4 * 3 * 3)


@given(
    length=st.integers(1, 12),
    size=st.integers(1, 4),
    stride=st.integers(1, 3),
    low=st.integers(-2, 4),
    high=st.integers(-2, 4),
    dilation=st.integers(1, 3),
    base=st.integers(1, 3),
)
def test_window_positions_match_brute_force(
    length: int, size: int, stride: int, low: int, high: int, dilation: int, base: int
) -> None:
    window = WindowDimension(
        size=size,
        stride=stride,
        padding_low=low,
        padding_high=high,
        window_dilation=dilation,
        base_dilation=base,
    )
    cells = [False] * low if low > 0 else []
    for element in range(length):
        cells += [True] + [False] * (base - 1 if element < length - 1 else 0)
    cells += [False] * max(high, 0)
    cells = cells[max(-low, 0) : len(cells) - max(-high, 0)]
    span = (size - 1) * dilation + 1
    results = max(0, (len(cells) - span) // stride + 1)
    met = sum(
        cells[result * stride + offset * dilation]
        for result in range(results)
        for offset in range(size)
    )
    assert window_positions(length, results, window) == met


# Traffic.


def traffic(body: str, *computations: str) -> int:
    text = "HloModule m\n" + "\n".join(computations) + "\nENTRY e {\n" + body + "\n}"
    return count(read_module(from_text(text)), ONE).hbm_bytes


ROW, TABLE = 256 * 4, 1024 * 256 * 4
OPERANDS = """  table = f32[1024,256]{1,0} parameter(0)
  row = f32[1,256]{1,0} parameter(1)
  i = s32[] parameter(2)
  zero = s32[] constant(0)
"""


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("f32[1024,256]{1,0} negate(table)", 2 * TABLE),
        ("f32[1024,256]{1,0} add(table, table)", 2 * TABLE),  # Read once.
        ("f32[262144]{0} bitcast(table)", 0),
        ("(f32[1024,256]{1,0}, s32[]) tuple(table, i)", 0),
        ("f32[1,256]{1,0} dynamic-slice(table, i, zero), dynamic_slice_sizes={1,256}", 2 * ROW + 8),
        ("f32[4,256]{1,0} slice(table), slice={[0:4], [0:256]}", 2 * 4 * ROW),
        ("f32[1024,256]{1,0} dynamic-update-slice(table, row, i, zero)", 2 * ROW),
        ("f32[1024,1]{1,0} dot(table, row), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
         TABLE + ROW + 1024 * 4),
    ],
)  # fmt: skip
def test_traffic_of_one_instruction(root: str, expected: int) -> None:
    assert traffic(f"{OPERANDS}  ROOT r = {root}") == expected


FUSED = """fused {
  table = f32[1024,256]{1,0} parameter(0)
  row = f32[1,256]{1,0} parameter(1)
  i = s32[] parameter(2)
  zero = s32[] constant(0)
BODY
}"""
ONE_ROW, WHOLE = "f32[1,256]{1,0}", "f32[1024,256]{1,0}"
SLICE = "dynamic-slice(OF, i, zero), dynamic_slice_sizes={1,256}"


@pytest.mark.parametrize(
    ("result", "body", "expected"),
    [
        # Updates a row in place: reads the row and the index, writes the row.
        (WHOLE, f"n = {ONE_ROW} negate(row); dynamic-update-slice(table, n, i, zero)", 2 * ROW + 4),
        # Reads a row, adds another.
        (ONE_ROW, f"s = {ONE_ROW} {SLICE.replace('OF', 'table')}; add(s, row)", 3 * ROW + 4),
        # The same through a bitcast.
        (ONE_ROW, f"b = {WHOLE} bitcast(table); s = {ONE_ROW} {SLICE.replace('OF', 'b')};"
         " add(s, row)", 3 * ROW + 4),
        # What is cut out of an elementwise value is all that is computed of it, and read for it.
        (ONE_ROW, f"n = {WHOLE} negate(table); {SLICE.replace('OF', 'n')}", 2 * ROW + 4),
        # Every other of the first half of the rows, one after the other.
        ("f32[256,256]{1,0}", "h = f32[512,256]{1,0} slice(table), slice={[0:512], [0:256]};"
         " n = f32[512,256]{1,0} exponential(h);"
         " slice(n), slice={[0:512:2], [0:256]}", 2 * 256 * ROW),
        # Both halves of what two slices read.
        ("f32[512,256]{1,0}", f"n = {WHOLE} negate(table);"
         "a = f32[512,256]{1,0} slice(n), slice={[0:1024:2], [0:256]};"
         "b = f32[512,256]{1,0} slice(n), slice={[1:1024:2], [0:256]}; add(a, b)",
         TABLE + 512 * ROW),
        # The slice does not help where the whole is read as well.
        (f"({ONE_ROW}, {WHOLE})", f"s = {ONE_ROW} {SLICE.replace('OF', 'table')};"
         f"n = {WHOLE} negate(table); tuple(s, n)", 2 * TABLE + ROW + 4),
        # An update of a computed value is in the place of nothing.
        (WHOLE, f"n = {WHOLE} negate(table); dynamic-update-slice(n, row, i, zero)",
         2 * TABLE + ROW + 4),
        # What nobody knows to be one to one may need everything.
        (ONE_ROW, f"n = {WHOLE} custom-call(table), custom_call_target=\"f\";"
         f" {SLICE.replace('OF', 'n')}", TABLE + ROW + 4),
        # An update that is not the result, but read on, copies the whole.
        (WHOLE, f"u = {WHOLE} dynamic-update-slice(table, row, i, zero); negate(u)",
         2 * TABLE + ROW + 4),
    ],
)  # fmt: skip
def test_traffic_of_a_fusion(result: str, body: str, expected: int) -> None:
    *lines, root = body.split(";")
    computation = FUSED.replace("BODY", "\n".join([*lines, f"ROOT r = {result} {root}"]))
    call = f"{result} fusion(table, row, i), kind=kLoop, calls=fused"
    assert traffic(f"{OPERANDS}  ROOT r = {call}", computation) == expected


def test_a_chain_in_a_fusion_may_be_long() -> None:
    """A loop that is unrolled is one fusion of a thousand operations."""
    links = [f"x{n + 1} = {WHOLE} negate(x{n})" for n in range(3000)]
    body = "\n".join([f"x0 = {WHOLE} negate(table)", *links, f"ROOT r = {WHOLE} negate(x3000)"])
    call = f"{WHOLE} fusion(table, row, i), kind=kLoop, calls=fused"
    assert traffic(f"{OPERANDS}  ROOT r = {call}", FUSED.replace("BODY", body)) == 2 * TABLE


def test_what_is_computed_for_a_collective_in_a_fusion_is_read() -> None:
    body = (
        f"n = {WHOLE} negate(table)\nROOT r = {WHOLE} all-reduce(n), replica_groups={{}}, "
        "to_apply=add"
    )
    call = f"{WHOLE} fusion(table, row, i), kind=kLoop, calls=fused"
    texts = [ADD, FUSED.replace("BODY", body), f"ENTRY e {{\n{OPERANDS}  ROOT r = {call}\n}}"]
    module = read_module(from_text("\n".join(["HloModule m", *texts])))
    entry = module.computations[module.entry]
    fusion = entry.root_instruction
    touches = fusion_touches(module, fusion, [one.shape for one in entry.operands(fusion)])
    read = sum(size for _, size in touches)
    assert read == TABLE


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        # What a nested fusion hands on as it is, is updated in place; what it changes is written.
        (f"ROOT c = {WHOLE} copy(p)", 2 * ROW + 4),
        (f"b = {WHOLE} bitcast(p)\n  ROOT c = {WHOLE} copy(b)", 2 * ROW + 4),
        (f"ROOT c = {WHOLE} negate(p)", 2 * TABLE + ROW + 4),
        ("ROOT c = f32[1024,256]{0,1} copy(p)", 2 * TABLE + ROW + 4),
    ],
)
def test_traffic_through_a_nested_fusion(inner: str, expected: int) -> None:
    kept = inner.rsplit("= ", 1)[1].split(" ")[0]
    nested = f"nested {{\n  p = {WHOLE} parameter(0)\n  {inner}\n}}\n"
    update = f"ROOT r = {kept} dynamic-update-slice(k, row, i, zero)"
    body = f"k = {kept} fusion(table), kind=kLoop, calls=nested\n{update}"
    call = f"{kept} fusion(table, row, i), kind=kLoop, calls=fused"
    assert traffic(f"{OPERANDS}  ROOT r = {call}", nested + FUSED.replace("BODY", body)) == expected


# Collectives: axes.

MESHES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


@given(MESHES, st.data())
def test_groups_of_whole_axes_span_those_axes(sizes: list[int], data: st.DataObject) -> None:
    axes = tuple((f"a{k}", size) for k, size in enumerate(sizes))
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    grid = np.arange(np.prod(sizes)).reshape(sizes)
    rest = [axis for axis in range(len(sizes)) if axis not in chosen]
    size = int(np.prod([sizes[axis] for axis in chosen]))
    groups = tuple(map(tuple, grid.transpose(rest + chosen).reshape(-1, size).tolist()))
    expected = tuple(f"a{axis}" for axis in sorted(chosen) if sizes[axis] > 1)
    assert span_of_groups(groups, axes) == CollectiveSpan(axes=expected, group_size=size)


@given(MESHES, st.data())
def test_a_shift_along_an_axis_spans_it(sizes: list[int], data: st.DataObject) -> None:
    axes = tuple((f"a{k}", size) for k, size in enumerate(sizes))
    axis = data.draw(st.sampled_from(range(len(sizes))))
    grid = np.arange(np.prod(sizes)).reshape(sizes)
    pairs = tuple(zip(grid.ravel().tolist(), np.roll(grid, -1, axis).ravel().tolist()))
    spanned = (f"a{axis}",) if sizes[axis] > 1 else ()
    assert span_of_pairs(pairs, axes) == CollectiveSpan(axes=spanned, group_size=sizes[axis])


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ((), ("dp", "tp"), 8),  # All devices.
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("tp",), 2),  # The minor half of tp.
        (((0, 2), (1, 3), (4, 6), (5, 7)), ("tp",), 2),  # The major half of tp.
        (((0, 1, 4, 5), (2, 3, 6, 7)), ("dp", "tp"), 4),
        (((0, 5), (1, 4), (2, 7), (3, 6)), (), 2),  # Diagonals.
        (((0, 1), (2, 6)), (), 2),  # Groups that differ in their axes.
        (((0, 1, 2), (4, 5, 6)), ("tp",), 3),
        (((0,), (1,)), (), 1),
    ],
)
def test_span_of_unusual_groups(
    groups: tuple[tuple[int, ...], ...], axes: tuple[str, ...], size: int
) -> None:
    assert span_of_groups(groups, (("dp", 2), ("tp", 4))) == CollectiveSpan(
        axes=axes, group_size=size
    )


@pytest.mark.parametrize(
    ("pairs", "axes", "size"),
    [
        (((0, 1), (1, 2), (2, 3)), ("tp",), 4),  # A chain.
        (((0, 1), (1, 0)), ("tp",), 2),
        (((3, 4), (7, 0), (0, 1)), ("dp", "tp"), 3),  # A shift along both axes, flattened.
        (((0, 0), (1, 1)), (), 1),  # Nothing moves.
    ],
)
def test_span_of_unusual_pairs(
    pairs: tuple[tuple[int, int], ...], axes: tuple[str, ...], size: int
) -> None:
    assert span_of_pairs(pairs, (("dp", 2), ("tp", 4))) == CollectiveSpan(
        axes=axes, group_size=size
    )


def test_device_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="device 8 is outside"):
        span_of_groups(((0, 8),), (("dp", 2), ("tp", 4)))
    with pytest.raises(ValueError, match="device 9 is outside"):
        span_of_pairs(((9, 0),), (("dp", 2), ("tp", 4)))


# Collectives: bytes.


@pytest.mark.parametrize("devices", [2, 3, 4, 8, 512])
def test_ring_bytes_equal_a_simulated_ring(devices: int) -> None:
    chunk = 24
    array = chunk * devices
    # Around a ring, n-1 rounds, each sending one of n chunks; an all-reduce goes around twice.
    around = sum(chunk for _ in range(devices - 1))
    assert kind_named("all-gather").wire_bytes(array, devices) == around
    assert kind_named("reduce-scatter").wire_bytes(array, devices) == around
    assert kind_named("all-reduce").wire_bytes(array, devices) == 2 * around
    # Each device holds n chunks, one for each device, itself included.
    assert kind_named("all-to-all").wire_bytes(devices * array, devices) == around
    assert kind_named("collective-permute").wire_bytes(array, devices) == array
    assert kind_named("collective-broadcast").wire_bytes(array, devices) == array


def shard_mapped(function: Callable[..., Any], output: P, dtype: Any = jnp.bfloat16) -> Counts:
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2),
        ("dp", "fsdp", "tp"),
        axis_types=(AxisType.Auto,) * 3,
    )
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("tp"), out_specs=output, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 128), dtype, sharding=NamedSharding(mesh, P("tp")))
    return count(read_module(compiled(mapped, x)), CUBE)


LOCAL = 32 * 128  # Elements of (64, 128) on one of the two devices along tp.
MANUAL: dict[str, tuple[Callable[[jax.Array], jax.Array], P, str, int, int]] = {
    "psum": (lambda x: jax.lax.psum(x, "tp"), P(), "all-reduce", LOCAL, LOCAL),
    "psum_scatter": (lambda x: jax.lax.psum_scatter(x, "tp", tiled=True), P("tp"),
                     "reduce-scatter", LOCAL, LOCAL // 2),
    "all_gather": (lambda x: jax.lax.all_gather(x, "tp", tiled=True), P(),
                   "all-gather", 2 * LOCAL, LOCAL),
    "all_to_all": (lambda x: jax.lax.all_to_all(x, "tp", 0, 1, tiled=True), P(None, "tp"),
                   "all-to-all", 2 * LOCAL, LOCAL // 2),
    "ppermute": (lambda x: jax.lax.ppermute(x, "tp", [(0, 1), (1, 0)]), P("tp"),
                 "collective-permute", LOCAL, LOCAL),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32])
@pytest.mark.parametrize("name", MANUAL)
def test_collectives_are_counted_at_the_width_of_the_program(name: str, dtype: Any) -> None:
    """XLA's CPU compiler widens 16-bit collectives; what is counted is what the program says."""
    function, output, kind, payload, wire = MANUAL[name]
    counts = shard_mapped(function, output, dtype)
    width = jnp.dtype(dtype).itemsize
    (collective,) = counts.collectives
    assert collective == Collective(
        kind=kind,
        axes=("tp",),
        group_size=2,
        count=1,
        payload_bytes=payload * width,
        wire_bytes=wire * width,
    )
    assert counts.uncounted == ()


def test_a_sum_that_the_user_widened_is_counted_wide() -> None:
    counts = shard_mapped(
        lambda x: jax.lax.psum(x.astype(jnp.float32), "tp").astype(jnp.bfloat16), P()
    )
    assert [c.payload_bytes for c in counts.collectives] == [LOCAL * 4]


def test_a_gather_that_may_have_been_narrow_is_counted_wide_and_named() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x.astype(jnp.float32), "tp", tiled=True) * 1.5

    counts = shard_mapped(function, P())
    assert [c.payload_bytes for c in counts.collectives] == [2 * LOCAL * 4]
    assert counts.uncounted == ("all-gather of values widened from bf16 counted as f32",)


ASYNC = """HloModule m, is_scheduled=true, num_partitions=8
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
wrapped {
  p = f32[64]{0} parameter(0)
  ROOT r = f32[32]{0} reduce-scatter(p), channel_id=3, replica_groups=[4,2]<=[8], use_global_device_ids=true, dimensions={0}, to_apply=add
}
ENTRY e {
  p = f32[64]{0} parameter(0)
  g = (f32[64]{0}, f32[256]{0}) all-gather-start(p), channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true, dimensions={0}
  r = f32[64]{0} all-reduce-start(p), channel_id=2, replica_groups={}, use_global_device_ids=true, to_apply=add
  c = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(p), channel_id=4, source_target_pairs={{0,4},{4,0}}
  s = ((f32[64]{0}), f32[32]{0}) async-start(p), calls=wrapped
  gd = f32[256]{0} all-gather-done(g)
  rd = f32[64]{0} all-reduce-done(r)
  cd = f32[64]{0} collective-permute-done(c)
  sd = f32[32]{0} async-done(s)
  ROOT t = (f32[256]{0}, f32[64]{0}, f32[64]{0}, f32[32]{0}) tuple(gd, rd, cd, sd)
}"""  # noqa: E501


def test_asynchronous_collectives_count_once() -> None:
    counts = count(read_module(from_text(ASYNC)), [("dp", 2), ("tp", 4)])
    whole = 64 * 4
    assert [(c.kind, c.axes, c.group_size, c.count, c.payload_bytes, c.wire_bytes)
            for c in counts.collectives] == [
        ("all-gather", ("tp",), 4, 1, 4 * whole, 3 * whole),
        ("all-reduce", ("dp", "tp"), 8, 1, whole, 2 * 7 * whole // 8),
        ("collective-permute", ("dp",), 2, 1, whole, whole),
        ("reduce-scatter", ("tp",), 2, 1, whole, whole // 2),
    ]  # fmt: skip
    # In and out of: gather, reduce, permute, scatter.
    assert counts.hbm_bytes == (1 + 4) * whole + 2 * whole + 2 * whole + 3 * whole // 2


FUSED_GATHERS = """HloModule m, num_partitions=8
start {
  p = f32[64]{0} parameter(0)
  ROOT g = f32[128]{0} all-gather(p), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, dimensions={0}
}
done {
  p = f32[64]{0} parameter(0)
  ROOT g = f32[128]{0} all-gather(p), channel_id=CHANNEL, replica_groups=[4,2]<=[8], use_global_device_ids=true, dimensions={0}
}
ENTRY e {
  p = f32[64]{0} parameter(0)
  a = f32[128]{0} fusion(p), kind=kCustom, calls=start
  b = f32[128]{0} fusion(p), kind=kCustom, calls=done
  ROOT t = (f32[128]{0}, f32[128]{0}) tuple(a, b)
}"""  # noqa: E501


@pytest.mark.parametrize(("channel", "expected"), [(1, 1), (2, 2)])
def test_a_collective_repeated_in_fusions_under_one_channel_counts_once(
    channel: int, expected: int
) -> None:
    text = FUSED_GATHERS.replace("CHANNEL", str(channel))
    counts = count(read_module(from_text(text)), [("dp", 4), ("tp", 2)])
    assert [c.count for c in counts.collectives] == [expected]


def test_groups_of_one_device_are_no_communication() -> None:
    text = FUSED_GATHERS.replace("[4,2]<=[8]", "[8,1]<=[8]").replace("CHANNEL", "2")
    text = text.replace("f32[128]", "f32[64]")
    assert count(read_module(from_text(text)), [("dp", 8)]).collectives == ()


SCATTERS = """HloModule m, num_partitions=8
add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT s = f32[] add(x, y)
}
first {
  p = f32[64]{0} parameter(0)
  i = s32[] parameter(1)
  r = f32[64]{0} all-reduce(p), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=add
  ROOT s = f32[32]{0} dynamic-slice(r, i), dynamic_slice_sizes={32}
}
second {
  p = f32[64]{0} parameter(0)
  i = s32[] parameter(1)
  r = f32[64]{0} all-reduce(p), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=add
  ROOT s = f32[32]{0} dynamic-slice(r, i), dynamic_slice_sizes={32}
}
ENTRY e {
  p = f32[64]{0} parameter(0)
  q = f32[64]{0} parameter(1)
  i = s32[] parameter(2)
  a = f32[32]{0} fusion(p, i), kind=kCustom, calls=first
  b = f32[32]{0} fusion(q, i), kind=kCustom, calls=second
  ROOT t = (f32[32]{0}, f32[32]{0}) tuple(a, b)
}"""  # noqa: E501


def test_two_reduce_scatters_of_a_tpu_are_two_under_one_channel() -> None:
    counts = count(read_module(from_text(SCATTERS)), [("dp", 4), ("tp", 2)])
    assert [(c.kind, c.count, c.payload_bytes) for c in counts.collectives] == [
        ("reduce-scatter", 2, 2 * 64 * 4)
    ]


BEGUN_AND_WHOLE = """HloModule m, num_partitions=8
add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT s = f32[] add(x, y)
}
start {
  p = f32[64]{0} parameter(0)
  g = f32[128]{0} all-gather(p), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, dimensions={0}
  ROOT c = (f32[128]{0}, f32[64]{0}) custom-call(g, p), custom_call_target="AsyncCollectiveStart"
}
done {
  p = (f32[128]{0}, f32[64]{0}) parameter(0)
  a = f32[64]{0} get-tuple-element(p), index=1
  g = f32[128]{0} all-gather(a), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, dimensions={0}
  ROOT c = f32[128]{0} custom-call(g), custom_call_target="AsyncCollectiveDone"
}
sum {
  p = f32[64]{0} parameter(0)
  i = s32[] parameter(1)
  r = f32[64]{0} all-reduce(p), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=add
  ROOT s = f32[32]{0} dynamic-slice(r, i), dynamic_slice_sizes={32}
}
ENTRY e {
  p = f32[64]{0} parameter(0)
  i = s32[] parameter(1)
  a = (f32[128]{0}, f32[64]{0}) fusion(p), kind=kCustom, calls=start
  b = f32[128]{0} fusion(a), kind=kCustom, calls=done
  c = f32[32]{0} fusion(p, i), kind=kCustom, calls=sum
  ROOT t = (f32[128]{0}, f32[32]{0}) tuple(b, c)
}"""  # noqa: E501


def test_a_sum_is_counted_under_the_channel_of_a_gather_that_a_fusion_begins() -> None:
    counts = count(read_module(from_text(BEGUN_AND_WHOLE)), [("dp", 4), ("tp", 2)])
    assert [(c.kind, c.count, c.payload_bytes) for c in counts.collectives] == [
        ("all-gather", 1, 128 * 4),
        ("reduce-scatter", 1, 64 * 4),
    ]
