"""Routes of a batch of plans, computed once per distinct layout of axes on the links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from automesh.cost.unique_rows import Codes, distinct, products, ranked
from automesh.hardware.fabric.fabric import Route
from automesh.mesh.plan_arrays import Batch

# The routes of a set of axes for each mesh of a batch.
RoutesOf = Callable[[Batch, tuple[str, ...]], Route]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRoutes:
    """One set of axes on the plans of a batch.

    Attributes:
      routes: the distinct routes.
      place: [ICI shapes * granule counts] index into `routes`.
      granules: [DCN shapes] rank of the number of granules that the axes span.
      granule_counts: number of such ranks.
    """

    routes: Route
    place: Codes
    granules: Codes
    granule_counts: int

    def __len__(self) -> int:
        return len(self.routes.ici_size)

    def taken(self, ici: Codes, dcn: Codes) -> Codes:
        """Indexes each plan's route, [plans], by indices into `RouteTable.ici` and `.dcn`."""
        return self.place[ici * self.granule_counts + self.granules[dcn]]


class RouteTable:
    """Routes of a batch by set of axes.

    A route only depends on the ICI sizes of all axes, which decide the layout, and on the number of
    granules that its own axes span.

    Attributes:
      ici, dcn: the distinct shapes inside and between granules.
      sizes: the distinct sizes of all axes.
    """

    def __init__(self, batch: Batch, routes_of: RoutesOf) -> None:
        inside = [ranked(column) for column in batch.ici.T]
        between = [ranked(column) for column in batch.dcn.T]
        both = [products(one, other) for one, other in zip(inside, between, strict=True)]
        self.ici = distinct(inside, len(batch))
        self.dcn = distinct(between, len(batch))
        self.sizes = distinct(both, len(batch))
        self._batch = batch
        self._routes_of = routes_of
        self._known: dict[tuple[str, ...], AxisRoutes] = {}

    def of(self, axes: tuple[str, ...]) -> AxisRoutes:
        """Returns the routes of one set of axes."""
        if axes not in self._known:
            self._known[axes] = self._found(axes)
        return self._known[axes]

    def _found(self, axes: tuple[str, ...]) -> AxisRoutes:
        columns = [place for place, name in enumerate(self._batch.names) if name in axes]
        spanned = np.prod(self._batch.dcn[self.dcn.first][:, columns], axis=1, dtype=np.int64)
        granules = distinct([spanned], len(spanned))
        # One DCN shape represents all that span the same number of granules.
        dcn_rows = self.dcn.first[granules.first]
        shapes = Batch(
            names=self._batch.names,
            ici=np.repeat(self._batch.ici[self.ici.first], len(granules), axis=0),
            dcn=np.tile(self._batch.dcn[dcn_rows], (len(self.ici), 1)),
        )
        routes, place = _deduplicated(self._routes_of(shapes, axes))
        return AxisRoutes(
            routes=routes,
            place=place,
            granules=granules.inverse,
            granule_counts=len(granules),
        )


def _deduplicated(routes: Route) -> tuple[Route, Codes]:
    """Returns the distinct routes, and the index of each mesh's route."""
    values = [getattr(routes, field.name) for field in fields(Route)]
    ranks = [
        np.unique(value, return_inverse=True)[1] for value in values if (value != value[0]).any()
    ]
    found = distinct(ranks, len(routes.ici_size))
    return routes.rows(found.first), found.inverse
