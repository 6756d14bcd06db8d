"""Floating-point operations of matrix multiplications and convolutions: two per multiply-add.

Source: xla/service/hlo_cost_analysis.cc (HandleDot, HandleRaggedDot, HandleConvolution), except
that a complex multiply-add counts as four real ones.
"""

from __future__ import annotations

import math

from automesh.hlo.nouns import Computation, Instruction, Shape, WindowDimension


def flops_of(computation: Computation, instruction: Instruction) -> int:
    """Counts the operations of one `dot`, `ragged-dot` or `convolution`; 0 for any other."""
    if instruction.opcode in ("dot", "ragged-dot"):
        return _dot(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    return 0


def _dot(computation: Computation, instruction: Instruction) -> int:
    assert instruction.dot is not None
    left, right = (operand.shape for operand in computation.operands(instruction)[:2])
    contracted = math.prod(left.dims[dim] for dim in instruction.dot.lhs_contracting)
    results = instruction.shape.size
    if set(instruction.dot.ragged) & set(instruction.dot.lhs_contracting):
        # The groups share the contracted dimension, and each has a result of its own.
        results //= math.prod(instruction.shape.dims[:1])
    return 2 * results * contracted * _real_factor(left, right)


def _convolution(computation: Computation, instruction: Instruction) -> int:
    numbers = instruction.convolution
    assert numbers is not None
    image, kernel = (operand.shape for operand in computation.operands(instruction)[:2])
    positions = math.prod(
        window_positions(image.dims[i], instruction.shape.dims[o], window)
        for i, o, window in zip(numbers.input_spatial, numbers.output_spatial, numbers.window)
    )
    features_in = image.dims[numbers.input_feature] // numbers.feature_groups
    features_out = instruction.shape.dims[numbers.output_feature]
    batch = image.dims[numbers.input_batch] // numbers.batch_groups
    return 2 * positions * features_in * features_out * batch * _real_factor(image, kernel)


def window_positions(length: int, results: int, window: WindowDimension) -> int:
    """Pairs of result and window element that meet a real element: no padding, no hole."""
    dilated = (length - 1) * window.base_dilation + 1
    pairs = 0
    for offset in range(window.size):
        shift = offset * window.window_dilation - window.padding_low
        if window.base_dilation == 1:
            first = max(0, -(shift // window.stride))
            last = min(results - 1, (dilated - 1 - shift) // window.stride)
            pairs += max(0, last - first + 1)
        else:
            touched = (shift + result * window.stride for result in range(results))
            pairs += sum(0 <= at < dilated and at % window.base_dilation == 0 for at in touched)
    return pairs


def _real_factor(left: Shape, right: Shape) -> int:
    return 4 if left.element_type.startswith("c") and right.element_type.startswith("c") else 1
