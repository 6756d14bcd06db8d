"""The right classes, roles and warnings stand at the top of each script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from automesh import jsonio
from automesh.program.infer.nouns import ArrayClasses, CautionKind, Role, StepClasses
from tests.program.capture.test_run_script import environment
from tests.support.made_once import made_once
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "data" / "scripts" / "infer"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, StepClasses]:
    answers = made_once(tmp_path_factory, "inferred", lambda _: inferred())[1]
    return {name: jsonio.from_json(one, StepClasses) for name, one in answers.items()}


def inferred() -> dict[str, Any]:
    scripts = sorted(map(str, FOLDER.glob("*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.jobs.inferred_scripts", *scripts],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def argument(classes: StepClasses, name: str) -> ArrayClasses:
    return next(one for one in classes.arguments if one.name == name)


def kinds(classes: StepClasses) -> set[CautionKind]:
    return {one.kind for one in classes.cautions}


def roles(classes: StepClasses) -> dict[str, Role]:
    return {one.name: one.role for one in classes.arguments}


def is_split(classes: StepClasses, name: str) -> bool:
    return not classes.named(name).whole


@pytest.mark.slow
def test_a_batch_made_inside(found: Mapping[str, StepClasses]) -> None:
    case = found["batch_made_inside"]
    assert roles(case) == {
        "key": Role.KEY,
        "params['embed']": Role.PARAMETER,
        "params['out']": Role.PARAMETER,
    }
    assert argument(case, "key").dims == ("",)
    assert argument(case, "params['embed']").dims == ("vocab", "embed")
    assert argument(case, "params['out']").dims == ("embed", "vocab")
    (batch,) = case.batches
    assert (batch.name, batch.size, batch.parts) == ("batch", 128, 128)
    vocab = case.named("vocab")
    assert vocab.parts == 1
    assert vocab.whole.startswith("65 = 5 * 13 divides by no mesh axis")
    (text,) = case.held
    assert (text.shape, text.role) == ((110_130,), Role.DATA)
    assert not is_split(case, text.dims[0])
    # The constraint is on what is gathered: the 128 rows.
    assert [(one.shape, one.dims) for one in case.inner] == [((128, 65), ("batch", ""))]
    assert {CautionKind.BATCH_INSIDE, CautionKind.GATHERS_DATA_SET} <= kinds(case)
    assert CautionKind.NO_LOSS not in kinds(case)


def test_an_epoch_in_one_step(found: Mapping[str, StepClasses]) -> None:
    case = found["epoch_in_one_step"]
    assert argument(case, "rows").role == Role.DATA
    data_set, pixel = argument(case, "rows").dims
    assert (case.named(data_set).size, case.named(pixel).size) == (4096, 784)
    assert not is_split(case, data_set)
    assert "gathers all of it" in case.named(data_set).whole
    (batch,) = case.batches
    assert batch.size == 32
    assert all(batch.name not in one.dims for one in case.arguments)
    weight, velocity = argument(case, "state[0][0]"), argument(case, "state[0][1]")
    assert (weight.role, velocity.role) == (Role.PARAMETER, Role.MOMENT)
    assert weight.dims == velocity.dims
    assert weight.dims[0] == pixel
    assert case.arguments[velocity.of or 0] is weight
    assert ((32, 784), (batch.name, "")) in [(one.shape, one.dims) for one in case.inner]
    assert case.steps_per_call == 128
    assert {
        CautionKind.MANY_STEPS,
        CautionKind.NO_LOSS,
        CautionKind.GATHERS_DATA_SET,
        CautionKind.BATCH_INSIDE,
    } <= kinds(case)


def test_equal_sizes_are_no_classes(found: Mapping[str, StepClasses]) -> None:
    case = found["equal_sizes"]
    dims = {one.name: one.dims for one in case.arguments}
    assert dims == {
        "state['embed']": ("vocab", "embed"),
        "state['up']": ("embed", "mlp"),
        "state['down']": ("mlp", "embed"),
        "state['out']": ("embed", "vocab"),
        "key": ("",),
        "tokens": ("batch", "sequence"),
    }
    sizes = {one.name: one.size for one in case.classes}
    assert sizes == {"batch": 2, "vocab": 128, "embed": 128, "sequence": 128, "mlp": 512}
    assert [one.name for one in case.batches] == ["batch"]
    assert case.named("batch").parts == 2
    assert argument(case, "key").role == Role.KEY


def test_an_odd_tied_vocabulary(found: Mapping[str, StepClasses]) -> None:
    case = found["odd_tied_vocab"]
    assert argument(case, "table").dims == ("vocab", "embed")
    vocab = case.named("vocab")
    assert vocab.whole.startswith("50257 = 29 * 1733 divides by no mesh axis")
    assert vocab.cure == "pad it to 50304"
    assert argument(case, "keys").dims == ("batch",)
    assert argument(case, "keys").role == Role.KEY
    assert argument(case, "keys").state_of is None
    assert argument(case, "tokens").dims == ("batch", "sequence")
    assert CautionKind.TIED in kinds(case)


def test_a_padded_graph(found: Mapping[str, StepClasses]) -> None:
    case = found["padded_graph"]
    assert argument(case, "senders").dims == argument(case, "receivers").dims == ("edges",)
    nodes, embed = argument(case, "nodes").dims
    assert nodes == "nodes"
    assert case.named(nodes).whole.startswith("33 = 3 * 11 divides by no mesh axis")
    assert argument(case, "w").dims[0] == embed
    assert not is_split(case, argument(case, "n_node").dims[0])
    assert [one.name for one in case.batches] == ["edges"]
    assert CautionKind.NO_BATCH in kinds(case)


def test_per_example_gradients(found: Mapping[str, StepClasses]) -> None:
    case = found["per_example_gradients"]
    assert roles(case) == {
        "key": Role.KEY,
        "i": Role.COUNTER,
        "w": Role.PARAMETER,
        "x": Role.DATA,
    }
    assert argument(case, "x").dims[0] == "batch"
    assert argument(case, "x").dims[1] == argument(case, "w").dims[0]
    assert {CautionKind.PER_EXAMPLE_GRADIENTS, CautionKind.NO_LOSS} <= kinds(case)
    (said,) = [one for one in case.cautions if one.kind == CautionKind.PER_EXAMPLE_GRADIENTS]
    assert "each of 256 examples (4,194,304 numbers)" in said.text


def test_time_is_first(found: Mapping[str, StepClasses]) -> None:
    case = found["time_major"]
    assert argument(case, "tokens").dims == ("time", "batch")
    assert "a loop walks over it" in case.named("time").whole
    assert case.named("batch").size == 32
    rows, columns = (case.named(name) for name in argument(case, "w").dims)
    assert [size for _, size in rows.pieces] == [128, 256]
    assert [size for _, size in columns.pieces] == [256] * 4
    # What the gates are of, and what the rows end with, is what the loop carries.
    assert {name for name, _ in columns.pieces} == {rows.pieces[1][0]} == {"hidden"}
    assert {CautionKind.PACKED, CautionKind.GRADIENT_IN_LOOP} <= kinds(case)
    (said,) = [one for one in case.cautions if one.kind == CautionKind.GRADIENT_IN_LOOP]
    assert "393,216 numbers" in said.text
    assert "each of 128 turns" in said.text


def test_two_batches_in_one(found: Mapping[str, StepClasses]) -> None:
    case = found["two_batches_in_one"]
    (batch,) = case.batches
    assert (batch.name, batch.size, batch.parts) == ("batch", 64, 64)
    assert argument(case, "real").dims[0] == "batch"
    # Each of the two draws of noise has the batch, too.
    assert [(one.shape, one.dims) for one in case.inner] == [((64, 20), ("batch", ""))] * 2
    columns = case.named(argument(case, "gen").dims[1])
    assert columns.parts == 1
    assert columns.stored == 3136
    assert "3,136 = 7 * 448" in columns.whole
    assert argument(case, "real").dims[3] == argument(case, "disc").dims[0]
    (said,) = [one for one in case.cautions if one.kind == CautionKind.STACKED_BATCHES]
    assert "2 batches of 64" in said.text
    assert "(2, 64, ...)" in said.text
    assert [one.role for one in case.arguments] == [
        Role.KEY,
        Role.PARAMETER,
        Role.PARAMETER,
        Role.DATA,
    ]
