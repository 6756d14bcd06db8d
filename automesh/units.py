"""Formatting and parsing of bytes, seconds and counts; nothing else in the package formats a number."""

from __future__ import annotations

import re

from automesh.errors import UsageError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
_DURATION_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def parse_duration(text: str) -> float:
    """Reads `90`, `90s`, `10m`, `1.5h` into seconds.

    Raises:
      UsageError: not a duration, or zero.

    >>> parse_duration("10m")
    600.0
    """
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _DURATION_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"`{text}` is not a duration", hint="write for example `90s`, `10m` or `1.5h`")
    return seconds


def format_seconds(seconds: float) -> str:
    """Three significant digits with an SI unit.

    >>> format_seconds(0.01234), format_seconds(75.2)
    ('12.3 ms', '75.2 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        # 0.9995 would print as "1e+03 ms": round up into the larger unit instead.
        if seconds >= 0.9995 * scale or unit == "ns":
            return f"{_three_digits(seconds / scale)} {unit}"
    raise AssertionError("unreachable")


def format_bytes(count: float) -> str:
    """Three significant digits with a binary unit.

    >>> format_bytes(14_925_102_489)
    '13.9 GiB'
    """
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(count) >= 0.9995 * scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Three significant digits with k, M, G, T or P.

    >>> format_count(2_100_000)
    '2.10 M'
    """
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def format_wait(seconds: float) -> str:
    """A remaining time as people say it.

    >>> format_wait(200), format_wait(8)
    ('3 min', '8 s')
    """
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 0):.0f} s"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.2f}" if magnitude < 9.995 else f"{value:.1f}" if magnitude < 99.95 else f"{value:.0f}"
