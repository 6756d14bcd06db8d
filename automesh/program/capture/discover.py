"""Runs a script without `build` for the first time, to find the mesh that it makes and the function
that is its step (jax).

`flow.choice` says how the step is distinguished from other functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.layout.shardings import axes_of_entry
from automesh.program.capture.abstract.record import ValueNeeded, needed_at_line, seen
from automesh.program.capture.abstract.trace import is_without_arrays, without_arrays
from automesh.program.capture.build import on_attached
from automesh.program.capture.flow.finder import FoundStep, StepFinder
from automesh.program.capture.flow.program import facts_of
from automesh.program.capture.flow.unplaced import unplaced
from automesh.program.capture.frames import asking_line
from automesh.program.capture.hooks import Call, MakeMesh
from automesh.program.capture.in_text import (
    jitted_trainers,
    lines_of_gradients,
    mesh_in_text,
    takes_gradients,
)
from automesh.program.capture.nouns import (
    Capture,
    Discovery,
    ScriptMesh,
    ScriptStep,
    Sizes,
    SourceLine,
)
from automesh.program.capture.refusals import no_step, nothing_jitted
from automesh.program.capture.run_script import (
    Ended,
    ScriptStopped,
    run_script,
    stop_script,
)
from automesh.program.capture.step_call import TracedCall, place_of
from automesh.program.capture.world import told
from automesh.program.capture.world.kept_apart import among_real_files
from automesh.program.capture.world.meshes import same_on, text_of
from automesh.program.capture.world.modes import outside_of_modes
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.trace_file import Handed, write_trace
from automesh.program.infer.classes import step_classes
from automesh.program.infer.search.layout import Split
from automesh.program.lower.static_args import is_ref, leaf_shape
from automesh.program.nouns import Entry
from automesh.texts.exceptions import in_one_line

_WORDS = {AxisType.Auto: "auto", AxisType.Explicit: "explicit", AxisType.Manual: "manual"}
# Bytes of arrays up to which they are made on this machine, if a script cannot do without them.
_LARGEST_MADE = 2**31
# Seconds for which a script may train on one device before it makes the mesh that is in its text.
_LONGEST_BEFORE_MESH_S = 60.0
# How long it may sample or evaluate before the training of which its text speaks, and after how
# long a sentence says that this is waited for.
_LONGEST_BEFORE_GRADIENT_S = 240.0
_TOLD_AFTER_S = 10.0
# How long the script's main thread waits while the step of another one is stored.
_LONGEST_STORE_S = 120.0
# A script that calls its step less often has hardly come to the end of its training.
_CALLS_OF_A_LOOP = 3
# A loop with at most so much work is run where nothing else tells whether it is all of a training.
_LONGEST_RUN_FLOPS = 1e12


Keep = Callable[[TracedCall, Mesh, Sequence[Any]], None]
Tell = Callable[[str], None]


def _tell_nobody(text: str) -> None:
    """Tells nobody what a run waits for."""


def discover(
    entry: Entry,
    *,
    step: str = "",
    bare: bool = False,
    keep: Keep | None = None,
    tell: Tell = _tell_nobody,
    infer: bool = False,
) -> Discovery:
    """Runs a script until its step is known.

    Args:
      step: name of the function that is wanted; empty for the one that looks most like the step.
        Functions that are one step have a `+` between their names.
      bare: whether to run it without its arrays.
      keep: is called with the call of the step while its arguments are alive, the script's mesh,
        and the placement of the arguments at the first call of the step.
      tell: is called with a sentence if the run waits long for the script's training.
      infer: find the classes of the step's dimensions even if the script makes a mesh, and how it
        splits the arguments itself.

    Raises:
      UsageError: it has no mesh or no step, or fails before its step; the error names the line and
        says what to do.
    """
    begun_s = perf_counter()
    run, ended = _run(entry, step, None, bare=bare, keep=keep, tell=tell)
    found = run.finder.found or run.finder.ended()
    if not bare and _may_go_on(found, ended):
        # The loop is not the whole training, as the script looked at its results.
        run, ended = _run(entry, step, None, bare=False, keep=keep, tell=tell, runs_loops=True)
        found = run.finder.found or run.finder.ended()
    if isinstance(found, ScriptStep):
        # Several functions that are one step, in a script that ends after two iterations.
        run, ended = _run(entry, step, found, bare=bare, keep=keep, tell=tell)
        found = run.finder.found
    if run.unjitted_at is not None and _hardly_a_step(found):
        # No jitted function looks like a step, but the script takes gradients outside of jit.
        again, ended_again = _run(
            entry, step, None, bare=bare, keep=keep, tell=tell, takes_unjitted=True
        )
        other = again.finder.found or again.finder.ended()
        if isinstance(other, FoundStep) and not _hardly_a_step(other):
            found = replace(other, step=replace(other.step, is_unjitted=True))
            run, ended = again, ended_again
        elif found is None or not (found.step.carried and found.step.defined_at.file):
            # The remaining functions change nothing, or belong to a library, as a helper of its
            # optimizer does.
            if ended is not None and ended.error is not None:
                found = None  # It fails; the step may be what comes after.
            elif run.trained_at is not None:
                raise nothing_jitted(entry, run.trained_at)
    if bare and (by := _ended_by_nan(found, ended)) is not None:
        raise by
    if bare and (by := _cut_too_early(run, found, ended)) is not None:
        raise by
    if not isinstance(found, FoundStep) or _is_guess(found, ended):
        error = (_caught(ended) if bare else None) or run.refusal(entry, ended)
        raise _with_nan(error) if bare else error
    discovery = run.discovery(found)
    if infer and discovery.makes_mesh:
        discovery = replace(
            discovery,
            classes=step_classes(found.whole, found.step.carried),
            written=_written(found, run.own_mesh(found)),
        )
    if run.finder.found is None:  # The script has ended by itself.
        run.store(found)
    discovery = replace(discovery, took_s=perf_counter() - begun_s, not_carried=run.not_carried)
    if not bare:
        return discovery
    lines = _lines_with_nan()
    notices = (
        (f"run without its arrays, the script reads its numbers as nan: {lines}",) if lines else ()
    )
    return replace(
        discovery,
        capture=replace(discovery.capture, without_arrays=True),
        notices=(*discovery.notices, *notices),
    )


def _caught(ended: Ended | None) -> UsageError | None:
    """Returns the error for a value that was asked for in vain, where a framework has caught it and
    has ended the script with an exit code."""
    return seen().needed if ended is not None and ended.exit_code else None


def _ended_by_nan(found: FoundStep | ScriptStep | None, ended: Ended | None) -> ValueNeeded | None:
    """Returns the error for a script that has ended after few calls of its step, and may have done
    so because a number was nan: it compared one, or it read one, as `while float(loss) > 0.1`
    does. None if it has not, or if it only read one and its arrays are too large to be made."""
    known = seen()
    if ended is None or ended.error is not None:
        return None
    if isinstance(found, FoundStep) and not (
        found.step.doubt and found.step.calls < _CALLS_OF_A_LOOP
    ):
        return None
    if known.decided is not None:
        return needed_at_line("compares a number", known.decided)
    if known.printed and known.most_bytes <= _LARGEST_MADE:
        return needed_at_line("reads a number", known.printed[-1])
    return None


def _is_guess(found: FoundStep, ended: Ended | None) -> bool:
    """Whether the step is only a doubtful function that was called before the script failed, so
    that the user should hear of the failure instead."""
    is_doubtful = bool(found.step.doubt) and found.step.loop is None
    return is_doubtful and ended is not None and ended.error is not None


def _hardly_a_step(found: FoundStep | ScriptStep | None) -> bool:
    """Whether a script has no step, or only a doubtful one that takes no gradient."""
    if not isinstance(found, FoundStep):
        return found is None
    call = found.whole
    facts = facts_of(call.traced.jaxpr, num_constants=len(call.settings.constants))
    return bool(found.step.doubt) and found.step.loop is None and not facts.has_gradient


def _may_go_on(found: FoundStep | ScriptStep | None, ended: Ended | None) -> bool:
    """Whether a script that was not run to its end, or was ended by a number that was nan, may call
    the function with the loop again, and whether the loop is short enough to be run."""
    if not isinstance(found, FoundStep) or found.step.loop is None or ended is None:
        return False
    work = found.step.flops * found.step.loop.turns
    is_cut = isinstance(ended.error, ValueNeeded) or (ended.error is None and _has_decided())
    return is_cut and 0 < work <= _LONGEST_RUN_FLOPS


def _has_decided() -> bool:
    """Whether the script has compared a number without data."""
    return seen().decided is not None


def _cut_too_early(
    run: _ScriptWatch, found: FoundStep | ScriptStep | None, ended: Ended | None
) -> ValueNeeded | None:
    """Returns the error that has ended a script before it showed all of its step: in its first
    round, or after one call of a function with a loop that it may call again. None if its arrays
    are too large to be made."""
    if not isinstance(found, FoundStep) or ended is None or seen().most_bytes > _LARGEST_MADE:
        return None
    is_early = found.step.calls < _CALLS_OF_A_LOOP or run.finder.is_waiting
    if isinstance(ended.error, ValueNeeded) and is_early and found.step.loop is None:
        return ended.error
    if not _may_go_on(found, ended):
        return None
    if isinstance(ended.error, ValueNeeded):
        return ended.error
    return needed_at_line("compares a number", seen().decided)


def _run(
    entry: Entry,
    wanted: str,
    known: ScriptStep | None,
    *,
    bare: bool,
    keep: Keep | None,
    tell: Tell,
    runs_loops: bool = False,
    takes_unjitted: bool = False,
) -> tuple[_ScriptWatch, Ended | None]:
    with ExitStack() as modes:

        def go_on_bare() -> None:
            if not is_without_arrays() and not runs_loops:
                modes.enter_context(without_arrays())

        if bare:
            go_on_bare()
        finder = StepFinder(wanted=wanted, on_long_loop=go_on_bare, known=known)
        run = _ScriptWatch(
            entry=entry,
            finder=finder,
            keep=keep,
            tell=tell,
            mesh_to_come=mesh_in_text(entry),
            takes_unjitted=takes_unjitted,
        )
        finder.may_stop, finder.trains_often = run.may_stop, run.trains_often
        ended = run_script(entry, run)
    run.wait_until_stored()
    return run, ended


def _lines_with_nan() -> str:
    printed = seen().printed
    return ", ".join(map(str, printed[:3])) + (", ..." if len(printed) > 3 else "")


def _with_nan(error: UsageError) -> UsageError:
    """Returns the error with a remark that it may come from the nan that the script read for its
    numbers."""
    lines = _lines_with_nan()
    if not lines or isinstance(error, ValueNeeded):
        return error
    said = f"; it was run without its arrays, and the numbers that it reads at {lines} were nan"
    return UsageError(f"{error.message}{said}", hint=error.hint)


def discover_for_absent(
    entry: Entry,
    *,
    step: str = "",
    keep: Keep | None = None,
    again: Callable[[str], None] = lambda _: None,
    tell: Tell = _tell_nobody,
    infer: bool = False,
) -> Discovery:
    """Runs a script without its arrays, for devices that are not here. If it cannot do without them
    and they are small, runs it again with them, on this machine.

    Args:
      again: is called with the reason before the script is started a second time.
      tell: see `discover`.

    Raises:
      UsageError: as `discover`; or the script needs a value of arrays that are too large, and the
        error names the line.
    """
    try:
        return discover(entry, step=step, bare=True, keep=keep, tell=tell, infer=infer)
    except UsageError as error:
        # A run with its arrays would want other devices, or other axes, too.
        if seen().most_bytes > _LARGEST_MADE or told.wanted_devices() or told.refuses_axes():
            raise
        reason, needed = error.message, isinstance(error, ValueNeeded)
    again("with its arrays")
    try:
        found = discover(entry, step=step, keep=keep, tell=tell, infer=infer)
    except UsageError as error:
        if not needed:
            raise
        # Such as a kernel that only the target can run.
        said = f"{error.message}; it was run with its arrays on this machine, because {reason}"
        raise UsageError(said, hint=error.hint) from error
    made = f"the arrays of the script are made on this machine, because {reason}"
    return replace(found, notices=(*found.notices, made))


def discover_here(
    entry: Entry,
    *,
    step: str = "",
    device_memory_bytes: Callable[[], int],
    keep: Keep | None = None,
    again: Callable[[str], None] = lambda _: None,
    tell: Tell = _tell_nobody,
    infer: bool = False,
    measures_nothing: bool = False,
) -> Discovery:
    """Runs a script on the devices that are here. If its step is too large for one of them, later
    runs that measure nothing are without its arrays.

    Args:
      device_memory_bytes: returns the bytes that one device can hold, 0 if unknown. It is called
        after the run, as the script may set the number of devices.
      again: is called with the reason before the script is started a second time.
      tell: see `discover`.
      measures_nothing: run it without its arrays first, and with them only if it cannot do without
        them: a first step may compile and compute for minutes.

    Raises:
      UsageError: as `discover`.
    """
    reason = ""
    if measures_nothing:
        try:
            return discover(entry, step=step, bare=True, keep=keep, tell=tell, infer=infer)
        except UsageError as error:
            # A run with its arrays would want other devices, or other axes, too.
            if told.wanted_devices() or told.refuses_axes():
                raise
            reason = error.message
        again("with its arrays")
    found = discover(entry, step=step, keep=keep, tell=tell, infer=infer)
    if reason:
        made = f"the script was run again, with its arrays, because {reason}"
        found = replace(found, notices=(*found.notices, made))
    limit_bytes = device_memory_bytes()
    if not limit_bytes or found.capture.step.argument_bytes <= limit_bytes:
        return found
    again("without its arrays, which a device cannot hold")
    bare = discover(entry, step=found.capture.step.name, bare=True)
    notices = tuple(dict.fromkeys((*found.notices, *bare.notices)))
    return replace(found, capture=replace(found.capture, without_arrays=True), notices=notices)


@dataclass(slots=True, kw_only=True)
class _ScriptWatch:
    """Notes down the meshes that a script makes and the functions that it calls.

    Attributes:
      mesh_to_come: the line of the script that makes a mesh, as its text shows; None if no line
        does.
      tell: is called with a sentence if the script goes on for long before it trains.
      takes_unjitted: whether gradients and `shard_map`s outside of jit count as calls.
      unjitted_at: the first line that takes a gradient, or calls a `shard_map`, outside of jit;
        None if no line does.
      trained_at: the first line that takes a gradient outside of jit, also in a `shard_map`; None
        if no line does.
      pmapped: the line that trains by `jax.pmap`, where the script was stopped; else None.
      mapped_at: the first line that calls a function which `jax.pmap` made; None if no line does.
    """

    entry: Entry
    finder: StepFinder
    takes_unjitted: bool = False
    unjitted_at: SourceLine | None = None
    trained_at: SourceLine | None = None
    mesh_to_come: SourceLine | None = None
    keep: Keep | None = None
    tell: Tell = _tell_nobody
    not_carried: str = ""
    pmapped: SourceLine | None = None
    mapped_at: SourceLine | None = None
    meshes: dict[tuple[Any, ...], ScriptMesh] = field(
        default_factory=dict[tuple[Any, ...], ScriptMesh]
    )
    made: dict[ScriptMesh, Mesh] = field(default_factory=dict[ScriptMesh, Mesh])
    _is_ours: bool = False
    _waits_since_s: float = 0.0
    _is_told: bool = False
    _waited: str = ""
    _trains_later: bool | None = None
    _gradients: int | None = None
    _stopped_in: int = 0
    _stored: threading.Event = field(default_factory=threading.Event)

    def mesh(self, make: MakeMesh, devices: Any, names: tuple[str, ...], axis_types: Any) -> Mesh:
        """Makes the mesh as the script asks, and notes it down."""
        made = make(on_attached(devices), names, axis_types)
        if self._is_ours:
            return made
        place = asking_line()
        if place.file:
            axes = tuple((str(text_of(name)), size) for name, size in made.shape.items())
            noted = ScriptMesh(
                axes=axes,
                axis_types=tuple(_WORDS[kind] for kind in made.axis_types),
                made_at=place,
            )
            if not self.meshes and self.finder.has_gone_on:
                self.finder.look_anew()
            self.made.setdefault(self.meshes.setdefault((axes, noted.axis_types), noted), made)
        return made

    def _never_reached(self) -> tuple[str, ...]:
        if self.mesh_to_come is None:
            return ()
        return (f"{self.mesh_to_come}, which would make a mesh, was not reached",)

    def _waited_in_vain(self) -> tuple[str, ...]:
        return (self._waited,) if self._waited else ()

    def may_stop(self, has_gradient: bool) -> bool:
        """Whether a step may be the one that is looked for: a script that samples first, or that
        trains on one device and makes a mesh afterwards, goes on until then.

        Args:
          has_gradient: whether a gradient is taken in the step, or the user wants it by its name.
        """
        waits_for_mesh = not self.meshes and self.mesh_to_come is not None
        waits_for_gradient = not has_gradient and self.trained_at is None
        if waits_for_gradient:
            if self._trains_later is None:
                self._trains_later = takes_gradients(self.entry)
            waits_for_gradient = self._trains_later
        if not (waits_for_mesh or waits_for_gradient):
            return True
        longest_s = _LONGEST_BEFORE_GRADIENT_S if waits_for_gradient else _LONGEST_BEFORE_MESH_S
        self._waits_since_s = self._waits_since_s or perf_counter()
        took_s = perf_counter() - self._waits_since_s
        if waits_for_gradient and took_s > _TOLD_AFTER_S and not self._is_told:
            self._is_told = True
            called = ", ".join(f"`{name}`" for name in list(self.finder.names())[-3:])
            self.tell(
                f"the script calls {called} and has trained nothing yet: it is run on until it "
                "trains; `--step NAME` names a step that takes no gradient"
            )
        if took_s > longest_s and waits_for_gradient:
            self._waited = (
                f"the script trained nothing in the {longest_s:.0f} s for which its training was "
                "waited for; `--step NAME` names the function that trains, and waits longer"
            )
        return took_s > longest_s

    def trains_often(self) -> bool:
        """Whether the script takes gradients at several lines, and so may train several models."""
        if self._gradients is None:
            self._gradients = lines_of_gradients(self.entry)
        return self._gradients > 1

    def call(self, call: Call) -> Any:
        """Notes a call down; stops the script once its step is known."""
        if self.finder.found is not None:
            self._stop_again()
        try:
            return self.finder.call(call)
        except ScriptStopped:
            self._stopped_in = threading.get_ident()
            try:
                self.store(self.finder.found)
            finally:
                self._stored.set()
            raise

    def _stop_again(self) -> NoReturn:
        """Ends a script that has caught what has stopped it, or another thread of a script that is
        being stopped.

        Raises:
          ScriptStopped: in the thread that was stopped, and in the main one, once the step is
            stored.
          SystemExit: in any other thread, which must not disturb the end of the run.
        """
        here = threading.current_thread()
        if here.ident != self._stopped_in and here is not threading.main_thread():
            raise SystemExit
        self.wait_until_stored()
        stop_script()

    def wait_until_stored(self) -> None:
        """Waits for the thread that has found the step, while it stores it."""
        if self._stopped_in:
            self._stored.wait(_LONGEST_STORE_S)

    def store(self, found: FoundStep | None) -> None:
        """Passes the call of the step to `keep`, while its arguments are alive."""
        if self.keep is None or found is None:
            return
        own, call = self.own_mesh(found), found.whole
        if found.around is None:
            call = found.with_values()
        else:
            # What the program does before its loop may need more memory than there is.
            try:
                call = found.with_values()
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                told.tell(
                    "what the script computes before its loop could not be computed "
                    f"({in_one_line(error)}): its step can be estimated and compiled, not measured"
                )
        # An argument on another mesh of the same devices has a sharding on the script's own mesh,
        # too.
        placed = [same_on(place, own) or place for place in found.placed]
        try:
            with among_real_files(), outside_of_modes():
                self.keep(call, own, placed)
        except CannotCarry as error:
            self.not_carried = error.message

    def own_mesh(self, found: FoundStep) -> Mesh:
        """Returns the mesh of the script that the step uses; one of one device if it uses none."""
        return self.made[self._mesh_of(found)] if self._is_on_mesh(found) else self._one_device()

    def _is_on_mesh(self, found: FoundStep) -> bool:
        """Whether the script makes a mesh, and its step uses one."""
        return bool(self.meshes) and _uses_mesh(found, self.made[self._mesh_of(found)])

    def _one_device(self) -> Mesh:
        """Returns a mesh of one device for a script that makes none; it is not noted down."""
        self._is_ours = True
        try:
            return Mesh(np.asarray(jax.devices()[:1], dtype=object), ("device",))
        finally:
            self._is_ours = False

    def pmap(self, trains: Callable[[], bool]) -> None:
        """Stops the script at its first call of a function that `jax.pmap` made and in which a
        gradient is taken, unless the user named the step. Scripts with a jitted step call others,
        too, as many let their hosts wait for each other in this way."""
        if self.finder.wanted or self.finder.found is not None:
            return
        self.mapped_at = self.mapped_at or asking_line()
        if trains():
            self.pmapped = asking_line()
            stop_script()

    def unjitted(self, *, is_gradient: bool) -> bool:
        """Notes down where the script takes a gradient, or calls a `shard_map`, outside of jit."""
        if self.unjitted_at is None and (place := asking_line()).file:
            self.unjitted_at = place
        if is_gradient:
            self.gradient_in_a_map()
        return self.takes_unjitted

    def gradient_in_a_map(self) -> None:
        """Notes down where the script takes a gradient outside of jit."""
        if self.trained_at is None and (place := asking_line()).file:
            self.trained_at = place

    def refusal(self, entry: Entry, ended: Ended | None) -> UsageError:
        """Returns the error that says why there is no step."""
        called = self.finder.names()
        has_only_mapped = not called and ended is not None and ended.error is None
        return no_step(
            entry,
            ended,
            called=called,
            without_state=self.finder.without_state(),
            wanted=self.finder.wanted,
            pmapped=self.pmapped or (self.mapped_at if has_only_mapped else None),
            mesh_at=next((mesh.made_at for mesh in self.meshes.values()), None),
        )

    def discovery(self, found: FoundStep) -> Discovery:
        """Returns what is known once a step is chosen; for a script that makes no mesh, also the
        classes of its dimensions."""
        notices = (*found.notices, *self._waited_in_vain(), *self._uncalled())
        if not self.meshes:
            notices = (*notices, *self._never_reached())
            return replace(_without_mesh(found), notices=notices)
        own = self._mesh_of(found)
        if not self._is_on_mesh(found):
            return replace(_without_mesh(found), unused_mesh=own, notices=notices)
        return Discovery(
            capture=Capture(
                mesh=own, step=found.step, unplaced=unplaced(found.whole, found.placed)
            ),
            batch_axes=_axes_of(found, self.made[own]),
            num_devices=jax.device_count(),
            other_steps=found.others,
            other_meshes=tuple(mesh for mesh in self.meshes.values() if mesh is not own),
            notices=notices,
        )

    def _uncalled(self) -> tuple[str, ...]:
        """Names other functions that would train if the script went on, as after a warm-up."""
        if self.finder.found is None or self.finder.wanted:
            return ()
        called = self.finder.names().keys() | self.finder.names_inside()
        later = {
            name: line for name, line in jitted_trainers(self.entry).items() if name not in called
        }
        if not later:
            return ()
        listed = [f"`{name}` ({line})" for name, line in later.items()]
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        takes, was = ("take", "were") if len(listed) > 1 else ("takes", "was")
        return (
            f"{', '.join(listed[:3])}{more} {takes} gradients, too, and {was} not called up to "
            f"here: `--step {next(iter(later))}` searches that one",
        )

    def _mesh_of(self, found: FoundStep) -> ScriptMesh:
        made = list(self.meshes.values())
        # Among meshes of equally many devices, chooses the one with more axes, else the first. An
        # input pipeline, for example, makes a mesh in addition to that of the model.
        on_arguments = [_sizes(mesh) for mesh in found.meshes]
        candidates = [one for one in made if one.axes in on_arguments]
        if candidates:
            return max(candidates, key=lambda one: (one.num_devices, len(one.axes)))
        # If the arguments are on none of the meshes, chooses the last one with the most devices.
        return max(reversed(made), key=lambda one: one.num_devices)


def _uses_mesh(found: FoundStep, own: Mesh) -> bool:
    """Whether the arguments of a step, its results or its program name a mesh. A script may make
    one for its data or for a later model, and train on one device."""
    call = found.whole if found.around is None else found.around[0]
    if found.meshes or call.context is not None:
        return True
    stated = (*call.settings.in_shardings, *call.settings.out_shardings)
    held = [place_of(array) for array in call.settings.constants]
    if any(isinstance(one, NamedSharding) for one in (*stated, *held)):
        return True
    handed = Handed(own=own)
    try:
        write_trace(call.traced.jaxpr, handed)
    except CannotCarry:
        return True
    return bool(handed.meshes)


def _without_mesh(found: FoundStep) -> Discovery:
    mesh = ScriptMesh(axes=(("device", 1),), axis_types=("auto",), made_at=found.step.called_at)
    return Discovery(
        capture=Capture(mesh=mesh, step=found.step),
        batch_axes=(),
        num_devices=jax.device_count(),
        other_steps=found.others,
        classes=step_classes(found.whole, found.step.carried),
        makes_mesh=False,
    )


def _written(found: FoundStep, own: Mesh) -> tuple[Split | None, ...]:
    """Returns how the script splits each leaf of the step's arguments; see `Discovery.written`."""
    call = found.whole
    split: list[Split | None] = []
    for leaf, to, placed in zip(call.leaves, call.settings.in_shardings, found.placed, strict=True):
        sharding = placed if to is None else to
        sharding = same_on(sharding, own) or sharding
        rank = len(leaf_shape(leaf))
        if is_ref(leaf):
            split.append(None)
        elif sharding is None:
            split.append(((),) * rank)
        elif isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == own.axis_names:
            parts = [tuple(map(str, axes_of_entry(entry))) for entry in sharding.spec]
            split.append((*parts, *[()] * (rank - len(parts))))
        else:
            split.append(None)
    return tuple(split)


def _axes_of(found: FoundStep, own: Mesh) -> tuple[str, ...]:
    """Returns the axes of the script's own mesh that split the batch; all axes for a batch on
    another mesh of one axis over the same devices."""
    axes: list[str] = []
    for name in found.batch_axes:
        others = [mesh for mesh in found.meshes if name in mesh.axis_names]
        if name in own.axis_names:
            axes.append(str(text_of(name)))
        elif any(same_on(NamedSharding(mesh, PartitionSpec(name)), own) for mesh in others):
            axes += (str(text_of(one)) for one in own.axis_names)
    return tuple(dict.fromkeys(axes))


def _sizes(mesh: Mesh) -> Sizes:
    return tuple((str(text_of(name)), size) for name, size in mesh.shape.items())
