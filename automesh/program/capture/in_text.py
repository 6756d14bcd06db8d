"""Finds in the text of a script calls that its run may still make later."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from automesh.errors import UsageError
from automesh.limits import SCRIPT_BYTES
from automesh.package import is_users_file
from automesh.program.capture.nouns import SourceLine
from automesh.program.nouns import Entry
from automesh.program.script.notebook import cell_name, code_of
from automesh.reading import read_bytes

# What makes a mesh, or is one.
MESH = re.compile(r"mesh(?!grid)", re.I)
# Functions of jax, Flax, Equinox and Haiku that take gradients, or apply them.
_TAKES = re.compile(r"(filter_)?(value_and_)?grad|(filter_)?vjp")
_JITS = re.compile(r"(filter_|p)?jit")
_GRADIENT = re.compile(f"{_TAKES.pattern}|apply_gradients")


def mesh_in_text(entry: Entry) -> SourceLine | None:
    """Finds the first line of a script that calls something whose name says that it makes a mesh;
    None if no line does.

    Only a run shows whether the line is reached.
    """
    for file, text in _texts(Path(entry.location)):
        lines = [
            node.lineno
            for node in _nodes(text)
            if isinstance(node, ast.Call) and MESH.search(_last_name(node.func))
        ]
        if lines:
            return SourceLine(file=file, line=min(lines))
    return None


def takes_gradients(entry: Entry) -> bool:
    """Whether a script, or a module of the user's that it has imported, names what takes gradients.

    Only a run shows whether that line is reached.
    """
    return any(
        _GRADIENT.fullmatch(name)
        for path in _files(entry)
        for _, text in _texts(path)
        for node in _nodes(text)
        for name in _named_by(node)
    )


def lines_of_gradients(entry: Entry) -> int:
    """Counts the lines of a script, and of the user's modules that it has imported, that call what
    takes gradients."""
    lines = {
        (name, node.lineno)
        for path in _files(entry)
        for name, text in _texts(path)
        for node in _nodes(text)
        if isinstance(node, ast.Call) and _TAKES.fullmatch(_last_name(node.func))
    }
    return len(lines)


def jitted_trainers(entry: Entry) -> dict[str, SourceLine]:
    """Finds the functions of a script that are jitted and take gradients in their text, each with
    its first line."""
    found: dict[str, SourceLine] = {}
    for file, text in _texts(Path(entry.location)):
        nodes = _nodes(text)
        jitted = {
            _last_name(argument)
            for node in nodes
            if isinstance(node, ast.Call) and _JITS.search(_last_name(node.func))
            for argument in node.args[:1]
        }
        for node in nodes:
            if not isinstance(node, ast.FunctionDef):
                continue
            is_jitted = node.name in jitted or any(
                isinstance(part, ast.Name | ast.Attribute) and _JITS.search(_last_name(part))
                for decorator in node.decorator_list
                for part in ast.walk(decorator)
            )
            takes = any(
                isinstance(part, ast.Call) and _TAKES.fullmatch(_last_name(part.func))
                for part in ast.walk(node)
            )
            if is_jitted and takes:
                found.setdefault(node.name, SourceLine(file=file, line=node.lineno))
    return found


def _files(entry: Entry) -> list[Path]:
    """Returns the file of a script, and those of the user's modules that it has imported."""
    files = [Path(entry.location)]
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_users_file(file):
            files.append(Path(file))
    return list(dict.fromkeys(files))


def _named_by(node: ast.AST) -> list[str]:
    """Lists the functions that a part of a program names; variables may have the same names."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Call):
        return [_last_name(node.func)]
    if isinstance(node, ast.FunctionDef):
        return [_last_name(decorator) for decorator in node.decorator_list]
    return []


def _texts(path: Path) -> Iterator[tuple[str, bytes | str]]:
    """Yields the text of a script, or of each cell of a notebook, with the file name that its lines
    have in messages."""
    try:
        content = read_bytes(path, limit_bytes=SCRIPT_BYTES)
    except (UsageError, OSError):
        return  # A run says what is wrong with it.
    if path.suffix != ".ipynb":
        yield str(path), content
        return
    for number, text in enumerate(code_of(content, path.name), start=1):
        yield cell_name(path, number), text


def _nodes(text: bytes | str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return []  # Such as a cell with a magic.


def _last_name(function: ast.expr) -> str:
    """Returns the last part of a dotted name: `make_mesh` of `jax.make_mesh`."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
