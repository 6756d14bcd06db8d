"""Matrix products and convolutions: their local sizes and floating-point operations.

Two operations per multiply-add. Source: xla/service/hlo_cost_analysis.cc (HandleDot,
HandleRaggedDot, HandleConvolution), except that a complex multiply-add counts as four real ones.
On GPUs a product may be a call of cuBLAS, whose config says what a `dot` says
(xla/service/gpu/backend_configs.proto, GemmBackendConfig), and a convolution one of cuDNN, whose
window and dimension numbers are those of the convolution forward, whichever of its three arrays the
call computes (xla/service/gpu/transforms/conv_rewriter.cc).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from automesh.hlo.nouns import (
    Computation,
    ConvolutionDimensions,
    DotDimensions,
    Instruction,
    Shape,
    WindowDimension,
)
from automesh.hlo.schedule.nouns import ScheduledMatmul

_CUBLAS = "__cublas$"
# Calls of cuDNN that compute the image or the kernel instead of the result.
_BACKWARD_INPUT = "__cudnn$convBackwardInput"
_BACKWARD_FILTER = "__cudnn$convBackwardFilter"
_REAL_PART = {"c64": "f32", "c128": "f64"}


def matmul_of(computation: Computation, instruction: Instruction) -> ScheduledMatmul | None:
    """Returns the product of a `dot`, `ragged-dot`, `convolution` or library call; else None."""
    if instruction.convolution is not None:
        return _product_of_convolution(computation, instruction, instruction.convolution)
    dimensions = product_dimensions(instruction)
    if dimensions is None:
        return None
    left, right = (operand.shape for operand in computation.operands(instruction)[:2])
    sizes = left.dims
    return ScheduledMatmul(
        dtype=_dtype(left, right),
        batch=_product(sizes, dimensions.lhs_batch),
        m=_product(sizes, _rest(left, dimensions.lhs_batch, dimensions.lhs_contracting)),
        n=_product(
            right.dims,
            _rest(right, dimensions.rhs_batch, dimensions.rhs_contracting, dimensions.group),
        ),
        k=_product(sizes, dimensions.lhs_contracting) * _real_factor(left, right),
    )


def product_dimensions(instruction: Instruction) -> DotDimensions | None:
    """Returns the dimensions of a `dot`, `ragged-dot` or cuBLAS call; None for anything else."""
    if instruction.dot is not None:
        return instruction.dot
    if not instruction.target.startswith(_CUBLAS):
        return None
    config = instruction.config.get("gemm_backend_config") or {}
    numbers: Mapping[str, Any] = config.get("dot_dimension_numbers") or {}
    if not numbers:
        return None
    return DotDimensions(
        lhs_contracting=_numbers(numbers, "lhs_contracting_dimensions"),
        rhs_contracting=_numbers(numbers, "rhs_contracting_dimensions"),
        lhs_batch=_numbers(numbers, "lhs_batch_dimensions"),
        rhs_batch=_numbers(numbers, "rhs_batch_dimensions"),
    )


def _numbers(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    return tuple(int(number) for number in config.get(key, ()))  # JSON writes int64 as text.


def _product(sizes: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(sizes[dim] for dim in dims)


def _rest(shape: Shape, *taken: tuple[int, ...]) -> list[int]:
    gone = {dim for dims in taken for dim in dims}
    return [dim for dim in range(len(shape.dims)) if dim not in gone]


def _dtype(left: Shape, right: Shape) -> str:
    wider = max((left, right), key=lambda shape: shape.element_bits).element_type
    return _REAL_PART.get(wider, wider)


def flops_of(computation: Computation, instruction: Instruction) -> int:
    """Counts the operations of products that `matmul_of` knows; 0 for anything else."""
    if instruction.convolution is not None:
        return _convolution(computation, instruction, instruction.convolution)
    one = matmul_of(computation, instruction)
    return 0 if one is None else 2 * one.batch * one.m * one.n * one.k


def _forward(computation: Computation, instruction: Instruction) -> tuple[Shape, Shape, Shape]:
    """Returns image, kernel and result of an instruction's forward convolution."""
    made = instruction.shape.elements[0] if instruction.shape.elements else instruction.shape
    first, second = (operand.shape for operand in computation.operands(instruction)[:2])
    if instruction.target == _BACKWARD_INPUT:
        return made, second, first
    if instruction.target == _BACKWARD_FILTER:
        return first, made, second
    return first, second, made


def _product_of_convolution(
    computation: Computation, instruction: Instruction, numbers: ConvolutionDimensions
) -> ScheduledMatmul:
    image, kernel, result = _forward(computation, instruction)
    groups = numbers.feature_groups * numbers.batch_groups
    sizes = {
        "batch": groups,
        "m": image.dims[numbers.input_batch] // numbers.batch_groups,
        "n": result.dims[numbers.output_feature] // groups,
    }
    met = 1.0
    for i, k, o, window in zip(
        numbers.input_spatial, numbers.kernel_spatial, numbers.output_spatial, numbers.window
    ):
        length, elements, results = image.dims[i], kernel.dims[k], result.dims[o]
        pairs = window_positions(length, results, window)
        sizes[_role(length, elements, results, pairs)] *= results
        met *= pairs / max(results, 1)
    features_in = image.dims[numbers.input_feature] // numbers.feature_groups
    forward = ScheduledMatmul(
        dtype=_dtype(image, kernel),
        batch=sizes["batch"],
        m=sizes["m"],
        n=sizes["n"],
        k=max(1, round(features_in * met)) * _real_factor(image, kernel),
    )
    # Rows are positions of the images. For the gradient of a kernel they are summed over; the
    # gradient of the images has them as rows, with input and output features swapped.
    if instruction.target == _BACKWARD_FILTER:
        return replace(forward, m=forward.k, k=forward.m)
    if instruction.target == _BACKWARD_INPUT:
        return replace(forward, n=forward.k, k=forward.n)
    return forward


def _role(length: int, elements: int, results: int, pairs: int) -> Literal["batch", "m", "n"]:
    """Returns the role of a convolution's spatial dimension in the product.

    TPU compilers write further dimensions of a product as spatial ones, in which every result uses
    one element: of both image and kernel (a batch), of the image alone (rows of the result) or of
    the kernel alone (its columns).
    """
    if results == pairs == length == elements:
        return "batch" if results > 1 else "m"
    return "n" if length == 1 and results == pairs == elements else "m"


def _convolution(
    computation: Computation, instruction: Instruction, numbers: ConvolutionDimensions
) -> int:
    image, kernel, result = _forward(computation, instruction)
    positions = math.prod(
        window_positions(image.dims[i], result.dims[o], window)
        for i, o, window in zip(numbers.input_spatial, numbers.output_spatial, numbers.window)
    )
    features_in = image.dims[numbers.input_feature] // numbers.feature_groups
    features_out = result.dims[numbers.output_feature]
    batch = image.dims[numbers.input_batch] // numbers.batch_groups
    return 2 * positions * features_in * features_out * batch * _real_factor(image, kernel)


def window_positions(length: int, results: int, window: WindowDimension) -> int:
    """Counts pairs of result and window element that use a real element: no padding, no hole."""
    dilated = (length - 1) * window.base_dilation + 1
    common = math.gcd(window.stride, window.base_dilation)
    period = window.base_dilation // common
    inverse = pow(window.stride // common, -1, period) if period > 1 else 0
    pairs = 0
    for offset in range(window.size):
        shift = offset * window.window_dilation - window.padding_low
        if shift % common:
            continue
        # The result r uses shift + r * stride, which is real at multiples of the base dilation.
        first = max(0, -(shift // window.stride))
        last = min(results - 1, (dilated - 1 - shift) // window.stride)
        phase = -(shift // common) * inverse % period
        first += (phase - first) % period
        pairs += max(0, (last - first) // period + 1)
    return pairs


def _real_factor(left: Shape, right: Shape) -> int:
    return 4 if left.element_type.startswith("c") and right.element_type.startswith("c") else 1
