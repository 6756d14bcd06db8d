"""Which plan of several granules a mesh names."""

from __future__ import annotations

import pytest

from automesh.errors import UsageError
from automesh.mesh.axes import Plan, parse_mesh
from automesh.tuner.lint.plans import plan_named

NAMES = ("dp", "tp")
LEGAL = [
    Plan(axes=parse_mesh(mesh, NAMES), knobs=(("remat", remat),))
    for mesh in ("dcn.dp:2,tp:8", "dcn.dp:2,dp:2,tp:4")
    for remat in ("none", "full")
]


@pytest.mark.parametrize(
    ("text", "mesh", "is_left_out"),
    [
        ("dp:2,tp:8", "dcn.dp:2,tp:8", False),
        ("dp:4,tp:-1", "dcn.dp:2,dp:2,tp:4", False),
        ("dcn.dp:2,tp:8 remat=full", "dcn.dp:2,tp:8", False),
        ("tp:16", "dcn.tp:2,tp:8", True),
        ("dcn.tp:2,dp:8 remat=full", "dcn.tp:2,dp:8", True),
    ],
)
def test_sizes_in_all_and_meshes_that_a_search_leaves_out(
    text: str, mesh: str, is_left_out: bool
) -> None:
    plan, notice = plan_named(text, LEGAL, num_devices=16)
    assert plan.mesh == mesh and ("a search leaves" in notice) is is_left_out
    assert dict(plan.knobs)["remat"] == ("full" if "full" in text else "none")


def test_a_mesh_of_another_number_of_devices_is_refused() -> None:
    with pytest.raises(UsageError, match="16 devices"):
        plan_named("tp:8", LEGAL, num_devices=16)
