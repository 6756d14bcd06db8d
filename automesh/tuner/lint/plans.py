"""Finds the plan that a user names, also one that a search would leave out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, Plan, format_mesh, parse_mesh
from automesh.tuner.explain.mesh import find_plan

_DCN = "dcn."


def plan_named(text: str, plans: Sequence[Plan], *, num_devices: int) -> tuple[Plan, str]:
    """Finds the plan of a mesh; where there are several granules, its sizes may be those in all.

    Which axes cross the network between granules is then taken from the first plan with these
    sizes; if there is none, the first axes of the mesh cross it, as jax orders devices.

    Args:
      text: `dp:2,tp:8`, `dcn.dp:2,tp:8`, knobs behind it.
      plans: the legal plans.

    Returns:
      The plan, and what the user should know of the choice; else an empty text.

    Raises:
      UsageError: not a mesh of these devices.
    """
    granules = plans[0].num_granules
    mesh, *settings = text.split() or [""]
    if granules == 1:
        return find_plan(text, plans, num_devices=num_devices)
    names = [axis.name for axis in plans[0].axes]
    if _DCN in mesh:
        axes = parse_mesh(mesh, names, num_devices=num_devices, num_granules=granules)
    else:
        whole = parse_mesh(mesh, names, num_devices=num_devices)
        axes = _known(whole, plans) or _spread(mesh, whole, granules)
    if any(plan.axes == axes for plan in plans):
        return find_plan(" ".join((format_mesh(axes), *settings)), plans, num_devices=num_devices)
    template, _ = find_plan(" ".join((plans[0].mesh, *settings)), plans, num_devices=num_devices)
    return replace(template, axes=axes), (
        f"a search leaves `{format_mesh(axes)}` out: axes that its space does not let cross the "
        "network between granules do so there"
    )


def _known(whole: Sequence[MeshAxis], plans: Sequence[Plan]) -> tuple[MeshAxis, ...] | None:
    sizes = [axis.size for axis in whole]
    return next((plan.axes for plan in plans if [a.size for a in plan.axes] == sizes), None)


def _spread(mesh: str, whole: Sequence[MeshAxis], granules: int) -> tuple[MeshAxis, ...]:
    axes: list[MeshAxis] = []
    left = granules
    for axis in whole:
        across = math.gcd(axis.size, left)
        left //= across
        axes.append(MeshAxis(name=axis.name, ici=axis.size // across, dcn=across))
    if left > 1:
        raise UsageError(
            f"the sizes of mesh `{mesh}` cannot be spread over {granules} granules (slices or "
            "nodes)",
            hint="say which axes cross the network between them: `dcn.dp:2,tp:8`",
        )
    return tuple(axes)
