"""Which versions of a compiler fit the installed jax, by jax's own word (no jax)."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from automesh.platforms import platform_named


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
            one.specifier
            for one in requirements
            if one.name in known.packages and one.marker and one.marker.evaluate(environment)
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
