"""Seconds of copies between a device and its host, for many sizes of one set of active axes.

One link carries both directions, and copy engines drive it: a copy runs beside all kernels of the
block that it stands in, as it does between `copy-start` and `copy-done` of compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automesh.cost.formulas import Formulas, Sums
from automesh.cost.terms import Terms
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSeconds:
    """What a step waits for the host's memory.

    Attributes:
      exposed_s: [regions, sizes]: beyond the kernels of the regions that copies run beside; of
        several such regions it stands in the last one.
      total_s: [sizes]: of all copies, one after the other.
    """

    exposed_s: Floats
    total_s: Floats


class HostLink:
    """The copies of one step."""

    def __init__(self, terms: Terms, formulas: Formulas) -> None:
        copies = terms.host_transfers
        self.copies = copies
        self._counts = Sums(formulas, [one.count for one in copies])
        self._bytes = Sums(formulas, [one.bytes for one in copies])
        self._beside: dict[tuple[int, ...], list[int]] = {}
        for number, one in enumerate(copies):
            self._beside.setdefault(one.regions, []).append(number)

    def __bool__(self) -> bool:
        return bool(self.copies)

    def each_s(self, values: Floats, speeds: Speeds) -> Floats:
        """Of all executions of each copy in a step: [copies, sizes].

        Args:
          values: from `Formulas.values`.
        """
        return self._counts.at(values) * self._bytes.at(values) / speeds.host_bytes_per_s

    def seconds(self, values: Floats, speeds: Speeds, kernels_s: Floats) -> HostSeconds:
        """Prices the copies.

        Args:
          values: from `Formulas.values`.
          kernels_s: [regions, sizes]: what copies may run beside.
        """
        each = self.each_s(values, speeds)
        exposed = np.zeros_like(kernels_s)
        for regions, copies in self._beside.items():
            hidden = np.add.reduce(kernels_s[list(regions)], axis=0)
            exposed[regions[-1]] += np.maximum(np.add.reduce(each[copies], axis=0) - hidden, 0.0)
        return HostSeconds(exposed_s=exposed, total_s=np.add.reduce(each, axis=0))
