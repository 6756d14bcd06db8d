"""Makes text of others safe to show on a terminal.

Exception texts, file names, names of studies, notes and what a script prints may hold anything:
escape sequences that move the cursor or rename the window, control characters, marks that reverse
the direction of writing, and bytes that are no UTF-8. All such text passes through this module.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata

# ESC and the characters of C1 that mean the same begin: a control sequence (CSI), a string that
# ends with BEL or ST (OSC, DCS, SOS, PM, APC), or a sequence of two characters and more.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# Of Unicode's line ends, only the line feed separates lines here.
_LINE_END = re.compile(r"\r\n|\r")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)  # the code points for bytes of a name that are no UTF-8


def as_unicode(text: str, *, mark: str = "\\") -> str:
    r"""Escapes what UTF-8 cannot hold as in Python: a byte becomes `\xe9`.

    Python keeps the bytes of a file name that it cannot decode as lone surrogates, which cannot be
    printed, or stored in JSON, CSV or a database.

    Args:
      mark: for the backslash; inside of JSON it is two.

    >>> as_unicode("caf\udce9.py")
    'caf\\xe9.py'
    """
    # Most text is ASCII, which Python checks at once.
    if text.isascii():
        return text
    return _SURROGATE.sub(lambda found: mark + _code(found[0]), text)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold a text: it has no lone surrogate."""
    return text.isascii() or _SURROGATE.search(text) is None


def clean(text: str, limit: int = 0) -> str:
    """Makes foreign text safe for one line of a terminal: no escape codes, controls or line ends.

    Args:
      limit: cut at a word after about this many characters; 0 keeps all.
    """
    text = " ".join(_printable(text.replace("\u2026", "...")).split())
    if limit and len(text) > limit:
        return textwrap.shorten(text[: limit + 1], limit, placeholder=" ...")
    return text


def clean_lines(text: str) -> str:
    """Makes foreign text of several lines safe for a terminal; lines, indents and tabs are kept,
    spaces at the ends of lines are not."""
    text = _LINE_END.sub("\n", text)
    cleaned = ("\t".join(map(_printable, line.split("\t"))) for line in text.split("\n"))
    return "\n".join(line.rstrip(" ") for line in cleaned)


def without_controls(text: str) -> str:
    """Drops every character that a terminal may obey, and nothing else.

    So no line of formatted text gets longer. Line feeds and private characters, which have a
    meaning for the formatting, are kept.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char for char in text if char == "\n" or not _is_control(char))


def shortened(text: str, limit: int) -> str:
    """Leaves out the middle of a text that is longer than `limit` characters, and says how much.

    >>> shortened("9" * 5000, 40)
    '99999999999999999999 [... 4970 characters ...] 9999999999'
    """
    if len(text) <= limit:
        return text
    head, tail = limit // 2, limit // 4
    return f"{text[:head]} [... {len(text) - head - tail} characters ...] {text[-tail:]}"


def _printable(text: str) -> str:
    """Removes escape sequences from a line, and replaces unprintable characters by spaces."""
    if text.isascii() and text.isprintable():
        return text
    text = as_unicode(_ESCAPE.sub("", text))
    return "".join(char if char.isprintable() else " " for char in text)


def _is_control(char: str) -> bool:
    # Control, format (bidirectional marks among them), surrogate, separators of lines, paragraphs.
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _code(char: str) -> str:
    code = ord(char)
    return f"x{code - 0xDC00:02x}" if code in _BYTES else f"u{code:04x}"
