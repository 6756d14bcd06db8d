"""The command that goes on with a search: composed from parts that are checked, never from a text
that a study holds.

Whoever writes a storage may put anything into it. Only the parts of a command are kept: the script,
the options of `automesh search` by their names, and the script's own arguments. What is shown
begins with `automesh search`, every part is quoted for a shell, and no part has a secret.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from automesh.limits import MOST_COMMAND_CHARS
from automesh.options.table import SEARCH
from automesh.texts.storage_url import typeable

_OPTIONS = tuple(option for option in SEARCH if not option.is_argument)
VALUED = frozenset(option.word for option in _OPTIONS if not option.is_flag)
"""The options of `automesh search` that take a value."""
FLAGS = frozenset(option.word for option in _OPTIONS if option.is_flag)
"""Those that take none."""
_SHORT = {f"-{option.short}": option.word for option in _OPTIONS if option.short}
_BEGINS_ANEW = tuple(option.word for option in _OPTIONS if not option.has_resume)
_PROGRAM = ("automesh", "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCommand:
    """The parts of `automesh search SCRIPT --option VALUE ... -- ARGS`.

    Attributes:
      script: what is searched; empty where `--command` says so.
      options: names without their dashes, in the order in which they were typed, and values; a flag
        has an empty one.
      args: the script's own.
    """

    script: str = ""
    options: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()

    def without(self, *names: str) -> SearchCommand:
        """Returns the command without some of its options."""
        return SearchCommand(
            script=self.script,
            options=tuple(option for option in self.options if option[0] not in names),
            args=self.args,
        )

    @property
    def words(self) -> list[str]:
        """Returns the words behind `automesh search`."""
        words = [self.script] if self.script else []
        for name, value in self.options:
            if name in FLAGS:
                words.append(f"--{name}")
            else:
                # Behind a space a value with a dash would be taken for the next option.
                words += [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]
        return [*words, "--", *self.args] if self.args else words


def read_words(words: Sequence[str]) -> SearchCommand | None:
    """Reads the words behind `automesh search`, without those that would begin a new search.

    Returns:
      None if there is an option that `automesh search` does not have. No part has a secret.
    """
    script, options, args = "", list[tuple[str, str]](), list[str]()
    rest = list(typeable(words))
    while rest:
        word = rest.pop(0)
        if word == "--":
            args += rest
            break
        if not word.startswith("-") or word == "-":
            script, args = (script, [*args, word]) if script else (word, args)
            continue
        name, mark, value = word.partition("=")
        name = _SHORT.get(name) or name.removeprefix("--")
        if name in VALUED and (mark or rest):
            options.append((name, value if mark else rest.pop(0)))
        elif name in FLAGS and not mark:
            options.append((name, ""))
        else:
            return None
    command = SearchCommand(script=script, options=tuple(options), args=tuple(args))
    return command.without(*_BEGINS_ANEW)


def read_text(text: str) -> SearchCommand | None:
    """Reads a command that a former version kept as a text; None if it is not in the form that
    those versions wrote.

    Those versions quoted each word in which a shell would do something: a text in which a shell
    would still do something is not theirs.
    """
    if len(text) > MOST_COMMAND_CHARS:
        return None
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    is_ours = tuple(words[:2]) == _PROGRAM and shlex.join(words) == text
    return read_words(words[2:]) if is_ours else None


def text_of(command: SearchCommand | None) -> str:
    """Returns the command as a user would type it.

    Returns:
      Empty if there is no command, or if it has a part that automesh itself would not have kept:
      an unknown option, a script that would be taken for an option, a control character; or if it
      is too long.
    """
    if command is None or not _is_plausible(command):
        return ""
    text = shlex.join(typeable([*_PROGRAM, *command.words]))
    return text if len(text) <= MOST_COMMAND_CHARS and text.isprintable() else ""


def _is_plausible(command: SearchCommand) -> bool:
    if command.script.startswith("-"):
        return False
    return all(name in VALUED or (name in FLAGS and not value) for name, value in command.options)
