"""Runs a script as Python runs it, until a watcher stops it (jax)."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from automesh.errors import UsageError
from automesh.package import is_users_file
from automesh.program.absent import unsaid_axes
from automesh.program.absent.device_queries import attached
from automesh.program.capture.frames import failing_line
from automesh.program.capture.hooks import Watcher, watching
from automesh.program.capture.world import told
from automesh.program.capture.world.entered import world
from automesh.program.capture.world.numbers import note_wanted_devices
from automesh.program.capture.world.starting import start
from automesh.program.capture.world.wishes import has_started
from automesh.program.nouns import Entry

# Modules of the user that runs have imported in this process.
_IMPORTED: set[str] = set()


class ScriptStopped(BaseException):
    """The exception that ends a script at its step. It is no `Exception`, as user code may catch
    these and go on."""


@dataclass(slots=True)
class _StopState:
    """The data of this process about the run in progress.

    Attributes:
      is_running: whether a script is being run.
      times: how often it was stopped; more than once if it catches everything.
    """

    is_running: bool = False
    times: int = 0


_STATE = _StopState()


def stop_script() -> NoReturn:
    """Ends the script that is being run.

    A script that catches everything, as a bare `except:` around each step does, goes on and comes
    here again. From the second time on it is stopped anew at its next line, and so in the end
    outside of all that catches.

    Raises:
      ScriptStopped: always.
    """
    _STATE.times += 1
    if _STATE.is_running and _STATE.times > 1:
        _stop_at_each_line()
    raise ScriptStopped


def _stop_at_each_line() -> None:
    """Stops the script at its next line, outside of what has caught it, and again where something
    else catches that."""

    def seen(frame: FrameType, event: str, _: Any) -> Any:
        if not is_users_file(frame.f_code.co_filename):
            return None
        if event == "line":
            raise ScriptStopped  # Python ends the tracing then.
        return seen

    def trace_again(*_: Any) -> None:
        if sys.gettrace() is not seen:
            sys.settrace(seen)

    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            frame.f_trace = seen
        frame = frame.f_back
    sys.settrace(seen)
    sys.setprofile(trace_again)


def _let_go(tracing: Any, profiling: Any) -> None:
    _STATE.is_running = False
    if _STATE.times > 1:
        sys.setprofile(profiling)
        sys.settrace(tracing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a script that was not stopped.

    Attributes:
      error: what it raised; None if it ran to its last line.
      exit_code: exit code of `sys.exit`; 0 if it was not called.
    """

    error: Exception | None = None
    exit_code: int = 0


def run_script(entry: Entry, watcher: Watcher) -> Ended | None:
    """Runs the script from its first line, as `__main__`, with its own arguments, in a world of its
    own (see `capture.world`).

    Modules of the user that an earlier run has imported are imported anew, as they hold objects
    that were made for another mesh.

    Returns:
      How it ended; None if the watcher stopped it.
    """
    for name in _IMPORTED:
        sys.modules.pop(name, None)
    before = set(sys.modules)
    ends = (ScriptStopped, UsageError)
    observing = sys.gettrace(), sys.getprofile()
    _STATE.is_running, _STATE.times = True, 0
    unsaid_axes.forget_place()
    with (
        world(is_late=has_started(), shown=_shown(entry), ends=ends),
        unsaid_axes.unsaid_axes(are_auto=entry.capture is not None and entry.capture.makes_auto),
        watching(watcher),
    ):
        try:
            try:
                start(entry, ends=_is_for_other_devices)
            finally:
                _let_go(*observing)
        except ScriptStopped:
            return None
        except SystemExit as ended:
            return Ended(exit_code=_exit_code(ended.code))
        # Any error of the user's code is reported with its line.
        except Exception as error:  # noqa: BLE001
            note_wanted_devices(error)
            if unsaid_axes.refuses_explicit(error):
                told.refuse_axes()
            place = failing_line(error.__traceback__)
            if place.file:
                told.fail_at(place.file, place.line)
            return Ended(error=error)
        finally:
            sys.stdout.flush()
            _IMPORTED.update(name for name in sys.modules.keys() - before if _is_users_module(name))
    return Ended()


def _is_for_other_devices(error: Exception) -> bool:
    """Whether a script fails because it wants another number of devices than those on which it
    runs."""
    note_wanted_devices(error)
    return told.wanted_devices() > 0


def _shown(entry: Entry) -> int:
    """Returns how many devices the script sees: as many as in its first run, if there are so
    many."""
    wanted = entry.capture.num_devices if entry.capture is not None else 0
    return wanted if 0 < wanted <= len(attached()) else 0


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    # Python does the same with `sys.exit("what is wrong")`.
    sys.stderr.write(f"{code}\n")
    return 1


def _is_users_module(name: str) -> bool:
    file: Any = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and is_users_file(file)
