"""Formatting and parsing of bytes, seconds and counts; nothing else formats a number."""

from __future__ import annotations

import re

from automesh.errors import UsageError
from automesh.limits import LONGEST_S, MOST_BYTES

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?", re.ASCII)
_DURATION_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE | re.ASCII)
_SIZE_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("i", 1024), ("ib", 1024))
}


def parse_duration(text: str) -> float:
    """Reads `90`, `90s`, `10m`, `1.5h` into seconds.

    Raises:
      UsageError: not a duration, zero, or longer than a year.

    >>> parse_duration("10m")
    600.0
    """
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _DURATION_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(
            f"`{text}` is not a duration" + (" above zero" if match else ""),
            hint="write for example `90s`, `10m` or `1.5h`",
        )
    if seconds > LONGEST_S:
        raise UsageError(f"`{text}` is longer than a year", hint="write for example `8h` or `7d`")
    return seconds


def parse_bytes(text: str) -> int:
    """Reads `512MiB`, `8GiB`, `1.5TB`, `1000000` into bytes.

    Raises:
      UsageError: not a size, zero, or more than an exbibyte.

    >>> parse_bytes("8GiB")
    8589934592
    """
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _SIZE_BYTES[(match[2] or "").lower()] if match else 0.0
    if size < 1:
        raise UsageError(
            f"`{text}` is not a size of memory" + (" above zero" if match else ""),
            hint="write for example `8GiB` or `512MiB`",
        )
    if size > MOST_BYTES:
        raise UsageError(
            f"`{text}` is more memory than there is", hint="write for example `8GiB` or `512MiB`"
        )
    return int(size)


def format_seconds(seconds: float) -> str:
    """Formats seconds with three significant digits and an SI unit.

    >>> format_seconds(0.01234), format_seconds(75.2)
    ('12.3 ms', '75.2 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        # 0.9995 would print as "1e+03 ms": round up into the larger unit instead.
        if seconds >= 0.9995 * scale or unit == "ns":
            return f"{_three_digits(seconds / scale)} {unit}"
    raise AssertionError("unreachable")


def format_bytes(count: float) -> str:
    """Formats bytes with three significant digits and a binary unit.

    >>> format_bytes(14_925_102_489)
    '13.9 GiB'
    """
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(count) >= 0.9995 * scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Formats a count with three significant digits and k, M, G, T or P.

    >>> format_count(2_100_000)
    '2.10 M'
    """
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def format_change(ratio: float) -> str:
    """Returns a ratio as a signed change in per cent.

    >>> format_change(1.098), format_change(0.9)
    ('+9.8 %', '-10.0 %')
    """
    # Rounded first, so that a hair below 1 is not a negative zero.
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"


def format_wait(seconds: float) -> str:
    """Returns a remaining time as people say it.

    >>> format_wait(200), format_wait(8)
    ('3 min', '8 s')
    """
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 0):.0f} s"


def format_elapsed(seconds: float) -> str:
    """Returns a time that has passed, in steps of a second until an hour has.

    >>> format_elapsed(89), format_elapsed(133), format_elapsed(7380)
    ('89 s', '2 min 13 s', '2 h 3 min')
    """
    whole = round(max(seconds, 0))
    if whole < 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if whole < 3600 else f"{minutes // 60} h {minutes % 60} min"


def format_percent(fraction: float) -> str:
    """Formats a share in per cent: one decimal below ten per cent, none above.

    >>> format_percent(0.0123), format_percent(0.17)
    ('1.2 %', '17 %')
    """
    percent = 100 * fraction
    return f"{percent:.1f} %" if abs(percent) < 9.95 else f"{percent:.0f} %"


def format_factor(factor: float) -> str:
    """Formats a factor, by which something is faster or slower.

    >>> format_factor(1.312), format_factor(24.3)
    ('1.31x', '24.3x')
    """
    return f"{_three_digits(factor)}x"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return (
        f"{value:.2f}"
        if magnitude < 9.995
        else f"{value:.1f}"
        if magnitude < 99.95
        else f"{value:.0f}"
    )
