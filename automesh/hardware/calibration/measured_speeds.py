"""Speeds as they were measured, and those of the data sheet for what was not."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

import numpy as np

from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.calibration.probes import link_seconds
from automesh.hardware.calibration.profile import CollectiveFit, MatmulFit, Profile
from automesh.hardware.calibration.profile_files import find_profile
from automesh.hardware.calibration.speeds import CollectiveSeconds, Speeds
from automesh.hardware.chips import Chip
from automesh.hardware.fabric.fabric import Fabric, Floats, Route

_TURN = "transpose"


class Calibrated:
    """Speeds from a profile; see `Speeds`.

    Args:
      base: for what the profile lacks, and for the bounds, which no measurement can prove.
    """

    def __init__(self, profile: Profile, base: Speeds) -> None:
        self._base = base
        self._matmuls = {fit.dtype: fit for fit in profile.matmuls}
        kinds = dict.fromkeys(fit.collective for fit in profile.collectives)
        self._collectives = {
            kind: _Curve([fit for fit in profile.collectives if fit.collective == kind])
            for kind in kinds
        }
        self.origin = _origin(profile)
        # The mean over forms of kernels, which on a CPU are bound by arithmetic.
        self.memory_bytes_per_s = _streaming(profile) or base.memory_bytes_per_s
        self.kernel_overhead_s = profile.kernel_s or base.kernel_overhead_s
        self.near_bytes = base.near_bytes
        self.epilogue_bytes_per_s = 0.0  # Fits of whole multiplications hold it already.
        self.host_bytes_per_s = base.host_bytes_per_s
        self.bound_memory_bytes_per_s = base.bound_memory_bytes_per_s

    def bound_flops_per_s(self, dtype: str) -> float:
        """See `Speeds`."""
        return self._base.bound_flops_per_s(dtype)

    def matmul_s(self, dtype: str, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
        """See `Speeds`; starting the kernel is left out, being `kernel_overhead_s`."""
        fit = self._matmuls.get(dtype)
        if fit is None:
            return self._base.matmul_s(dtype, batch, m, n, k)
        return np.asarray(
            max(fit.call_s - self.kernel_overhead_s, 0.0) + _amount(fit, batch, m, n, k)
        )

    def collective_s(self, kind: str, payload_bytes: Floats, route: Route) -> CollectiveSeconds:
        """See `Speeds`; groups that cross granules keep the data sheet's time."""
        sheet = self._base.collective_s(kind, payload_bytes, route)
        curve = self._collectives.get(kind)
        if curve is None:
            return sheet
        call_s, slowness = curve.at(route.ici_size)
        # Of groups that cross granules nothing was measured.
        here = (route.ici_size > 1) & (route.dcn_size <= 1)
        links_s = link_seconds(kind, payload_bytes, route)
        return CollectiveSeconds(
            latency_s=np.where(here, call_s, sheet.latency_s),
            ici_s=np.where(here, slowness * links_s, sheet.ici_s),
            dcn_s=sheet.dcn_s,
        )


def find_speeds(
    fabric: Fabric, *, platform: str, device_kind: str, environ: Mapping[str, str]
) -> Speeds:
    """The speeds that a search takes: from the profile of such devices, if there is one.

    Args:
      fabric: of the target.
      platform, device_kind: of its devices, as jax calls them.
      environ: `$AUTOMESH_PROFILES` names the folder of the profiles.

    Raises:
      UsageError: there is a profile, but it is broken.
    """
    found = find_profile(platform, device_kind, fabric.num_devices, environ=environ)
    return speeds_for(fabric.chip, fabric, found if isinstance(found, Profile) else None)


def speeds_for(chip: Chip, fabric: Fabric, profile: Profile | None) -> Speeds:
    """Measured speeds if there is a profile, else those of the data sheet."""
    base = datasheet_speeds(chip, fabric)
    return base if profile is None else Calibrated(profile, base)


class _Curve:
    """Laws of one kind of collective over the sizes of its groups."""

    def __init__(self, fits: Sequence[CollectiveFit]) -> None:
        ordered = sorted(fits, key=lambda fit: fit.group_size)
        self._sizes = np.array([fit.group_size for fit in ordered], float)
        # A wait among more devices is not shorter: a dip is noise.
        self._call_s = np.maximum.accumulate([fit.call_s for fit in ordered])
        self._slowness = np.array([fit.slowness for fit in ordered])

    def at(self, size: Floats) -> tuple[Floats, Floats]:
        """Seconds per call and slowness for groups of `size` devices.

        Between measured sizes straight lines; beyond them the waits grow with the number of
        devices, as the steps of a ring do, and the slowness stays.
        """
        call_s = np.interp(size, self._sizes, self._call_s)
        beyond = np.maximum(size / self._sizes[-1], 1.0)
        return np.asarray(call_s * beyond), np.asarray(np.interp(size, self._sizes, self._slowness))


def _amount(fit: MatmulFit, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
    per_matrix = fit.left_s * m * k + fit.right_s * k * n + fit.result_s * m * n
    return batch * (fit.batch_s + per_matrix + fit.flop_s * 2 * m * n * k)


def _streaming(profile: Profile) -> float:
    """Bytes per second over all forms of kernels, each with the same share; 0 if not measured."""
    # Accelerators' compilers choose layouts so that most transposes cost nothing.
    counted = [fit for fit in profile.streams if profile.platform == "cpu" or fit.form != _TURN]
    slopes = [fit.byte_s for fit in counted if fit.byte_s > 0]
    return len(slopes) / sum(slopes) if slopes else 0.0


def _origin(profile: Profile) -> str:
    text = f"calibration of {profile.about()}, {profile.made[:10]}"
    then, now = dict(profile.versions).get("jaxlib", ""), importlib.metadata.version("jaxlib")
    if then in ("", now):
        return text
    return f"{text}, with jaxlib {then}, and this is {now}: calibrate again"
