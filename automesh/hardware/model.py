"""The hardware model that plans are priced with: links, layouts of mesh axes, speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from automesh.hardware.calibration.measured_speeds import find_speeds
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Fabric, Layouts, Route
from automesh.hardware.fabric.routes import routes
from automesh.mesh.plan_arrays import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareModel:
    """All properties of devices that times depend on.

    Attributes:
      layouts: where the axes of meshes are on the fabric, for every ICI shape in use; only used if
        the fabric is a torus.
      speeds: from a data sheet, or measured.
    """

    fabric: Fabric
    layouts: Layouts
    speeds: Speeds

    def routes(self, meshes: Batch, axes: tuple[str, ...]) -> Route:
        """Returns the links of a set of axes; see `automesh.hardware.fabric.routes.routes`."""
        return routes(self.fabric, self.layouts, meshes, axes)


def hardware_model(
    fabric: Fabric,
    layouts: Layouts,
    *,
    platform: str,
    device_kind: str,
    environ: Mapping[str, str],
) -> HardwareModel:
    """Makes the model of devices, with the measured speeds of a calibration if there is one.

    Raises:
      UsageError: a profile cannot be read.
    """
    speeds = find_speeds(fabric, platform=platform, device_kind=device_kind, environ=environ)
    return HardwareModel(fabric=fabric, layouts=layouts, speeds=speeds)
