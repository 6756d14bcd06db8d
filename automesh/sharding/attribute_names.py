"""Names of the attributes that this package adds to operations of an MLIR module."""

from __future__ import annotations

# At products and convolutions: mesh axes that split left side, right side and result before
# reshards are inserted, each as `dp,tp`; `?` if the value itself does not state it.
DECLARED = "automesh.declared"
# At operations whose arrays moved to other, free axes: all of these axes. The move is only valid
# for their present sizes.
FIXED = "automesh.fixed"
# How sizes of results, trips of loops and costs of custom calls depend on the sizes of the mesh
# axes.
DIMENSIONS, TRIPS, COST = "automesh.dimensions", "automesh.trips", "automesh.cost"
# At the function `main`: the results that are arguments of the next step, and their names.
CARRY = "automesh.carry"
# At operations on one device, which need all operands gathered: the mesh.
GATHERS = "automesh.gathers"
# At Fourier transforms that the compiler makes products before the partitioner sees them.
AS_PRODUCT = "automesh.as_product"
