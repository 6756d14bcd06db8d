"""What a search says of a script that it runs as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automesh.errors import UsageError
from automesh.hardware import parse_target
from automesh.program.capture.nouns import (
    Capture,
    Carried,
    Discovery,
    LoopStep,
    ScriptMesh,
    ScriptStep,
    SourceLine,
    StepPart,
)
from automesh.program.infer.nouns import StepClasses
from automesh.program.nouns import Entry
from automesh.space.space import SearchSpace
from automesh.tuner.request import SearchRequest
from automesh.tuner.script.around import check_around, searched_around
from automesh.tuner.script.capture import (
    _baseline,  # pyright: ignore[reportPrivateUsage]
    _notices,  # pyright: ignore[reportPrivateUsage]
    _space,  # pyright: ignore[reportPrivateUsage]
)

LINE = SourceLine(file="/home/me/train.py", line=7)
STEP = ScriptStep(
    name="train_step",
    defined_at=SourceLine(file="/home/me/train.py", line=3),
    called_at=LINE,
    argument_bytes=2048,
    carried=(Carried(output=0, argument=0, count=1),),
    calls=3,
    flops=300.0,
)
MESH = ScriptMesh(axes=(("data", 4),), axis_types=("auto",), made_at=LINE)


def told(step: ScriptStep, *others: ScriptStep) -> str:
    found = Discovery(
        capture=Capture(mesh=MESH, step=step),
        batch_axes=("data",),
        num_devices=4,
        other_steps=others,
    )
    return "\n".join(
        _notices(found, SearchSpace(name="own", shipped=True, names=("data",), axes=()))
    )


def test_what_is_not_searched_has_its_share() -> None:
    said = told(STEP, replace(STEP, name="eval_step", calls=1, flops=100.0))
    assert "not searched: `eval_step` (train.py:7; 1 call, 2.00 KiB, 10% of the work" in said
    assert "`--step NAME` searches another" in said


def test_a_choice_in_doubt_names_the_option_and_the_others() -> None:
    said = told(replace(STEP, doubt="no gradient is taken in it"), replace(STEP, name="update"))
    assert "`train_step` may not be the step: no gradient is taken in it" in said
    assert "`--step NAME` chooses another function, among `update`" in said
    assert "may not be" not in told(STEP)


def test_what_is_made_outside_of_jit_is_said_with_the_cure() -> None:
    said = told(replace(STEP, carried=(), outside=("moments", "params")))
    assert "only loss and gradients are jitted (`train_step`): `moments` and `params` are" in said
    assert "neither estimated nor timed; jit the update, too" in said
    assert "comes back" not in said


def test_steps_of_parts_and_turns_are_said_to_be_so() -> None:
    parts = tuple(
        StepPart(name=name, defined_at=SourceLine(), called_at=LINE, skipped=0, kept=(0,))
        for name in ("grad_fn", "apply_fn")
    )
    said = told(replace(STEP, name="grad_fn+apply_fn", parts=parts))
    assert "`grad_fn`, called at train.py:7 and then `apply_fn`, called at train.py:7" in said
    assert "searched as one step" in said
    said = told(replace(STEP, loop=LoopStep(at=LINE, turns=2000)))
    assert "one turn of its loop at train.py:7, of 2,000" in said


REQUEST = SearchRequest(
    subject=Entry(kind="script", location="/home/me/train.py", function=""), infer=True
)


def test_explicit_axes_are_refused_where_other_shardings_are_wanted() -> None:
    mesh = replace(MESH, axis_types=("explicit",))
    found = Discovery(capture=Capture(mesh=mesh, step=STEP), batch_axes=("data",), num_devices=4)
    with pytest.raises(UsageError, match=r"the axes of data:4 \(train.py:7\) are Explicit"):
        check_around(REQUEST, found)
    check_around(REQUEST, replace(found, capture=replace(found.capture, mesh=MESH)))


def test_a_step_that_is_not_stored_is_not_split_in_other_ways() -> None:
    found = Discovery(
        capture=Capture(mesh=MESH, step=STEP),
        batch_axes=("data",),
        num_devices=4,
        notices=("train.py is run again for each mesh: it has a callback",),
        classes=StepClasses(classes=(), arguments=()),
    )
    space = SearchSpace(name="own", shipped=True, names=("data",), axes=())
    with pytest.raises(UsageError, match=r"needs the stored step of train.py: .* has a callback"):
        searched_around(REQUEST, parse_target("cpu:4", {}), found, space)


def spanning(axes: tuple[tuple[str, int], ...], *batch: str) -> tuple[tuple[str, ...], str, str]:
    """Returns the axes that may span nodes, the baseline on 16 nodes of 8 devices, and the
    notice."""
    mesh = ScriptMesh(axes=axes, axis_types=("auto",) * len(axes), made_at=LINE)
    found = Discovery(
        capture=Capture(mesh=mesh, step=STEP), batch_axes=batch, num_devices=mesh.num_devices
    )
    request = SearchRequest(
        subject=Entry(kind="script", location="/home/me/train.py", function="train_step")
    )
    space = _space(request, found)
    said = next((one for one in _notices(found, space) if "may span" in one), "")
    slow = tuple(axis.name for axis in space.axes if axis.dcn)
    return slow, _baseline(found, parse_target("gpu-h100-128", {})), said


@pytest.mark.parametrize("batch", [("envs",), ("fsdp",), ("envs", "fsdp")])
def test_axes_of_data_span_nodes_whatever_their_names(batch: tuple[str, ...]) -> None:
    slow, baseline, said = spanning((("envs", 64), ("fsdp", 2)), *batch)
    assert slow == ("envs", "fsdp") and not said
    assert baseline == "dcn.envs:16,envs:4,fsdp:2"


def test_an_axis_that_splits_state_alone_takes_the_nodes_that_the_batch_does_not_fill() -> None:
    """Before, such a mesh could not be laid out, and nothing was compared with the script's own."""
    slow, baseline, said = spanning((("dp", 4), ("fsdp", 16), ("tp", 2)), "dp")
    assert slow == ("dp", "fsdp")
    assert baseline == "dcn.dp:4,dcn.fsdp:4,fsdp:4,tp:2"
    assert said.startswith(
        "only `dp`, `fsdp` may span slices or nodes: no batch is split over `tp`,"
    )


def test_a_model_axis_spans_nodes_if_the_batch_is_split_over_it() -> None:
    assert spanning((("dp", 64), ("sp", 2)), "dp", "sp")[0] == ("dp", "sp")
    assert spanning((("dp", 64), ("sp", 2)))[0] == ("dp", "sp")  # Nothing shows the batch.


def test_axes_of_the_batch_that_the_mesh_lacks_leave_all_others_free() -> None:
    """Else no axis spans nodes, and no mesh of several nodes is legal."""
    assert spanning((("tp", 64), ("sp", 2)), "rows")[0] == ("tp", "sp")
