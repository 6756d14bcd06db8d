"""Makes a mesh from a string, as in eformer: `dp:2,tp:4` or `2,4` (jax)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError, check_type, did_you_mean
from automesh.mesh.axes import parse_mesh
from automesh.mesh.granules import granules_of
from automesh.mesh.layout.create import devices_of, mesh_on
from automesh.mesh.layout.devices import AxisTypes, axis_types_for, create_mesh_for
from automesh.mesh.names import as_names, check_names

AxisOrder = Literal["string", "names"]
_FORMS = "write for example `dp:2,tp:4` or, without names, `2,4`"


def parse_mesh_from_string(
    axis_dims: str,
    names: Sequence[str],
    *,
    order: AxisOrder = "string",
    axis_types: AxisTypes = None,
) -> Mesh:
    """Makes the mesh that a string describes, on all devices.

    With a `:` anywhere, every part is `name:size`: sizes are those of `create_mesh`, and each name
    is used once. Where a part is `dcn.name:size`, sizes are those of automesh's text form
    instead: `dcn.dp:2,fsdp:4` are two granules along `dp` and four devices of each along `fsdp`.
    Without a `:`, parts are sizes in the order of `names`. Spaces around parts do not matter.

    Args:
      axis_dims: the string; one size may be -1.
      names: all axes of the mesh.
      order: of the axes in a mesh given by names: that of the string, as in eformer, or that of
        `names`.
      axis_types: `jax.sharding.AxisType`s or the words auto, explicit, manual: one for each of
        `names`, in their order, or one for all. Default: Auto.

    Returns:
      The mesh.

    Raises:
      UsageError: malformed text; a name that is unknown, missing or repeated; another number of
        sizes than of names; sizes that do not fit the devices.
      WrongType: an argument of the wrong type; also a `TypeError`.

    Example:
      >>> dict(parse_mesh_from_string("tp:4,dp:2", ["dp", "tp"]).shape)
      {'tp': 4, 'dp': 2}
      >>> dict(parse_mesh_from_string("-1, 4", ["data", "model"]).shape)
      {'data': 2, 'model': 4}
    """
    hint = "`create_mesh` takes sizes as numbers"
    check_type(axis_dims, str, "`axis_dims` must be a string", hint=hint)
    known = as_names(names, "`names`")
    check_names(known, ())
    if order not in ("string", "names"):
        raise UsageError(
            f"`order` is {order!r}; it must be `string` or `names`",
            hint="it is the order of the axes in a mesh that is given by names",
        )
    types = dict(zip(known, axis_types_for(axis_types, known), strict=True))
    if not axis_dims.strip():
        raise UsageError("`axis_dims` is empty", hint=_FORMS)
    if ":" not in axis_dims:
        sizes = _positional(axis_dims, known)
        return mesh_on(devices_of(None), sizes, known, axis_types=tuple(types.values()))
    return _named(axis_dims, types, order)


def _positional(text: str, names: Sequence[str]) -> tuple[int, ...]:
    pieces = [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        if not piece.removeprefix("-").isdecimal():
            raise UsageError(f"`{piece}` in mesh `{text}` is not a size", hint=_FORMS)
    if len(pieces) != len(names):
        raise UsageError(
            f"mesh `{text}` has {len(pieces)} sizes for the {len(names)} axes {list(names)}",
            hint="give a size for each name; 1 for an axis that is not used",
        )
    return tuple(int(piece) for piece in pieces)


def _named(text: str, types: Mapping[str, AxisType], order: AxisOrder) -> Mesh:
    names = tuple(types)
    used = _names_in(text, names)
    missing = [name for name in names if name not in used]
    if missing:
        raise UsageError(
            f"mesh `{text}` gives no size for `{missing[0]}` of the axes {list(names)}",
            hint=f"add `{missing[0]}:1`, or leave it out of `names`",
        )
    devices = devices_of(None)
    hybrid = "dcn." in text
    count = len(granules_of(devices)) if hybrid else 1
    by_name = {
        axis.name: axis
        for axis in parse_mesh(text, names, num_devices=len(devices), num_granules=count)
    }
    axes = [by_name[name] for name in (used if order == "string" else names)]
    chosen = [types[axis.name] for axis in axes]
    if hybrid:
        return create_mesh_for(axes, devices=devices, axis_types=chosen)
    sizes, in_order = [axis.size for axis in axes], [axis.name for axis in axes]
    return mesh_on(devices, sizes, in_order, axis_types=chosen)


def _names_in(text: str, names: Sequence[str]) -> list[str]:
    """Returns names in the order of their first appearance; `parse_mesh` reports malformed text."""
    pieces = [piece.partition(":") for piece in text.split(",")]
    used = [name.strip().removeprefix("dcn.") for name, colon, _ in pieces if colon]
    for name in used:
        if name not in names:
            meant = did_you_mean(name, names) or f"; known are {', '.join(names)}"
            raise UsageError(f"mesh `{text}` names the unknown axis `{name}`{meant}", hint=_FORMS)
    return list(dict.fromkeys(used))
