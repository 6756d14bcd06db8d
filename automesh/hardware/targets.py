"""Targets of a search: the attached devices, virtual ones, or absent devices."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from automesh.errors import UsageError, did_you_mean
from automesh.hardware.absent import Absent
from automesh.hardware.chips import chip_for
from automesh.hardware.clusters import Clusters
from automesh.hardware.machines import read_cluster
from automesh.hardware.slices import read_slice
from automesh.limits import TARGET_CHARS

MAX_CPU_DEVICES = 4096
MAX_CPU_PROCESSES = 256
_CPU = re.compile(r"cpu:([0-9]+)(?:\*([0-9]+))?")
_EXAMPLES = ("local", "cpu:8", "tpu-v5p-128", "v5e:4x8", "gpu-h100-64")
_UNDERSTOOD = (
    "`local` (the attached devices), `cpu:N` (N virtual CPU devices), `cpu:N*P` (P processes of N "
    "each), or a name like "
    "`tpu-v5p-128`, `v5e:4x8` or `gpu-h100-64`; `automesh targets` lists them"
)


class Described(Protocol):
    """A device that names its kind; `automesh.program.nouns.Device` fits."""

    @property
    def platform(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...
    @property
    def slice_index(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Devices to search for.

    Attributes:
      name: as the user wrote it.
      selector: name that a rule is written for; empty for `local` until the devices are inspected
        (see `local_selector`).
      platforms: value of JAX_PLATFORMS for the workers, never empty.
      cpu_devices: virtual CPU devices of a process; 0 leaves jax's own number.
      processes: processes of one jax program, which share the devices; more than 1 are a gang (see
        `automesh.launch`).
      absent: the devices that the name means, if they are absent: the workers use as many virtual
        CPU devices instead, but at most MAX_CPU_DEVICES.
      notices: messages for the user, one sentence each.
      figures: a hash of what the user's file says about the devices; empty without one.
    """

    name: str
    selector: str
    platforms: str
    cpu_devices: int = 0
    processes: int = 1
    absent: Absent | None = None
    notices: tuple[str, ...] = ()
    figures: str = ""


def parse_target(name: str, environ: Mapping[str, str], clusters: Clusters | None = None) -> Target:
    """Reads the name of a target.

    Args:
      environ: environment variables; if JAX_PLATFORMS is set, it decides what `local` is.
      clusters: the user's own, if there are any.

    Raises:
      UsageError: an unknown name, or devices that cannot exist.
    """
    text = name.strip()
    if text == "local":
        return _local(environ)
    if len(text) > TARGET_CHARS:
        raise UsageError(f"`{name}` is too long for a target", hint=f"use {_UNDERSTOOD}")
    match = _CPU.fullmatch(text)
    if match:
        return _virtual(name, int(match[1]), int(match[2] or 1))
    if text.startswith("cpu"):
        raise UsageError(
            f"target `{name}` does not say how many virtual devices",
            hint="write for example `cpu:8`",
        )
    small = text.lower()
    own = clusters.find(small) if clusters else None
    absent = own[0] if own else read_slice(small) or read_cluster(small)
    if absent is not None:
        return Target(
            name=name,
            selector=absent.selector,
            platforms="cpu",
            cpu_devices=min(absent.num_devices, MAX_CPU_DEVICES),
            absent=absent,
            notices=_about_nvlink(absent),
            figures=own[1].figures if own else "",
        )
    raise _unknown(name, clusters)


def _about_nvlink(absent: Absent) -> tuple[str, ...]:
    """Says that what crosses nodes does not leave NVLink, if one domain joins all of them: jax
    itself groups devices by node, so that such parts of an axis are written with `dcn.`, too."""
    if absent.joined_hosts < 2 or absent.joined_hosts < absent.num_hosts:
        return ()
    return (
        f"NVLink joins all {absent.num_hosts} nodes of {absent.selector}: `dcn.` parts of a mesh "
        "cross nodes, not a network, and are priced at NVLink's speed",
    )


def _virtual(name: str, count: int, processes: int) -> Target:
    if not 1 <= count * processes <= MAX_CPU_DEVICES:
        each = f" in each of {processes} processes" if processes != 1 else ""
        asked = f"{count} devices{each}"
        raise UsageError(
            f"target `{name}` asks for {asked}; 1 to {MAX_CPU_DEVICES} are possible",
            hint="write for example `cpu:8`, or `cpu:4*2` for two processes of four",
        )
    if processes > MAX_CPU_PROCESSES:
        raise UsageError(
            f"target `{name}` asks for {processes} processes; {MAX_CPU_PROCESSES} are the most",
            hint="write for example `cpu:4*2` for two processes of four devices",
        )
    return Target(
        name=name,
        selector=local_selector("cpu", "cpu", count * processes, processes),
        platforms="cpu",
        cpu_devices=count,
        processes=processes,
    )


def _unknown(name: str, clusters: Clusters | None) -> UsageError:
    text = name.strip()
    if text.lower().startswith("neuron-"):
        return UsageError(
            f"`{name}` is not a target: AWS Neuron devices are not on record",
            hint=f"use {_UNDERSTOOD}",
        )
    names = clusters.names if clusters else ()
    in_file = f", nor one of `{clusters.path}`: {', '.join(names)}" if clusters else ""
    return UsageError(
        f"`{name}` is not a target{in_file}{did_you_mean(text, (*names, *_EXAMPLES))}",
        hint=f"use {_UNDERSTOOD}",
    )


def check_present(target: Target) -> None:
    """Checks that the devices are attached, for a command that needs them.

    Raises:
      UsageError: the devices are absent.
    """
    if target.absent is not None:
        raise UsageError(
            f"target `{target.name}` names devices that are not here",
            hint=f"`automesh targets {target.name}` tells what is known of them, and whether they "
            "can be compiled for on this machine",
        )


def local_selector(platform: str, device_kind: str, count: int, num_slices: int = 1) -> str:
    """Returns the usual name of attached devices.

    Args:
      device_kind: as jax reports it.
      count: all devices, of all slices.
      num_slices: of a TPU; of virtual CPU devices, the processes that have them.

    >>> local_selector("cpu", "cpu", 8), local_selector("cpu", "cpu", 8, 2)
    ('cpu-8', 'cpu-4-2')
    >>> local_selector("tpu", "TPU v5 lite", 512, 2)
    'tpu-v5litepod-256-2'
    """
    if platform == "cpu":
        return f"cpu-{count // num_slices}-{num_slices}" if num_slices > 1 else f"cpu-{count}"
    chip = chip_for(device_kind, platform)
    slug = _slug(device_kind) if chip.rough else chip.slug
    if platform != "tpu":
        return f"{platform}-{slug}-{count}"
    each = f"tpu-{slug}-{count // num_slices * chip.counted_per_device}"
    return f"{each}-{num_slices}" if num_slices > 1 else each


def selector_of(devices: Sequence[Described]) -> str:
    """Returns the usual name of all devices of a job, as jax describes them.

    Args:
      devices: of all its processes; slices differ in their indices.
    """
    of_cpus = devices[0].platform == "cpu"
    slices = len({one.process_index if of_cpus else one.slice_index for one in devices})
    return local_selector(devices[0].platform, devices[0].kind, len(devices), slices)


def _slug(device_kind: str) -> str:
    words = re.sub(r"[^a-z0-9.]+", "-", device_kind.lower()).strip("-")
    return re.sub(r"^(nvidia|amd|tpu)-", "", words)


def _local(environ: Mapping[str, str]) -> Target:
    asked = environ.get("JAX_PLATFORMS", "").strip()
    platforms, notices = (asked, ()) if asked else _attached()
    return Target(name="local", selector="", platforms=platforms, notices=notices)


def _attached() -> tuple[str, tuple[str, ...]]:
    """Guesses the value of JAX_PLATFORMS for the attached devices, without importing jax."""
    chips = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    present = (
        ("tpu", "TPU", bool(chips), ("libtpu",), "jax[tpu]"),
        (
            "cuda",
            "NVIDIA GPU",
            Path("/dev/nvidia0").exists(),
            ("jax_cuda12_plugin", "jax_cuda13_plugin"),
            "jax[cuda12]",
        ),
        (
            "rocm",
            "AMD GPU",
            Path("/dev/kfd").exists(),
            ("jax_rocm60_plugin", "jax_rocm7_plugin"),
            "jax[rocm]",
        ),
    )
    notices: list[str] = []
    for platform, device, is_there, plugins, package in present:
        if is_there and any(importlib.util.find_spec(plugin) for plugin in plugins):
            # The CPU as well, second so that it is not the default: scripts build arrays there.
            return f"{platform},cpu", tuple(notices)
        # A /dev/vfio group alone may belong to any passed-through device.
        if is_there and (platform != "tpu" or any(Path("/dev").glob("accel*"))):
            notices.append(
                f"this machine seems to have a {device} that jax cannot use: install `{package}`"
            )
    return "cpu", tuple(notices)
