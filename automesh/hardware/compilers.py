"""Which compilers for devices that are not here this machine has (no jax)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import sys
from dataclasses import dataclass, replace

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from automesh.errors import UsageError
from automesh.hardware.absent import Absent, AbsentDevices
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.gpu_configurations import configuration_of
from automesh.hardware.slices import wraps_of
from automesh.hardware.targets import Target
from automesh.package import installed_version
from automesh.platforms import platform_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """What compiles for one platform without its devices.

    Attributes:
      platform: tpu or gpu.
      name: as people know it.
      version: of the one that is installed, or where it is; empty if none is.
      install: what to do where it is not, a sentence without its end.
    """

    platform: str
    name: str
    version: str
    install: str


def compiler_for(platform: str) -> Compiler:
    """The compiler for a platform, installed or not.

    Args:
      platform: tpu or gpu.
    """
    known = platform_named(platform)
    versions = (
        installed_version(plugin.packages[0])
        for plugin in known.plugins
        if importlib.util.find_spec(plugin.module) and all(map(installed_version, plugin.packages))
    )
    version = next(versions, "") or _of_environment(platform)
    install = known.install
    if not sys.platform.startswith("linux"):
        install = f"{install} on Linux, for which alone it is made"
    return Compiler(platform=platform, name=known.compiler, version=version, install=install)


def check_compilable(target: Target) -> None:
    """Makes sure that absent devices can be compiled for, as far as can be told without jax.

    Raises:
      UsageError: there is no compiler for them, or none here.
    """
    absent = target.absent
    if absent is None:
        return
    by_estimate = "rank its meshes by estimate with `--dry-run`"
    if not has_compiler(absent):
        raise UsageError(
            f"no compiler knows the devices of target `{target.name}`, {absent.fabric.chip.name}",
            hint=by_estimate,
        )
    compiler = compiler_for(absent.platform)
    if not compiler.version:
        raise UsageError(
            f"target `{target.name}` is not here, and {compiler.name}, which compiles for "
            f"{platform_named(absent.platform).devices}, is not installed",
            hint=f"{compiler.install}, or {by_estimate}",
        )


def has_compiler(absent: Absent) -> bool:
    """Whether devices are of a kind that can be compiled for, here or anywhere."""
    return bool(absent.topology or absent.gpu)


def _of_environment(platform: str) -> str:
    # A libtpu that is no package; of one that is, jax sets this variable itself.
    path = os.environ.get(platform_named(platform).library_variable, "")
    return f"at {path}" if path else ""


# Which versions of a compiler fit the installed jax, by jax's own word.


def wanted_by_jax(platform: str) -> SpecifierSet:
    """The versions that the installed jax asks for in its own extra; any, if it names none.

    Args:
      platform: tpu or gpu.
    """
    known = platform_named(platform)
    environment = {"extra": known.jax_extra}
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("jax") or ()]
    except importlib.metadata.PackageNotFoundError:
        return SpecifierSet()
    return next(
        (
            requirement.specifier
            for requirement in requirements
            if requirement.name in known.packages
            and requirement.marker
            and requirement.marker.evaluate(environment)
        ),
        SpecifierSet(),
    )


def fits(version: str, wanted: SpecifierSet) -> bool:
    """Whether a version is one of those that are asked for."""
    return wanted.contains(version, prereleases=True)


def is_too_old(version: str, wanted: SpecifierSet) -> bool:
    """Whether a version is older than all that are asked for: such compilers may crash.

    >>> wanted = SpecifierSet("==0.0.42.*")
    >>> is_too_old("0.0.41", wanted), is_too_old("0.0.42.1", wanted), is_too_old("0.0.43", wanted)
    (True, False, False)
    """
    least = [
        Version(one.version.removesuffix(".*"))
        for one in wanted
        if one.operator in ("==", ">=", "~=")
    ]
    return bool(least) and Version(version) < max(least)


# What a compile-only client of jax is told about hardware that is not here.


def absent_devices_of(absent: Absent) -> AbsentDevices:
    """What a compile-only client is told about the devices that a target names.

    The granules of GPUs are their hosts, one jax process each, as for attached ones. Their compiler
    is told which hosts NVLink joins, as so many domains of so many hosts of so many devices: inside
    a domain it makes kernels of its own of small collectives, and schedules others by its speed.
    """
    fabric, hosts = absent.fabric, absent.num_hosts
    # It knows domains of one size only: where they would not be filled, it is told of smaller ones.
    joined = math.gcd(hosts, absent.joined_hosts)
    one = AbsentDevices(
        platform="gpu",
        device_kind=absent.device_kind,
        num_devices=absent.num_devices,
        num_granules=fabric.num_granules,
        num_hosts=absent.num_hosts,
        topology=f"{hosts // joined}x{joined}x{absent.num_devices // hosts}",
    )
    if fabric.kind != "torus":
        return replace(one, gpu=absent.gpu, memory_bytes=absent.device_memory_bytes)
    usual = wraps_of(absent.device_kind, fabric.torus)
    return replace(
        one,
        platform="tpu",
        topology=absent.topology,
        torus=fabric.torus,
        # libtpu makes the same program whichever ends are linked, but refuses unusual ones.
        wraps=fabric.wraps if fabric.wraps == usual else (),
        devices_per_chip=fabric.devices_per_chip,
        chip_config=absent.chip_config,
        host=absent.host,
    )


def attached_devices_of(
    fabric: Fabric,
    *,
    device_kind: str,
    memory_bytes: int,
    says: tuple[tuple[str, int | str], ...],
) -> AbsentDevices:
    """What a process that has none of the attached accelerators is told about them.

    Args:
      fabric: of all of them, which one jax process drives.
      memory_bytes: of one.
      says: see `AbsentDevices`.
    """
    count = fabric.num_granules * fabric.granule_devices
    one = AbsentDevices(
        platform="gpu",
        device_kind=device_kind,
        num_devices=count,
        num_granules=fabric.num_granules,
        num_hosts=1,
        topology=f"1x1x{count}",
        memory_bytes=memory_bytes,
        is_attached=True,
        says=says,
    )
    if fabric.kind != "torus":
        return replace(one, gpu=configuration_of(fabric.chip))
    return replace(
        one,
        platform="tpu",
        topology="",
        torus=fabric.torus,
        wraps=fabric.wraps,
        devices_per_chip=fabric.devices_per_chip,
        host=(*fabric.torus, 1, 1)[:3],  # All of them are one process's.
    )
