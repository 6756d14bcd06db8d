"""Programs that are not started by the name of a file: `-m pkg.train`, and console scripts (no
jax).

Finds the file of a program where Python would look for it, without importing anything of the
program.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from automesh.errors import UsageError, did_you_mean

MODULE, ENTRY = "-m ", "--entry "
"""The beginning of a text that names a module to run, or a console script."""
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_started(text: str) -> bool:
    """Whether a text names a module or a console script."""
    return text.startswith((MODULE, ENTRY))


def words_of(script: str) -> list[str]:
    """Returns the command-line words that name a script."""
    return script.split(" ", 1) if is_started(script) else [script]


def file_of(text: str) -> Path:
    """Returns the file that is run first.

    Args:
      text: `-m pkg.train` or `--entry NAME`.

    Raises:
      UsageError: there is no such module or console script.
    """
    if text.startswith(ENTRY):
        return _file_of_script(text.removeprefix(ENTRY))
    name = text.removeprefix(MODULE)
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--module: `{name}` is not the name of a module",
            hint="write it as for python: `automesh search -m package.train`",
        )
    found = _file_of_module(name, run=True)
    if found is None:
        raise UsageError(
            f"--module: there is no module `{name}` that can be run, in {Path.cwd()} or where "
            "Python looks",
            hint="run it where `python -m` works, or with PYTHONPATH",
        )
    return found


def _file_of_script(name: str) -> Path:
    scripts = importlib.metadata.entry_points(group="console_scripts")
    known = [one for one in scripts if one.name == name]
    if not known:
        raise UsageError(
            f"--entry: no installed package has a console script `{name}`"
            f"{did_you_mean(name, sorted(one.name for one in scripts))}",
            hint="install the package in the environment that automesh runs in, or use "
            "`-m package.module`",
        )
    found = _file_of_module(known[0].module, run=False)
    if found is None:
        raise UsageError(
            f"--entry: the module `{known[0].module}` of `{name}` has no file in Python",
            hint="use `-m package.module`, or the path of a script",
        )
    return found


def _file_of_module(name: str, *, run: bool) -> Path | None:
    """Returns the file of a module; for a package that will be run, its `__main__`."""
    first, *rest = name.split(".")
    for folders in _folders_of(first):
        for folder in folders:
            base = Path(folder, *rest) if rest else Path(folder)
            package = "__main__.py" if run else "__init__.py"
            for file in (base.with_suffix(".py"), base / package):
                if (rest or file.parent == base) and file.is_file():
                    return file.resolve()
    if rest:
        return None
    for folder in _path():
        if (file := Path(folder, f"{first}.py")).is_file():
            return file.resolve()
    spec = _spec(first)
    return Path(spec).resolve() if spec.endswith(".py") else None


def _folders_of(package: str) -> Iterator[Iterable[str]]:
    """Yields the folders that a package may consist of, in the order in which Python looks."""
    for folder in _path():
        if (place := Path(folder, package)).is_dir():
            yield [str(place)]
    try:  # For packages that were installed in place.
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return
    if found is not None and found.submodule_search_locations:
        yield list(found.submodule_search_locations)


def _spec(module: str) -> str:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    return (found.origin or "") if found is not None else ""


def _path() -> list[str]:
    return [os.getcwd(), *(one for one in sys.path if one)]  # noqa: PTH109 - as Python does


def module_name_of(file: Path, missing: str) -> str:
    """Returns the name under which `python -m` would run a script that lies in the package
    `missing`; empty if it does not."""
    path = file.resolve()
    for folder in path.parents:
        if folder.name == missing:
            return ".".join(path.relative_to(folder.parent).with_suffix("").parts)
    return ""
