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
    """Finds the functions of a script that are jitted and take gradients in their text, or in that
    of functions of the script that they name; each with its first line.

    Leaves out those that another such function names, and those with decorators that may give them
    another name.
    """
    nodes = [(file, node) for file, text in _texts(Path(entry.location)) for node in _nodes(text)]
    defined = {node.name: (file, node) for file, node in nodes if isinstance(node, ast.FunctionDef)}
    named = {
        name: {_own_name(part) for part in ast.walk(node)} & defined.keys()
        for name, (_, node) in defined.items()
    }
    trains = {
        name
        for name, (_, node) in defined.items()
        if any(
            isinstance(part, ast.Call) and _TAKES.fullmatch(_last_name(part.func))
            for part in ast.walk(node)
        )
    }
    changes = True
    while changes:  # Functions that others name by way of a third one.
        wider = {name: those.union(*(named[one] for one in those)) for name, those in named.items()}
        changes, named = wider != named, wider
    trains |= {name for name, those in named.items() if those & trains}
    jitted = {
        _last_name(argument)
        for _, node in nodes
        if isinstance(node, ast.Call) and _JITS.fullmatch(_last_name(node.func))
        for argument in node.args[:1]
    }
    jitted |= {
        name
        for name, (_, node) in defined.items()
        if node.decorator_list and all(map(_jits, node.decorator_list))
    }
    other = {
        name for name, (_, node) in defined.items() if not all(map(_jits, node.decorator_list))
    }
    found = (trains & jitted) - other
    inner = {one for name in found for one in named[name] if one != name}
    return {
        name: SourceLine(file=file, line=node.lineno)
        for name, (file, node) in defined.items()
        if name in found - inner
    }


def _jits(decorator: ast.expr) -> bool:
    """Whether a decorator jits: `jax.jit`, `partial(jax.jit, ...)`."""
    return any(
        isinstance(part, ast.expr) and _JITS.fullmatch(_last_name(part))
        for part in ast.walk(decorator)
    )


def _own_name(node: ast.AST) -> str:
    """Returns the function of the script that a part of its text may name: `f` and `self.f`, and
    not the attribute `f` of something else; empty if it names none."""
    if isinstance(node, ast.Name):
        return node.id
    is_own = isinstance(node, ast.Attribute) and _last_name(node.value) == "self"
    return node.attr if is_own and isinstance(node, ast.Attribute) else ""


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
