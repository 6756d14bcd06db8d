"""What surrounds every command: streams that any terminal can show, errors as sentences."""

from __future__ import annotations

import codecs
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from automesh.errors import AutomeshError, Interrupted, NoFeasibleMesh, UsageError, of_system
from automesh.texts.storage_url import masked, secrets_among, typeable
from automesh.texts.terminal import clean
from automesh.tuner.interrupts import end_on_sigterm, exit_code

_STOPPED = 130
_ASCII_ERRORS = "automesh.stand-ins"
_ASCII = {"\u2500": "-", "\u2501": "=", "\u00b1": "~"}

# The root of Typer's argument errors; its module is private, its subclass is not.
_ArgumentError: type[Exception] = typer.BadParameter.__mro__[2]  # pyright: ignore


def prepare_streams() -> None:
    """Lets output be written whatever the terminal can show, and if there is no stream at all."""
    codecs.register_error(_ASCII_ERRORS, _ascii_for)
    # `automesh show >&-` gives a program no stream at all.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ASCII_ERRORS)


def _ascii_for(error: UnicodeError) -> tuple[str, int]:
    """What a terminal that has only ASCII gets: one character for one, so that columns hold."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    foreign = error.object[error.start : error.end]
    return "".join(_ASCII.get(char, "?") for char in foreign), error.end


def guarded(call: Callable[[], Any], commands: Sequence[str]) -> int:
    """Runs the command line and gives its exit code; `commands` are the names of all commands."""
    end_on_sigterm()
    try:
        outcome = call()
        sys.stdout.flush()
        if outcome == _STOPPED:  # Typer has caught a KeyboardInterrupt.
            return _complain(interrupted(), exit_code())
        return outcome if isinstance(outcome, int) else 0
    except NoFeasibleMesh as error:
        return _complain(error, 1)
    except Interrupted as error:
        return _complain(error, exit_code())
    except AutomeshError as error:
        return _complain(error, 2)
    except BrokenPipeError:
        # The reader of our table went away (`automesh show | head`): not an error of anyone's.
        _drop_output()
        return 0
    except SystemExit as error:
        # So Typer deals with a broken pipe of its own accord.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        return _complain(of_system(error), 2)
    except _ArgumentError as error:
        return _complain(UsageError(_sentence(error), hint=_help_for(error, commands)), 2)


def _drop_output() -> None:
    """Lets what is still to be written vanish: Python would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def typed() -> list[str]:
    """The command to go on with: what was typed, without what would begin anew."""
    words = sys.argv[1:]
    ours = words[: words.index("--")] if "--" in words else words
    kept = [word for word in ours if word != "--new"]
    return ["automesh", *kept, *words[len(ours) :]]


def interrupted() -> Interrupted:
    """What to say when the user has stopped the program: how to go on."""
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


def _complain(error: AutomeshError, code: int) -> int:
    # The table first: both may go to one terminal.
    sys.stdout.flush()
    hint = f"hint: {_indented(error.hint)}\n" if error.hint else ""
    # Each message is masked where it is made; what is quoted of a mistyped command is not.
    secrets = secrets_among(sys.argv, os.environ)
    sys.stderr.write(masked(f"error: {clean(error.message)}\n{hint}", secrets))
    return code


def _indented(text: str) -> str:
    """All but the first line further in: what a hint quotes cannot pass for an error of ours."""
    first, *rest = text.split("\n")
    return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in rest)])
