"""Says in one sentence why nothing of a script can be searched (jax)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from automesh.errors import UsageError, did_you_mean
from automesh.limits import SCRIPT_BYTES
from automesh.package import installed_version, is_users_file
from automesh.program.absent.device_queries import seen_by_scripts
from automesh.program.capture.abstract.record import ValueNeeded
from automesh.program.capture.frames import failing_line
from automesh.program.capture.in_text import MESH, jitted_trainers
from automesh.program.capture.nouns import SourceLine
from automesh.program.capture.run_script import Ended
from automesh.program.nouns import Entry
from automesh.program.script.started import module_name_of
from automesh.reading import read_bytes
from automesh.texts.exceptions import in_one_line

# Errors of jax about values that a trace does not have.
_NEEDS_VALUES = frozenset(
    {
        "ConcretizationTypeError",
        "NonConcreteBooleanIndexError",
        "TracerArrayConversionError",
        "TracerBoolConversionError",
        "TracerIntegerConversionError",
    }
)
# jax's words where a script asks for devices of a platform that is not here.
_NO_PLATFORM = re.compile(r"Unknown backend:? '?(\w+)'? requested")
# Python's words, and jax's where it has removed a name.
_LACKS = re.compile(
    r"^module '(?P<of>[\w.]+)' has no attribute '(?P<name>\w+)'"
    r"|^cannot import name '(?P<missing>\w+)' from '(?P<module>[\w.]+)'"
)
_CALLS_NONE = (
    "let it call its training step, jitted, at least three times (a step of NumPy alone has "
    "nothing to be searched), or "
)
HINT = "write a function `build(mesh)` that returns the step and its arguments"


def no_step(
    entry: Entry,
    ended: Ended | None,
    *,
    called: Mapping[str, SourceLine],
    without_state: Mapping[str, SourceLine],
    wanted: str,
    pmapped: SourceLine | None,
    mesh_at: SourceLine | None = None,
) -> UsageError:
    """Returns the error that says why a script has no step.

    Args:
      called: names of the jitted functions that it has called, with the line of the first call.
      without_state: those of them that are called again and again with nothing but new arrays.
      wanted: the name that the user gave.
      mesh_at: where it makes its mesh; None if nowhere.
      pmapped: where it calls what `jax.pmap` made; None if nowhere.
    """
    name = Path(entry.location).name
    if pmapped is not None:
        place = f" ({pmapped})" if pmapped.file else ""
        return UsageError(
            f"{name} uses `jax.pmap`{place}, which has no mesh that could be another one",
            hint="use `jax.jit` with arrays that are split over a `jax.sharding.Mesh`",
        )
    if ended is not None and isinstance(ended.error, ValueNeeded):
        return ended.error
    if ended is not None and ended.error is not None:
        return _failed(name, ended.error)
    if ended is not None and ended.exit_code:
        return UsageError(
            f"{name} ended with exit code {ended.exit_code} before its step",
            hint="give its own arguments after `--`, as in `automesh search train.py -- --steps 5`",
        )
    if wanted and not set(wanted.split("+")) <= set(called):
        listed = ", ".join(f"`{one}`" for one in called) or "none"
        return UsageError(
            f"{name} calls no jitted function `{wanted}`{did_you_mean(wanted, list(called))}; "
            f"those that it calls are: {listed}",
            hint="name one of them with `--step`",
        )
    if not called:
        there = _functions(Path(entry.location))
        named = ""
        if there:
            named = f"name the function that takes the mesh, as in `{name}:{there[0]}`, or "
        mesh = f"; it makes its mesh at {mesh_at}" if mesh_at is not None else ""
        if not there and (trainers := jitted_trainers(entry)):
            return UsageError(
                f"{name} ended without calling what it jits and takes gradients in, "
                f"{_defined(trainers)}{mesh}",
                hint="a script that resumes a training which is done already, or has no steps to "
                f"do, ends so: give it a new folder or more steps, as in `automesh search {name} "
                "-- --steps 100`",
            )
        return UsageError(
            f"{name} has no function `build`, and it ended without calling a function that "
            f"`jax.jit` made{mesh}",
            hint=named + ("" if named else _CALLS_NONE) + HINT,
        )
    if without_state:
        take, make, back = (
            ("takes", "it makes", "it")
            if len(without_state) == 1
            else ("take", "they make", "them")
        )
        return UsageError(
            f"{name} jits no training step: {_listed(without_state)} {take} no gradient, nothing "
            f"of what {make} comes back to {back}, and all arguments are made anew for each call",
            hint="put what one step does into a function, and jit that; or name a function that is "
            "to be searched as it is with `--step`",
        )
    once = _listed(called)
    return UsageError(
        f"{name} ended without calling a jitted function twice with the same shapes "
        f"(it called {once})",
        hint="let it train for three steps or more, or " + HINT,
    )


def _defined(functions: Mapping[str, SourceLine]) -> str:
    """Lists the first three of some functions, with the lines where they begin."""
    return ", ".join([f"`{one}` ({at})" for one, at in functions.items()][:3])


def _listed(functions: Mapping[str, SourceLine]) -> str:
    """Lists the first six of some functions, with the lines that call them."""
    listed = [f"`{one}` at {at}" if at.file else f"`{one}`" for one, at in functions.items()]
    return ", ".join(listed[:6])


def nothing_jitted(entry: Entry, place: SourceLine) -> UsageError:
    """Returns the error for a script that takes gradients outside of any jit, in a way that is not
    one call.

    Args:
      place: the line that takes the gradients.
    """
    name = Path(entry.location).name
    return UsageError(
        f"{name} jits no training step: it takes gradients at {place} outside of `jax.jit`",
        hint="put what one step does into a function, and jit that (`jax.jit`, `nnx.jit`, "
        "`eqx.filter_jit`): it is many times as fast, too",
    )


def _functions(path: Path) -> list[str]:
    """Returns the names of functions at the top level of a script that seem to take its mesh."""
    body = ast.parse(read_bytes(path, limit_bytes=SCRIPT_BYTES)).body
    return [
        one.name
        for one in body
        if isinstance(one, ast.FunctionDef)
        and any(MESH.search(argument.arg) for argument in one.args.args)
    ]


def _failed(name: str, error: Exception) -> UsageError:
    place = failing_line(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename and is_users_file(error.filename):
        place = SourceLine(file=error.filename, line=error.lineno or 0)
    if isinstance(error, UsageError) and not place.file:
        return error  # About the whole file, such as a notebook that cannot be read.
    text = in_one_line(error)
    if isinstance(error, SyntaxError):
        text = f"{type(error).__name__}: {error.msg}"  # The message names the place already.
    if isinstance(error, EOFError):
        return UsageError(
            f"{name} asks for input at {place}, and there is nobody to answer",
            hint="let it run without, as a training job does",
        )
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        if module := module_name_of(Path(place.file), missing):
            return UsageError(
                f"{name} fails at {place}: {text}",
                hint=f"`{missing}` is its own package: run it as a module, in the folder that has "
                f"`{missing}`: `automesh search -m {module}`",
            )
        if missing != error.name and missing in sys.modules:
            return UsageError(
                f"{name} fails at {place}: {text}",
                hint=f"the `{missing}` that is installed here has no such module: the script was "
                "written for another version of it",
            )
        return UsageError(
            f"{name} fails at {place}: {text}",
            hint=f"install `{error.name}` in the environment that automesh runs in",
        )
    if package := _without_the_name(error):
        version = installed_version(package)
        said = f"{package} {version}" if version else package
        return UsageError(
            f"{name} fails at {place}: {text}",
            hint=f"the {said} that is installed here has no such name: the script was written for "
            "another version of it",
        )
    if type(error).__name__ in _NEEDS_VALUES:
        return UsageError(
            f"{name} fails at {place} before its step, where a shape or a branch depends on the "
            f"values of an array that `jax.jit` traces: {text}",
            hint="give it a fixed size (`jnp.nonzero(..., size=...)`, `jnp.where` for a mask, "
            "`jax.lax.cond` for a branch), or do that before the step",
        )
    if found := _NO_PLATFORM.search(str(error)):
        return _other_platform(name, place, found[1])
    devices = len(jax.devices())
    return UsageError(
        f"{name} fails at {place} before its step: {text}",
        hint=f"it was run on {'one device' if devices == 1 else f'{devices} devices'} here",
    )


def _without_the_name(error: Exception) -> str:
    """Returns the installed package of a module that lacks a name which the script takes from it,
    such as `jax` for `jax.tree_map`; empty if the error is another one."""
    lacking = _LACKS.search(str(error))
    if lacking is None or not isinstance(error, AttributeError | ImportError):
        return ""
    module, missing = lacking["of"] or lacking["module"], lacking["name"] or lacking["missing"]
    loaded = sys.modules.get(module)
    file: Any = getattr(loaded, "__file__", None)
    is_installed = isinstance(file, str) and not is_users_file(file)
    return module.partition(".")[0] if is_installed and not hasattr(loaded, missing) else ""


def _other_platform(name: str, place: SourceLine, wanted: str) -> UsageError:
    """Returns the error for a script that asks for the devices of a platform by its name.

    Args:
      wanted: that name, as jax has it.
    """
    here = seen_by_scripts()[0]
    kinds = {"gpu": "gpu-h100-8", "cuda": "gpu-h100-8", "tpu": "tpu-v5p-16"}
    target = kinds.get(wanted)
    hint = "let it ask for `jax.devices()`, which has the devices of every target"
    if target is not None:
        hint = f"name a target that has them, as in `--target {target} --dry-run`; or {hint}"
    return UsageError(
        f"{name} asks for devices of the platform `{wanted}` at {place}, and the target has those "
        f"of `{here}` alone",
        hint=hint,
    )
