"""Which compilers for devices that are not here this machine has (no jax)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass

from automesh.errors import UsageError
from automesh.hardware.absent import Absent
from automesh.hardware.targets import Target
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
        _version(plugin.packages[0])
        for plugin in known.plugins
        if importlib.util.find_spec(plugin.module) and all(map(_version, plugin.packages))
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
    return bool(absent.topology if absent.platform == "tpu" else absent.gpu)


def _of_environment(platform: str) -> str:
    # A libtpu that is no package; of one that is, jax sets this variable itself.
    path = os.environ.get("TPU_LIBRARY_PATH", "") if platform == "tpu" else ""
    return f"at {path}" if path else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
