"""Starts a program as Python or a shell would: a file, a module, a notebook, a console script (no
jax).
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib.metadata
import importlib.util
import linecache
import os
import re
import runpy
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from automesh.errors import UsageError
from automesh.limits import SCRIPT_BYTES
from automesh.package import INSTALLED, count_as_users, is_users_file
from automesh.program.capture.world.told import tell
from automesh.program.nouns import Entry
from automesh.program.script.notebook import CodeCell, cell_name, cells_of
from automesh.program.script.started import ENTRY, MODULE
from automesh.reading import read_bytes
from automesh.texts.exceptions import in_one_line

# Lines of a notebook that are for IPython: a magic or a shell command, help, or the result of one
# of these.
_LINE_MAGIC = re.compile(r"\s*(%|!|\?)|.*[^#\s]\?{1,2}\s*$")
_ASSIGNED = re.compile(r"(\s*)([\w, ]+?)\s*=\s*[%!]")
# Magics of whole cells whose text is Python, which is run.
_PYTHON_CELLS = frozenset({"time", "timeit", "capture", "prun", "python", "python3"})


def start(entry: Entry, *, ends: Callable[[Exception], bool] = lambda _: False) -> None:
    """Runs a program from its beginning, as `__main__`, with its own arguments and with the import
    path that it would have.

    Args:
      ends: whether an error in a cell of a notebook keeps the remaining cells from being run.

    Raises:
      UsageError: there is no such console script, or a notebook cannot be read.
      BaseException: any error that the program raises.
    """
    path = Path(entry.location)
    if entry.start and any(f"/{folder}/" in entry.location for folder in INSTALLED):
        count_as_users(_package_of(path))
    if entry.start.startswith(MODULE):
        _set_path(os.getcwd())
        sys.argv = [str(path), *entry.argv]
        runpy.run_module(
            entry.start.removeprefix("-m ").strip(), run_name="__main__", alter_sys=True
        )
    elif entry.start.startswith(ENTRY):
        _console_script(entry.start.removeprefix(ENTRY), entry.argv)
    elif path.suffix == ".ipynb":
        _set_path(str(path.parent))
        sys.argv = [str(path), *entry.argv]
        _notebook(path, ends)
    else:
        _set_path(str(path.parent))
        sys.argv = [str(path), *entry.argv]
        runpy.run_path(str(path), run_name="__main__")


def _package_of(path: Path) -> str:
    """Returns the folder of the installed package that a file belongs to."""
    inside = next(parent for parent in path.parents if parent.name in INSTALLED)
    return str(inside / path.relative_to(inside).parts[0])


def _set_path(first: str) -> None:
    if first in sys.path:
        sys.path.remove(first)
    sys.path.insert(0, first)


def _console_script(name: str, argv: tuple[str, ...]) -> None:
    found = list(importlib.metadata.entry_points(group="console_scripts", name=name))
    if not found:
        raise UsageError(
            f"no installed package has a console script `{name}`",
            hint="install it in the environment that automesh runs in, or use `-m package.module`",
        )
    sys.argv = [str(Path(sys.executable).parent / name), *argv]
    main: Any = found[0].load()
    sys.exit(main())


def _notebook(path: Path, ends: Callable[[Exception], bool]) -> None:
    """Runs the code cells of a notebook in their order, without lines that are for IPython alone.

    After a cell that fails the next cells are run, as people do in Jupyter: many notebooks show
    what does not work, and mark such cells. If a cell without this mark fails, its error is raised
    at the end.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(path), display=print, get_ipython=lambda: None)
    before, import_before = sys.modules["__main__"], builtins.__import__
    sys.modules["__main__"] = main
    builtins.__import__ = _importing_shell(import_before)
    failed: Exception | None = None
    try:
        for number, cell in enumerate(code_cells(path), start=1):
            name, source = cell_name(path, number), cell.text
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            try:
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                awaited: Any = eval(compile(source, name, "exec", flags), main.__dict__)
                if awaited is not None:
                    asyncio.run(_awaiting(awaited))
            except UsageError:
                raise  # The cell needs what this run cannot give it.
            except Exception as error:
                if ends(error):
                    raise
                marked = ", as it is marked to" if cell.is_meant_to_fail else ""
                tell(
                    f"cell {number} of the notebook fails{marked} ({in_one_line(error)}); the next "
                    "ones were run all the same, as Jupyter does"
                )
                if failed is None and not cell.is_meant_to_fail:
                    failed = error
    finally:
        builtins.__import__ = import_before
        sys.modules["__main__"] = before
    if failed is not None:
        raise failed


async def _awaiting(cell: Any) -> None:
    await cell


def _importing_shell(before: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an `__import__` that finds a stand-in for IPython where it is not installed: Jupyter
    always has it, and notebooks import what shows their results. The stand-in shows nothing.

    Only the user's own code gets it. A library that finds an IPython asks it for much more, and
    does without where there is none.
    """
    if "IPython" in sys.modules or importlib.util.find_spec("IPython") is not None:
        return before
    shell = types.ModuleType("IPython")
    shown: Any = types.ModuleType("IPython.display")
    shown.__getattr__ = lambda name: _shown_by(name)
    shell.__dict__.update(display=shown, get_ipython=lambda: None)

    def find(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        file = globals.get("__file__") if globals is not None else None
        is_shell = level == 0 and name in ("IPython", "IPython.display")
        if is_shell and isinstance(file, str) and is_users_file(file):
            return shown if fromlist and name != "IPython" else shell
        return before(name, globals, locals, fromlist, level)

    return find


def _shown_by(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None


def code_cells(path: Path) -> list[CodeCell]:
    """Returns the code cells of a notebook as Python, with the same lines.

    Raises:
      UsageError: the file is not a notebook.
    """
    cells = cells_of(read_bytes(path, limit_bytes=SCRIPT_BYTES), path.name)
    return [replace(cell, text=_python(cell.text)) for cell in cells]


def _python(cell: str) -> str:
    lines = cell.splitlines()
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("%%"):
        magic = first.lstrip().removeprefix("%%").split()[:1]
        if not magic or magic[0] not in _PYTHON_CELLS:
            tell(f"a cell of the notebook was left out: `{first.strip()}`")
            return "\n" * len(lines)
        lines[lines.index(first)] = ""
    kept: list[str] = []
    for line in lines:
        if assigned := _ASSIGNED.match(line):
            tell(f"a line of the notebook has no result: `{line.strip()}`")
            kept.append(f"{assigned[1]}{assigned[2]} = []")
        elif _LINE_MAGIC.match(line) and not _is_python(line):
            tell(f"a line of the notebook was left out: `{line.strip()}`")
            kept.append(f"{line[: len(line) - len(line.lstrip())]}pass")
        else:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _is_python(line: str) -> bool:
    """Whether a line that looks like a magic may be the rest of an expression."""
    return line.lstrip().startswith("%") and line.lstrip()[1:2] in (" ", "(", "=")
