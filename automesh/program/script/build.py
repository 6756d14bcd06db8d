"""Calls the user's build function on a mesh, and checks its result (jax)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError, kind_of
from automesh.mesh.axes import Knobs, MeshAxis, parse_mesh
from automesh.mesh.granules import LocatedDevice
from automesh.mesh.layout.devices import axis_types_for, create_mesh_for
from automesh.mesh.mapping import LogicalAxes, LogicalMapping
from automesh.program.script.contexts import Ambient, ambient_mesh, no_ambient_mesh, traces_of
from automesh.program.script.pure_step import pure
from automesh.program.script.signature import MAPPING
from automesh.program.script.workload import Workload

_FORM = "return `step, args`, a `jax.stages.Traced` or an `automesh.Workload`"
_WORDS = {AxisType.Auto: "auto", AxisType.Explicit: "explicit", AxisType.Manual: "manual"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The result of `build` on one mesh.

    Attributes:
      mesh: the mesh that it was given.
      axis_types: one per axis, as plain words; empty if the workload asked for none.
      workload: checked; `args` is a tuple, of pytrees of arrays and of static arguments (see
        `pure_step`). For a traced step, `step` is the `Traced` and `args` is
        empty.
      ambient: the context of `build`, in which its step is traced and run, too.
    """

    mesh: Mesh
    axis_types: tuple[str, ...]
    workload: Workload
    ambient: Ambient

    @property
    def traced(self) -> jax.stages.Traced | None:
        step = self.workload.step
        return step if isinstance(step, jax.stages.Traced) else None


def build_on(
    build: Callable[..., Any],
    axes: Sequence[MeshAxis],
    *,
    axis_types: tuple[str, ...] = (),
    mapping: LogicalAxes = (),
    knobs: Knobs = (),
    devices: Sequence[LocatedDevice] | None = None,
) -> Built:
    """Calls `build` on a mesh of `axes`; calls it again if the workload asks for other axis types.

    Args:
      axes: all axes of the mesh, in order; the mesh takes as many devices as their sizes multiply
        to.
      axis_types: one per axis, as an inspection reported them; empty for Auto.
      mapping: argument `mapping` of `build`; empty to leave it out.
      knobs: keyword arguments for `build`.
      devices: devices of the mesh; by default all devices of the default backend.

    Raises:
      UsageError: the return value is not one of the three forms, or a field of the workload is
        wrong.
    """
    arguments: dict[str, Any] = dict(knobs)
    if mapping:
        arguments[MAPPING] = dict(LogicalMapping(mapping))
    built = _call(build, axes, axis_types, arguments, devices)
    wanted = built.axis_types
    if wanted and wanted != (axis_types or ("auto",) * len(axes)):
        built = _call(build, axes, wanted, arguments, devices)
        if built.axis_types != wanted:
            raise UsageError(
                f"the workload asks for the axis types {wanted}, "
                f"and for {built.axis_types} once it has them",
                hint="let `Workload(axis_types=...)` not depend on the mesh that `build` is given",
            )
    return built


def _call(
    build: Callable[..., Any],
    axes: Sequence[MeshAxis],
    axis_types: tuple[str, ...],
    arguments: Mapping[str, Any],
    devices: Sequence[LocatedDevice] | None,
) -> Built:
    mesh = create_mesh_for(axes, devices=devices, axis_types=axis_types)
    # As text: 1 and True are equal, but may result in different programs.
    call = (mesh, repr(arguments))
    with traces_of(call), no_ambient_mesh():
        returned: Any = build(mesh, **arguments)
        ambient = Ambient(mesh=ambient_mesh(), call=call)
    workload = _workload(returned, getattr(build, "__name__", "build"))
    return Built(
        mesh=mesh,
        axis_types=_axis_types(workload.axis_types, mesh.axis_names),
        workload=_checked(workload, mesh.axis_names),
        ambient=ambient,
    )


def _workload(returned: Any, name: str) -> Workload:
    if isinstance(returned, Workload):
        return returned
    if isinstance(returned, jax.stages.Traced):
        return Workload(cast("Callable[..., Any]", returned))
    if isinstance(returned, tuple):
        parts = cast("tuple[Any, ...]", returned)
        if len(parts) == 2:
            return Workload(parts[0], parts[1])
        raise UsageError(f"`{name}` returned a tuple of {len(parts)}, not of 2", hint=_FORM)
    if returned is None:
        raise UsageError(f"`{name}` returned nothing", hint=_FORM)
    if isinstance(returned, (jax.stages.Lowered, jax.stages.Compiled)):
        kind = type(returned).__name__
        raise UsageError(
            f"`{name}` returned a `jax.stages.{kind}`, which cannot be lowered again",
            hint="return what `jax.jit(step).trace(*args)` gives",
        )
    raise UsageError(f"`{name}` returned {kind_of(returned)}", hint=_FORM)


def _checked(workload: Workload, names: tuple[str, ...]) -> Workload:
    if isinstance(workload.step, jax.stages.Traced):
        if workload.args or workload.kwargs:
            raise UsageError(
                "the workload has a traced step and arguments besides",
                hint="a `Traced` knows its arguments; leave `args` and `kwargs` out",
            )
    elif not callable(workload.step):
        raise UsageError(f"the step is {kind_of(workload.step)}, not a function", hint=_FORM)
    args: Any = workload.args
    if not isinstance(args, (tuple, list)):
        raise UsageError(
            f"the step's arguments are {kind_of(args)}, not a tuple",
            hint="return `step, (state, batch)`; write `(state,)` for a single argument",
        )
    kwargs: Any = workload.kwargs
    if not isinstance(kwargs, Mapping) or any(
        not isinstance(key, str) for key in cast("Any", kwargs)
    ):
        raise UsageError("the workload's `kwargs` must be a dict with names as keys")
    for field, value in (("init", workload.init), ("advance", workload.advance)):
        if value is not None and not callable(value):
            raise UsageError(f"the workload's `{field}` is {kind_of(value)}, not a function")
    _check_baseline(workload.baseline, names)
    tokens: Any = workload.tokens_per_step
    if not isinstance(tokens, int) or tokens < 0:
        raise UsageError(
            f"the workload's `tokens_per_step` is {tokens!r}; it must be an integer, at least 0"
        )
    positions = tuple(cast("Sequence[Any]", args))
    return pure(
        replace(
            workload, args=positions, kwargs=dict(workload.kwargs), facts=dict(read_facts(workload))
        )
    )


def _check_baseline(baseline: Any, names: tuple[str, ...]) -> None:
    if baseline is None:
        return
    if not isinstance(baseline, str):
        raise UsageError(
            f"the workload's `baseline` is {kind_of(baseline)}, not a mesh in text form",
            hint='write for example `baseline="dp:2,tp:4"`',
        )
    mesh = baseline.split()[:1]  # Knobs may follow; they are checked with the search space.
    if mesh and "-1" not in mesh[0]:
        try:
            parse_mesh(mesh[0], names)
        except UsageError as error:
            raise UsageError(
                f"the workload's `baseline` does not fit: {error.message}", hint=error.hint
            ) from None


def read_facts(workload: Workload) -> tuple[tuple[str, int], ...]:
    """Returns the workload's facts as plain integers, sorted by name.

    Raises:
      UsageError: a fact is not an integer, or its name is not a string.
    """
    facts: Any = workload.facts
    if not isinstance(facts, Mapping):
        raise UsageError(
            f"the workload's `facts` are {kind_of(facts)}, not a dict of integers",
            hint='write for example `facts={"num_kv_heads": 8}`',
        )
    read: list[tuple[str, int]] = []
    for name, value in cast("Mapping[Any, Any]", facts).items():
        if not isinstance(name, str):
            raise UsageError(f"the name of a fact must be a string, got {name!r}")
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise UsageError(
                f"the fact `{name}` is {value!r}, {kind_of(value)}; facts are integers",
                hint="constraints divide by facts; leave out what is no count",
            )
        read.append((name, int(value)))
    return tuple(sorted(read))


def check_facts(
    expected: Sequence[tuple[str, int]], found: Sequence[tuple[str, int]], *, mesh: str
) -> None:
    """Checks that facts do not differ from those on the mesh of one device.

    Raises:
      UsageError: names the fact and both values.
    """
    before, now = dict(expected), dict(found)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            values = [str(facts[name]) if name in facts else "missing" for facts in (before, now)]
            raise UsageError(
                f"the fact `{name}` depends on the mesh: it is {values[0]} on one device "
                f"and {values[1]} on `{mesh}`",
                hint="report the global number, as it is before sharding",
            )


def _axis_types(wanted: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    if wanted is None:
        return ()
    if isinstance(wanted, Mapping):
        by_name = cast("Mapping[Any, Any]", wanted)
        unknown = [name for name in by_name if name not in names]
        if unknown:
            raise UsageError(
                f"`axis_types` names the axis `{unknown[0]}`, which is none of: {', '.join(names)}"
            )
        wanted = [by_name.get(name, "auto") for name in names]
    return tuple(_WORDS[one] for one in axis_types_for(wanted, names))
