"""Command templates: `python train.py --fsdp {fsdp} --tp {tp}`, read, checked and filled in.

A template is split into words as a shell would split it, but there is no shell: no variables, no
pipes, no wildcards. In a word, `{axis}` is the whole size of a mesh axis, `{ici.axis}` and
`{dcn.axis}` are its parts inside and between granules (slices or nodes), `{knob}` is a knob of the
search space, and `{run_dir}` is an empty folder of the run's own. `{{` and `}}` are braces.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from automesh.errors import UsageError
from automesh.mesh.axes import Plan, spelled
from automesh.texts.storage_url import masked, masked_word

Part = Literal["", "ici", "dcn"]
RUN_DIR = "run_dir"
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
_PARTS: dict[str, Part] = {"": "", "ici": "ici", "dcn": "dcn"}
_NAME = re.compile(r"(?:(ici|dcn)\.)?([A-Za-z_][A-Za-z0-9_]*)")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Words that have a meaning for a shell when they stand alone.
_SHELL = frozenset(["|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>"])
_BRACES = "write {{ and }} for braces that belong to the command"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """A placeholder for a number or a word of the plan.

    Attributes:
      part: the part of an axis; empty for the whole axis, and for knobs.
    """

    name: str
    part: Part = ""

    def __str__(self) -> str:
        return f"{{{self.part}.{self.name}}}" if self.part else f"{{{self.name}}}"


Word = tuple[str | Placeholder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A command with placeholders.

    Attributes:
      words: the words; each is a sequence of texts and placeholders.
    """

    words: tuple[Word, ...]

    def __str__(self) -> str:
        """Returns the template as one would type it: `parse_template` reads it back as an equal
        value."""
        return " ".join(_quoted(word) for word in self.words)

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """All different placeholders, in the order in which they first appear."""
        found = (piece for word in self.words for piece in word if isinstance(piece, Placeholder))
        return tuple(dict.fromkeys(found))

    @property
    def constants(self) -> tuple[str, ...]:
        """The words that are the same for all plans."""
        return tuple(
            "".join(str(piece) for piece in word)
            for word in self.words
            if not any(isinstance(piece, Placeholder) for piece in word)
        )

    def fill(self, values: Mapping[Placeholder, str]) -> tuple[str, ...]:
        """Returns the words of a command; `values` has every placeholder."""
        return tuple(
            "".join(values[piece] if isinstance(piece, Placeholder) else piece for piece in word)
            for word in self.words
        )

    def for_plan(self, plan: Plan, *, run_dir: str) -> tuple[str, ...]:
        """Returns the words of the command that runs a plan; the plan has every axis and knob
        named."""
        axes, knobs = {axis.name: axis for axis in plan.axes}, dict(plan.knobs)
        values: dict[Placeholder, str] = {}
        for placeholder in self.placeholders:
            if placeholder.name == RUN_DIR:
                values[placeholder] = run_dir
            elif placeholder.name in axes:
                axis = axes[placeholder.name]
                sizes = {"": axis.size, "ici": axis.ici, "dcn": axis.dcn}
                values[placeholder] = str(sizes[placeholder.part])
            else:
                values[placeholder] = spelled(knobs[placeholder.name])
        return self.fill(values)


def parse_template(text: str) -> Template:
    """Reads a command template.

    Raises:
      UsageError: the text is empty, or has an open quote, an unmatched brace, an impossible name,
        or syntax that only a shell would understand.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"the command `{masked(text)}` cannot be split into words: {str(error).lower()}",
            hint="close the quote, or put a backslash before it",
        ) from None
    if not words:
        raise UsageError(
            "the command is empty", hint="write for example 'python train.py --fsdp {fsdp}'"
        )
    for word in words:
        if word in _SHELL:
            raise UsageError(
                f"`{word}` in the command means something to a shell only, and none is used",
                hint="put it into a script, and search `bash run.sh {fsdp}`",
            )
    template = Template(words=tuple(_word(word) for word in words))
    _check_program(template, words[0])
    return template


def find_program(template: Template) -> str:
    """Returns the path of the program that the command runs.

    Raises:
      UsageError: there is no such program.
    """
    first = template.constants[0]
    found = shutil.which(first)
    if found is not None:
        return str(Path(found).absolute())
    path = Path(first)
    if path.is_file() and path.suffix == ".py":
        raise UsageError(
            f"the command begins with `{first}`, which cannot be run by itself",
            hint=f"begin with Python: `python {first} ...`",
        )
    if path.is_file():
        raise UsageError(
            f"the command begins with `{first}`, which may not be executed",
            hint=f"`chmod +x {first}`, or begin with what interprets it",
        )
    raise UsageError(
        f"the command begins with `{first}`, and there is no such program",
        hint="give its path, or add its folder to PATH",
    )


def _check_program(template: Template, first: str) -> None:
    if any(isinstance(piece, Placeholder) for piece in template.words[0]):
        raise UsageError(
            f"the command begins with `{first}`, but every plan needs the same program",
            hint="begin with a program: 'python train.py --fsdp {fsdp}'",
        )
    if _ASSIGNMENT.match(first):
        raise UsageError(
            f"the command begins with `{first}`, which sets a variable only in a shell",
            hint=f"write `env {first} ...`",
        )


def _word(text: str) -> Word:
    pieces: list[str | Placeholder] = []

    def add(literal: str) -> None:
        if pieces and isinstance(pieces[-1], str):
            pieces[-1] += literal
        else:
            pieces.append(literal)

    for match in _PIECE.finditer(text):
        piece, inside = match[0], match[1]
        if piece in ("{{", "}}"):
            add(piece[0])
        elif inside is not None:
            pieces.append(_placeholder(text, inside, before=text[: match.start()]))
        elif piece in ("{", "}"):
            raise UsageError(
                f"`{masked_word(text)}` in the command has a single `{piece}`", hint=_BRACES
            )
        else:
            add(piece)
    return tuple(pieces) or ("",)


def _placeholder(word: str, inside: str, *, before: str) -> Placeholder:
    if before.endswith("$"):
        raise UsageError(
            f"`${{{inside}}}` in the command is a variable to a shell only, and none is used",
            hint="write its value, or put the command into a script",
        )
    match = _NAME.fullmatch(inside)
    if match is None:
        raise UsageError(
            f"`{{{inside}}}` in the command is not the name of an axis or a knob",
            hint=f"write {{fsdp}}, {{ici.fsdp}} or {{dcn.fsdp}}; {_BRACES}",
        )
    part, name = match.groups()
    if name == RUN_DIR and part:
        raise UsageError(f"`{{{inside}}}` in `{word}` has no parts", hint="write {run_dir}")
    return Placeholder(name=name, part=_PARTS[part or ""])


def masked_template(text: str) -> str:
    """Returns a template as it may be stored and shown: `***` replaces the secrets of URLs in its
    words."""
    try:
        words = shlex.split(text)
    except ValueError:
        return masked(text)
    shown = [masked_word(word) for word in words]
    return text if shown == words else " ".join(map(_quoted_text, shown))


def _quoted(word: Word) -> str:
    texts = (
        str(piece)
        if isinstance(piece, Placeholder)
        else piece.replace("{", "{{").replace("}", "}}")
        for piece in word
    )
    return _quoted_text("".join(texts))


def _quoted_text(text: str) -> str:
    # `shlex` would quote braces, which have no meaning in a shell; the template is easier to read
    # without these quotes.
    bare = shlex.quote(text.replace("{", "").replace("}", "")) == text.replace("{", "").replace(
        "}", ""
    )
    return text if bare else shlex.quote(text)
