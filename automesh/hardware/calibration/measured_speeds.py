"""Measured speeds, completed by those of the data sheet."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.calibration.probes import between_seconds, link_seconds
from automesh.hardware.calibration.profile import METHOD, CollectiveFit, MatmulFit, Profile
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
        self._inside = {
            kind: _Curve(fits) for kind, fits in _by_kind(profile.collectives, between=False)
        }
        self._between = {
            kind: _Surface(fits) for kind, fits in _by_kind(profile.collectives, between=True)
        }
        self.origin = _origin(profile)
        # The mean over forms of kernels, which on a CPU are bound by arithmetic.
        self.memory_bytes_per_s = _streaming(profile) or base.memory_bytes_per_s
        self.kernel_overhead_s = profile.kernel_s or base.kernel_overhead_s
        self.near_bytes = base.near_bytes
        self.epilogue_bytes_per_s = 0.0  # The fits of whole multiplications include it already.
        self.host_bytes_per_s = base.host_bytes_per_s
        self.window_flops_per_byte = base.window_flops_per_byte
        self.bound_memory_bytes_per_s = base.bound_memory_bytes_per_s

    def bound_flops_per_s(self, dtype: str) -> float:
        """See `Speeds`."""
        return self._base.bound_flops_per_s(dtype)

    def matmul_s(self, dtype: str, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
        """See `Speeds`; without the start of the kernel, which is `kernel_overhead_s`."""
        fit = self._matmuls.get(dtype)
        if fit is None:
            return self._base.matmul_s(dtype, batch, m, n, k)
        return np.asarray(
            max(fit.call_s - self.kernel_overhead_s, 0.0) + _amount(fit, batch, m, n, k)
        )

    def collective_s(self, kind: str, payload_bytes: Floats, route: Route) -> CollectiveSeconds:
        """See `Speeds`; groups of kinds that were not measured keep the data sheet's time."""
        found = self._base.collective_s(kind, payload_bytes, route)
        links_s = link_seconds(kind, payload_bytes, route)
        if (curve := self._inside.get(kind)) is not None:
            call_s, slowness = curve.at(route.ici_size)
            here = (route.ici_size > 1) & (route.dcn_size <= 1)
            found = CollectiveSeconds(
                latency_s=np.where(here, call_s, found.latency_s),
                ici_s=np.where(here, slowness * links_s, found.ici_s),
                dcn_s=found.dcn_s,
            )
        if (surface := self._between.get(kind)) is not None:
            call_s, slowness = surface.at(route.ici_size, route.dcn_size)
            here = route.dcn_size > 1
            network_s = between_seconds(kind, payload_bytes, route)
            found = CollectiveSeconds(
                latency_s=np.where(here, call_s, found.latency_s),
                ici_s=np.where(here, slowness * links_s, found.ici_s),
                dcn_s=np.where(here, slowness * network_s, found.dcn_s),
            )
        return found


def find_speeds(
    fabric: Fabric, *, platform: str, device_kind: str, environ: Mapping[str, str]
) -> Speeds:
    """Finds the speeds for a search: from the profile of its devices, if there is one.

    Args:
      fabric: of the target.
      platform, device_kind: of its devices, as jax calls them.
      environ: `$AUTOMESH_PROFILES` names the folder of the profiles.

    Raises:
      UsageError: there is a profile, but it is broken.
    """
    found = find_profile(
        platform,
        device_kind,
        fabric.num_devices,
        environ=environ,
        num_granules=fabric.num_granules,
    )
    return speeds_for(fabric.chip, fabric, found if isinstance(found, Profile) else None)


def speeds_for(chip: Chip, fabric: Fabric, profile: Profile | None) -> Speeds:
    """Returns measured speeds if there is a profile, else those of the data sheet."""
    base = datasheet_speeds(chip, fabric)
    return base if profile is None else Calibrated(profile, base)


def _by_kind(
    fits: Sequence[CollectiveFit], *, between: bool
) -> list[tuple[str, list[CollectiveFit]]]:
    """Groups the laws by kind, either of groups inside a granule or of groups over several."""
    chosen = sorted(
        (fit for fit in fits if (fit.granules > 1) == between), key=lambda fit: fit.collective
    )
    return [(kind, list(same)) for kind, same in groupby(chosen, lambda fit: fit.collective)]


class _Curve:
    """The laws of one kind of collective, by the size of its groups inside a granule."""

    def __init__(self, fits: Sequence[CollectiveFit]) -> None:
        ordered = sorted(fits, key=lambda fit: fit.group_size)
        self._sizes = np.array([fit.group_size for fit in ordered], float)
        # The latency among more devices is not lower: a dip is noise.
        self._call_s = np.maximum.accumulate([fit.call_s for fit in ordered])
        self._slowness = np.array([fit.slowness for fit in ordered])

    def at(self, size: Floats) -> tuple[Floats, Floats]:
        """Returns seconds per call and slowness, for groups of `size` devices.

        Interpolates linearly between measured sizes; beyond them the latency grows with the number
        of devices, as the steps of a ring do, and the slowness stays the same.
        """
        call_s = np.interp(size, self._sizes, self._call_s)
        beyond = np.maximum(size / self._sizes[-1], 1.0)
        return np.asarray(call_s * beyond), np.asarray(np.interp(size, self._sizes, self._slowness))


class _Surface:
    """The laws of one kind of collective, by the number of granules and of devices in each."""

    def __init__(self, fits: Sequence[CollectiveFit]) -> None:
        ordered = sorted(fits, key=lambda fit: fit.granules)
        curves = {
            granules: _Curve(list(same))
            for granules, same in groupby(ordered, lambda fit: fit.granules)
        }
        self._granules = np.array(list(curves), float)
        self._curves = tuple(curves.values())

    def at(self, size: Floats, granules: Floats) -> tuple[Floats, Floats]:
        """Returns seconds per call and slowness, for groups of `size` devices in each of several
        granules.

        Interpolates linearly between measured numbers of granules; beyond them as `_Curve.at`.
        """
        calls, slownesses = (
            np.array(one) for one in zip(*(each.at(size) for each in self._curves))
        )
        call_s = np.array(_between_rows(self._granules, np.maximum.accumulate(calls), granules))
        slowness = _between_rows(self._granules, slownesses, granules)
        return call_s * np.maximum(granules / self._granules[-1], 1.0), slowness


def _between_rows(places: Floats, rows: Floats, wanted: Floats) -> Floats:
    """Interpolates linearly between rows: [meshes] from [places, meshes], one place per mesh."""
    if len(places) == 1:
        return np.asarray(rows[0])
    upper = np.clip(np.searchsorted(places, wanted), 1, len(places) - 1)
    low, high = places[upper - 1], places[upper]
    share = np.clip((wanted - low) / (high - low), 0.0, 1.0)
    meshes = np.arange(rows.shape[1])
    return np.asarray((1 - share) * rows[upper - 1, meshes] + share * rows[upper, meshes])


def _amount(fit: MatmulFit, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
    per_matrix = fit.left_s * m * k + fit.right_s * k * n + fit.result_s * m * n
    return batch * (fit.batch_s + per_matrix + fit.flop_s * 2 * m * n * k)


def _streaming(profile: Profile) -> float:
    """Returns the bytes per second, averaged over all forms of kernels; 0 if they were not
    measured."""
    # Accelerators' compilers choose layouts so that most transposes cost nothing.
    counted = [fit for fit in profile.streams if profile.platform == "cpu" or fit.form != _TURN]
    slopes = [fit.byte_s for fit in counted if fit.byte_s > 0]
    return len(slopes) / sum(slopes) if slopes else 0.0


def _origin(profile: Profile) -> str:
    text = f"calibration of {profile.about()}, {profile.made[:10]}"
    if profile.method != METHOD:
        return f"{text}, by a former method: calibrate again"
    then, now = dict(profile.versions).get("jaxlib", ""), importlib.metadata.version("jaxlib")
    if then in ("", now):
        return text
    return f"{text}, with jaxlib {then}, and this is {now}: calibrate again"
