"""The first run of a script without `build`: which mesh it makes, which function is its step (jax).

The step is the jitted function with the largest arguments that is called again and again with
arguments of the same shapes, and whose outputs come back as arguments of its next call. A small
function may do all that, too (one that splits a random key): such a one ends the run only if its
arguments are a good part of all arrays that there are.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from automesh.errors import UsageError, did_you_mean
from automesh.limits import SCRIPT_BYTES
from automesh.program.capture.abstract_arrays import ValueNeeded, bytes_alive, seen, without_arrays
from automesh.program.capture.build import on_attached
from automesh.program.capture.frames import asking_line, describe_function, failing_line
from automesh.program.capture.hooks import Call, MakeMesh
from automesh.program.capture.nouns import (
    Capture,
    Carried,
    Discovery,
    ScriptMesh,
    ScriptStep,
    Sizes,
    SourceLine,
)
from automesh.program.capture.run_script import Ended, ScriptStopped, run_script
from automesh.program.capture.step_call import TracedCall, trace
from automesh.program.lower.static_args import is_ref, leaf_shape
from automesh.program.nouns import Entry
from automesh.program.script.started import module_name_of
from automesh.reading import read_bytes

_WORDS = {AxisType.Auto: "auto", AxisType.Explicit: "explicit", AxisType.Manual: "manual"}
# Calls with the same shapes that make a function a step, and that end the run in any case.
_ENOUGH, _MOST = 3, 40
# Of all arrays that there are, what the arguments of a step take at least.
_SHARE = 0.25
# Less than this is a random key or a counter, whose functions are called before there is any state.
_LEAST_BYTES = 1024
# Arrays up to this size are made on this machine if a script cannot do without.
_LARGEST_MADE = 2**31
_HINT = "write a function `build(mesh)` that returns the step and its arguments"


def discover(entry: Entry, *, step: str = "", bare: bool = False) -> Discovery:
    """Runs a script until its step is known.

    Args:
      step: the name of the function that is wanted; empty for the one that looks like the step.
      bare: run it without its arrays.

    Raises:
      UsageError: it has no mesh or no step, or fails before it; with the line and what to do.
    """
    run = _Watch(wanted=step)
    with without_arrays() if bare else nullcontext():
        ended = run_script(entry, run)
    found = run.chosen or run.best(least=2)
    if found is None or found.last is None:
        raise _with_nan(_nothing(entry, run, ended)) if bare else _nothing(entry, run, ended)
    discovery = run.discovery(found, entry)
    if not bare:
        return discovery
    lines = _lines_with_nan()
    notices = (
        (f"run without its arrays, the script reads its numbers as nan: {lines}",) if lines else ()
    )
    return replace(
        discovery, capture=replace(discovery.capture, without_arrays=True), notices=notices
    )


def _lines_with_nan() -> str:
    printed = seen().printed
    return ", ".join(map(str, printed[:3])) + (", ..." if len(printed) > 3 else "")


def _with_nan(error: UsageError) -> UsageError:
    """An error that may come of what the script was given for its numbers."""
    lines = _lines_with_nan()
    if not lines or isinstance(error, ValueNeeded):
        return error
    said = f"; it was run without its arrays, and the numbers that it reads at {lines} were nan"
    return UsageError(f"{error.message}{said}", hint=error.hint)


def discover_for_absent(entry: Entry, *, step: str = "") -> Discovery:
    """Runs a script without its arrays, for devices that are not here; where it cannot do without
    and they are small, with them, on this machine.

    Raises:
      UsageError: as `discover`; or at which line it needs a value of arrays that are too large.
    """
    try:
        return discover(entry, step=step, bare=True)
    except UsageError as error:
        if seen().most_bytes > _LARGEST_MADE:
            raise
        reason = error.message
    found = discover(entry, step=step)
    return replace(
        found, notices=(f"the arrays of the script are made on this machine, because {reason}",)
    )


def discover_here(
    entry: Entry, *, step: str = "", device_memory_bytes: Callable[[], int]
) -> Discovery:
    """Runs a script on the devices that are here; if its step is too large for one of them, it is
    run without its arrays wherever it is not measured.

    Args:
      device_memory_bytes: what one device can hold; 0 where nobody says. Asked after the run: the
        script may say how many devices there shall be.

    Raises:
      UsageError: as `discover`.
    """
    found = discover(entry, step=step)
    limit_bytes = device_memory_bytes()
    if not limit_bytes or found.capture.step.argument_bytes <= limit_bytes:
        return found
    bare = discover(entry, step=found.capture.step.name, bare=True)
    return replace(found, capture=replace(found.capture, without_arrays=True), notices=bare.notices)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The calls of one function from one line.

    Attributes:
      form: shapes and types of the last call's leaves; `same` calls in a row had it.
      outputs: of the last call, without keeping them alive.
      last: the last call, with its trace, once it may be the step.
    """

    name: str
    defined_at: SourceLine
    called_at: SourceLine
    form: tuple[Any, ...] = ()
    same: int = 0
    calls: int = 0
    bytes: int = 0
    comes_back: bool = False
    outputs: list[Any] = field(default_factory=list[Any])
    last: TracedCall | None = None
    carried: tuple[Carried, ...] = ()
    batch_axes: tuple[str, ...] = ()
    meshes: tuple[Mesh, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Watch:
    """Notes down what a script makes and calls."""

    wanted: str
    chosen: _Seen | None = None
    asked_pmap: bool = False
    meshes: dict[tuple[Any, ...], ScriptMesh] = field(
        default_factory=dict[tuple[Any, ...], ScriptMesh]
    )
    seen: dict[tuple[str, SourceLine], _Seen] = field(
        default_factory=dict[tuple[str, SourceLine], _Seen]
    )

    def mesh(self, make: MakeMesh, devices: Any, names: tuple[str, ...], axis_types: Any) -> Mesh:
        """The script's own mesh, noted down."""
        made = make(on_attached(devices), names, axis_types)
        place = asking_line()
        if place.file:
            axes = tuple((str(name), size) for name, size in made.shape.items())
            noted = ScriptMesh(
                axes=axes,
                axis_types=tuple(_WORDS[kind] for kind in made.axis_types),
                made_at=place,
            )
            self.meshes.setdefault((axes, noted.axis_types), noted)
        return made

    def call(self, call: Call) -> Any:
        """Notes a call down; stops the script once its step is known."""
        name, defined_at = describe_function(call.function)
        place = asking_line()
        one = self.seen.setdefault(
            (name, place), _Seen(name=name, defined_at=defined_at, called_at=place)
        )
        leaves = jax.tree.leaves((call.args, call.kwargs))
        form = tuple((leaf_shape(leaf), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)
        one.same = one.same + 1 if form == one.form else 1
        one.form, one.calls = form, one.calls + 1
        one.bytes = sum(map(_bytes, leaves))
        made = {id(output) for ref in one.outputs if (output := ref()) is not None}
        one.comes_back = any(id(leaf) in made for leaf in leaves) or any(map(is_ref, leaves))
        if one.same > 1:
            self._describe(one, call)
        if one.same >= _ENOUGH and self._is_step(one):
            self.chosen = one
            raise ScriptStopped
        outputs = call.run()
        one.outputs = [
            weakref.ref(leaf) for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)
        ]
        return outputs

    def pmap(self) -> None:
        """Noted down: a function that `jax.pmap` made has no mesh."""
        self.asked_pmap = True

    def _describe(self, one: _Seen, call: Call) -> None:
        if one.last is not None and not one.comes_back:
            return
        traced = trace(call)
        leaves = traced.leaves
        one.last = traced
        one.carried = _carried(leaves, one.outputs)
        taken = _taken(one.carried)
        one.meshes = _meshes_of(leaves)
        new = [leaf for position, leaf in enumerate(leaves) if position not in taken]
        one.batch_axes = _batch_axes(new)

    def _is_step(self, one: _Seen) -> bool:
        if self.wanted:
            return one.name == self.wanted
        if one is not self.best(least=1):
            return False
        if not one.comes_back:
            return one.same >= _MOST
        return one.same >= _MOST or one.bytes >= max(_SHARE * bytes_alive(), _LEAST_BYTES)

    def best(self, *, least: int) -> _Seen | None:
        """The most likely step among what was called so often with the same shapes."""
        candidates = [
            one
            for one in self.seen.values()
            if one.same >= least and (not self.wanted or one.name == self.wanted)
        ]
        back = [candidate for candidate in candidates if candidate.comes_back]
        return max(back or candidates, key=lambda one: one.bytes, default=None)

    def discovery(self, found: _Seen, entry: Entry) -> Discovery:
        """What is known, once a step is chosen.

        Raises:
          UsageError: the script makes no mesh.
        """
        if not self.meshes:
            raise UsageError(
                f"{Path(entry.location).name} makes no mesh: its step `{found.name}` "
                f"({found.called_at}) runs on one device",
                hint="split its arrays over a `jax.sharding.Mesh`, or " + _HINT,
            )
        own = self._mesh_of(found)
        others = [one for one in self.seen.values() if one is not found and one.same > 1]
        return Discovery(
            capture=Capture(mesh=own, step=_step(found)),
            batch_axes=tuple(name for name in found.batch_axes if name in own.names),
            num_devices=jax.device_count(),
            other_steps=tuple(_step(one) for one in sorted(others, key=lambda other: -other.bytes)),
            other_meshes=tuple(mesh for mesh in self.meshes.values() if mesh is not own),
        )

    def _mesh_of(self, found: _Seen) -> ScriptMesh:
        made = list(self.meshes.values())
        # Of several over as many devices, as an input pipeline makes one beside that of the model,
        # the one with more axes; else the first.
        on_arguments = [_sizes(mesh) for mesh in found.meshes]
        candidates = [one for one in made if one.axes in on_arguments]
        if candidates:
            return max(candidates, key=lambda one: (one.num_devices, len(one.axes)))
        # Of several that no argument tells apart, the last one made of most devices.
        return max(reversed(made), key=lambda one: one.num_devices)


def _step(one: _Seen) -> ScriptStep:
    return ScriptStep(
        name=one.name,
        defined_at=one.defined_at,
        called_at=one.called_at,
        argument_bytes=one.bytes,
        skipped=max(one.calls - one.same, 0),
        carried=one.carried,
    )


def _bytes(leaf: Any) -> int:
    return int(getattr(leaf, "nbytes", 0) or 0)


def _carried(leaves: Sequence[Any], outputs: Sequence[Any]) -> tuple[Carried, ...]:
    """Runs of outputs of the last call among the arguments of this one."""
    places = {
        id(output): position
        for position, ref in enumerate(outputs)
        if (output := ref()) is not None
    }
    runs: list[Carried] = []
    for argument, leaf in enumerate(leaves):
        output = places.get(id(leaf))
        if output is None:
            continue
        last = runs[-1] if runs else None
        if last and (last.argument + last.count, last.output + last.count) == (argument, output):
            runs[-1] = Carried(output=last.output, argument=last.argument, count=last.count + 1)
        else:
            runs.append(Carried(output=output, argument=argument, count=1))
    return tuple(runs)


def _taken(carried: Sequence[Carried]) -> set[int]:
    return {run.argument + offset for run in carried for offset in range(run.count)}


def _meshes_of(leaves: Sequence[Any]) -> tuple[Mesh, ...]:
    return tuple(
        dict.fromkeys(
            leaf.sharding.mesh
            for leaf in leaves
            if isinstance(getattr(leaf, "sharding", None), NamedSharding)
            and isinstance(leaf.sharding.mesh, Mesh)
        )
    )


def _sizes(mesh: Mesh) -> Sizes:
    return tuple((str(name), size) for name, size in mesh.shape.items())


def _batch_axes(leaves: Sequence[Any]) -> tuple[str, ...]:
    """Axes that split the first dimension of the arrays that are new in every call."""
    found: dict[str, None] = {}
    for leaf in leaves:
        sharding: Any = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not leaf_shape(leaf) or not sharding.spec:
            continue
        first: Any = sharding.spec[0]
        names = first if isinstance(first, tuple) else (first,)
        found |= dict.fromkeys(str(name) for name in names if isinstance(name, str))
    return tuple(found)


def _nothing(entry: Entry, run: _Watch, ended: Ended | None) -> UsageError:
    """Why a script has no step, in one sentence."""
    name = Path(entry.location).name
    if ended is not None and isinstance(ended.error, ValueNeeded):
        return ended.error
    if ended is not None and ended.error is not None:
        return _failed(name, ended.error)
    if ended is not None and ended.exit_code:
        return UsageError(
            f"{name} ended with exit code {ended.exit_code} before its step",
            hint="give its own arguments after `--`, as in `automesh search train.py -- --steps 5`",
        )
    if run.asked_pmap:
        return UsageError(
            f"{name} uses `jax.pmap`, which has no mesh that could be another one",
            hint="use `jax.jit` with arrays that are split over a `jax.sharding.Mesh`",
        )
    names = list(dict.fromkeys(one.name for one in run.seen.values()))
    if run.wanted and run.wanted not in names:
        called = ", ".join(f"`{one}`" for one in names) or "none"
        return UsageError(
            f"{name} calls no jitted function `{run.wanted}`{did_you_mean(run.wanted, names)}; "
            f"those that it calls are: {called}",
            hint="name one of them with `--step`",
        )
    if not names:
        there = _functions(Path(entry.location))
        named = ""
        if there:
            named = f"name the function that takes the mesh, as in `{name}:{there[0]}`, or "
        return UsageError(
            f"{name} has no function `build`, and it ended without calling a function that "
            "`jax.jit` made",
            hint=named + _HINT,
        )
    once = ", ".join(f"`{one}`" for one in names[:6])
    return UsageError(
        f"{name} ended without calling a jitted function twice with the same shapes "
        f"(it called {once})",
        hint="let it train for three steps or more, or " + _HINT,
    )


def _functions(path: Path) -> list[str]:
    """The functions at the top level of a script."""
    body = ast.parse(read_bytes(path, limit_bytes=SCRIPT_BYTES)).body
    return [one.name for one in body if isinstance(one, ast.FunctionDef)]


def _failed(name: str, error: Exception) -> UsageError:
    place = failing_line(error.__traceback__)
    text = f"{type(error).__name__}: {error}".splitlines()[0]
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
        return UsageError(
            f"{name} fails at {place}: {text}",
            hint=f"install `{error.name}` in the environment that automesh runs in",
        )
    return UsageError(
        f"{name} fails at {place} before its step: {text}",
        hint=f"it was run on {len(jax.devices())} devices here",
    )
