"""Says in a sentence what an exception of a library or of the user's code is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from automesh.texts.terminal import as_unicode

# The most characters of a message that are read; even jax's longest ones, with a whole type, are
# shorter.
MOST_CHARS_READ = 100_000
_MOST_CHARS_SHOWN = 200
# The name of jax's error about an array that a mesh does not divide: jax/_src/sharding.py.
UNDIVIDED = "IndivisibleError"
_INDIVISIBLE = re.compile(
    r"array axis (\d+) is partitioned (\d+) times, but the dimension size is (\d+) "
    r"\(full shape: (\(.*?\))"
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


def undivided(error: BaseException) -> Undivided | None:
    """Reads jax's error about an array that a mesh does not divide; None for any other error."""
    if type(error).__name__ != UNDIVIDED:
        return None
    if not (found := _INDIVISIBLE.search(said_by(error))):
        return None
    dimension, parts, size = map(int, found.groups()[:3])
    return Undivided(dimension=dimension, parts=parts, size=size, shape=found[4])


def sentence_of(error: BaseException) -> str:
    """Returns `in_one_line` of an error in 200 characters."""
    return shortened(in_one_line(error))


def in_one_line(error: BaseException) -> str:
    """Returns `ValueError: the first line of its message`; the type alone if it has no message, as
    that of `assert len(devices) == 8`; for jax's error about an array that a mesh does not divide,
    the array and which sizes would do."""
    name, said = type(error).__name__, said_by(error)
    if found := undivided(error):
        size, parts = found.size, found.parts
        return (
            f"{name}: dimension {found.dimension} of an array {found.shape} is {size}, no multiple "
            f"of {parts}{_multiples(size, parts)}"
        )
    lines = said.strip().splitlines()
    return f"{name}: {lines[0].strip()}" if lines else name


def _multiples(size: int, parts: int) -> str:
    """Names the multiples of `parts` next to a size: ` (16 and 20 are)`."""
    below = size // parts * parts
    return f" ({below} and {below + parts} are)" if below else f" ({parts} is)"


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
