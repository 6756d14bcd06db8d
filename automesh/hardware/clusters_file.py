"""Reads clusters that the user describes, for `--hardware FILE`.

The file is TOML. A cluster is a target by its name, and the name is what its rules are written for:

    [clusters.lab]                       # nodes of GPUs that a switch joins
    chip = "h100"                        # on record (`automesh targets`), or one of [chips] below
    nodes = 16
    devices_per_node = 8
    network_bytes_per_s = 400e9          # one way, of all network cards of a node
    joined_devices = 8                   # that NVLink joins, over nodes; default: those of a node
    source = "our wiki"                  # shown by `automesh targets`

    [clusters.pod]                       # chips linked in a torus
    chip = "v5p"
    torus = [4, 4, 8]                    # chips along each dimension of a slice
    wraps = [true, true, true]           # whose ends are linked; default: as Google's are
    slices = 2
    host = [2, 2, 1]                     # chips of one host; default: as Google's are
    network_bytes_per_s = 25e9           # one way, of all network cards of a host

    [chips.h100-nvl]                     # figures are those of one jax device
    like = "h100"                        # compiled as this one, which gives what is left out here
    hbm_bytes = 99.9e9                   # that programs can have
    hbm_bytes_per_s = 3.9e12
    link_bytes_per_s = 300e9             # one way, over all links to its switch
                                         # (in a torus: over one link of a chip)
    link_latency_s = 3.4e-6
    flops_per_s = { bf16 = 835e12, fp8 = 1671e12 }
    device_kind = "NVIDIA H100 NVL"      # as jax calls it

A chip without `like` needs `platform` ("gpu" or "tpu") and all figures but the latency; it can
be estimated for, not compiled for. `lab-64` is 64 devices of `lab`, `pod-1` is one slice of `pod`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from automesh.errors import UsageError, did_you_mean
from automesh.hardware.chips import Chip, known_chips
from automesh.hardware.clusters import Clusters, Nodes, Slices, UserCluster
from automesh.hardware.gpu_configurations import usable_bytes_of
from automesh.hardware.machines import MAX_GPUS, Machine
from automesh.hardware.slices import MAX_SLICES, Generation, generation_called, wraps_of
from automesh.hardware.targets import parse_target
from automesh.mesh.strict_files import read_table
from automesh.platforms import PLATFORMS, platform_named
from automesh.texts.user_text import user_path

# Chips in files of users; the docstring of this module shows how to write them.


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
class TableName:
    """The name of a table in the file, for error messages."""

    path: Path
    table: str

    def __call__(self, key: str = "") -> str:
        return f"`{self.path}`: `{self.table}{f'.{key}' if key else ''}`"


def chip_on_record(name: str) -> Chip | None:
    """Returns the chip of this name or alias (`v5e`); None if there is none."""
    generation = generation_called(name)
    return known_chips().get(generation.slug if generation else name)


def read_chip(place: TableName, name: str, own: OwnChip) -> Chip:
    """Makes the chip that a table describes.

    Raises:
      UsageError: it has no `like`, and some figures are missing.
    """
    base = _base_row(place, own)
    peaks = base.peak_flops_per_s if own.flops_per_s is None else tuple(own.flops_per_s.items())
    if "bf16" not in dict(peaks):
        raise UsageError(
            f"{place('flops_per_s')} has no `bf16`, which MFU is computed with",
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


def _base_row(place: TableName, own: OwnChip) -> Chip:
    """Returns the chip in `like`; without it, an empty row to be filled in."""
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
                f"{platform_named(base.platform).one_device}",
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
        link_latency_s=platform_named(own.platform).link_latency_s,
        dcn_bytes_per_s=0.0,
        counted_per_device=1,
        rough=False,
        source="",
    )


_NAME = re.compile(r"[a-z][a-z0-9._-]*")

_Count = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCluster:
    """A table `[clusters.NAME]`; see the module."""

    chip: str
    nodes: _Count | None = None
    devices_per_node: _Count | None = None
    joined_devices: _Count | None = None
    torus: tuple[_Count, ...] | None = None
    wraps: tuple[bool, ...] | None = None
    slices: _Count | None = None
    host: tuple[_Count, ...] | None = None
    network_bytes_per_s: Figure | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    clusters: dict[str, OwnCluster]
    chips: dict[str, OwnChip] = field(default_factory=dict[str, OwnChip])


def read_clusters(path: Path) -> Clusters:
    """Reads a file of clusters; the module says what is in it.

    Raises:
      UsageError: it cannot be read, or describes an impossible cluster.
    """
    try:
        file = read_table(path, _File)
    except UsageError as error:
        hint = error.hint or "`automesh targets --help` shows what a file of clusters may say"
        raise UsageError(error.message, hint=hint) from None
    if not file.clusters:
        raise UsageError(
            f"`{path}`: `clusters` must not be empty", hint="write a table `[clusters.NAME]`"
        )
    chips = {
        name: read_chip(TableName(path=path, table=f"chips.{name}"), name, own)
        for name, own in file.chips.items()
    }
    return Clusters(
        path=path,
        all=tuple(_cluster(path, name, file, chips) for name in file.clusters),
    )


def clusters_in(file: str) -> Clusters | None:
    """Reads the clusters of a file as `read_clusters` does; None if no file is named."""
    return read_clusters(user_path(file)) if file else None


def _cluster(path: Path, name: str, file: _File, chips: Mapping[str, Chip]) -> UserCluster:
    place, table = TableName(path=path, table=f"clusters.{name}"), file.clusters[name]
    _check_name(place, name)
    chip = chips.get(table.chip) or chip_on_record(table.chip)
    if chip is None:
        known = [*chips, *known_chips()]
        raise UsageError(
            f"{place('chip')} is `{table.chip}`, which is neither on record nor in [chips]"
            f"{did_you_mean(table.chip, known)}",
            hint=f"use one of {', '.join(known)}, or give its figures in [chips.{table.chip}]",
        )
    _check_keys(place, table, chip)
    own = file.chips.get(table.chip)
    generation = generation_called(chip.slug)
    parts: Nodes | Slices
    if platform_named(chip.platform).fabric == "switch":
        parts = _nodes(place, name, table)
    else:
        parts = _slices(place, table, generation)
        chip = _with_network(place, table, chip, parts)
    said = json.dumps([asdict(table), asdict(own) if own else {}], sort_keys=True)
    return UserCluster(
        name=name,
        chip=chip,
        parts=parts,
        memory_bytes=_memory_bytes(chip, generation, own),
        is_memory_stated=bool(own and own.hbm_bytes),
        source=table.source,
        figures=hashlib.sha256(said.encode()).hexdigest()[:8],
    )


def _check_name(place: TableName, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{place()} is not a name for targets",
            hint="use small letters, digits, dots and dashes, a letter first",
        )
    try:
        parse_target(name, {})
    except UsageError:
        if not name.startswith("cpu"):  # It has its own message.
            return
    raise UsageError(
        f"{place()} has the name of a target that exists without the file",
        hint="give it another name",
    )


def _check_keys(place: TableName, table: OwnCluster, chip: Chip) -> None:
    """Checks that a cluster is either nodes of GPUs or slices of TPUs."""
    needed = platform_named(chip.platform).needed_cluster_keys
    advice = " and ".join(f"`{one}`" for one in needed)
    others = [platform for platform in PLATFORMS if platform.name != chip.platform]
    for key in [key for other in others for key in other.cluster_keys]:
        if getattr(table, key) is not None:
            raise UsageError(
                f"{place(key)} does not go with `{table.chip}`, "
                f"{platform_named(chip.platform).one_device}",
                hint=f"give {advice} instead",
            )
    for key in needed:
        if getattr(table, key) is None:
            raise UsageError(
                f"{place(key)} is missing",
                hint=f"`{table.chip}` is {platform_named(chip.platform).one_device}: give {advice}",
            )


def _nodes(place: TableName, name: str, table: OwnCluster) -> Nodes:
    nodes, each = table.nodes or 1, table.devices_per_node or 1
    joined = table.joined_devices or each
    if nodes * each > MAX_GPUS:
        raise UsageError(
            f"{place()} has {nodes * each} devices; at most {MAX_GPUS} are possible",
            hint="give fewer nodes",
        )
    if joined % each:
        raise UsageError(
            f"{place('joined_devices')} is {joined}, not a multiple of the {each} devices of a "
            "node",
            hint="NVLink joins whole nodes; leave it out if it joins the devices of one",
        )
    if nodes * each > joined and table.network_bytes_per_s is None:
        raise UsageError(
            f"{place('network_bytes_per_s')} is missing",
            hint="nodes need it: one way, of all network cards of one, in bytes per second "
            "(8 cards of 400 Gbit/s: 400e9)",
        )
    machine = Machine(
        name=name,
        chip=table.chip,
        devices=each,
        domain=joined,
        network_bytes_per_s=table.network_bytes_per_s or 0.0,
        source=table.source,
    )
    return Nodes(machine=machine, count=nodes)


def _slices(place: TableName, table: OwnCluster, generation: Generation | None) -> Slices:
    torus, slices = table.torus or (), table.slices or 1
    if len(torus) not in (2, 3):
        raise UsageError(
            f"{place('torus')} has {len(torus)} dimensions; two or three are possible",
            hint="give the chips of a slice along each dimension: `torus = [4, 4, 8]`",
        )
    if generation and (reason := generation.why_not(torus)):
        raise UsageError(
            f"{place('torus')} is {'x'.join(map(str, torus))}: {reason}",
            hint="give the shape of a slice, or describe the chips in [chips] without `like`",
        )
    if slices > MAX_SLICES:
        raise UsageError(
            f"{place('slices')} is {slices}; at most {MAX_SLICES} are possible",
            hint="give fewer slices",
        )
    for key in ("wraps", "host"):
        given: tuple[object, ...] | None = getattr(table, key)
        if given is None and generation is None:
            raise UsageError(
                f"{place(key)} is missing",
                hint=f"how chips of the kind `{table.chip}` are linked is not on record: give "
                "`wraps` and `host`",
            )
        if given is not None and len(given) != len(torus):
            raise UsageError(
                f"{place(key)} has {len(given)} values, but the torus {len(torus)} dimensions",
                hint="give one for each dimension",
            )
    host = table.host or (generation.host_of(torus) if generation else ())
    if any(size % have for size, have in zip(torus, host)):
        raise UsageError(
            f"{place('host')} is {'x'.join(map(str, host))}, of which no torus of "
            f"{'x'.join(map(str, torus))} can be made",
            hint="give sizes that divide those in `torus`",
        )
    wraps = table.wraps or (wraps_of(generation.device_kind, torus) if generation else ())
    return Slices(
        generation=generation, torus=torus, wraps=wraps, host=(*host, 1)[:3], count=slices
    )


def _with_network(place: TableName, table: OwnCluster, chip: Chip, parts: Slices) -> Chip:
    """Returns the chip with its share of its host's network."""
    if table.network_bytes_per_s is not None:
        each = math.prod(parts.host) * chip.devices_per_chip
        return replace(chip, dcn_bytes_per_s=table.network_bytes_per_s / each)
    if parts.count > 1 and not chip.dcn_bytes_per_s:
        raise UsageError(
            f"{place('network_bytes_per_s')} is missing",
            hint="slices need it: one way, of all network cards of a host, in bytes per second",
        )
    return chip


def _memory_bytes(chip: Chip, generation: Generation | None, own: OwnChip | None) -> int:
    if own and own.hbm_bytes:
        return chip.hbm_bytes
    return generation.usable_bytes if generation else usable_bytes_of(chip)
