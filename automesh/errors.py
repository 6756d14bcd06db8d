"""Every error that a user sees: a sentence that says what was wrong, a hint what to do."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

from automesh.limits import HINT_LINE_CHARS, MESSAGE_CHARS
from automesh.texts.terminal import clean_lines, shortened


class AutomeshError(Exception):
    """A problem that the user can mend: printed without a traceback, exit code 2.

    Args:
      message: one sentence: what was wrong, what was got, what was expected. No full stop at the
        end.
      hint: one sentence: what to do about it. Empty if the message says it all.
    """

    # Both may quote foreign text, such as names of files or what a script raised: control
    # characters are removed, and of a long text only the beginning and the end are kept.
    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = shortened(clean_lines(message), MESSAGE_CHARS)
        lines = clean_lines(hint).split("\n")
        self.hint = "\n".join(shortened(line, HINT_LINE_CHARS) for line in lines)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(AutomeshError, ValueError):
    """A mistake in the user's arguments, files or code: exit code 2."""


class NotInstalled(UsageError, ImportError):
    """Something that is in a plug-in, which is not installed; an ImportError too, which code that
    can do without it catches."""


class WrongType(UsageError, TypeError):
    """An argument of a wrong type."""


class IllegalMapping(UsageError):
    """A mapping with which an array cannot be split; the message has its path, its axis and why."""


class UnknownMeshAxis(IllegalMapping, KeyError):
    """A mesh axis that the mesh does not have; also a KeyError, as in Haliax."""


class NoFeasibleMesh(AutomeshError):
    """The search ended without a plan that may be exported: exit code 1."""


class Interrupted(AutomeshError):
    """Ctrl-C: the study is left resumable: exit code 130."""


def kind_of(value: object) -> str:
    """Returns the type of a value with its article.

    >>> kind_of(3), kind_of([])
    ('an int', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def check_type(value: object, kind: type, what: str, *, hint: str = "") -> None:
    """Accepts values of a type; a bool is not an integer here.

    Args:
      what: the value, for the error: `` `backend` must be a string``.

    Raises:
      WrongType: a value of another type.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise WrongType(f"{what}, got {kind_of(value)}: {value!r}", hint=hint)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean `x`?)` with the most similar known name; empty if none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


_OF_LIMITS = {
    errno.EMFILE: "raise the limit of open files: `ulimit -n 4096`",
    errno.ENFILE: "end what has many files open: this machine has no more",
    errno.EAGAIN: "raise the limit of processes: `ulimit -u 4096`",
    errno.ENOMEM: "free memory, or raise the limit of addresses: `ulimit -v unlimited`",
}


def of_system(error: OSError) -> UsageError:
    """Describes an error of the operating system in a sentence."""
    what = f"`{error.filename}`: " if error.filename else ""
    hint = _OF_LIMITS.get(error.errno or 0, "check the disk and the permissions")
    return UsageError(
        f"{what}{(error.strerror or type(error).__name__).lower()}",
        hint=f"{hint}; what is finished is kept",
    )


def unwritable(path: object, error: OSError, *, hint: str) -> UsageError:
    """Describes in a sentence why the operating system did not let us write a file.

    Args:
      path: used if the error itself names no file; it may name a lock or a folder instead.
      hint: what to do about it.
    """
    name = error.filename if isinstance(error.filename, str) else path
    reason = (error.strerror or type(error).__name__).lower()
    return UsageError(f"`{name}` cannot be written: {reason}", hint=hint)
