"""Tells from the text of a script whether it has a function that takes a mesh (no jax)."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from automesh.limits import SCRIPT_BYTES
from automesh.reading import Unreadable, read_bytes

_MESH = re.compile(r"mesh(?!grid)", re.I)


def defines(path: Path, name: str) -> bool:
    """Whether a script may have a function `name` at its top level that takes a mesh.

    If the text of the script does not answer this, the answer is True: the import of the script
    then says what is wrong. A function that the script itself calls with something else than a
    mesh, such as a `build(config)` that makes a model, is another one.
    """
    tree = _tree_of(path)
    if tree is None:
        return True
    if not _binds_in(tree, name, path, frozenset()):
        return False
    function = _function(tree, name, path)
    return function is None or _takes_mesh(function) or not _is_called_without_mesh(tree, name)


def _tree_of(path: Path) -> ast.Module | None:
    """Returns the program in a file; None if it cannot be read."""
    try:
        return ast.parse(read_bytes(path, limit_bytes=SCRIPT_BYTES))
    except (Unreadable, OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _binds_in(tree: ast.Module, name: str, path: Path, seen: frozenset[Path]) -> bool:
    return any(_binds(statement, name, path, seen) for statement in tree.body)


def _binds(statement: ast.AST, name: str, path: Path, seen: frozenset[Path]) -> bool:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return statement.name == name
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return _exports(statement, name, path, seen)
        case ast.Import() | ast.ImportFrom():
            return name in [(one.asname or one.name).partition(".")[0] for one in statement.names]
        case ast.Name(ctx=ast.Store()):
            return statement.id == name
        case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return False
        case _:
            children = ast.iter_child_nodes(statement)
            return any(_binds(child, name, path, seen) for child in children)


def _exports(statement: ast.ImportFrom, name: str, path: Path, seen: frozenset[Path]) -> bool:
    """Whether `from module import *` may bind a name. What an installed package exports under this
    name is not for automesh."""
    file = _file_of(statement, path)
    if file is None:
        top = (statement.module or "").partition(".")[0]
        try:
            return not top or importlib.util.find_spec(top) is None
        except (ImportError, ValueError):
            return True
    if file in seen:
        return False  # Modules may import everything from each other.
    tree = _tree_of(file)
    return tree is None or _binds_in(tree, name, file, seen | {file})


def _file_of(statement: ast.ImportFrom, path: Path) -> Path | None:
    """Returns the file that an import of a script reads, if it lies beside the script."""
    folder = path.parent
    for _ in range(statement.level - 1):
        folder = folder.parent
    place = folder.joinpath(*(statement.module or "").split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((one for one in files if one.is_file()), None)


def _function(tree: ast.Module, name: str, path: Path) -> ast.FunctionDef | None:
    """Returns the function of a name, in a script or in the file from which it is imported; None if
    it is not found."""
    for node in _at_top_level(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if not isinstance(node, ast.ImportFrom) or (file := _file_of(node, path)) is None:
            continue
        there = [one.name for one in node.names if (one.asname or one.name) in (name, "*")]
        imported = _tree_of(file) if there else None
        for other in _at_top_level(imported) if imported is not None else ():
            wanted = name if there[0] == "*" else there[0]
            if isinstance(other, ast.FunctionDef) and other.name == wanted:
                return other
    return None


def _at_top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements of a module, also those in its conditions and attempts."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _at_top_level(node)


def _takes_mesh(function: ast.FunctionDef) -> bool:
    """Whether the first parameter of a function has a mesh in its name or in its annotation."""
    given = [*function.args.posonlyargs, *function.args.args]
    return bool(given) and bool(_MESH.search(ast.unparse(given[0])))


def _is_called_without_mesh(tree: ast.Module, name: str) -> bool:
    """Whether a script calls a function, and always with something else than a mesh."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    given = [ast.unparse(one) for call in calls for one in (*call.args, *call.keywords)]
    return bool(calls) and not any(map(_MESH.search, given))
