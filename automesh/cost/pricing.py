"""The entry to pricing: terms of a step and plans of a fabric in, prices out (numpy, no jax)."""

from __future__ import annotations

from collections.abc import Mapping

from automesh.cost.plans import price_on
from automesh.cost.prices import Prices
from automesh.cost.terms import Terms
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Fabric, Layouts, Route
from automesh.hardware.fabric.routes import routes
from automesh.mesh.plan_arrays import Batch


def price(
    terms: Mapping[tuple[str, ...], Terms],
    batch: Batch,
    *,
    fabric: Fabric,
    layouts: Layouts,
    speeds: Speeds,
) -> Prices:
    """Prices plans.

    Args:
      terms: by set of active axes, in the order of the mesh.
      batch: meshes of the fabric; those whose set has no terms, or where its terms do not hold, are
        marked in `Prices.needs_own`.
      layouts: of every ICI shape in the batch.
    """

    def routes_of(meshes: Batch, axes: tuple[str, ...]) -> Route:
        return routes(fabric, layouts, meshes, axes)

    return price_on(terms, batch, routes_of=routes_of, speeds=speeds)
