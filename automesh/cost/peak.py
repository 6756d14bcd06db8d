"""Memory of one device, for many sizes of one set of active axes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from automesh.cost.formulas import Formulas
from automesh.cost.terms import Terms
from automesh.hardware.fabric.fabric import Floats

_MOST_COMPARED = 512  # memory points: more are not searched for those that never count


class Peak:
    """Arguments and outputs of one step, and the temporaries at every point of it."""

    def __init__(self, terms: Terms, formulas: Formulas) -> None:
        lasting = (terms.argument_bytes, terms.output_bytes, terms.alias_bytes)
        points = formulas.matrix([point.bytes for point in terms.points])
        self._points = _undominated(points)
        self._lasting = formulas.matrix(lasting)

    def argument_bytes(self, values: Floats) -> Floats:
        """Bytes of the arguments, [sizes], from `Formulas.values`."""
        return np.rint(self._lasting[0] @ values[: self._lasting.shape[1]])

    def bytes(self, values: Floats) -> NDArray[np.int64]:
        """Arguments, outputs that take no argument's place, and the most temporaries: [sizes]."""
        arguments, outputs, alias = self._lasting @ values[: self._lasting.shape[1]]
        temporaries = np.zeros(values.shape[1])
        if len(self._points):
            temporaries = (self._points @ values[: self._points.shape[1]]).max(axis=0)
        # Whole bytes: the last digit of a matrix product depends on how many meshes there are.
        return np.rint(arguments + temporaries + outputs - alias).astype(np.int64)


def _undominated(points: Floats) -> Floats:
    """Leaves out points that another point exceeds on every mesh, coefficient by coefficient."""
    points = np.unique(points, axis=0)
    if len(points) > _MOST_COMPARED:
        return points
    exceeds = (points[:, None, :] >= points[None, :, :]).all(axis=2)
    return points[exceeds.sum(axis=0) == 1]  # each but exceeds itself, being unlike all others
