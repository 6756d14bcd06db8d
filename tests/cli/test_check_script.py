"""`automesh check-script`: what is said of scripts that are ready, and of those that are not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import automesh
from automesh import jsonio
from automesh.answers import ScriptCheck
from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, Plan
from automesh.program.nouns import StepRef
from automesh.program.step_summary import Argument, CarriedArgument, StepSummary
from automesh.report.script_check.nouns import CheckedScript, Problem, ProgramCheck
from automesh.report.script_check.table import SCHEMA
from automesh.tuner import script_check
from automesh.tuner.script_check import alone, covering
from automesh.worker.handlers import jobs
from automesh.worker.messages import SummarizeJob
from tests.support import paths
from tests.support.paths import ROOT, SCRIPTS
from tests.support.program_jobs import script

GOLDEN = paths.GOLDEN / "check_script"
CHECKED = SCRIPTS / "checked.py"


def check(name: str, text: str) -> None:
    """Compares with the golden file, which is written if it is not there."""
    # What a program says of itself, jax's frames and this machine's folders are another test's.
    text = re.sub(r"`[^`]*stablehlo[^`]*`", "`LINE`", " ".join(text.split(" ")))
    text = text.replace(str(ROOT), "AUTOMESH")
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path} was not there and is written now: read it")
    assert text == path.read_text(encoding="utf-8")


def checked(function: str, **more: str) -> ScriptCheck:
    options = {"target": "cpu:4", **more}
    return automesh.check_script(f"{CHECKED.name}:{function}", **options)


@pytest.fixture
def in_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setattr(script_check, "BUILDING_S", 0.0)  # How many are built depends on the host.
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


READY = {
    "dense_lm": (ROOT / "examples", "dense_lm.py", {"space": "dense_lm", "target": "cpu:8"}),
    "haliax_lm": (
        ROOT / "examples",
        "haliax_lm.py",
        {"space": "haliax_lm.toml", "target": "cpu:8"},
    ),
    "train_state": (SCRIPTS / "steps", "train_state.py", {"target": "cpu:4"}),
    "everything": (SCRIPTS, "checked.py:everything", {"target": "cpu:4", "space": "own.toml"}),
}
_SLOWEST = ("haliax_lm", "train_state")
OWN = "[axes]\ndp = {}\ntp = { max = 2 }\n[knobs]\nfused = [false, true]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.long) if one in _SLOWEST else one for one in READY],
)
def test_a_ready_script_in_words(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, text, options = READY[name]
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(script_check, "BUILDING_S", 0.0)  # How many are built depends on the host.
    if options.get("space") == "own.toml":
        (tmp_path / "own.toml").write_text(OWN)
        options = {**options, "space": str(tmp_path / "own.toml")}
    found = automesh.check_script(text, **options)
    assert found.is_ready
    if "space" in options and Path(options["space"]).is_absolute():
        # Where lines are broken depends on the length of that path.
        assert "own.toml" in "".join(found.table(width=80).split())
    else:
        check(name, found.table(width=80))


def test_a_script_without_a_mesh_has_classes_of_dimensions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine with a single device, too, over which nothing could be split."""
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = automesh.check_script(SCRIPTS / "infer" / "odd_tied_vocab.py", target="local")
    assert found.is_ready
    assert (found.found.target, found.found.command.split()[-1]) == ("cpu-8", "cpu:8")
    classes = found.to_json()["step"]["classes"]
    dims = {one["name"]: one["dims"] for one in classes["arguments"]}
    assert dims == {
        "table": ["vocab", "embed"],
        "tokens": ["batch", "sequence"],
        "keys": ["batch"],
    }
    text = " ".join(found.table(width=80).split())
    assert "vocab 50,257: table.0; whole: 50257 = 29 * 1733 divides by no mesh axis" in text
    assert "(pad it to 50304)" in text
    assert "roles parameter: table data: tokens key: keys" in text


PROBLEMS = {
    "nothing_split": "the step splits nothing over the mesh axes `dp`, `fsdp`, `ep`, `tp`, `sp`",
    "nothing_to_compare": "the step returns no scalar float, such as its loss",
    "other_axes": "`other_axes` uses the mesh axis `",
    "mesh_in_facts": "the fact `batch` depends on the mesh: it is 8 on one device and 32 on",
    "unfit_baseline": "the sizes of mesh `dp:3` multiply to 3, but there are 4 devices",
    "changing": "`args[0]` is float32[",
    "timed": "the step is traced to another program every time: `",
    "raising": "`raising` raised ValueError: there is no such layer",
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("function", PROBLEMS)
def test_a_problem_is_named_with_what_to_do(function: str, in_scripts: None) -> None:
    found = checked(function)
    assert not found.is_ready
    (problem,) = found.found.problems
    assert PROBLEMS[function] in problem.what
    assert problem.hint
    assert f"automesh search checked.py:{function} --target cpu:4" in found.table(width=200)
    # The others name what comes first, count calls, or quote what depends on the release of jax.
    if function not in ("changing", "other_axes", "timed", "raising"):
        check(function, found.table(width=80))


@pytest.mark.slow
def test_a_step_without_a_loss_is_ready_where_it_carries_something_on(in_scripts: None) -> None:
    found = checked("no_loss")
    assert found.is_ready
    assert "meshes are compared by the first updates" in " ".join(found.table(width=80).split())


@pytest.mark.slow
def test_a_set_of_names_is_a_note_and_no_problem(in_scripts: None) -> None:
    found = checked("ordered")
    assert found.is_ready
    program = found.found.program
    assert (program.found, program.hash_seed, program.other_seed) == ("by hash seed", "0", "1")
    assert "(checked.py:" in program.detail
    (note,) = found.found.notes
    assert note.startswith("the program depends on the order of a set (`")


@pytest.mark.slow
def test_where_one_process_is_served_the_others_come_after_it(
    in_scripts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_check, "serves_several", lambda target: False)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    program = checked("ordered").found.program
    assert (program.found, program.hash_seed, program.other_seed) == ("by hash seed", "7", "8")


@pytest.mark.slow
def test_meshes_that_cannot_be_traced_are_told(in_scripts: None) -> None:
    found = checked("indivisible")
    assert found.is_ready
    assert found.found.meshes == ("dp:4",)
    notes = " ".join(found.found.notes)
    for mesh in ("dp:2,tp:2", "tp:4"):
        assert f"not on {mesh}: lowering the step raised IndivisibleError: dimension 1" in notes


REFUSING = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def build(mesh):
    if mesh.shape["tp"] == 8:
        raise ValueError("tp 8 needs 8 heads, and there are 4")
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, P("dp", None)))

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, loss

    return step, (w, x)
"""


@pytest.mark.slow
def test_plans_that_the_step_refuses_are_not_called_legal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the plan is none of those on which the step is traced for its description."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "refusing.py").write_text(REFUSING, encoding="utf-8")
    found = automesh.check_script("refusing.py", target="cpu:8")
    assert found.is_ready and found.found.plans is not None
    assert found.found.meshes == ("dp:4,tp:2",)
    plans = found.found.plans
    assert (plans.legal, plans.built) == (3, 3)
    assert ("ValueError at refusing.py:7", 1) in plans.ruled_out
    assert any("`tp:8` cannot be built: ValueError: tp 8 needs" in one for one in found.found.notes)


@pytest.mark.slow
def test_a_check_without_time_says_on_how_many_plans_the_step_was_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script_check, "BUILDING_S", 0.0)
    (tmp_path / "refusing.py").write_text(REFUSING, encoding="utf-8")
    found = automesh.check_script("refusing.py", target="cpu:8")
    text = " ".join(found.table(width=300).split())
    assert "plans 4 of 35 plans are legal" in text
    assert "the step was built on none of the legal ones in the time of this check" in text


@pytest.mark.slow
def test_a_baseline_that_the_step_refuses_is_to_be_mended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A search refuses it, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "refusing.py").write_text(REFUSING, encoding="utf-8")
    found = automesh.check_script("refusing.py", target="cpu:8", baseline="tp:8")
    (problem,) = found.found.problems
    assert "the baseline `tp:8` cannot be built" in problem.what


@pytest.mark.slow
def test_what_is_donated_and_lost_is_told(in_scripts: None) -> None:
    found = checked("lost")
    assert found.is_ready and found.found.step is not None
    assert found.found.step.lost == ("args[0]",)
    assert any("donated, and no output replaces it" in note for note in found.found.notes)
    assert any("every step starts from the same arguments" in note for note in found.found.notes)


@pytest.mark.slow
def test_a_single_device_is_looked_at_as_eight(
    in_scripts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = checked("everything", target="local").found
    assert (found.device_count, found.target) == (8, "cpu-8")
    assert found.command.endswith("--target cpu:8")
    assert any("single device" in note for note in found.notes)


def test_a_script_that_cannot_be_loaded_is_refused(in_scripts: None) -> None:
    with pytest.raises(UsageError, match="has no function `nowhere`"):
        checked("nowhere")
    with pytest.raises(UsageError, match="no script"):
        automesh.check_script("nowhere.py")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    unwanted = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PYTHONHASHSEED")
    return subprocess.run(
        [sys.executable, "-m", "automesh", "check-script", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        env={name: value for name, value in os.environ.items() if name not in unwanted},
    )


@pytest.mark.slow
def test_the_command_says_what_it_does_and_ends_with_a_code() -> None:
    arguments = ("--target", "cpu:2", "--json", "--", "--size", "small")
    ready = run("checked.py:everything", *arguments, folder=SCRIPTS)
    assert ready.returncode == 0, ready.stderr
    said = ready.stderr.splitlines()
    assert said[0] == f"importing {CHECKED}"
    assert "calling `everything` twice on dp:2" in said
    assert "tracing the step in a second process" in said
    data = json.loads(ready.stdout)
    assert (data.pop("schema"), data.pop("ready")) == (SCHEMA, True)
    # Strict: an unknown, missing or mistyped key is an error.
    found = jsonio.from_json(data, CheckedScript)
    assert found.command == ("automesh search checked.py:everything --target cpu:2 -- --size small")
    wrong = run("checked.py:raising", "--target", "cpu:2", folder=SCRIPTS)
    assert wrong.returncode == 1
    assert "mend 1" in wrong.stdout


def summary(path: Path, mesh: str = "dp:2,tp:2") -> StepSummary:
    """What the worker says of a script, without a worker."""
    sizes = dict(part.split(":") for part in mesh.split(","))
    axes = tuple(MeshAxis(name=name, ici=int(sizes.get(name, 1))) for name in ("dp", "tp"))
    job = SummarizeJob(
        step=StepRef(entry=script(path)),
        plan=Plan(axes=axes),
    )
    found = jobs.handle(job, lambda event: {})
    assert isinstance(found, StepSummary)
    return found


def by_name(found: StepSummary) -> dict[str, Argument]:
    return {one.name: one for one in found.arguments}


def test_arrays_are_described_as_the_step_takes_them() -> None:
    found = summary(SCRIPTS / "steps" / "typed_keys.py")
    arguments = by_name(found)
    weights, keys = arguments["args[0][0]"], arguments["args[0][2]"]
    assert (weights.shape, weights.dtype, weights.spec) == ((16, 32), "float32", "P(None, 'tp')")
    assert (weights.total_bytes, weights.device_bytes) == (2048, 1024)
    assert weights.is_donated and not arguments["args[1]"].is_donated
    assert (keys.dtype, keys.origin, keys.values) == ("key<fry>", "made up", "random keys")
    assert found.carried == (CarriedArgument(argument="args[0]", output="outputs[0]", arrays=3),)
    assert found.losses == ("outputs[1]",)
    assert found.change == ""


def test_static_and_keyword_arguments_keep_their_places() -> None:
    found = summary(SCRIPTS / "steps" / "keyword_arguments.py")
    assert found.static == (("kwargs['clip']", "True"),)
    assert by_name(found)["kwargs['rate']"].origin == "build"


def test_what_is_changed_in_place_is_carried() -> None:
    found = summary(SCRIPTS / "steps" / "nnx_objects.py")
    assert [(one.argument, one.output) for one in found.carried] == [
        ("args[0]", ""),
        ("args[1]", ""),
    ]


def test_a_traced_step_is_described_by_what_it_was_traced_for() -> None:
    found = by_name(summary(SCRIPTS / "steps" / "traced_stage.py"))
    assert found["args[0]"].spec == "P(None, 'tp')"


@pytest.mark.parametrize("path", sorted((SCRIPTS / "steps").glob("*.py")), ids=lambda one: one.stem)
def test_every_kind_of_step_can_be_described(path: Path) -> None:
    found = summary(path)
    assert found.change == ""
    assert found.losses
    names = [one.name for one in found.arguments]
    assert len(set(names)) == len(names)
    for one in found.arguments:
        assert 0 <= one.device_bytes <= one.total_bytes
        assert bool(one.values) == (one.origin == "made up")


def argument(name: str, shape: tuple[int, ...], spec: str = "") -> Argument:
    size = 4
    for one in shape:
        size *= one
    return Argument(
        name=name,
        shape=shape,
        dtype="float32",
        spec=spec,
        total_bytes=size,
        device_bytes=size,
        is_donated=False,
        is_ref=False,
        origin="made up",
        values="floats of both signs",
    )


def record(arguments: tuple[Argument, ...]) -> CheckedScript:
    step = StepSummary(
        arguments=arguments,
        static=(("args[9]", "Config()"),),
        carried=(),
        lost=(),
        losses=("outputs[1]",),
        has_init=False,
        has_advance=False,
        is_pipeline=False,
        change="",
        fingerprint="f",
    )
    return CheckedScript(
        script="train.py",
        function="build",
        target="cpu-8",
        platform="cpu",
        device="cpu",
        device_count=8,
        mesh="dp:8",
        meshes=("dp:8",),
        step=step,
        axes=("dp", "tp"),
        used_axes=("dp",),
        searched_axes=("dp",),
        axis_types=(),
        baseline="",
        facts=(),
        tokens_per_step=0,
        knobs=(),
        left_out=(),
        program=ProgramCheck(found="same", detail="", hash_seed="0", other_seed="1"),
        plans=None,
        notes=(),
        problems=(),
        command="automesh search train.py",
        versions=(),
    )


def model(layers: int) -> tuple[Argument, ...]:
    """Parameters and two moments of a model of so many layers."""
    parts = ("params", "opt_state[0].mu", "opt_state[0].nu")
    return tuple(
        argument(f"args[0].{part}['layers'][{layer}]['{name}']", (8, width))
        for part in parts
        for layer in range(layers)
        for name, width in (("up", 32), ("down", 16))
    )


def test_a_single_array_has_its_figures_and_no_column_that_says_nothing() -> None:
    table = ScriptCheck(found=record((argument("args[0]", (8, 32)),))).table(width=100)
    (head,) = (line for line in table.splitlines() if line.startswith("argument"))
    assert [word for word in head.split("  ") if word.strip()] and "per device" in head
    assert "donated" not in head and "values" not in head


def test_layers_and_moments_share_lines() -> None:
    table = ScriptCheck(found=record(model(48))).table(width=100, colour=False)
    lines = table.splitlines()[4:8]
    assert [" ".join(line.split()[:3]) for line in lines] == [
        "args[0].params['layers'][0..47]['up'] f32[8,32] not",
        "args[0].params['layers'][0..47]['down'] f32[8,16] not",
        "args[0].opt_state[0].mu as args[0].params",
        "args[0].opt_state[0].nu as args[0].params",
    ], table
    assert "288 arrays" in table


def test_all_of_them_are_shown_when_asked_for() -> None:
    arguments = tuple(argument(f"args[0]['{chr(97 + k)}']", (k + 1,)) for k in range(26))
    table = ScriptCheck(found=record(arguments)).table(width=80, colour=False)
    assert "6 smaller ones of them, 84 B, not shown: --all shows each" in table
    assert "args[0]['a']" not in table.split("arrays ")[0]
    table = ScriptCheck(found=record(arguments)).table(width=80, colour=False, show_all=True)
    assert all(one.name in table for one in arguments)
    assert "--all" not in table


KEYS = st.lists(
    st.sampled_from([".params", ".mu", ".nu", "['w']", "['up']", "[0]", "[1]", "[12]", "['b2']"]),
    min_size=1,
    max_size=4,
)


@given(
    st.lists(KEYS, min_size=1, max_size=30, unique_by=tuple),
    st.integers(30, 140),
    st.booleans(),
)
def test_no_line_is_too_wide_and_no_byte_is_lost(
    keys: list[list[str]], width: int, show_all: bool
) -> None:
    found = record(tuple(argument("args[0]" + "".join(path), (8, 4)) for path in keys))
    table = ScriptCheck(found=found).table(width=width, colour=False, show_all=show_all)
    assert max(map(len, table.splitlines())) <= max(width, 40)
    assert f"{len(keys)} array" in table.replace("\n", " ")


def test_problems_have_numbers_and_hints() -> None:
    problems = (
        Problem(what="this is wrong", hint="do that:\n  line"),
        Problem(what="too", hint=""),
    )
    table = ScriptCheck(found=replace(record(()), problems=problems)).table(width=80, colour=False)
    assert table.endswith(
        "mend 1    this is wrong\nhint      do that:\n            line\nmend 2    too\n"
        "then      automesh search train.py\n"
    )


SIZES = st.sampled_from([1, 2, 4])


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=30))
def test_the_meshes_looked_at_cover_every_axis_that_can_be(sizes: list[tuple[int, ...]]) -> None:
    names = ("dp", "tp", "sp")
    plans = [
        Plan(axes=tuple(MeshAxis(name=name, ici=size) for name, size in zip(names, one)))
        for one in sizes
    ]
    above = [{name for name, size in plan.sizes.items() if size > 1} for plan in plans]
    coverable = set().union(*above)
    chosen = covering(plans, names)
    assert chosen and set(chosen) <= set(plans)
    assert {name for plan in chosen for name, size in plan.sizes.items() if size > 1} == coverable
    # The first has the most axes, and none is there for nothing.
    assert len(above[plans.index(chosen[0])]) == max(map(len, above))
    for plan in alone(plans, names):
        assert len([size for size in plan.sizes.values() if size > 1]) == 1


def test_without_plans_there_is_no_mesh() -> None:
    assert covering([], ("dp",)) == []
