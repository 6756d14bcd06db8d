"""Checks words and paths of a user before anything else uses them."""

from __future__ import annotations

import errno
from pathlib import Path

from automesh.errors import UsageError
from automesh.texts.terminal import as_unicode, is_unicode


def check_text(text: str) -> str:
    """Checks that workers and studies can handle a word.

    Raises:
      UsageError: it holds a NUL, or bytes that are no UTF-8, which neither jax nor JSON nor a
        database accepts.
    """
    if "\0" in text:
        raise UsageError(
            f"`{text}` holds a NUL character, which no name and no argument can have",
            hint="leave it out",
        )
    if is_unicode(text):
        return text
    raise UsageError(
        f"`{as_unicode(text)}` is not UTF-8, which neither jax nor a study accepts",
        hint=_how_to_name(text),
    )


def user_path(given: str | Path) -> Path:
    """Returns the path that a user means, with `~` and `~name` replaced; it need not exist.

    Raises:
      UsageError: it can be no path: as `check_text`, an unknown user, too long, a link to itself.
    """
    text = check_text(str(given))
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise UsageError(
            f"`{text}` begins with the home of a user that there is not: `{user}`",
            hint=f"write the whole path, or `./{text}` for a name that begins with ~",
        ) from None
    # A relative path starts at a folder whose own name may be anything.
    check_text(str(path.absolute()))
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(
                f"`{text}` is too long for a path", hint="write a shorter one"
            ) from None
        if error.errno == errno.ELOOP:
            raise UsageError(
                f"`{text}` is a symbolic link that leads to itself",
                hint="remove the link, or let it lead to a file",
            ) from None
    return path


def _how_to_name(text: str) -> str:
    try:
        text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        return "rename it: names of files and folders must be UTF-8"
    # It is UTF-8, but Python is configured for another encoding.
    return (
        "let Python read names as UTF-8: set PYTHONUTF8=1, or LC_ALL to a UTF-8 locale as C.UTF-8"
    )
