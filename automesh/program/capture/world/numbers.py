"""Finds the number of devices that a script wants, where it failed with another number (jax)."""

from __future__ import annotations

import linecache
import math
import re
import traceback

import jax

from automesh.package import is_users_file
from automesh.program.capture.world.told import want_devices
from automesh.texts.exceptions import Undivided, undivided

# The sizes of a mesh in a message: `(2, 4)`, `(8,)`.
_SIZES = re.compile(r"[(\[](\d+(?:, ?\d+)*),?[)\]]")
_ABOUT = re.compile(r"device|reshape", re.I)
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.]*\d)")
# A check of the script's own: `assert jax.device_count() == 8`, `if len(jax.devices()) < 8: raise`.
_CHECKED = re.compile(
    r"(?:device_count\(\)|len\((?:jax\.)?(?:local_)?devices(?:\(\))?\)|num_devices|n_devices)"
    r"\s*(?:==|!=|>=|<)\s*(\d+)"
)
_MOST = 4096


def note_wanted_devices(error: Exception) -> None:
    """Notes down how many devices a script wants, if that is why it failed."""
    shown = jax.device_count()
    found = undivided(error)  # The numbers in its message are those of an array.
    wanted = _dividing(found, shown) if found else _from_check(error, shown)
    if 0 < wanted <= _MOST and wanted != shown:
        want_devices(wanted, str(found or ""))


def _dividing(found: Undivided, shown: int) -> int:
    """Returns the number of devices by which the script's mesh divides the array; 0 if that is one
    device, on which its mesh is none."""
    parts = math.gcd(found.size, found.parts)
    return shown * parts // found.parts if parts > 1 and shown % found.parts == 0 else 0


def _from_check(error: Exception, shown: int) -> int:
    return _from_message(str(error), shown) or _from_line(error, shown) or _from_words(error, shown)


def _from_message(text: str, shown: int) -> int:
    """Returns the product of the sizes that a message names together with the number of devices; 0
    if it does not name both."""
    if not _ABOUT.search(text) or not re.search(rf"\b{shown}\b", text):
        return 0
    for sizes in _SIZES.findall(text):
        product = math.prod(int(size) for size in sizes.split(","))
        if product != shown:
            return product
    return 0


def _from_words(error: Exception, shown: int) -> int:
    """Returns the only other number in the message of the script's own check, where the message
    also names the number of devices, as in `16 devices do not match the product of the mesh, 8`; 0
    if there is none, or more than one."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not is_users_file(frames[-1].filename):
        return 0
    text = str(error)
    if not isinstance(error, AssertionError | ValueError | RuntimeError):
        return 0
    numbers = {int(number) for number in _NUMBER.findall(text)}
    others = numbers - {shown}
    is_about = "device" in text.lower() and shown in numbers
    return others.pop() if is_about and len(others) == 1 else 0


def _from_line(error: Exception, shown: int) -> int:
    """Returns the number with which the failing line, or the line above it, compares the number of
    devices; 0 if there is none."""
    frames = [
        one for one in traceback.extract_tb(error.__traceback__) if is_users_file(one.filename)
    ]
    if not frames or not isinstance(error, AssertionError | ValueError | RuntimeError):
        return 0
    last = frames[-1]
    for number in (last.lineno or 0, (last.lineno or 0) - 1):
        if found := _CHECKED.search(linecache.getline(last.filename, number)):
            return int(found[1]) if int(found[1]) != shown else 0
    return 0
