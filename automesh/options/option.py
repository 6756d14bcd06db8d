"""One option of `automesh search` as a record: how it is written on the command line and in Python,
what it belongs to, how it is read, and who passes it on.

A record is plain data: the command line (`automesh.cli`), the request (`automesh.tuner.request`),
the command that goes on with a search (`automesh.report.search_command`), a service's order and a
JobSet are made from the same records, so that an option that is added to the table is in all of
them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from automesh.errors import UsageError
from automesh.texts.user_text import user_path
from automesh.units import parse_bytes, parse_duration

_WIDTH = 100
_Scalar = bool | int | float | str
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionKind:
    """A kind of value that options have; each is a constant of this module.

    Attributes:
      typed: its type on the command line.
      python: its type in `automesh.search`.
      default: if nobody gives the option.
      read: turns what the user gave into what the request holds; None if another module reads it,
        which knows more, such as `automesh.tuner.request`.
      is_named: an error of `read` gets the name of the option in front; else it has it already.
      is_list: it may be given several times.
    """

    typed: Any
    python: Any
    default: Any = ""
    read: Callable[[Any], Any] | None = None
    is_named: bool = False
    is_list: bool = False


def _as_given(value: Any) -> Any:
    return value


def _absolute(given: str | Path | None) -> str:
    """Returns the absolute path of a file, for processes with another working directory; empty for
    none."""
    return str(user_path(given).absolute()) if given else ""


def _absolute_path(given: str | Path) -> Path:
    return user_path(given).absolute()


def _bytes_or_zero(text: str) -> int:
    return parse_bytes(text) if text else 0


def _seconds_or_zero(text: str) -> float:
    return parse_duration(text) if text else 0.0


FLAG = OptionKind(typed=bool, python=bool, default=False, read=_as_given)
TEXT = OptionKind(typed=str, python=str, read=_as_given)
TIMES = OptionKind(typed=str, python=str)
"""The source of a command's step times."""
TEXTS = OptionKind(typed=list[str] | None, python=Sequence[str], default=None, is_list=True)
NUMBER = OptionKind(typed=int, python=int, default=0, read=_as_given)
NUMBER_OR_NONE = OptionKind(typed=int | None, python=int | None, default=None, read=_as_given)
"""A number for which 0 means 0, and not the usual value: see `Option.otherwise`."""
DURATION = OptionKind(typed=str, python=str, read=parse_duration, is_named=True)
DURATION_OR_NONE = OptionKind(typed=str, python=str, read=_seconds_or_zero, is_named=True)
SIZE = OptionKind(typed=str, python=str, read=_bytes_or_zero, is_named=True)
MESH = OptionKind(typed=str, python=str, is_named=True)
"""A mesh, or a file of another framework that has one."""
FILE = OptionKind(typed=str, python=str | Path, read=str)
"""A file that this process reads, as it was given."""
ABSOLUTE_FILE = OptionKind(typed=str, python=str | Path, read=_absolute)
"""A file that other processes read, which may have another working directory."""
SPACE = OptionKind(typed=str, python=str | Path)
"""A search space: its name or its file."""
SPLITS = OptionKind(typed=list[str] | None, python=Sequence[str], default=None, is_list=True)
"""Axes of a script's mesh, each with the axes that replace it."""
NEW_FILE = OptionKind(typed=Path | None, python=str | Path | None, default=None)
"""A file that is written."""
FOLDER = OptionKind(typed=Path, python=str | Path, read=_absolute_path)
COMPILER_OPTIONS = OptionKind(
    typed=list[str] | None,
    python=Mapping[str, _Scalar | Sequence[_Scalar]] | Sequence[str] | None,
    default=None,
    is_list=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of `automesh search`.

    Attributes:
      name: in Python; `reserve_hbm` is `--reserve-hbm` on the command line.
      value: what kind of value it takes.
      help: what `--help` says.
      doc: what the docstring of `automesh.search` says; empty if only the command line has it.
      metavar: what stands for the value in `--help`.
      default: if nobody gives it; by default that of its kind of value.
      otherwise: what a request has for a number that nobody gives.
      least: the smallest number that it takes.
      short: `v` for `-v`.
      shows_default: whether `--help` shows the default.
      is_argument: it is an argument, recognized by its place, and no option.
      searches: `build`, if only a search of a step that is built has it, `command`, if only one of
        a `--command`; `any`, if both have it.
      field: the field of its group's noun that holds its value once it was read; empty if none
        does, since the option says what is searched or what the command prints.
      group: `search`, whose noun is `SearchRequest`; `command`, of a search by a command, whose
        noun is `TimedCommand`; `hosts`, where a search or a calibration runs, whose noun is
        `Cluster`; `jobset`, how a JobSet is written.
      is_path: its value is a path, which may begin with `~`.
      has_secret: its value may have a password.
      has_server: `--server` passes it on to a service.
      has_order: the order that a service takes has it, see `automesh.submissions.order`.
      has_jobset: a JobSet's command has it; the others are for the host that writes the JobSet.
      has_resume: it is in the command that goes on with a search.
    """

    name: str
    value: OptionKind
    help: str
    doc: str = ""
    metavar: str = ""
    default: Any = None
    otherwise: int = 0
    least: int | None = None
    short: str = ""
    shows_default: bool = False
    is_argument: bool = False
    searches: Literal["any", "build", "command"] = "any"
    field: str = ""
    group: Literal["search", "command", "hosts", "jobset"] = "search"
    is_path: bool = False
    has_secret: bool = False
    has_server: bool = False
    has_order: bool = False
    has_jobset: bool = True
    has_resume: bool = True

    @property
    def word(self) -> str:
        """Its name on the command line, without dashes."""
        return self.name.replace("_", "-")

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.value is FLAG

    @property
    def usual(self) -> Any:
        """Its value if nobody gives it."""
        return self.value.default if self.default is None else self.default

    def is_given(self, value: object) -> bool:
        """Whether a value says something: 0 and empty do not, but of `NUMBER_OR_NONE` 0 does."""
        return value is not None if self.value is NUMBER_OR_NONE else bool(value)


Read = Callable[[Any], Any]


def read_values(
    options: Iterable[Option],
    given: Mapping[str, Any],
    spelled: Callable[[str], str],
    special: Mapping[OptionKind, Read] | None = None,
) -> dict[str, Any]:
    """Reads what a user gave, into the fields of a request.

    Args:
      options: the options; those with a `field` are read, in this order.
      given: values by the names of the options; an option that is missing has its usual value.
      spelled: how the user writes an option: `--step-time` for `step_time`.
      special: readers for kinds of values that have none, or that this caller reads in another way.

    Raises:
      UsageError: a value is wrong.
    """
    found: dict[str, Any] = {}
    for option in options:
        if not option.field:
            continue
        read = (special or {}).get(option.value) or option.value.read
        if read is None:
            raise TypeError(f"nothing reads the option `{option.name}`")
        value = given.get(option.name, option.usual)
        if value is None and option.value is NUMBER_OR_NONE:
            value = option.otherwise
        try:
            found[option.field] = read(value)
        except UsageError as error:
            if not option.value.is_named:
                raise
            message = f"{spelled(option.name)}: {error.message}"
            raise UsageError(message, hint=error.hint) from None
    return found


def described(options: Iterable[Option]) -> Callable[[_Function], _Function]:
    """Puts what each option means where a docstring says `options: ...` in a line of its own."""

    def describe(function: _Function) -> _Function:
        text = function.__doc__ or ""  # None under `python -OO`.
        function.__doc__ = re.sub(r"^( *)options: .*$", _args, text, count=1, flags=re.MULTILINE)
        return function

    def _args(found: re.Match[str]) -> str:
        return "\n".join(
            textwrap.fill(
                f"{option.name}: {option.doc}",
                width=_WIDTH,
                initial_indent=found[1],
                subsequent_indent=f"{found[1]}  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            for option in options
            if option.doc
        )

    return describe
