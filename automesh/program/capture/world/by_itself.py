"""Finds whether a script that failed under automesh also fails without it (no jax).

The script is run once more, in a process of its own and without automesh's hooks, until it has gone
past the line at which it failed. A line of a function or of a loop may fail when it runs again, so
that the script goes on for some seconds then. Its files are kept apart, as in every run.
"""

from __future__ import annotations

import ast
import functools
import json
import linecache
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from automesh.jsonio import from_json, to_json
from automesh.program.nouns import Entry
from automesh.texts.exceptions import in_one_line

_MARK = "automesh-by-itself:"
# How long a script goes on after a line that may run again has passed once.
_MORE_S = 5.0
_RUN_AGAIN = (
    ast.For, ast.AsyncFor, ast.While, ast.comprehension, ast.FunctionDef, ast.AsyncFunctionDef,
    ast.Lambda,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a script that was run by itself.

    Attributes:
      what: the script failed, went past the line, or did neither in time.
      error: the last line of its traceback.
    """

    what: Literal["fails", "passes", "unknown"]
    error: str = ""


def run_by_itself(entry: Entry, file: str, line: int, *, limit_s: float) -> Verdict:
    """Runs a script without automesh's hooks, with the environment variables of this process, until
    it has gone past a line.

    Args:
      limit_s: seconds after which the script is ended.
    """
    order = json.dumps({"entry": to_json(entry, Entry), "file": file, "line": line})
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import run_order; run_order()", order],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Verdict(what="unknown")
    for text in reversed(out.splitlines()):
        if text.startswith(_MARK):
            return from_json(json.loads(text.removeprefix(_MARK)), Verdict)
    return Verdict(what="unknown")


def run_order() -> None:
    """Runs the script; this is the main function of the process of its own, whose argument is the
    order."""
    from automesh.program.capture.foreign.files import led_to_layer
    from automesh.program.capture.world.kept_apart import kept_apart
    from automesh.program.capture.world.starting import start

    said: Any = json.loads(sys.argv[1])
    entry = from_json(said["entry"], Entry)
    place = said["file"], said["line"]
    with kept_apart(), led_to_layer():
        passed = _watch(*place)
        try:
            start(entry, ends=lambda error: _passes_through(error, *place))
        except SystemExit as ended:
            fails = ended.code and not passed.is_set()
            _say(Verdict(what="fails" if fails else "passes", error=f"exit code {ended.code}"))
        except BaseException as error:  # noqa: BLE001 - whatever the script raises
            fails = not passed.is_set() or _passes_through(error, *place)
            _say(Verdict(what="fails" if fails else "passes", error=in_one_line(error)))
        else:
            _say(Verdict(what="passes"))
    _leave()


def _passes_through(error: BaseException, file: str, line: int) -> bool:
    """Whether an error was raised at a line, or in a function that this line calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return any((one.filename, one.lineno) == (file, line) for one in frames)


def _watch(file: str, line: int) -> threading.Event:
    """Ends the process as soon as the script has gone past a line: the function or module of the
    line runs code below its statement, or any code after it.

    Returns:
      Set once the script has gone past a line that may run again; the process then ends later.
    """
    executed: set[int] = set()
    passed = threading.Event()

    def end() -> None:
        _say(Verdict(what="passes"))
        _leave()

    def inside(frame: FrameType, event: str, arg: object) -> Any:
        del arg
        # Only now: the text of a notebook's cell is known once the cell runs.
        first, last = statement()
        if event == "exception":
            executed.discard(id(frame))
        elif event == "line" and first <= frame.f_lineno <= last:
            executed.add(id(frame))
        elif event in ("line", "return") and (id(frame) in executed or frame.f_lineno > last):
            if not _may_run_again(file, line):
                end()
            if not passed.is_set():
                passed.set()
                later = threading.Timer(_MORE_S, end)
                later.daemon = True
                later.start()
            sys.settrace(None)
            return None
        return inside

    def outside(frame: FrameType, event: str, arg: object) -> Any:
        del event, arg
        if passed.is_set():
            return None
        code = frame.f_code
        is_there = code.co_filename == file and any(one == line for _, _, one in code.co_lines())
        return inside if is_there else None

    statement = functools.cache(lambda: _statement(file, line))
    threading.settrace(outside)
    sys.settrace(outside)
    return passed


def _may_run_again(file: str, line: int) -> bool:
    """Whether a line is in a loop or a function, or makes a function."""
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError):
        return False  # Such as a cell with a magic.
    return any(
        first <= line <= last
        for one in nodes
        if isinstance(one, _RUN_AGAIN)
        for first, last in _lines(one)
    )


def _lines(node: ast.AST) -> Iterator[tuple[int, int]]:
    """Yields the first and the last line of a node; of a comprehension, which has none, those of
    its parts."""
    parts = [node.target, node.iter] if isinstance(node, ast.comprehension) else [node]
    for part in parts:
        first = getattr(part, "lineno", 0)
        yield first, getattr(part, "end_lineno", None) or first


def _statement(file: str, line: int) -> tuple[int, int]:
    """Returns the first and the last line of the innermost statement that contains a line; for a
    statement with a body, those of the part before the body."""
    found = (line, line)
    try:
        statements = ast.walk(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError):
        return found  # Such as a cell with a magic.
    for one in statements:
        if not isinstance(one, ast.stmt):
            continue
        body: list[ast.stmt] = getattr(one, "body", [])
        last = body[0].lineno - 1 if body else one.end_lineno or one.lineno
        if one.lineno <= line <= last:
            found = (one.lineno, last)
    return found


def _say(verdict: Verdict) -> None:
    sys.settrace(None)
    with suppress(OSError):
        os.write(1, f"\n{_MARK}{json.dumps(to_json(verdict, Verdict))}\n".encode())


def _leave() -> None:
    from automesh.program.capture.world.kept_apart import forget_layer

    forget_layer()
    # Threads and exit hooks of the script could keep the process from ending.
    os._exit(0)
