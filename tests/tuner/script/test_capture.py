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
from automesh.tuner.script.capture import _notices  # pyright: ignore[reportPrivateUsage]

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
