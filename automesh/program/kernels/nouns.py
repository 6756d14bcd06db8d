"""The counted cost of one kernel, and its form in the text that XLA passes to its backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TARGET = "tpu_custom_call"  # of custom calls that hold a kernel for TPUs
GROUP = "custom_call_config"  # of its backend's text: holds `body`, and `cost_estimate` if stated
_TYPES = {"i1": "pred", "i4": "s4", "i8": "s8", "i16": "s16", "i32": "s32", "i64": "s64"}


def type_name(element: str) -> str:
    """Returns XLA's name of an element type of MLIR."""
    return _TYPES.get(element, element.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProduct:
    """A matrix product that a kernel repeats.

    Attributes:
      m, n, k: rows, columns and contracted elements of one call of the matrix unit's operation.
      dtype: element type of the wider operand, by XLA's name: bf16, f32, s8.
    """

    m: int
    n: int
    k: int
    dtype: str

    @property
    def flops(self) -> int:
        """FLOPs of one product, two per multiply-add."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """The work of one call of a kernel on one device.

    Attributes:
      flops: FLOPs of its matrix products, two per multiply-add.
      transcendentals: exponentials, logarithms and similar functions, per element.
      bytes_accessed: bytes moved between the device's main memory and the kernel's blocks; for a
        kernel whose blocks are not counted (`is_whole`), those of its operands and results.
      product: the product with most of the FLOPs; None if there is none, or if its shape does not
        determine the time, since many run in parallel.
      dtype: element type of that product's wider operand, if `product` does not say it.
      is_most: True if the kernel skips work by what it reads in data that is not known here, so
        that it was counted as if it skipped nothing.
      is_least: True if data that is not known here decides how often a loop runs, so that its body
        was counted once.
    """

    flops: int
    transcendentals: int
    bytes_accessed: int
    product: KernelProduct | None = None
    dtype: str = ""
    is_most: bool = False
    is_least: bool = False
    is_whole: bool = False

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are added to the kernel's group in the backend's text."""
        counted: dict[str, Any] = {"is_most": self.is_most}
        counted |= {name: True for name in ("is_least", "is_whole") if getattr(self, name)}
        if self.product is not None:
            one = self.product
            counted |= {"tile": [one.m, one.n, one.k], "dtype": one.dtype}
        elif self.dtype:
            counted["dtype"] = self.dtype
        return {
            "cost_estimate": {
                "flops": self.flops,
                "transcendentals": self.transcendentals,
                "bytes_accessed": self.bytes_accessed,
            },
            "counted": counted,
        }
