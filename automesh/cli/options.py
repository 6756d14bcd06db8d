"""What several commands share: how an option is read, and how a result is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from automesh.errors import UsageError
from automesh.jsonio import dumps
from automesh.texts.storage_url import PASSWORD, has_secret

if TYPE_CHECKING:
    from automesh.answers import Result, Results

_T = TypeVar("_T")

Hardware = Annotated[str, typer.Option(metavar="FILE", help="TOML file with clusters of your own.")]
ScriptArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="The script's own sys.argv, after --."),
]


def with_notice(storage: str) -> str:
    """A storage as it was given; says so on stderr if everybody on this machine can read its
    password."""
    if has_secret(storage):
        sys.stderr.write(
            "note: other users of this machine can read the password in --storage, for example "
            f"with `ps`: leave it out and set {PASSWORD} (see `automesh search --help`)\n"
        )
    return storage


StorageOfSearch = Annotated[
    str,
    typer.Option(
        metavar="URL",
        callback=with_notice,
        help="The --storage of the search, if it had one; the password as there.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say how the estimates were made, too.")
]


def read_option(option: str, read: Callable[[str], _T], text: str) -> _T:
    """What an option says.

    Raises:
      UsageError: as `read`, with the name of the option in front.
    """
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hint) from None


def print_result(result: Result | Results, *, as_json: bool, top: int, verbose: bool) -> None:
    """Prints a result on stdout, as a table or as JSON."""
    table = "" if as_json else result.table(top=top, verbose=verbose) + "\n"
    sys.stdout.write(table or json_text(result))


def json_text(found: Found) -> str:
    """What `--json` prints."""
    return dumps(found.to_json(), indent=1) + "\n"


class Found(Protocol):
    """What a command has found."""

    def to_json(self) -> Any:
        """As plain JSON values."""
        ...
