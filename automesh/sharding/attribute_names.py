"""Attributes that this package leaves at the operations of an MLIR module."""

from __future__ import annotations

# At products and convolutions: mesh axes that split left side, right side and result before
# reshards are inserted, each as `dp,tp`; `?` where that is not written at the value itself.
DECLARED = "automesh.declared"
# At operations whose arrays moved to other axes, because these were free: all of these axes, for
# the sizes of which alone that holds.
FIXED = "automesh.fixed"
# How the sizes of results, the trips of loops and the cost of custom calls depend on the sizes of
# the mesh axes.
DIMENSIONS, TRIPS, COST = "automesh.dimensions", "automesh.trips", "automesh.cost"
# At the function `main`: which results are arguments of the next step, and what these are called.
CARRY = "automesh.carry"
# At operations that one device does, for which all of their operands are gathered: the mesh.
GATHERS = "automesh.gathers"
