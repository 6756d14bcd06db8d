"""The text of a program with the user's source line of each line, and the first difference between
two such texts (no jax)."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from automesh import limits, reading
from automesh.errors import AutomeshError
from automesh.files import write_whole
from automesh.texts.terminal import as_unicode

# `#loc12 = loc("add"(#loc4))`, as MLIR prints it before and after the operations.
_DEFINITION = re.compile(r"(#loc\d*) = loc\((.*)\)")
_AT_END = re.compile(r" loc\((#loc\d*|unknown)\)$")
_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+)')
_REFERENCE = re.compile(r"#loc\d*")
_FUNCTION = re.compile(r'  func\.func (?:public |private )?@("[^"]*"|[\w.$-]+)')
_SYMBOL = re.compile(r'@("[^"]*"|[\w.$-]+)')
_ADDRESS = re.compile(r'(@CustomSPMDPartitioning\(.*?backend_config = ")\d+')
# Whole on each device: jax names a mesh there or none, as the array came from a `device_put` or
# from a compiled function.
_WHOLE = re.compile(r"(#sdy\.sharding<@)empty_mesh(, \[(?:\{\}(?:, \{\})*)?\]>)")
_NEAR = 12  # lines that are searched for a place if a line has none of its own
_SHOWN = 100  # characters of a line
_BEFORE = 30  # of these, the most before the first that differs


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLine:
    """A line of a program.

    Attributes:
      place: `train.py:12`; empty if unknown.
    """

    text: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference between two programs.

    Attributes:
      line, other: the first different line of each program, cut around the difference.
      place: place in the user's code, `train.py:12`; empty if unknown.
    """

    line: str
    other: str
    place: str

    def __str__(self) -> str:
        where = f" ({self.place})" if self.place else ""
        return f"`{self.line}`{where} in one, `{self.other}` in the other"


def read_lines(text: str, printed: str, *, is_users: Callable[[str], bool]) -> tuple[TextLine, ...]:
    """Adds places in the user's code to the lines of a program.

    Args:
      text: the program without places.
      printed: the same program with places, as MLIR prints it.
      is_users: says whether a path is the user's own code.

    Raises:
      AutomeshError: they are not the same program.
    """
    places = _Places(definitions=dict(_DEFINITION.findall(printed)), is_users=is_users)
    lines = text.splitlines()
    located = [line for line in printed.splitlines() if not _DEFINITION.fullmatch(line)]
    while located and not located[-1].strip():
        located.pop()
    if len(lines) != len(located):
        raise AutomeshError(f"{len(lines)} lines of a program have {len(located)} places")
    return tuple(
        TextLine(text=line, place=places.of(found[1]) if (found := _AT_END.search(one)) else "")
        for line, one in zip(lines, located, strict=True)
    )


@dataclass(slots=True, kw_only=True)
class _Places:
    """Finds the innermost line of the user's code in a location.

    A name contains its location, and a call has the callee before its caller. So the first file of
    the user in reading order is the innermost.
    """

    definitions: dict[str, str]
    is_users: Callable[[str], bool]
    known: dict[str, str] = field(default_factory=dict[str, str])

    def of(self, name: str) -> str:
        if name not in self.known:
            self.known[name] = ""  # A location that refers to itself has no place.
            self.known[name] = self._read(self.definitions.get(name, ""))
        return self.known[name]

    def _read(self, body: str) -> str:
        if found := _FILE.match(body):
            path, line = found[1], found[2]
            return f"{Path(path).name}:{line}" if self.is_users(path) else ""
        return next(filter(None, map(self.of, _REFERENCE.findall(body))), "")


def first_difference(one: Sequence[TextLine], other: Sequence[TextLine]) -> Difference | None:
    """Returns the first line in which two programs differ; None if they are the same."""
    for index in range(max(len(one), len(other))):
        mine = one[index].text.strip() if index < len(one) else ""
        theirs = other[index].text.strip() if index < len(other) else ""
        if mine != theirs:
            start = _first_character(mine, theirs)
            return Difference(
                line=_excerpt(mine, start),
                other=_excerpt(theirs, start),
                place=_place_near(one, index) or _place_near(other, index),
            )
    return None


def write_text(path: Path, lines: Sequence[TextLine]) -> None:
    """Writes a program to a file: for each line its place, a tab, and its text."""
    text = "\n".join(f"{line.place}\t{line.text}" for line in lines)
    write_whole(path, as_unicode(text), lasting=False)


def read_text(path: Path) -> tuple[TextLine, ...]:
    """Reads what `write_text` wrote.

    Raises:
      Unreadable: the file cannot be read.
    """
    text = reading.read_text(path, limit_bytes=limits.PROGRAM_TEXT_BYTES)
    pairs = [line.partition("\t") for line in text.split("\n")]
    return tuple(TextLine(place=place, text=text) for place, _, text in pairs)


def _place_near(lines: Sequence[TextLine], index: int) -> str:
    """Returns the place of a line; for a constant, which has none, that of the lines after it."""
    following = lines[index : index + _NEAR]
    before = lines[max(index - _NEAR, 0) : index]
    return next((one.place for one in (*following, *reversed(before)) if one.place), "")


def _first_character(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next(
        (index for index, (mine, theirs) in enumerate(pairs) if mine != theirs),
        min(len(one), len(other)),
    )


def _excerpt(line: str, start: int) -> str:
    if not line:
        return "(nothing)"
    if len(line) <= _SHOWN or start <= _SHOWN - _BEFORE:
        return line[:_SHOWN] + "..." * (len(line) > _SHOWN)
    # Shows the name of the operation and the part that differs, perhaps deep inside a constant.
    begin, end = start - _BEFORE // 2, start + _SHOWN - 2 * _BEFORE
    return f"{line[:_BEFORE]}...{line[begin:end]}" + "..." * (end < len(line))


def in_one_form(lines: Sequence[TextLine]) -> tuple[TextLine, ...]:
    """Returns a program whose functions are numbered in the order in which `main` reaches them,
    those with the same text once, whose custom partitionings have no address, and whose whole
    arrays name the mesh.

    It depends on jax's caches whether two traces of one function become one function of the program
    or two, and the numbers in the names depend on that. Both are the same program. An operation of
    `custom_partitioning` states the address of its Python functions in this process.

    Returns:
      The lines of `main`, then those of the others; `lines` if there is no `main`.
    """
    lines = [
        replace(one, text=_WHOLE.sub(r"\1mesh\2", _ADDRESS.sub(r"\1", one.text))) for one in lines
    ]
    functions = _functions(lines)
    main = next((name for name in functions if name.strip('"') == "main"), None)
    if main is None:
        return tuple(lines)
    known: dict[str, str] = {}

    def in_digest(inside: str, found: re.Match[str]) -> str:
        if found[1] == inside:
            return "@"
        return digest(found[1]) if found[1] in functions else found[0]

    def digest(name: str) -> str:
        if name not in known:
            known[name] = name  # Functions do not call themselves.
            called = functools.partial(_SYMBOL.sub, functools.partial(in_digest, name))
            text = [called(line.text) for line in functions[name]]
            known[name] = hashlib.sha256("\n".join(text).encode()).hexdigest()
        return known[name]

    numbers: dict[str, str] = {digest(main): "main"}
    order = [main]

    def numbered(found: re.Match[str]) -> str:
        name = found[1]
        if name not in functions:
            return found[0]
        if digest(name) not in numbers:
            numbers[digest(name)] = f"function{len(numbers)}"
            order.append(name)
        return f"@{numbers[digest(name)]}"

    made: list[TextLine] = []
    for name in order:  # The list grows during the loop.
        made += [replace(one, text=_SYMBOL.sub(numbered, one.text)) for one in functions[name]]
    return tuple(made)


def _functions(lines: Sequence[TextLine]) -> dict[str, list[TextLine]]:
    """Returns the lines of each function of a program, by its name as it is written."""
    found: dict[str, list[TextLine]] = {}
    name = ""
    for line in lines:
        if begins := _FUNCTION.match(line.text):
            name = begins[1]
        if name:
            found.setdefault(name, []).append(line)
        if line.text.rstrip() == "  }":
            name = ""
    return found
