"""Says in a sentence what an exception of a library or of the user's code is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from automesh.texts.terminal import as_unicode

# The most characters of a message that are read; even jax's longest ones, with a whole type, are
# shorter.
MOST_CHARS_READ = 100_000
_MOST_CHARS_SHOWN = 200
# How jax says that a mesh does not divide an array: jax/_src/sharding_impls.py, and, for types with
# shardings and for `shard_map`, jax/_src/core.py and jax/_src/shard_map.py.
_INDIVISIBLE = tuple(
    re.compile(text, re.DOTALL)
    for text in (
        r"array axis (?P<dimension>\d+) is partitioned (?P<parts>\d+) times, but the dimension "
        r"size is (?P<size>\d+) \(full shape: (?P<shape>\(.*?\))",
        r"array axis (?P<dimension>\d+) is partitioned (?P<parts>\d+) times, but does not evenly "
        r"divide the dimension size (?P<size>\d+)\. Got shape: (?P<shape>\(.*?\))",
        r"of shape \w+\[(?P<shape>[\d,]+)\].*?maps array axis (?P<dimension>\d+) \(of size "
        r"(?P<size>\d+)\) to mesh ax.*?\(of (?:total )?size (?P<parts>\d+)\)",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undivided:
    """A dimension of an array that a mesh does not divide.

    Attributes:
      parts: into how many parts the mesh would split it.
    """

    dimension: int
    parts: int
    size: int
    shape: str

    def __str__(self) -> str:
        return (
            f"dimension {self.dimension} of an array {self.shape} is {self.size}, no multiple of "
            f"{self.parts} ({self._multiples})"
        )

    @property
    def _multiples(self) -> str:
        below = self.size // self.parts * self.parts
        near = f"{below} or {below + self.parts}" if below else f"{self.parts}"
        return f"{near} would do"


def undivided(error: BaseException) -> Undivided | None:
    """Reads jax's error about an array that a mesh does not divide; None for any other error."""
    said = said_by(error)
    for form in _INDIVISIBLE:
        if found := form.search(said):
            sizes = found["shape"].strip("()").replace(" ", "").rstrip(",").split(",")
            return Undivided(
                dimension=int(found["dimension"]),
                parts=int(found["parts"]),
                size=int(found["size"]),
                shape=f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})",
            )
    return None


def sentence_of(error: BaseException) -> str:
    """Returns `in_one_line` of an error in 200 characters."""
    return shortened(in_one_line(error))


def in_one_line(error: BaseException) -> str:
    """Returns `ValueError: the first line of its message`; the type alone if it has no message, as
    that of `assert len(devices) == 8`; for jax's error about an array that a mesh does not divide,
    the array and which sizes would do."""
    name, said = type(error).__name__, said_by(error)
    if found := undivided(error):
        return f"{name}: {found}"
    lines = said.strip().splitlines()
    return f"{name}: {lines[0].strip()}" if lines else name


def said_by(error: BaseException) -> str:
    """Returns the beginning of an exception's message."""
    try:
        return as_unicode(str(error)[:MOST_CHARS_READ])
    except BaseException:  # noqa: BLE001 - the user's __str__ may do anything, `sys.exit()` too
        return "(its message cannot be printed)"


def shortened(text: str) -> str:
    """Returns a text, or as many of its sentences as fit into 200 characters; cuts the first one if
    it is longer."""
    if len(text) <= _MOST_CHARS_SHOWN:
        return text
    end = text.rfind(". ", 0, _MOST_CHARS_SHOWN)
    return text[:end] if end > 0 else text[: _MOST_CHARS_SHOWN - 3] + "..."
