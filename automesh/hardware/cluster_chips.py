"""Chips in files of the user's own; `clusters_file` says how to write them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from automesh.errors import UsageError, did_you_mean
from automesh.hardware.chips import Chip, known_chips
from automesh.hardware.slices import generation_called

KIND = {"tpu": "a TPU, whose chips are linked in a torus", "gpu": "a GPU, which sits in a node"}
# Of a hop, as in data/chips.json: TPUs, and NCCL's ring over NVLink.
_LATENCY_S = {"tpu": 1e-6, "gpu": 3.4e-6}

Figure = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnChip:
    """A table `[chips.NAME]`; see `clusters_file`."""

    like: str = ""
    platform: Literal["gpu", "tpu", ""] = ""
    device_kind: str = ""
    flops_per_s: dict[str, Figure] | None = None
    hbm_bytes: Figure | None = None
    hbm_bytes_per_s: Figure | None = None
    link_bytes_per_s: Figure | None = None
    link_latency_s: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A table of the file, for errors."""

    path: Path
    table: str

    def __call__(self, key: str = "") -> str:
        return f"`{self.path}`: `{self.table}{f'.{key}' if key else ''}`"


def chip_on_record(name: str) -> Chip | None:
    """The chip of this name, or alias (`v5e`); None if there is none."""
    generation = generation_called(name)
    return known_chips().get(generation.slug if generation else name)


def read_chip(place: Place, name: str, own: OwnChip) -> Chip:
    """The chip that a table describes.

    Raises:
      UsageError: it is like none on record and leaves figures out.
    """
    base = _base(place, own)
    peaks = base.peak_flops_per_s if own.flops_per_s is None else tuple(own.flops_per_s.items())
    if "bf16" not in dict(peaks):
        raise UsageError(
            f"{place('flops_per_s')} has no `bf16`, which utilisation is counted against",
            hint="give the dense FLOP/s of one device by number type: bf16, fp8, int8",
        )
    link = own.link_bytes_per_s
    return replace(
        base,
        name=name,
        device_kinds=(own.device_kind,) if own.device_kind else base.device_kinds,
        peak_flops_per_s=peaks,
        hbm_bytes=int(own.hbm_bytes or base.hbm_bytes),
        hbm_bytes_per_s=own.hbm_bytes_per_s or base.hbm_bytes_per_s,
        # The devices of a chip share its links.
        link_bytes_per_s=link / base.devices_per_chip if link else base.link_bytes_per_s,
        link_latency_s=own.link_latency_s or base.link_latency_s,
        source=place() + (f"; what it leaves out: {base.name}" if own.like else ""),
    )


def _base(place: Place, own: OwnChip) -> Chip:
    """The chip that this one is like; of one that is like none, a row to be filled in."""
    if own.like:
        base = chip_on_record(own.like)
        if base is None:
            raise UsageError(
                f"{place('like')} is `{own.like}`, which is not on record"
                f"{did_you_mean(own.like, known_chips())}",
                hint=f"use one of {', '.join(known_chips())}, or leave it out and give all figures",
            )
        if own.platform not in ("", base.platform):
            raise UsageError(
                f"{place('platform')} is `{own.platform}`, but `{own.like}` is "
                f"{KIND[base.platform]}",
                hint="leave `platform` out",
            )
        return base
    needed = ("platform", "flops_per_s", "hbm_bytes", "hbm_bytes_per_s", "link_bytes_per_s")
    for key in needed:
        if not getattr(own, key):
            raise UsageError(
                f"{place(key)} is missing",
                hint="give all figures, or in `like` a chip on record that it differs from: "
                f"{', '.join(known_chips())}",
            )
    return Chip(
        name="",
        slug="",
        platform=own.platform,
        device_kinds=(),
        devices_per_chip=1,
        peak_flops_per_s=(),
        hbm_bytes=0,
        hbm_bytes_per_s=0.0,
        link_bytes_per_s=0.0,
        link_latency_s=_LATENCY_S[own.platform],
        dcn_bytes_per_s=0.0,
        counted_per_device=1,
        rough=False,
        source="",
    )
