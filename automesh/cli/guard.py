"""The guard around every command: streams that any terminal can show, errors as sentences."""

from __future__ import annotations

import codecs
import errno
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from automesh.errors import AutomeshError, Interrupted, NoFeasibleMesh, UsageError, of_system
from automesh.options.table import SEARCH
from automesh.texts.storage_url import masked, secrets_among, typeable
from automesh.texts.streams import open_streams, unwritten
from automesh.texts.terminal import clean
from automesh.tuner.interrupts import end_on_sigterm, exit_code

_STOPPED = 130
_ASCII_ERRORS = "automesh.stand-ins"
_ASCII = {"\u2500": "-", "\u2501": "=", "\u00b1": "~"}

# The root of Typer's argument errors; its module is private, its subclass is not.
_ArgumentError: type[Exception] = typer.BadParameter.__mro__[2]  # pyright: ignore


def prepare_streams() -> None:
    """Lets output be written whatever the terminal can show, and even if nobody reads it."""
    codecs.register_error(_ASCII_ERRORS, _ascii_for)
    open_streams(errors=_ASCII_ERRORS)


def _ascii_for(error: UnicodeError) -> tuple[str, int]:
    """Returns an ASCII character for one that the terminal cannot show, so that columns hold."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    foreign = error.object[error.start : error.end]
    return "".join(_ASCII.get(char, "?") for char in foreign), error.end


def guarded(call: Callable[[], Any], commands: Sequence[str]) -> int:
    """Runs the command line and gives its exit code; `commands` are the names of all commands."""
    end_on_sigterm()
    error, code = _outcome(call, commands)
    # The table first: both may go to one terminal.
    lost = unwritten(sys.stdout)
    if error is not None:
        _complain(error)
    # The reader of our table may go away (`automesh show | head`): not an error of anyone's.
    if lost is not None and not isinstance(lost, BrokenPipeError):
        _complain(_not_printed(lost))
        code = code if error is not None and isinstance(error, Interrupted) else 2
    return code


def _outcome(call: Callable[[], Any], commands: Sequence[str]) -> tuple[AutomeshError | None, int]:
    """Returns the message with which the command line ended, and its exit code."""
    try:
        outcome = call()
        if outcome == _STOPPED:  # Typer has caught a KeyboardInterrupt.
            return interrupted(), exit_code()
        return None, outcome if isinstance(outcome, int) else 0
    except NoFeasibleMesh as error:
        return error, 1
    except Interrupted as error:
        return error, exit_code()
    except AutomeshError as error:
        return error, 2
    except OSError as error:
        return of_system(error), 2
    except _ArgumentError as error:
        return UsageError(_sentence(error), hint=_help_for(error, commands)), 2


def _not_printed(lost: OSError) -> UsageError:
    """Returns the error of output on stdout that was not written."""
    if lost.errno == errno.EBADF:
        return UsageError(
            "stdout is closed: what was to be printed there is lost",
            hint="all files are written; `> /dev/null` prints nothing without an error",
        )
    return UsageError(
        f"stdout cannot be written: {(lost.strerror or type(lost).__name__).lower()}",
        hint="all files are written; what was to be printed is lost in part or as a whole",
    )


def typed() -> list[str]:
    """Returns the command that continues: the words that the user typed, without options that would
    begin anew."""
    words = sys.argv[1:]
    ours = words[: words.index("--")] if "--" in words else words
    anew = [f"--{option.word}" for option in SEARCH if not option.has_resume]
    kept = [word for word in ours if word not in anew]
    return ["automesh", *kept, *words[len(ours) :]]


def interrupted() -> Interrupted:
    """Says after an interruption how to go on."""
    command = shlex.join(typeable(typed()))
    return Interrupted(
        "interrupted; what is finished is kept", hint=f"the same command goes on: {command}"
    )


def _sentence(error: Any) -> str:
    message: str = error.format_message()
    return message[:1].lower() + message[1:].rstrip(".")


def _help_for(error: Any, commands: Sequence[str]) -> str:
    typed = " ".join(["automesh", *(name for name in sys.argv[1:2] if name in commands)])
    command = error.ctx.command_path if error.ctx else typed
    if command.endswith(" search"):
        return "`automesh search --help` lists all; the script's own arguments follow --"
    return f"`{command} --help` lists all"


def _complain(error: AutomeshError) -> None:
    hint = f"hint: {_indented(error.hint)}\n" if error.hint else ""
    # Each message is masked where it is made; what is quoted of a mistyped command is not.
    secrets = secrets_among(sys.argv, os.environ)
    sys.stderr.write(masked(f"error: {clean(error.message)}\n{hint}", secrets))


def _indented(text: str) -> str:
    """Indents all lines but the first: text that a hint quotes cannot pass for an error of ours."""
    first, *rest = text.split("\n")
    return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in rest)])
