"""Local sizes of matrix products: dots in any order of dimensions, convolutions, cuBLAS calls."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.hlo import Computation, Instruction, Shape
from automesh.hlo.nouns import ConvolutionDimensions, DotDimensions, WindowDimension
from automesh.hlo.schedule.nouns import Compute, ScheduledMatmul
from automesh.hlo.work.flops import flops_of, matmul_of
from tests.support.hlo_text import schedule

SIZES = st.lists(st.integers(1, 5), min_size=0, max_size=2)


def computation(*operands: Shape, result: Instruction) -> Computation:
    parameters = [
        Instruction(id=number, name=f"p{number}", opcode="parameter", shape=shape)
        for number, shape in enumerate(operands)
    ]
    listed = {one.id: one for one in [*parameters, result]}
    return Computation(
        id=1, name="c", instructions=listed, root=result.id, is_fusion=False, is_scheduled=True
    )


def array(dims: tuple[int, ...], dtype: str = "bf16", bits: int = 16) -> Shape:
    return Shape(element_type=dtype, dims=dims, element_bits=bits)


@given(batch=SIZES, m=SIZES, n=SIZES, k=SIZES, data=st.data())
def test_sizes_of_a_dot_do_not_depend_on_the_order_of_its_dimensions(
    batch: list[int], m: list[int], n: list[int], k: list[int], data: st.DataObject
) -> None:
    def shuffled(*parts: list[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Dims in random order, and the positions of each part."""
        labels = [(part, index) for part, sizes in enumerate(parts) for index in range(len(sizes))]
        order = data.draw(st.permutations(labels))
        dims = tuple(parts[part][index] for part, index in order)
        where = [
            tuple(order.index((part, index)) for index in range(len(sizes)))
            for part, sizes in enumerate(parts)
        ]
        return dims, where

    left, (left_batch, _, left_k) = shuffled(batch, m, k)
    right, (right_batch, _, right_k) = shuffled(batch, n, k)
    dot = Instruction(
        id=9,
        name="d",
        opcode="dot",
        shape=array((*batch, *m, *n)),
        operands=(0, 1),
        dot=DotDimensions(
            lhs_contracting=left_k, rhs_contracting=right_k, lhs_batch=left_batch,
            rhs_batch=right_batch,
        ),
    )  # fmt: skip
    inside = computation(array(left), array(right), result=dot)
    expected = [math.prod(part) for part in (batch, m, n, k)]
    assert matmul_of(inside, dot) == ScheduledMatmul(
        dtype="bf16", batch=expected[0], m=expected[1], n=expected[2], k=expected[3]
    )
    assert flops_of(inside, dot) == 2 * math.prod(expected)


def window(size: int, stride: int, low: int, high: int, base: int) -> WindowDimension:
    return WindowDimension(
        size=size,
        stride=stride,
        padding_low=low,
        padding_high=high,
        window_dilation=1,
        base_dilation=base,
    )


def convolution(image: Shape, kernel: Shape, result: Shape, along: WindowDimension) -> Computation:
    """One spatial dimension; image [batch, space, feature], kernel [space, in, out]."""
    one = Instruction(
        id=9,
        name="c",
        opcode="convolution",
        shape=result,
        operands=(0, 1),
        convolution=ConvolutionDimensions(
            input_batch=0,
            input_feature=2,
            input_spatial=(1,),
            kernel_spatial=(0,),
            kernel_input_feature=1,
            kernel_output_feature=2,
            output_batch=0,
            output_feature=2,
            output_spatial=(1,),
            feature_groups=1,
            batch_groups=1,
            window=(along,),
        ),
    )
    return computation(image, kernel, result=one)


@given(*[st.integers(1, 7)] * 4)
def test_a_batch_that_a_tpu_writes_as_a_convolution_is_a_batch(
    batch: int, m: int, n: int, k: int
) -> None:
    """As libtpu writes batched products: size b, stride b - 1, base dilation b."""
    along = window(batch, max(batch - 1, 1), 0, 0, batch)
    inside = convolution(array((m, batch, k)), array((batch, k, n)), array((m, batch, n)), along)
    one = inside.root_instruction
    assert matmul_of(inside, one) == ScheduledMatmul(dtype="bf16", batch=batch, m=m, n=n, k=k)
    assert flops_of(inside, one) == 2 * batch * m * n * k


@given(st.integers(1, 5), st.integers(3, 9), st.integers(1, 3), st.integers(1, 4))
def test_an_ordinary_convolution_multiplies_windows(
    images: int, length: int, size: int, features: int
) -> None:
    results = length - size + 1
    inside = convolution(
        array((images, length, features)),
        array((size, features, 6)),
        array((images, results, 6)),
        window(size, 1, 0, 0, 1),
    )
    one = inside.root_instruction
    product = matmul_of(inside, one)
    assert product is not None
    assert (product.m, product.n, product.k) == (images * results, 6, size * features)
    assert flops_of(inside, one) == 2 * product.batch * product.m * product.n * product.k


def test_of_two_types_the_wider_is_priced() -> None:
    dot = Instruction(
        id=9,
        name="d",
        opcode="dot",
        shape=array((2, 3), "f32", 32),
        operands=(0, 1),
        dot=DotDimensions(lhs_contracting=(1,), rhs_contracting=(0,), lhs_batch=(), rhs_batch=()),
    )
    inside = computation(array((2, 4), "f8e4m3fn", 8), array((4, 3)), result=dot)
    product = matmul_of(inside, dot)
    assert product is not None
    assert product.dtype == "bf16"


GEMM = (
    '{"operation_queue_id":"0","gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["2"],'
    '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}'
)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul"])
def test_a_cublas_call_is_a_product(target: str) -> None:
    entry = f"""  a = bf16[4,32,64]{{2,1,0}} parameter(0)
  b = bf16[4,128,32]{{2,1,0}} parameter(1)
  ROOT c = (bf16[4,64,128]{{2,1,0}}, s8[1024]{{0}}) custom-call(a, b),
    custom_call_target="{target}", backend_config={GEMM}"""
    plan = schedule(entry)
    (one,) = plan.body.operations
    assert isinstance(one, Compute)
    assert (one.kind, one.opcode, one.uncounted) == ("matrix", target, "")
    assert one.matmuls == (ScheduledMatmul(dtype="bf16", batch=4, m=64, n=128, k=32),)
    assert one.flops == 2 * 4 * 64 * 128 * 32
    assert plan.platform == "gpu"


def test_a_cublas_call_without_a_config_is_named() -> None:
    plan = schedule(
        "  a = f32[8,8]{1,0} parameter(0)\n  ROOT c = f32[8,8]{1,0} custom-call(a, a), "
        'custom_call_target="__cublas$gemm"'
    )
    assert plan.uncounted == ("custom call `__cublas$gemm`",)


def test_kernels_of_cudnn_are_named() -> None:
    plan = schedule(
        "  a = f32[8,8]{1,0} parameter(0)\n  ROOT c = f32[8,8]{1,0} custom-call(a), "
        'custom_call_target="__cudnn$fmhaSoftmax"'
    )
    (one,) = plan.body.operations
    assert isinstance(one, Compute)
    assert (one.kind, one.flops, one.hbm_bytes) == ("kernel", 0, 2 * 8 * 8 * 4)
    assert plan.uncounted == ("custom call `__cudnn$fmhaSoftmax`",)


# Convolutions of cuDNN: forward, and its two gradients, of the same images, kernels and results.
IMAGES, KERNELS, RESULTS = "f32[8,32,32,16]{3,2,1,0}", "f32[64,3,3,16]{3,2,1,0}", "f32[8,16,16,64]"
CALLS = {
    "convForward": (RESULTS, IMAGES, KERNELS),
    "convBiasActivationForward": (RESULTS, IMAGES, KERNELS),
    "convBackwardInput": (IMAGES, RESULTS, KERNELS),
    "convBackwardFilter": (KERNELS, IMAGES, RESULTS),
}


@pytest.mark.parametrize("name", CALLS)
def test_convolutions_of_cudnn_are_products(name: str) -> None:
    """They had no FLOPs: a residual network on a GPU was replayed a fifth too short."""
    made, first, second = CALLS[name]
    call = (
        f'({made}, u8[128]{{0}}) custom-call(p, q), custom_call_target="__cudnn${name}", '
        "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_o01i->b01f"
    )
    found = schedule(f"  p = {first} parameter(0)\n  q = {second} parameter(1)\n  ROOT r = {call}")
    (one,) = (each for each in found.body.operations if isinstance(each, Compute))
    (product,) = one.matmuls
    # Of 16 positions the last one meets padding in one of three places.
    met = (16 * 3 - 1) ** 2
    assert one.flops == 2 * 8 * met * 16 * 64
    rows, inner, columns = 8 * 16 * 16, round(16 * met / 16**2), 64
    assert (product.m, product.k, product.n) == {
        "convBackwardInput": (rows, columns, inner),
        "convBackwardFilter": (inner, rows, columns),
    }.get(name, (rows, inner, columns))


def test_other_calls_of_cudnn_convolve_nothing() -> None:
    found = schedule(
        "  p = f32[64,64]{1,0} parameter(0)\n  ROOT r = f32[64,64]{1,0} "
        'custom-call(p), custom_call_target="__cudnn$norm"'
    )
    assert not any(one.matmuls for one in found.body.operations if isinstance(one, Compute))
