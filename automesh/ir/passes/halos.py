"""Adds halos to convolutions: rows of the neighbours along a split dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator

from automesh.hlo.nouns import WindowDimension
from automesh.ir.graph import Graph, Operation, Value
from automesh.ir.passes.edits import blocks, like, set_operands


def exchange_halos(graph: Graph) -> None:
    """convolution(x, ...) -> convolution(concatenate(halo, x, halo), ...).

    Every device sends rows at its two ends to its neighbours: as many as the image is padded with
    at that end, less the holes of a dilated image.
    """
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        for operation in list(block.operations):
            if operation.name != "convolution":
                continue
            place = block.operations.index(operation)
            for dimension, window in _split_along(operation):
                image = operation.operands[0]
                made = [*_halos(image, dimension, window, sizes, operation.source)]
                halos = [one.results[0] for one in made if one.name == "collective_permute"]
                if halos:
                    joined = like(image)
                    made.append(
                        Operation(
                            name="concatenate",
                            operands=[image, *halos],
                            results=[joined],
                            attributes={"dim": dimension},
                            source=operation.source,
                        )
                    )
                    set_operands(operation, [joined, *operation.operands[1:]])
                    block.operations[place:place] = made
                    place += len(made)


def _split_along(convolution: Operation) -> Iterator[tuple[int, WindowDimension]]:
    """Finds dimensions of the image that are split together with the result, or with the kernel."""
    image, kernel = convolution.operands[:2]
    result, found = convolution.results[0], convolution.attributes
    spatial = zip(found["lhs_spatial"], found["rhs_spatial"], found["out_spatial"], strict=True)
    for (of_image, of_kernel, of_result), window in zip(spatial, found["window"], strict=True):
        if image.axes[of_image] and (result.axes[of_result] or kernel.axes[of_kernel]):
            yield of_image, window


def _halos(
    image: Value, dimension: int, window: WindowDimension, sizes: dict[str, int], source: str
) -> Iterator[Operation]:
    axes = image.axes[dimension]
    for padding in (window.padding_low, window.padding_high):
        rows = max(0, padding // window.base_dilation)
        if not rows:
            continue
        shape, split = list(image.shape), list(image.axes)
        shape[dimension], split[dimension] = rows, ()
        ends, halo = (
            Value(shape=tuple(shape), dtype=image.dtype, axes=tuple(split), manual=image.manual)
            for _ in range(2)
        )
        yield Operation(name="slice", operands=[image], results=[ends], source=source)
        yield Operation(
            name="collective_permute",
            operands=[ends],
            results=[halo],
            attributes={
                "axes": axes,
                "group": math.prod(sizes.get(axis, 1) for axis in axes),
                "exact": True,
            },
            source=source,
        )
