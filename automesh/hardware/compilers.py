"""Finds the compilers for absent devices that are installed here (no jax)."""

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
    """A compiler for one platform that needs no devices.

    Attributes:
      platform: tpu or gpu.
      name: the common name.
      version: the installed version, or its path; empty if none is installed.
      install: how to install it, the beginning of a sentence.
    """

    platform: str
    name: str
    version: str
    install: str


def compiler_for(platform: str) -> Compiler:
    """Returns the compiler for a platform, installed or not.

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
    """Checks, as far as that is possible without jax, that programs can be compiled for a target.

    Raises:
      UsageError: there is no compiler for its devices, or it is not installed here.
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
    """Whether any compiler knows these devices, installed here or not."""
    return bool(absent.topology or absent.gpu)


def _of_environment(platform: str) -> str:
    # A libtpu that is not an installed package; for an installed one, jax sets this variable
    # itself.
    path = os.environ.get(platform_named(platform).library_variable, "")
    return f"at {path}" if path else ""


# Versions of a compiler that fit the installed jax, as jax's own metadata states them.


def wanted_by_jax(platform: str) -> SpecifierSet:
    """Returns the versions that the installed jax requires in its extra; any, if it names none.

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
    """Whether a version is one of the required ones."""
    return wanted.contains(version, prereleases=True)


def is_too_old(version: str, wanted: SpecifierSet) -> bool:
    """Whether a version is older than all required ones: such compilers may crash.

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


# Descriptions of absent hardware for a compile-only client of jax.


def absent_devices_of(absent: Absent) -> AbsentDevices:
    """Describes the devices of a target for a compile-only client.

    The granules of GPUs are their hosts, one jax process each, as for attached ones. Their compiler
    needs the NVLink domains, as numbers of domains, of hosts in each, and of devices of a host:
    inside a domain it turns small collectives into kernels, and schedules others by NVLink's speed.
    """
    fabric, hosts = absent.fabric, absent.num_hosts
    # It knows domains of one size only: if the hosts do not fill them, smaller ones are stated.
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
    """Describes attached accelerators for a process that has none of them.

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
        host=(*fabric.torus, 1, 1)[:3],  # One process has all of them.
    )
