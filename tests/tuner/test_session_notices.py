"""Notices about plans that the builds of a search have ruled out."""

from __future__ import annotations

from dataclasses import replace

from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import RuledOut
from automesh.program.capture.nouns import Capture, ScriptMesh, ScriptStep, SourceLine
from automesh.program.nouns import Entry
from automesh.tuner.session import _not_run_there

LINE = SourceLine(file="/home/me/train.py", line=3)
MESH = ScriptMesh(axes=(("data", 2), ("model", 4)), axis_types=("auto",) * 2, made_at=LINE)
STEP = ScriptStep(name="step", defined_at=LINE, called_at=LINE, argument_bytes=8)
CARRIED = Capture(mesh=MESH, step=STEP).stored("trace")
PLAN = Plan(axes=parse_mesh("model:8", ("data", "model")))


def test_a_carried_script_was_not_run_on_meshes_that_do_not_divide_its_arrays() -> None:
    """A script pads its vocabulary for its mesh: of 1,008 rows, not 1,004, eight devices take
    126."""
    entry = Entry(kind="script", location="/home/me/train.py", function="step", capture=CARRIED)
    refused = {PLAN: RuledOut(rule="model divides 1004", detail="model is 8")}
    (said,) = _not_run_there(entry, refused)
    assert said.startswith("train.py was not run on meshes that do not divide its arrays")
    assert "as they are on data:2,model:4" in said
    others = {PLAN: RuledOut(rule="axis data unused by the step", detail="")}
    assert _not_run_there(entry, others) == ()
    assert _not_run_there(replace(entry, capture=Capture(mesh=MESH, step=STEP)), refused) == ()
    assert _not_run_there(replace(entry, capture=None), refused) == ()
