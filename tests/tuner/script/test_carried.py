"""The meshes of a script's second run, and what a search says about its starts."""

from __future__ import annotations

from automesh.program.capture.nouns import ScriptMesh, SourceLine
from automesh.tuner.script.carried import other_meshes


def meshes(*axes: tuple[str, int]) -> list[str]:
    line = SourceLine(file="/home/me/train.py", line=3)
    own = ScriptMesh(axes=axes, axis_types=("auto",) * len(axes), made_at=line)
    return [plan.mesh for plan in other_meshes(own, 8)]


def test_the_second_run_is_never_on_the_scripts_own_mesh() -> None:
    """A step in `shard_map` whose function could not be stored was taken to no other mesh; on its
    own one it was equal, and the script was started for each mesh without a word."""
    assert meshes(("data", 4), ("model", 2)) == ["data:2,model:4", "data:8", "model:8"]


def test_a_script_with_one_axis_has_no_second_run() -> None:
    assert meshes(("data", 8)) == []
