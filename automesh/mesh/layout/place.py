"""Gives one array a sharding: outside `jit`, inside it, or in a ShapeDtypeStruct (jax)."""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from automesh.errors import IllegalMapping, UsageError
from automesh.mesh.layout.context import is_staging, is_tracing


def place(array: Any, sharding: NamedSharding, *, path: str = "") -> Any:
    """Returns the array with this sharding.

    Args:
      array: moved if it is concrete, constrained while tracing; a ShapeDtypeStruct gets the
        sharding as attribute.
      path: of the array, for errors.

    Raises:
      UsageError: the array is concrete and the mesh has no devices.
      IllegalMapping: see `constrain`.

    Example:
      >>> mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
      >>> rows = place(jax.numpy.ones((8, 3)), NamedSharding(mesh, PartitionSpec("data")))
      >>> rows.addressable_data(0).shape
      (1, 3)
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(sharding=sharding)
    if is_tracing():
        return constrain(array, sharding, path=path)
    if isinstance(sharding.mesh, AbstractMesh):
        raise UsageError(
            f"{array_label(path)} cannot be put on an abstract mesh, which has no devices",
            hint="enter `jax.set_mesh(mesh)`, or pass `mesh=`",
        )
    current = getattr(array, "sharding", None)
    if current is not None and array.committed and current == sharding:
        return array
    return jax.device_put(array, sharding)


def constrain(array: Any, sharding: NamedSharding, *, path: str = "") -> Any:
    """Returns the traced array with this sharding, for all types of mesh axes.

    Raises:
      IllegalMapping: explicit and other mesh axes split one dimension in an order that jax lacks.

    Example:
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit, AxisType.Auto))
      >>> sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
      >>> with jax.set_mesh(mesh):
      ...     split = jax.jit(lambda x: constrain(x, sharding))(jax.numpy.ones((8, 8)))
      >>> split.sharding.shard_shape(split.shape)
      (2, 4)
    """
    kinds = set(sharding.mesh.axis_types)
    if AxisType.Explicit in kinds:
        _check_order(sharding, path)
        # Over explicit axes a constraint only checks, and only `reshard` changes the sharding; over
        # other axes only a constraint does.
        explicit = _spec_over(_without_unconstrained(array, sharding), AxisType.Explicit)
        is_mixed = kinds > {AxisType.Explicit}
        if is_mixed and (PartitionSpec.UNCONSTRAINED in sharding.spec or not is_staging()):
            return _constrained_as_auto(array, sharding.spec, explicit)
        array = _resharded(array, explicit)
        if kinds == {AxisType.Explicit}:
            return array
        sharding = _spec_over(sharding, AxisType.Auto)
    return jax.lax.with_sharding_constraint(array, sharding)


def keep_unconstrained(array: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Replaces each `PartitionSpec.UNCONSTRAINED` of a spec by the array's present split.

    Over explicit mesh axes no compiler chooses, so that unconstrained dimensions stay as they are.

    Example:
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
      >>> with jax.set_mesh(mesh):
      ...     rows = jax.device_put(jax.numpy.ones((8, 8)), PartitionSpec("data"))
      ...     open_rows = PartitionSpec(PartitionSpec.UNCONSTRAINED, "model")
      ...     tuple(keep_unconstrained(rows, open_rows, mesh))
      ('data', 'model')
    """
    kinds: dict[str, AxisType] = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    named = {axis for entry in spec for axis in axes_of(entry)}
    now = (*jax.typeof(array).sharding.spec, *[None] * len(spec))
    kept = [
        tuple(axis for axis in axes_of(entry) if kinds.get(axis) == AxisType.Explicit) or None
        for entry in now
    ]
    kept = [None if entry is None or named & set(entry) else entry for entry in kept]
    return PartitionSpec(
        *(
            here if entry is PartitionSpec.UNCONSTRAINED else entry
            for entry, here in zip(spec, kept, strict=False)
        )
    )


def _resharded(array: Any, sharding: NamedSharding) -> Any:
    """Calls `jax.sharding.reshard`, which alone sets a program's devices only under `set_mesh`."""
    reshard = jax.sharding.reshard
    if isinstance(sharding.mesh, AbstractMesh) or not jax.sharding.get_abstract_mesh().empty:
        return reshard(array, sharding)
    # A `jit` inside a `jit` sets them, by its `out_shardings`.
    return jax.jit(reshard, static_argnums=1, out_shardings=sharding)(array, sharding)


def _constrained_as_auto(array: Any, spec: PartitionSpec, explicit: NamedSharding) -> Any:
    """Constrains the array to this spec in a region where the explicit mesh axes are auto, too.

    Elsewhere, a constraint after `reshard` would close the dimensions that the spec leaves open;
    outside of `jit` it would undo the `reshard`.

    Args:
      explicit: the spec of the explicit axes.
    """

    on_mesh = isinstance(array, Tracer) or _mesh_of(array) == explicit.mesh
    placed = array if on_mesh else jax.device_put(array, explicit)

    def split(inside: Any) -> Any:
        return jax.lax.with_sharding_constraint(inside, spec)

    kinds = _kinds(explicit)
    axes = tuple(name for name, kind in kinds.items() if kind == AxisType.Explicit)
    return jax.sharding.auto_axes(split, axes=axes, out_sharding=explicit)(placed)


def _mesh_of(array: Any) -> Mesh | AbstractMesh | None:
    return getattr(getattr(array, "sharding", None), "mesh", None)


def array_label(path: str) -> str:
    """Names the array at this path of its tree, for errors.

    Example:
      >>> array_label("layers/0/wq"), array_label("")
      ('array `layers/0/wq`', 'the array')
    """
    return f"array `{path}`" if path else "the array"


def _check_order(sharding: NamedSharding, path: str) -> None:
    """Checks that explicit mesh axes come before others, since jax puts them there.

    Raises:
      IllegalMapping: a dimension is split over another axis first.
    """
    kinds = _kinds(sharding)
    for entry in map(axes_of, sharding.spec):
        rest = itertools.dropwhile(lambda axis: kinds[axis] == AxisType.Explicit, entry)
        late = [axis for axis in rest if kinds[axis] == AxisType.Explicit]
        if late:
            raise IllegalMapping(
                f"a dimension of {array_label(path)} is mapped to the mesh axes {entry}, of which "
                f"`{late[0]}` is of type explicit and must come before those that are not",
                hint="put the explicit mesh axes first in the mapping, or give all axes one type",
            )


def _spec_over(sharding: NamedSharding, kind: AxisType) -> NamedSharding:
    """Returns the part of a sharding over mesh axes of one type."""
    kinds = _kinds(sharding)
    entries = [
        entry
        if entry is PartitionSpec.UNCONSTRAINED
        else tuple(axis for axis in axes_of(entry) if kinds[axis] == kind) or None
        for entry in sharding.spec
    ]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def _without_unconstrained(array: Any, sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding without unconstrained dimensions: see `keep_unconstrained`."""
    spec = keep_unconstrained(array, sharding.spec, sharding.mesh)
    return NamedSharding(sharding.mesh, spec)


def _kinds(sharding: NamedSharding) -> dict[str, AxisType]:
    return dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec.

    Example:
      >>> axes_of("dp"), axes_of(("dp", "tp")), axes_of(None)
      (('dp',), ('dp', 'tp'), ())
    """
    if entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
