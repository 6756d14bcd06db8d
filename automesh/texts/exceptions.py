"""Says in a sentence what an exception of a library or of the user's code is."""

from __future__ import annotations

import re

from automesh.texts.terminal import as_unicode

# The most characters of a message that are read; even jax's longest ones, with a whole type, are
# shorter.
MOST_CHARS_READ = 100_000
_MOST_CHARS_SHOWN = 200
# jax/_src/sharding.py
_INDIVISIBLE = re.compile(
    r"array axis (\d+) is partitioned (\d+) times, but the dimension size is (\d+) "
    r"\(full shape: (\(.*?\))"
)


def sentence_of(error: BaseException) -> str:
    """Returns `in_one_line` of an error in 200 characters; shortens jax's message about a mesh."""
    name, said = type(error).__name__, said_by(error)
    if found := _INDIVISIBLE.search(said) if name == "IndivisibleError" else None:
        axis, parts, size, shape = found.groups()
        return f"{name}: dimension {axis} of an array {shape} is {size}, no multiple of {parts}"
    return shortened(in_one_line(error))


def in_one_line(error: BaseException) -> str:
    """Returns `ValueError: the first line of its message`; the type alone if it has no message, as
    that of `assert len(devices) == 8`."""
    lines = said_by(error).strip().splitlines()
    name = type(error).__name__
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
