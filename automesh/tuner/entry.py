"""What the user typed after `search`, turned into an `Entry`."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from automesh.errors import UsageError
from automesh.program.nouns import Entry

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FUNCTION = re.compile(r"[A-Za-z_]\w*")
UNMODIFIED = ""
"""The function of a script that has no `build`: it is captured, see `automesh.program.capture`."""


def parse_entry(text: str, argv: Sequence[str] = ()) -> Entry:
    """Reads `train.py`, `train.py:make_step` or `pkg.module:fn`.

    A script that is named alone and has no function `build` is to be run as it is: its function is
    `UNMODIFIED`.

    Raises:
      UsageError: no such script, a folder, or neither a script nor a module.
    """
    location, colon, function = text.rpartition(":")
    if not colon:
        location, function = text, "build"
    if not _FUNCTION.fullmatch(function):
        raise UsageError(
            f"`{function}` in `{text}` is not the name of a function",
            hint="write `train.py`, `train.py:make_step` or `package.module:function`",
        )
    path = Path(location).expanduser()
    if path.is_dir():
        raise UsageError(
            f"`{location}` is a folder, not a script",
            hint=f"name the script in it: `{location}/train.py`",
        )
    if path.suffix == ".ipynb" and path.exists():
        raise UsageError(
            f"`{location}` is a notebook, not a Python file",
            hint="call `automesh.search(build)` inside the notebook, or export it as a script",
        )
    if path.is_file():
        if not colon and not defines(path, function):
            function = UNMODIFIED
        return Entry(
            kind="script", location=str(path.resolve()), function=function, argv=tuple(argv)
        )
    if colon and _MODULE.fullmatch(location) and path.suffix != ".py":
        return Entry(kind="module", location=location, function=function, argv=tuple(argv))
    ending = f":{function}" if colon else ""
    raise UsageError(f"there is no script `{location}`", hint=_suggestion(path, ending))


def defines(path: Path, name: str) -> bool:
    """Whether a script may have something called `name` at its top level.

    What cannot be told from its text is taken for a yes: importing the script says what is wrong.
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return True
    return any(_binds(statement, name) for statement in body)


def _binds(statement: ast.AST, name: str) -> bool:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return statement.name == name
        case ast.Import() | ast.ImportFrom():
            bound = [(one.asname or one.name).partition(".")[0] for one in statement.names]
            return name in bound or "*" in bound
        case ast.Name(ctx=ast.Store()):
            return statement.id == name
        case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return False
        case _:
            return any(_binds(child, name) for child in ast.iter_child_nodes(statement))


def _suggestion(path: Path, ending: str) -> str:
    try:
        scripts = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return f"the folder `{path.parent}` does not exist either"
    close = difflib.get_close_matches(path.name, scripts, n=1)
    if close:
        return f"did you mean `{path.parent / close[0]}{ending}`?"
    return (
        "give the path of a Python file with a function `build(mesh)`, or `package.module:function`"
    )
