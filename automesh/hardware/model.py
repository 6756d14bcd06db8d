"""The hardware that a plan is priced on: how devices are linked, where axes lie, and how fast."""

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
    """Everything about devices that seconds depend on.

    Attributes:
      layouts: where the axes of meshes lie on the fabric: of every ICI shape that is asked about;
        not looked at unless the fabric is a torus.
      speeds: of a data sheet, or measured.
    """

    fabric: Fabric
    layouts: Layouts
    speeds: Speeds

    def routes(self, meshes: Batch, axes: tuple[str, ...]) -> Route:
        """How a set of axes lies on the wires; see `automesh.hardware.fabric.routes.routes`."""
        return routes(self.fabric, self.layouts, meshes, axes)


def hardware_model(
    fabric: Fabric,
    layouts: Layouts,
    *,
    platform: str,
    device_kind: str,
    environ: Mapping[str, str],
) -> HardwareModel:
    """The model of devices, with the speeds that a calibration has found for them, if there is one.

    Raises:
      UsageError: a profile cannot be read.
    """
    speeds = find_speeds(fabric, platform=platform, device_kind=device_kind, environ=environ)
    return HardwareModel(fabric=fabric, layouts=layouts, speeds=speeds)
