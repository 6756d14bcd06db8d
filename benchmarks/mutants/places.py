"""Draws places in the code, and one change of each: cosmic-ray's operators say what can change."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Left out, since most of what they make does the same: a decorator such as `functools.cache` or
# `dataclass(frozen=True)` that is removed; and operators of cosmic-ray that need arguments.
_LEFT_OUT = ("RemoveDecorator", "VariableInserter", "VariableReplacer", "NoOp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A file with one change.

    Attributes:
      file: relative to the repository, with `/`.
      line: of the change, from 1.
      operator: the name that cosmic-ray gives to the kind of change.
      before: the line as it is.
      after: the line as it is changed.
      code: the whole file with the change.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    code: str


def draw(root: Path, packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Mutants, drawn with one chance for each place of the code that can change.

    A place is a token or an expression; which of the changes that fit it is made is drawn, too, so
    that a `+`, which has ten replacements, is drawn no more often than a `not`. Annotations and the
    decorators of classes are no places: a change of them does nothing that a caller can see.

    Args:
      root: the repository.
      packages: folders or files relative to `root`.
      count: of mutants; fewer come back if the code has fewer places.
      seed: of the draw; the same seed and code give the same mutants.
    """
    chance = random.Random(seed)
    places = [
        (file, *place)
        for file in sorted(_files(root, packages))
        for place in _places((root / file).read_text("utf-8"))
    ]
    chance.shuffle(places)
    mutants: list[Mutant] = []
    for file, start, changes in places:
        if len(mutants) == count:
            break
        source = (root / file).read_text("utf-8")
        name, occurrence = chance.choice(changes)
        code = _changed(source, name, occurrence)
        if code is not None and _does_something(source, code):
            lines = _changed_lines(source, code)
            mutants.append(
                Mutant(
                    file=file, line=start, operator=name, before=lines[0], after=lines[1], code=code
                )
            )
    return mutants


def _files(root: Path, packages: Sequence[str]) -> Iterator[str]:
    for package in packages:
        path = root / package
        for file in [path] if path.is_file() else path.rglob("*.py"):
            yield file.relative_to(root).as_posix()


def _operators() -> dict[str, Any]:
    """Import here: cosmic-ray is no dependency of the tests."""
    from cosmic_ray.plugins import get_operator, operator_names

    return {
        name: get_operator(name)()
        for name in operator_names()
        if not any(left_out in name for left_out in _LEFT_OUT)
    }


def _places(source: str) -> list[tuple[int, list[tuple[str, int]]]]:
    """For each place its line and what can be done there: operator, and the how-manieth of it."""
    from cosmic_ray.ast import Visitor, get_ast

    operators = _operators()
    counts = dict.fromkeys(operators, 0)
    found: dict[tuple[Any, Any], list[tuple[str, int]]] = {}

    class Walk(Visitor):
        def visit(self, node: Any) -> Any:
            for name, operator in operators.items():
                for start, end in operator.mutation_positions(node):
                    found.setdefault((start, end), []).append((name, counts[name]))
                    counts[name] += 1
            return node

    Walk().walk(get_ast(source))
    without = _lines_without_effect(source)
    return [
        (start[0], changes)
        for (start, _), changes in sorted(found.items())
        if not any(first <= start <= last for first, last in without)
    ]


def _lines_without_effect(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Annotations, `slots=True` of a class and the like, and what only type checkers read.

    Each as (line, column) of its start and of its end.
    """
    spans: list[tuple[tuple[int, int], tuple[int, int]]] = []

    def add(node: ast.AST | None) -> None:
        if node is not None:
            place: Any = node
            spans.append(
                ((place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset))
            )

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg() | ast.AnnAssign():
                add(node.annotation)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                add(node.returns)
            case ast.ClassDef():
                for decorator in node.decorator_list:
                    add(decorator)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                add(node)
            case _:
                pass
    return spans


def _changed(source: str, name: str, occurrence: int) -> str | None:
    from cosmic_ray.mutating import mutate_code

    return mutate_code(source, _operators()[name], occurrence)


def _does_something(source: str, code: str) -> bool:
    """Whether Python reads the two files as different programs, and the second as one at all."""
    try:
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(code))
    except SyntaxError:
        return False


def _changed_lines(source: str, code: str) -> tuple[str, str]:
    pairs = zip(source.splitlines(), code.splitlines(), strict=False)
    return next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))
