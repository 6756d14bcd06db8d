"""Checks whether a step that was carried to a mesh equals that of a real run there (jax)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from automesh.mesh.axes import MeshAxis
from automesh.mesh.layout.shardings import axes_of_entry
from automesh.program.absent.device_queries import own
from automesh.program.capture.build import build_by_running
from automesh.program.capture.nouns import Capture, CarriedBy, CarryCheck, Sizes
from automesh.program.capture.step_call import TracedCall, place_of
from automesh.program.carry.batches import batch_there, build_with_batch
from automesh.program.carry.build import carried_build
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.size_reads import seeing_sizes_read
from automesh.program.carry.stored_step import read_step, store_in
from automesh.program.lower.program_text import first_difference, in_one_form
from automesh.program.lower.static_args import leaf_dtype, leaf_shape
from automesh.program.nouns import Entry
from automesh.program.script.build import Built, build_on
from automesh.texts.exceptions import sentence_of

# A second run in the same process is made if the first one took at most this share of its time.
_SHARE_OF_A_RUN = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedStep:
    """The stored step on a mesh, built and lowered; `program` is the result of `lower`."""

    by: CarriedBy
    axes: tuple[MeshAxis, ...]
    built: Built
    program: Any


def check_carried(
    entry: Entry,
    meshes: Sequence[tuple[MeshAxis, ...]],
    *,
    lower: Callable[[Built], Any],
    entering: Callable[[str], None],
    limit_s: float = math.inf,
) -> CarryCheck:
    """Runs the script on a mesh, and compares its step there with the stored one.

    A script that reads the sizes of its mesh is run on a second mesh as well, one that does not
    divide an argument of the carried step, if there is time for that.

    If they split arguments differently, and axes that have size 1 in the script's own mesh are
    larger in this one, the step of this run replaces the stored one. The new one is then carried
    back to the script's own mesh, and compared with the old one, which a real run gave there.

    Args:
      meshes: meshes to try in order; the first one on which jax accepts the stored step is used.
      lower: lowers a step.
      entering: is called with the name of each stage: `build`, `lower`.
      limit_s: the time after which this process is ended.

    Raises:
      Exception: any exception that ends the script before its step.
    """
    capture = entry.capture
    assert capture is not None
    entering("lower")
    axis_types = capture.searched.axis_types
    builds: dict[CarriedBy, Any] = {by: _build(entry, capture, by) for by in _WAYS}
    carried = _first_carried(builds, meshes, axis_types, lower)
    if isinstance(carried, str):
        return CarryCheck(difference=carried)
    mesh = _text(carried.axes)
    entering("build")
    begun_s = perf_counter()
    # `build` runs again if the axis types differ, so use the right types at once.
    taken: list[tuple[TracedCall, Mesh]] = []
    # The step of a second run may have replaced that of the first one: this is the third.
    is_first = _own_sizes(capture) == tuple(map(tuple, capture.mesh.axes))
    why = "" if is_first else "its own mesh has axes of size 1"
    running = build_by_running(entry, keep=lambda call, mesh: taken.append((call, mesh)), why=why)
    with seeing_sizes_read() as reads:
        real = build_on(running, carried.axes, axis_types=axis_types, devices=own())
    took_s = perf_counter() - begun_s
    entering("lower")
    name = capture.step.name
    said, by = difference(real, carried, lower, name), carried.by
    if said and by == "trace":
        # The function may have read the sizes of the mesh, so it is traced again.
        again = _first_carried({"function": builds["function"]}, [carried.axes], axis_types, lower)
        if isinstance(again, CarriedStep) and not difference(real, again, lower, name):
            said, by = "", again.by
    if said and taken:
        found = _other_batch(entry, carried, real, taken[-1][0], lower)
        if found is not None:
            return replace(found, mesh=mesh, took_s=took_s)
    # In the check of a winner the carried step was measured already.
    may_replace = (
        bool(said and taken)
        and is_first
        and not capture.is_carried
        and said == _of_splits(real, carried.built)
        and _differ_over(real, carried.built) <= {n for n, s in capture.mesh.axes if s == 1}
        and _singles(size for _, size in capture.mesh.axes)
        > _singles(axis.size for axis in carried.axes)
    )
    if may_replace and _only_adds_axes(real, carried.built):
        replaced = _replaced(entry, carried.axes, taken[-1], lower)
        if replaced is not None:
            return replace(replaced, mesh=mesh, took_s=took_s)
    elif may_replace and _stored(capture.folder, *taken[-1]):
        return CarryCheck(mesh=mesh, by=by, difference=said, took_s=took_s, is_stored=True)
    has_time = took_s < _SHARE_OF_A_RUN * limit_s
    if not said and reads and is_first and not capture.is_carried and has_time:
        entering("build")
        said, at = _where_it_does_not_divide(entry, builds[by], axis_types)
        mesh = at or mesh
    return CarryCheck(mesh=mesh, by=by, difference=said, took_s=took_s)


def _where_it_does_not_divide(
    entry: Entry, build: Any, axis_types: tuple[str, ...]
) -> tuple[str, str]:
    """Runs a script that reads the sizes of its mesh on the first of the meshes with all devices on
    one axis that does not divide the carried step's arguments: it may leave whole what that mesh
    does not divide. The others of these meshes are not tried.

    Returns:
      How its arguments differ there, and the mesh; empty if they do not, if the script fails there,
      or if every such mesh divides all.
    """
    capture = entry.capture
    assert capture is not None
    sizes = _own_sizes(capture)
    count = math.prod(size for _, size in sizes)
    why = "whether it splits what that mesh does not divide"
    for name, own_size in sizes:
        if own_size == count:
            continue
        axes = tuple(MeshAxis(name=one, ici=count if one == name else 1) for one, _ in sizes)
        try:
            carried = build_on(build, axes, axis_types=axis_types, devices=own())
        except Exception:  # noqa: BLE001  # Such a mesh has a refusal of its own.
            continue
        if not _has_uneven(carried):
            continue
        try:
            running = build_by_running(entry, keep=lambda *_: None, why=why)
            real = build_on(running, axes, axis_types=axis_types, devices=own())
        except Exception:  # noqa: BLE001  # It cannot run there either.
            return "", ""
        return _of_arguments(real, carried), _text(axes)
    return "", ""


def _has_uneven(built: Built) -> bool:
    """Whether mesh axes split a dimension of an argument that they do not divide."""
    sizes = dict(built.mesh.shape)
    for _, leaf in _leaves(built):
        sharding: Any = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            shape = leaf_shape(leaf)
            parts = [
                math.prod(sizes[one] for one in axes) for axes in _axes_of(sharding, len(shape))
            ]
            if any(size % part for size, part in zip(shape, parts, strict=True)):
                return True
    return False


def _replaced(
    entry: Entry,
    axes: tuple[MeshAxis, ...],
    taken: tuple[TracedCall, Mesh],
    lower: Callable[[Built], Any],
) -> CarryCheck | None:
    """Replaces the stored step by that of a real run on another mesh, and compares it with the
    former one, on the mesh of the former one. Returns None if the step of that run cannot be
    stored.

    Args:
      axes: of that mesh.
    """
    capture = entry.capture
    assert capture is not None
    own = [tuple(MeshAxis(name=name, ici=size) for name, size in _own_sizes(capture))]
    axis_types = capture.searched.axis_types
    former = _first_carried({"trace": _build(entry, capture, "trace")}, own, axis_types, lower)
    if not _stored(capture.folder, *taken):
        return None
    sizes = tuple((axis.name, axis.size) for axis in axes)
    stored = replace(capture, mesh=replace(capture.mesh, axes=sizes))
    said = former if isinstance(former, str) else ""
    for by in _WAYS:
        if isinstance(former, str):
            break
        builds: dict[CarriedBy, Any] = {by: _build(entry, stored, by)}
        again = _first_carried(builds, own, axis_types, lower)
        said = (
            again
            if isinstance(again, str)
            else difference(former.built, again, lower, capture.step.name)
        )
        if not said:
            return CarryCheck(by=by, is_stored=True)
    return CarryCheck(difference=said, is_stored=True)


def _other_batch(
    entry: Entry,
    carried: CarriedStep,
    real: Built,
    call: TracedCall,
    lower: Callable[[Built], Any],
) -> CarryCheck | None:
    """Returns how the step is carried with the batch of the script's own mesh, if its batch is all
    that a real run does differently; else returns None.

    Args:
      carried: the stored step on the mesh of that run.
      call: the call of the step in that run.
    """
    capture = entry.capture
    assert capture is not None
    batch = batch_there(capture, call, _text(carried.axes))
    if not batch:
        return None

    def traced(build: Any) -> CarriedStep | str:
        return _first_carried({"function": build}, [carried.axes], real.axis_types, lower)

    again, other = (
        traced(_build(entry, capture, "function")),
        traced(build_with_batch(capture, call)),
    )
    if isinstance(again, str) or isinstance(other, str):
        return None
    name = capture.step.name
    if difference(real, other, lower, name):
        return None
    # The function may read the sizes of the mesh, then the trace is of no use elsewhere.
    is_same = carried.by == "trace" and not difference(carried.built, again, lower, name)
    return CarryCheck(by="trace" if is_same else "function", batch=batch)


def _text(axes: Sequence[MeshAxis]) -> str:
    return ",".join(f"{axis.name}:{axis.size}" for axis in axes)


def _own_sizes(capture: Capture) -> Sizes:
    """Returns the mesh of the stored step, which `_first_carried` has read already."""
    own = read_step(Path(capture.folder)).own
    return tuple(zip(own.names, own.sizes, strict=True))


def _singles(sizes: Iterable[int]) -> int:
    """Counts the axes of size 1. Such a mesh does not show whether arrays that jax has placed would
    be split over these axes."""
    return sum(size == 1 for size in sizes)


def _stored(folder: str, call: TracedCall, mesh: Mesh) -> bool:
    """Replaces the stored call by that of a real run; False if it cannot be stored."""
    try:
        store_in(folder, call, mesh, [place_of(leaf) for leaf in call.leaves])
    except CannotCarry:
        return False
    return True


_WAYS: tuple[CarriedBy, ...] = ("trace", "function")


def _build(entry: Entry, capture: Capture, by: CarriedBy) -> Any:
    described = replace(capture, without_arrays=True, carried_by=by)
    return carried_build(replace(entry, capture=described), _refused, is_strict=True)


def _refused(why: str) -> Any:
    raise CannotCarry(why)


def _first_carried(
    builds: Mapping[CarriedBy, Any],
    meshes: Sequence[tuple[MeshAxis, ...]],
    axis_types: tuple[str, ...],
    lower: Callable[[Built], Any],
) -> CarriedStep | str:
    """Returns the stored step on the first mesh that accepts it; if none does, the reason."""
    refusal = ""
    for axes, (by, build) in itertools.product(meshes, builds.items()):
        try:
            built = build_on(build, axes, axis_types=axis_types, devices=own())
            return CarriedStep(by=by, axes=axes, built=built, program=lower(built))
        except CannotCarry as error:
            refusal = refusal or error.message
        # jax raises various exceptions if the step does not fit the mesh: 127 does not divide by 2.
        except Exception as error:  # noqa: BLE001
            refusal = refusal or (f"on {_text(axes)} jax refuses its step ({sentence_of(error)})")
    return refusal


def difference(real: Built, carried: CarriedStep, lower: Callable[[Built], Any], name: str) -> str:
    """Describes how a real run differs, in a sentence; empty if it does not.

    Args:
      name: name of the step.
    """
    said = _of_arguments(real, carried.built)
    if said:
        return said
    program, other = lower(real), carried.program
    if program.fingerprint(()) == other.fingerprint(()):
        return ""
    one, two = program.lines(), other.lines()
    found = first_difference(one, two)
    if found is not None and _devices(real) == _devices(carried.built):
        found = first_difference(in_one_form(one), in_one_form(two))
        if found is None:
            return ""
    if found is None:
        return f"`{name}` runs on devices in another order there"
    where = f" at {found.place}" if found.place else ""
    return f"`{name}` is another program there{where}: `{found.line}`, and not `{found.other}`"


def _devices(built: Built) -> list[int]:
    return [device.id for device in built.mesh.devices.flat]


def _of_arguments(real: Built, carried: Built) -> str:
    ones, others = _leaves(real), _leaves(carried)
    if len(ones) != len(others):
        return f"its step has {len(ones)} arrays as arguments there, and {len(others)} elsewhere"
    for (path, one), (_, other) in zip(ones, others, strict=True):
        if _form(one) != _form(other):
            return f"`{path}` is {_form(one)} there, and {_form(other)} elsewhere"
    return _of_splits(real, carried)


def _of_splits(real: Built, carried: Built) -> str:
    """Describes the argument that a real run splits differently; both have arguments of the same
    shapes."""
    ones, others = _leaves(real), _leaves(carried)
    if len(ones) != len(others):
        return ""
    for (path, one), (_, other) in zip(ones, others, strict=True):
        first: Any = getattr(one, "sharding", None)
        second: Any = getattr(other, "sharding", None)
        if not (isinstance(first, NamedSharding) and isinstance(second, NamedSharding)):
            continue
        if not first.is_equivalent_to(second, len(leaf_shape(one))):
            return f"`{path}` is split by {first.spec} there, and by {second.spec} elsewhere"
    return ""


def _only_adds_axes(real: Built, carried: Built) -> bool:
    """Whether a real run splits its arguments over all axes over which the carried step does, and
    maybe others: jax leaves an axis of size 1 out of what it has placed itself. Where a script
    leaves an axis out, it decides by its size, and may decide otherwise on the next mesh."""
    for (_, one), (_, other) in zip(_leaves(real), _leaves(carried), strict=True):
        first: Any = getattr(one, "sharding", None)
        second: Any = getattr(other, "sharding", None)
        if not (isinstance(first, NamedSharding) and isinstance(second, NamedSharding)):
            continue
        rank = len(leaf_shape(one))
        pairs = zip(_axes_of(first, rank), _axes_of(second, rank), strict=True)
        if not all(here >= there for here, there in pairs):
            return False
    return True


def _differ_over(real: Built, carried: Built) -> set[Any]:
    """Returns the axes over which only one of two steps splits an argument. If one of them is
    larger than 1 in the script's own mesh, the script decides by its size."""
    found = set[Any]()
    for (_, one), (_, other) in zip(_leaves(real), _leaves(carried), strict=True):
        first: Any = getattr(one, "sharding", None)
        second: Any = getattr(other, "sharding", None)
        if isinstance(first, NamedSharding) and isinstance(second, NamedSharding):
            rank = len(leaf_shape(one))
            for here, there in zip(_axes_of(first, rank), _axes_of(second, rank), strict=True):
                found |= here ^ there
    return found


def _axes_of(sharding: NamedSharding, rank: int) -> list[set[Any]]:
    """Returns the axes that split each dimension."""
    found = [set(axes_of_entry(entry)) for entry in sharding.spec]
    return [*found, *(set[Any]() for _ in range(rank - len(found)))]


def _leaves(built: Built) -> list[tuple[str, Any]]:
    tree = (built.workload.args, dict(built.workload.kwargs))
    return [
        (_name(jax.tree_util.keystr(path)), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _name(path: str) -> str:
    return f"args{path[3:]}" if path.startswith("[0]") else f"kwargs{path[3:]}"


def _form(leaf: Any) -> str:
    if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
        return type(leaf).__name__
    return f"{leaf_dtype(leaf)}{list(leaf_shape(leaf))}"
