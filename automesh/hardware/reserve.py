"""Memory of a device that plans leave free for everything else in the process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from automesh.errors import UsageError
from automesh.platforms import platform_named
from automesh.units import format_bytes, format_percent, parse_bytes

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Memory that is kept free on each device: a size plus a share of what a program could use."""

    size_bytes: int = 0
    share: float = 0.0

    def of(self, limit_bytes: int) -> int:
        """Returns the reserved bytes of a device on which a program could use `limit_bytes`."""
        return self.size_bytes + round(self.share * limit_bytes)

    def __str__(self) -> str:
        return format_percent(self.share) if self.share else format_bytes(self.size_bytes)


NO_RESERVE = Reserve()


def parse_reserve(text: str) -> Reserve:
    """Reads `1GiB`, `5%` or `0`.

    Raises:
      UsageError: neither a size nor a share below 100 %.
    """
    stripped = text.strip()
    match = _PERCENT.fullmatch(stripped)
    if match and float(match[1]) < 100:
        return Reserve(share=float(match[1]) / 100)
    if match:
        raise UsageError(
            f"`{text}` leaves nothing of a device", hint="write for example `512MiB` or `5%`"
        )
    if stripped == "0":
        return NO_RESERVE
    try:
        return Reserve(size_bytes=parse_bytes(stripped))
    except UsageError as error:
        hint = "write for example `512MiB`, `5%`, or `0` for nothing"
        raise UsageError(error.message, hint=hint) from None


def default_reserve(platform: str, environ: Mapping[str, str]) -> Reserve:
    """Returns the default reserve.

    Args:
      platform: cpu, gpu or tpu.
      environ: may set the part of a GPU that jax takes.

    Raises:
      UsageError: the set part is not between 0 and 1.
    """
    known = platform_named(platform)
    for name in known.share_variables:
        if text := environ.get(name, "").strip():
            return Reserve(share=_share_left_by_jax(name, text))
    return Reserve(size_bytes=known.reserve_bytes, share=known.reserve_share)


def _share_left_by_jax(name: str, text: str) -> float:
    """Returns the part of a GPU that jax does not take, from a variable's name and value."""
    try:
        taken = float(text)
    except ValueError:
        taken = -1.0
    if not 0 < taken <= 1:
        raise UsageError(
            f"`{name}` is `{text}`, which is no part of a GPU's memory",
            hint="set it to a number above 0 and up to 1, or unset it",
        )
    return 1 - taken
