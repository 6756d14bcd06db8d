"""Finds the build function in the file or module that the user named; one sentence describes each
possible error (no jax)."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from automesh.errors import UsageError, did_you_mean, kind_of
from automesh.package import LIBRARIES
from automesh.program.nouns import Entry
from automesh.program.script.payload import read_payload
from automesh.texts.exceptions import in_one_line


def load_entry(entry: Entry) -> Callable[..., Any]:
    """Imports the user's code and returns the build function.

    Sets `sys.argv` to the script's own and puts its directory (for a module: the working directory)
    first on `sys.path`. The code runs under a name that is not `__main__`. A script that is
    captured runs when the function is called, as `__main__`.

    Raises:
      UsageError: there is no such file, it cannot be imported, or it has no such function.
    """
    if entry.capture is not None:
        # Imported here, so that importing this module does not import jax.
        from automesh.program.capture.build import captured_build

        return captured_build(entry)
    if entry.kind == "pickle":
        sys.argv = [entry.location, *entry.argv]
        return read_payload(Path(entry.location))
    module = _load_script(entry) if entry.kind == "script" else _load_module(entry)
    return _function(module, entry)


def _load_script(entry: Entry) -> ModuleType:
    path = Path(entry.location)
    if not path.exists():
        raise UsageError(
            f"there is no script `{entry.location}`", hint="give the path of a Python file"
        )
    if path.is_dir():
        raise UsageError(
            f"`{entry.location}` is a directory, not a script",
            hint="give the path of a Python file in it",
        )
    if path.suffix == ".ipynb":
        raise UsageError(
            f"`{entry.location}` is a notebook, not a Python file",
            hint="call `automesh.search(build)` inside the notebook, or export it as a script",
        )
    sys.argv = [str(path), *entry.argv]
    _put_first(str(path.resolve().parent))
    # Under its own name, so that a helper module that imports the script gets this very module.
    taken = (
        path.stem in sys.modules
        or path.stem in sys.stdlib_module_names
        or not path.stem.isidentifier()
    )
    name = f"_automesh_{path.stem}" if taken else path.stem
    loader = _FromItsText(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise UsageError(f"`{entry.location}` cannot be read as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_error(entry.location, error) from error
    return module


class _FromItsText(importlib.machinery.SourceFileLoader):
    """Runs the text of a script, never the compiled code in `__pycache__`.

    A set that is a constant has another order in compiled code than in the text: the first process
    would trace another program than all later ones.
    """

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - as the loader has it
        return self.source_to_code(self.get_data(self.path), self.path)


def _load_module(entry: Entry) -> ModuleType:
    sys.argv = [entry.location, *entry.argv]
    _put_first(str(Path.cwd()))
    try:
        return importlib.import_module(entry.location)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (entry.location == missing or entry.location.startswith(f"{missing}.")):
            raise UsageError(
                f"there is no module `{entry.location}` (`{missing}` was not found)",
                hint="run the command in the directory that holds the package, or install it",
            ) from error
        raise _import_error(entry.location, error) from error
    except Exception as error:
        raise _import_error(entry.location, error) from error


def _put_first(directory: str) -> None:
    if directory in sys.path:
        sys.path.remove(directory)
    sys.path.insert(0, directory)


def _import_error(location: str, error: Exception) -> UsageError:
    if isinstance(error, SyntaxError):
        place = f"{error.filename or location}" + (f":{error.lineno}" if error.lineno else "")
        text = f": `{error.text.strip()}`" if error.text else ""
        return UsageError(f"{place}: {error.msg}{text}", hint="mend the syntax error")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    own = [frame for frame in frames if Path(frame.filename).name != Path(__file__).name]
    # The line of the user's code, not the one in a library that it called.
    theirs = [frame for frame in own if not frame.filename.startswith(LIBRARIES)] or own
    place = f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    reason = in_one_line(error)
    hint = "make it importable without side effects; put what trains under `if __name__ == ...`"
    if isinstance(error, ModuleNotFoundError):
        hint = f"install `{error.name}` in the environment that automesh runs in"
    return UsageError(f"importing `{location}` failed{place}: {reason}", hint=hint)


def _function(module: ModuleType, entry: Entry) -> Callable[..., Any]:
    found: Any = module
    for part in entry.function.split("."):
        found = getattr(found, part, None)
    if found is None:
        own = [
            name
            for name, value in vars(module).items()
            if callable(value)
            and not isinstance(value, type)
            and not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        listed = ", ".join(f"`{name}`" for name in own) or "none"
        example = f"{entry.location}:{own[0]}" if own else "def build(mesh): ... return step, args"
        raise UsageError(
            f"`{entry.location}` has no function `{entry.function}`"
            f"{did_you_mean(entry.function, own)}; its functions are: {listed}",
            hint=f"name the one that takes the mesh, as in `{example}`"
            if own
            else f"write `{example}`",
        )
    if not callable(found):
        raise UsageError(
            f"`{entry.function}` in `{entry.location}` is {kind_of(found)}, not a function",
            hint="it must take the mesh and return `(step, args)`",
        )
    return found
