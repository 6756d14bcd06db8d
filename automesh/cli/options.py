"""The parts that several commands share: reading options, and printing results."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import typer

from automesh.errors import UsageError
from automesh.jsonio import dumps
from automesh.options.option import Option
from automesh.options.table import BY_NAME
from automesh.texts.storage_url import PASSWORD, has_secret

if TYPE_CHECKING:
    from automesh.answers import Result
    from automesh.report.blocks.nouns import Report

_T = TypeVar("_T")
_Given = TypeVar("_Given")


def with_notice(storage: str) -> str:
    """Returns a storage; warns on stderr if everybody on this machine can read its password."""
    if has_secret(storage):
        sys.stderr.write(
            "note: other users of this machine can read the password in --storage, for example "
            f"with `ps`: leave it out and set {PASSWORD} (see `automesh search --help`)\n"
        )
    return storage


def parameter(option: Option) -> Any:
    """Makes the parameter with which Typer reads an option of the table."""
    if option.is_argument:
        return typer.Argument(metavar=option.metavar, help=option.help)
    words = [f"--{option.word}", *([f"-{option.short}"] if option.short else [])]
    return typer.Option(
        *words,
        metavar=option.metavar or None,
        min=option.least,
        help=option.help,
        show_default=option.shows_default,
        callback=with_notice if option.has_secret else None,
    )


def takes(options: Sequence[Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function with `**given`: Typer sees its own parameters, then the options
    of the table, whose values arrive in `given`; a list that nobody gave is empty."""

    def taking(function: Callable[..., None]) -> Callable[..., None]:
        def command(**typed: Any) -> None:
            for option in options:
                if option.value.is_list:
                    typed[option.name] = typed[option.name] or []
            function(**typed)

        (rest,) = (
            name
            for name, one in inspect.signature(function).parameters.items()
            if one.kind is one.VAR_KEYWORD
        )
        # The type of `**given` is for type checkers alone: its name is not known here.
        function.__annotations__.pop(rest, None)
        own = inspect.signature(function, eval_str=True).parameters.values()
        read = [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.usual,
                annotation=Annotated[option.value.typed, parameter(option)],
            )
            for option in options
        ]
        return _with_signature(command, [*(one for one in own if one.name != rest), *read])

    return taking


def reads(given: type[_Given]) -> Callable[[Callable[[_Given], None]], Callable[..., None]]:
    """Makes a command of a function that takes one record of what was given: the fields of the
    dataclass are the command's arguments and options, annotated as parameters are for Typer."""

    def reading(function: Callable[[_Given], None]) -> Callable[..., None]:
        def command(**typed: Any) -> None:
            function(given(**typed))

        hints = get_type_hints(given, include_extras=True)
        parameters = [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if one.default is MISSING else one.default,
                annotation=hints[one.name],
            )
            for one in fields(cast(Any, given))
        ]
        return _with_signature(command, parameters)

    return reading


def _with_signature(
    command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    # Typer reads the signature for what there is, and the annotations of the function beside it.
    command.__annotations__ = {}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


# Options of several commands. Those that mean the same in `search` come from the table.
Script = Annotated[
    str | None, typer.Argument(metavar="SCRIPT", help="What builds the step.", show_default=False)
]
ScriptArgs = Annotated[list[str] | None, parameter(BY_NAME["args"])]
Module = Annotated[str, parameter(BY_NAME["module"])]
Entry = Annotated[str, parameter(BY_NAME["entry"])]
Verbose = Annotated[bool, parameter(BY_NAME["verbose"])]
Target = Annotated[str, typer.Option(metavar="NAME", help="Devices, as in search.")]
Hardware = Annotated[str, typer.Option(metavar="FILE", help="TOML file with clusters of your own.")]
Space = Annotated[str, typer.Option(metavar="NAME", help="Search space, as in search.")]
Step = Annotated[
    str, typer.Option(metavar="NAME", help="For a script without `build`, as in search.")
]
Split = Annotated[
    list[str] | None,
    typer.Option(metavar="AXIS=A,B", help="For a script without `build`, as in search."),
]
Baseline = Annotated[str, typer.Option(metavar="MESH", help="The mesh that the script uses today.")]
AllAsJson = Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")]
StorageOfSearch = Annotated[
    str,
    typer.Option(
        metavar="URL",
        callback=with_notice,
        help="The --storage of the search, if it had one; the password as there.",
    ),
]


def named(
    script: str | None, module: str, entry: str, args: list[str] | None
) -> tuple[str | None, list[str] | None]:
    """Returns the workload in the words of `automesh.search`, and its own arguments.

    Raises:
      UsageError: it was named twice.
    """
    if not module and not entry:
        return script, args
    # Behind `--` stand arguments alone, of which the first looks like a script.
    if (module and entry) or (script is not None and "--" not in sys.argv):
        raise UsageError(
            "it was said twice what to run",
            hint="name a SCRIPT, or --module, or --entry; the program's own arguments follow --",
        )
    own = [*([] if script is None else [script]), *(args or [])]
    return (f"-m {module}" if module else f"--entry {entry}"), own


def read_option(option: str, read: Callable[[str], _T], text: str) -> _T:
    """Reads the value of an option.

    Raises:
      UsageError: as `read`, with the name of the option in front.
    """
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hint) from None


def spelled(option: str) -> str:
    """Returns an option as a user types it: `--step-time` for `step_time`."""
    return "-- ARGS" if option == "args" else f"--{option.replace('_', '-')}"


def print_report(report: Report, *, as_json: bool) -> None:
    """Prints a report of a command on stdout, for people or as JSON."""
    from automesh.report.blocks.json import to_json
    from automesh.report.blocks.terminal import told

    sys.stdout.write(dumps(to_json(report), indent=1) + "\n" if as_json else told(report))


def print_result(result: Result, *, as_json: bool, top: int, verbose: bool) -> None:
    """Prints a result on stdout, as a table or as JSON."""
    if as_json:
        print_report(result.to_report(), as_json=True)
    else:
        sys.stdout.write(result.table(top=top, verbose=verbose) + "\n")
