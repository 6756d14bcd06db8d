"""Makes a function `build(mesh)` of a script: it loads the stored step where there is one, else it
runs the script up to its step, with `mesh` instead of the script's own (jax)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError
from automesh.foreign.private import is_own_folder
from automesh.program.absent.device_queries import attached
from automesh.program.capture.abstract.record import ValueNeeded
from automesh.program.capture.abstract.trace import without_arrays
from automesh.program.capture.flow.host_copies import HostLeaf, copied
from automesh.program.capture.flow.program import flops_of, is_in_parts, opened_jaxpr
from automesh.program.capture.flow.sequence import StepCollector
from automesh.program.capture.frames import failing_line
from automesh.program.capture.hooks import Call, MakeMesh
from automesh.program.capture.nouns import Capture
from automesh.program.capture.run_script import Ended, run_script, stop_script
from automesh.program.capture.split_axes import meaning, split_names
from automesh.program.capture.step_call import TracedCall, workload_of
from automesh.program.capture.world.meshes import same_on
from automesh.program.carry.batches import state_places
from automesh.program.carry.build import carried_build
from automesh.program.carry.by_mesh import keep_call, kept_call
from automesh.program.carry.starts import note_start
from automesh.program.carry.stored_step import read_step
from automesh.program.carry.values import StoredStepLost
from automesh.program.lower.static_args import leaf_shape
from automesh.program.nouns import Entry
from automesh.program.script.data_arguments import is_key
from automesh.program.script.workload import Workload
from automesh.texts.exceptions import in_one_line

# A step that computes this many times as much on a mesh as on the script's own has other work
# there; sizes that are padded for a mesh change it by less.
_MOST_WORK = 1.2
# A state with this many times as many numbers is that of another model. Copies of some parameters
# for each part of the mesh make less of a difference.
_MOST_STATE = 1.5
# Bytes of arguments up to which they are kept on the host, so that the script runs once for each
# mesh.
_LARGEST_KEPT_BYTES = 2**30


class EndedEarly(RuntimeError):
    """The error that on this mesh the script ends before its step."""


class OtherBatch(RuntimeError):
    """The error that on this mesh the script gives its step another batch than on its own mesh, so
    that no time there compares with times elsewhere."""


def captured_build(entry: Entry) -> Any:
    """Returns the function `build(mesh)` of a script that has none of its own."""
    assert entry.capture is not None
    if entry.capture.layout is not None:
        from automesh.program.infer.search.build import inferred_build, rearranged_build

        if entry.capture.makes_mesh:
            return rearranged_build(entry, build_by_running)
        return inferred_build(entry)
    # On a host other than that of the search, this folder does not exist or belongs to another
    # search.
    if entry.capture.is_carried and is_own_folder(Path(entry.capture.folder)):
        return carried_build(entry, lambda _: build_by_running(entry))
    return build_by_running(entry)


def build_by_running(
    entry: Entry, keep: Callable[[TracedCall, Mesh], None] | None = None, *, why: str = ""
) -> Any:
    """Returns the function `build(mesh)` that runs the script, once for each mesh: later processes
    load the step that this run has left for them.

    Args:
      keep: is called after each run with the call of the step, and with the mesh that the script
        got. With it the script is always run.
      why: the reason, which is noted with the mesh where the starts of the script are counted.
    """
    assert entry.capture is not None
    known: dict[Any, _KeptBuild] = {}
    capture = entry.capture

    def build(mesh: Mesh) -> Workload:
        key = (mesh, mesh.axis_types)
        if key in known:
            return known[key].workload()
        if keep is None:
            kept = kept_call(capture, mesh, with_values=not capture.without_arrays)
            if kept is not None:
                _check_batch(entry, mesh, kept.call)
                return workload_of(kept.call, capture, kept.made)
        run = _UpToStep(capture=capture, plan=mesh, collector=StepCollector(capture.step))
        on = ",".join(f"{name}:{size}" for name, size in mesh.shape.items())
        note_start(capture.folder, f"{on} ({why})" if why else on)
        is_bare = capture.without_arrays and not capture.runs_with_arrays
        with meaning(capture.splits), without_arrays() if is_bare else nullcontext():
            ended = run_script(entry, run)
        if run.workload is None:
            raise _early(entry, ended)
        if run.whole is not None and run.made is not None:
            if keep is not None:
                keep(run.whole, run.made)
            keep_call(capture, mesh, run.whole, run.made)
        if keep is None and run.whole is not None:
            _check_batch(entry, mesh, run.whole)
        if (on_host := _kept(run.workload)) is not None:
            known[key] = on_host
        return run.workload

    return build


def _check_batch(entry: Entry, mesh: Mesh, call: TracedCall) -> None:
    """Checks that a step gets as many numbers as on the script's own mesh, besides its state and
    its random keys, has a state of about the same size, and computes as much.

    Meshes of fewer devices are only looked at to learn what the step does there.

    Raises:
      OtherBatch: it does not.
    """
    capture = entry.capture
    assert capture is not None
    is_own = tuple(mesh.shape.items()) == capture.searched.axes
    if is_own or mesh.size < capture.mesh.num_devices:
        return
    name, own = Path(entry.location).name, str(capture.mesh)
    if said := _other_leaves(capture, call):
        raise OtherBatch(
            f"{name} takes another batch here than on {own} ({', '.join(said[:2])}): give it one "
            "batch for all meshes to compare them"
        )
    if said := _other_model(capture, call):
        raise OtherBatch(
            f"the model of {name} depends on its mesh ({said} on {own}): times of different models "
            "do not compare"
        )
    step, jaxpr = capture.step, opened_jaxpr(call.traced.jaxpr)
    # What a part of `shard_map` computes is counted for one device; what loops and several
    # functions compute, per turn and per call.
    if step.loop is not None or step.parts or not step.flops or is_in_parts(jaxpr):
        return
    times = flops_of(jaxpr) / step.flops
    if not 1 / _MOST_WORK < times < _MOST_WORK:
        raise OtherBatch(
            f"the step of {name} computes {times:.2g} times as much here as on {own}: times of "
            "different work do not compare"
        )


def _other_leaves(capture: Capture, call: TracedCall) -> list[str]:
    """Describes the arguments that have other sizes than in the script's first run, if their sizes
    together differ: rows may also be divided otherwise among micro-batches."""
    try:
        step = read_step(Path(capture.folder))
    except StoredStepLost:
        return []
    if len(step.leaves) != len(call.leaves):
        return []  # The state itself depends on the mesh.
    state = state_places(capture.step.carried)
    pairs = [
        (name, leaf_shape(leaf), first.shape)
        for place, (name, leaf, first) in enumerate(
            zip(step.names, call.leaves, step.leaves, strict=True)
        )
        if place not in state and not is_key(leaf)
    ]
    if sum(math.prod(here) for _, here, _ in pairs) == sum(math.prod(own) for *_, own in pairs):
        return []
    return [
        f"`{name}` {list(here)}, and {list(own)} there" for name, here, own in pairs if here != own
    ]


def _other_model(capture: Capture, call: TracedCall) -> str:
    """Compares the numbers in the state with those in the script's first run; says both if one has
    over `_MOST_STATE` times as many, as where each stage of a pipeline has layers of its own. Empty
    if not."""
    try:
        step = read_step(Path(capture.folder))
    except StoredStepLost:
        return ""
    here = [leaf_shape(leaf) for leaf in call.leaves]
    own = [leaf.shape for leaf in step.leaves]
    what = "its arguments have"
    if len(here) == len(own):
        state = state_places(capture.step.carried)
        here, own = ([shapes[place] for place in sorted(state)] for shapes in (here, own))
        what = "its state has"
    mine, first = (sum(map(math.prod, shapes)) for shapes in (here, own))
    if not mine or not first or 1 / _MOST_STATE < mine / first < _MOST_STATE:
        return ""
    return f"{what} {mine:,} numbers here, and {first:,}"


def _early(entry: Entry, ended: Ended | None) -> Exception:
    name = Path(entry.location).name
    if ended is not None and isinstance(ended.error, ValueNeeded):
        return ended.error
    if ended is not None and ended.error is not None:
        place = failing_line(ended.error.__traceback__)
        text = in_one_line(ended.error)
        return EndedEarly(f"{name} fails at {place}: {text}")
    if ended is not None and ended.exit_code:
        return EndedEarly(f"{name} ends with exit code {ended.exit_code} before its step")
    assert entry.capture is not None
    names = [part.name for part in entry.capture.step.parts]
    if len(set(names)) == len(names):
        return EndedEarly(f"{name} ends before its step")
    # The number of micro-batches, which are calls, may depend on the mesh.
    called = ", then ".join(
        f"`{function}`" + (f" {times} times" if times > 1 else "")
        for function, times in ((one, len(list(run))) for one, run in itertools.groupby(names))
    )
    return EndedEarly(
        f"{name} ends and has never called {called}, which is its step on {entry.capture.mesh}"
    )


@dataclass(slots=True, kw_only=True)
class _UpToStep:
    """Gives a script the mesh of a plan, and stops the script at its step.

    Attributes:
      whole: the call of the step, once the script was stopped.
      made: the mesh that the script got for its own.
    """

    capture: Capture
    plan: Mesh
    collector: StepCollector
    workload: Workload | None = None
    whole: TracedCall | None = None
    made: Mesh | None = None

    def mesh(self, make: MakeMesh, devices: Any, names: tuple[str, ...], axis_types: Any) -> Mesh:
        """Returns the mesh of the plan where the script makes its own; other meshes are made on the
        devices that are here."""
        own, splits = self.capture.mesh, self.capture.splits
        is_own = names == own.names and np.size(devices) == own.num_devices
        chosen = self.plan.devices if is_own else _other(devices, own.num_devices, self.plan)
        if splits and len(names) == np.ndim(devices):
            names, shape, axis_types = split_names(names, np.shape(devices), axis_types, splits)
            chosen = chosen if is_own else chosen.reshape(shape)
        made = make(chosen, names, axis_types)
        self.made = made if is_own else self.made
        return made

    def call(self, call: Call) -> Any:
        """Stops the script at the call of its step; runs all other calls."""
        if self.workload is not None:  # The script has caught what has stopped it.
            stop_script()
        whole = self.collector.offer(_on_one_mesh(call, self.made, self.capture.mesh.num_devices))
        if whole is not None:
            self.whole = whole
            self.workload = workload_of(whole, self.capture, self.made)
            stop_script()
        outputs = call.run()
        self.collector.ran(outputs)
        return outputs

    def pmap(self, trains: Callable[[], bool]) -> None:
        """Lets the script go on, as its step is another function."""

    def unjitted(self, *, is_gradient: bool) -> bool:
        """Whether the script calls its step outside of jit, as its first run has shown."""
        del is_gradient
        return self.capture.step.is_unjitted

    def gradient_in_a_map(self) -> None:
        """Lets the script go on, as its first run has shown what its step is."""


def _other(devices: Any, count: int, plan: Mesh) -> Any:
    """Returns the devices of another mesh of the script. If this mesh has as many devices as the
    script's own and as the plan, in jax's order, they are the plan's, as jit accepts arrays of both
    meshes only if their devices agree. Otherwise they are devices that are here, also for a plan of
    another size: the script may make its own mesh of the devices of this one.

    Args:
      count: number of devices of the script's own mesh.
    """
    array = np.asarray(devices, dtype=object)
    ids = [device.id for device in array.flat]
    if array.size != count or array.size != plan.size or ids != sorted(ids):
        return on_attached(devices)
    return plan.devices.reshape(array.shape)


def _on_one_mesh(call: Call, own: Mesh | None, count: int) -> Call:
    """Returns a call with all arguments on the script's own mesh: those on another mesh of one axis
    over the same devices are moved, since that axis stands for all axes of the own mesh together.

    Args:
      count: number of devices of the mesh that the script asked for.
    """
    if own is None or AxisType.Explicit in own.axis_types:
        return call

    def moved(leaf: Any) -> Any:
        to = same_on(getattr(leaf, "sharding", None), own, count=count)
        return leaf if to is None else jax.device_put(leaf, to)

    args, kwargs = jax.tree.map(moved, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def on_attached(devices: Any) -> Any:
    """Returns as many devices that are here, in the same shape, for devices that are not here."""
    array = np.asarray(devices, dtype=object)
    here = attached()
    if all(device in here for device in array.flat):
        return array
    if array.size > len(here):
        raise UsageError(
            f"the script makes a mesh of {array.size} devices, and {len(here)} are simulated",
            hint="make the mesh of `jax.devices()`",
        )
    return np.asarray(here[: array.size], dtype=object).reshape(array.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptBuild:
    """A workload whose arguments are kept on the host.

    Attributes:
      leaves: what each leaf of the arguments is made of.
    """

    stripped: Workload
    tree: Any
    leaves: tuple[HostLeaf, ...] = field(repr=False)

    def workload(self) -> Workload:
        """Returns the workload with new arguments on the devices."""
        args, kwargs = self.tree.unflatten([leaf.made() for leaf in self.leaves])
        return replace(self.stripped, args=args, kwargs=kwargs)


def _kept(workload: Workload) -> _KeptBuild | None:
    """Copies the arguments to the host; returns None if they are too large, or partly on other
    hosts."""
    leaves, tree = jax.tree.flatten((workload.args, dict(workload.kwargs)))
    found = copied(leaves, _LARGEST_KEPT_BYTES)
    if found is None:
        return None
    return _KeptBuild(stripped=replace(workload, args=(), kwargs={}), tree=tree, leaves=found)
