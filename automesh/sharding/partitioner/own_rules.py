"""Sharding rules that are stated in place of Shardy's own (no jax).

Shardy wants dimensions whole that some operations work along. XLA's partitioner has methods for
several of these operations, so that they stay split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from automesh.sharding.attribute_names import AS_PRODUCT

_LETTERS = "ijklmnopqrstuvwxyz"


def alike(
    operands: Sequence[Sequence[int]],
    result: Sequence[int],
    *,
    scalars: int = 0,
    made: int | None = None,
) -> str:
    """Returns the rule by which all dimensions of operands and result are split alike.

    Args:
      operands: their shapes. One with fewer rows than the others has one for several of theirs.
      result: its shape, like that of the first operand.
      scalars: number of further operands.
      made: the first dimension of the result that has nothing to do with the operand's.
    """
    least = [min(sizes) for sizes in zip(*operands, strict=True)]
    sizes = list(least)

    def factor(size: int) -> str:
        sizes.append(size)
        return letter(len(sizes) - 1)

    texts = [
        [
            letter(d) + ("" if size == least[d] else factor(size // least[d]))
            for d, size in enumerate(shape)
        ]
        for shape in operands
    ]
    last = texts[0]
    if made is not None:
        last = [*texts[0][:made], *(factor(size) for size in result[made:])]
    given = ", ".join(f"[{', '.join(one)}]" for one in (*texts, *[()] * scalars))
    known = ", ".join(f"{letter(n)}={size}" for n, size in enumerate(sizes))
    return f"#sdy.op_sharding_rule<({given})->([{', '.join(last)}]) {{{known}}}>"


def letter(number: int) -> str:
    """Returns the name of a factor as Shardy writes it: i to z, then z_1 and so on."""
    last = len(_LETTERS) - 1
    return _LETTERS[number] if number <= last else f"z_{number - last}"


def mark_transforms(module: Any, ir: Any) -> None:
    """Marks the Fourier transforms of a program that is propagated for a TPU.

    Its compiler has made products with matrices of them before the partitioner sees them (libtpu
    0.0.52).

    Args:
      module: the operation of a module; changed in place.
      ir: MLIR's Python classes.
    """
    for region in module.regions:
        for block in region.blocks:
            for view in block.operations:
                if view.operation.name == "stablehlo.fft":
                    view.operation.attributes[AS_PRODUCT] = ir.UnitAttr.get()
                else:
                    mark_transforms(view.operation, ir)
