"""What a search is asked for, checked."""

from __future__ import annotations

import ast
import atexit
import difflib
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automesh.errors import UsageError
from automesh.hardware.reserve import parse_reserve
from automesh.program.capture.nouns import AxisSplit, parse_splits
from automesh.program.nouns import Entry
from automesh.program.script.payload import pickle_entry
from automesh.space.space import Knob

_FINALISTS = 8
_COMPILED_AHEAD = 10


def usual_top(*, is_ahead: bool) -> int:
    """Finalists of a race, or plans to compile for devices that are not here."""
    return _COMPILED_AHEAD if is_ahead else _FINALISTS


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The inputs of one search.

    Attributes:
      command: what was typed, to be shown as the way to go on; empty from Python.
      target: `local`, `cpu:N` for N virtual CPU devices, or devices that are not here.
      space: name of a shipped search space or path of a TOML file.
      budget_s: seconds for everything after the inspection; the final confirmation may overrun it.
      top: finalists of one race, or plans to compile for devices that are not here; the baseline
        not counted. 0 for what is usual.
      baseline: the script's own mesh in text form, knobs may follow (`dp:8 remat=full`); empty for
        the workload's own.
      rules: file that the rule is merged into; empty to write none.
      results: folder that holds the study's folder.
      storage: Optuna storage URL or journal file; empty for SQLite in the study's folder.
      dry_run: stop after the estimates.
      new: start another study even if one can be resumed.
      workers: compile workers side by side; 0 for one per core that the memory allows.
      timeout_s: limit of one job of a worker.
      memory_limit_bytes: limit of one worker; 0 for its share of the free memory.
      hardware: TOML file with clusters of the user's own; empty for none.
      reserve: memory of a device to keep free, `1GiB` or `5%`; empty for what is usual.
      xla: compiler options beside those of the space.
      curated: True for those that come with automesh as well, see `automesh.space.curated`.
      step: of a script without `build`, the function that is its step; empty for the one that looks
        like it.
      splits: of such a script, axes of its mesh that are to be several.
      notices: what the user should know of the script.
      shared_terms: folders of other searches for the same script, whose terms may do here as well.
    """

    entry: Entry
    command: str = ""
    target: str = "local"
    space: str = "auto"
    budget_s: float = 600.0
    top: int = 0
    baseline: str = ""
    rules: str
    results: Path
    storage: str = ""
    dry_run: bool = False
    new: bool = False
    workers: int = 0
    timeout_s: float = 300.0
    memory_limit_bytes: int = 0
    hardware: str = ""
    reserve: str = ""
    xla: tuple[Knob, ...] = ()
    curated: bool = False
    step: str = ""
    splits: tuple[AxisSplit, ...] = ()
    notices: tuple[str, ...] = ()
    shared_terms: tuple[Path, ...] = ()


# The arguments of a search, checked as far as no worker is needed for it.

# What the user typed after `search`, turned into an `Entry`.

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


def make_request(
    build: str | Path | Callable[..., Any],
    *,
    args: Sequence[str],
    target: str,
    hardware: str = "",
    space: str,
    budget_s: float,
    top: int | None,
    baseline: str,
    rules: Path | None,
    results: Path,
    storage: str,
    workers: int,
    timeout_s: float,
    memory_limit_bytes: int,
    reserve: str = "",
    xla: tuple[Knob, ...] = (),
    curated: bool = False,
    dry_run: bool,
    new: bool,
    command: str = "",
    step: str = "",
    split: Sequence[str] = (),
) -> SearchRequest:
    """Checks the arguments of a search that need no worker; see `SearchRequest`."""
    if top is not None and top < 1:
        raise UsageError(f"`top` is {top}; at least one finalist must be measured")
    if reserve:
        parse_reserve(reserve)
    entry = _entry_of(build, args)
    if rules is None and entry.kind == "script":
        rules = Path(entry.location).parent / "mesh_rules.toml"
    elif rules is None and entry.kind == "module":
        rules = Path("mesh_rules.toml")
    return SearchRequest(
        entry=entry,
        command=command,
        target=target,
        hardware=hardware,
        space=space,
        budget_s=budget_s,
        top=top or 0,
        baseline=baseline,
        rules=str(rules.absolute()) if rules is not None else "",
        results=results.absolute(),
        storage=storage,
        workers=workers,
        timeout_s=timeout_s,
        memory_limit_bytes=memory_limit_bytes,
        reserve=reserve,
        xla=xla,
        curated=curated,
        dry_run=dry_run,
        new=new,
        step=step,
        splits=parse_splits(split),
    )


def _entry_of(build: str | Path | Callable[..., Any], args: Sequence[str]) -> Entry:
    if isinstance(build, str | Path):
        return parse_entry(str(build), args)
    folder = Path(tempfile.mkdtemp(prefix="automesh-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pickle_entry(build, folder / "build.pickle")
