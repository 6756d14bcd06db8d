"""Explaining the plans of a study: found by mesh and knobs, refused in sentences, never run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from automesh import api
from automesh.cli import app as cli
from automesh.errors import UsageError
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed
from automesh.program.nouns import Entry, Propagation, StepRef
from automesh.report.estimates import Estimates
from automesh.report.facts import Devices, Provenance, Searched, StudyFacts
from automesh.report.files.csv import write_estimates
from automesh.report.search_command import SearchCommand
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.tuner.study.metadata import Header, Notebook
from automesh.tuner.study.study import open_study, parse_storage
from automesh.worker.messages import PropagateJob
from tests.support.cases.bad_inputs import GOOD
from tests.support.cases.explain_golden import decoder
from tests.support.samples import explain_samples as samples
from tests.support.samples.explain_samples import AXES

VERSIONS = (("jax", "0.10.2"),)
COMMAND = "automesh search train.py"
MESHES = ("fsdp:16", "fsdp:4,tp:4", "tp:16")
UNREACHED = samples.plan("dp:4,fsdp:4", remat="full")


def header(folder: Path, **changes: Any) -> Header:
    """A header; `changes` of its own fields, or of its facts'."""
    again = SearchCommand(script="train.py")
    counts: dict[str, Any] = {"baseline": (), "enumerated": 9, "plans": 7, "ruled_out": ()}
    parts: list[dict[str, Any]] = [
        {"workload": "train", "axes": AXES, "batch_axes": (), "template": ""},
        {"target": "gpu-h100-16", "platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 16}
        | {"fabric": samples.fabric()},
        {"source_hash": "abc", "versions": VERSIONS, "again": again, "speeds": ""}
        | {"location": str(folder / "study.db"), "results_dir": str(folder)},
    ]
    for part in parts:
        part |= {name: changes.pop(name) for name in part if name in changes}
    searched, devices, provenance = parts
    facts = StudyFacts(
        searched=Searched(**searched),
        devices=Devices(**devices),
        provenance=Provenance(**provenance),
    )
    return Header(facts=facts, **(counts | changes))


def make_study(folder: Path, **changes: Any) -> Path:
    """A study of three meshes, each with two values of a knob, and one that was not estimated."""
    folder.mkdir()
    place = parse_storage("", folder)
    with open_study(place, folder.name, source_hash="abc", versions=VERSIONS) as study:
        book = Notebook(study=study, source_hash="abc", versions=VERSIONS)
        book.note_header(header(folder, **changes))
    cache = TermsCache(folder=folder / "terms", source_hash="abc", versions=VERSIONS)
    plans = [samples.plan(mesh, remat=remat) for remat in ("full", "none") for mesh in MESHES]
    for plan in plans:
        cache.keep(*propagated(plan))
    found = {
        plan: samples.explained(plan.mesh, decoder(*active_of(plan))).estimated for plan in plans
    }
    estimates = Estimates(found=found, missing={UNREACHED: "the time was used up"})
    write_estimates(estimates, folder / "estimates.csv")
    return folder


def active_of(plan: Plan) -> tuple[str, ...]:
    return tuple(axis.name for axis in plan.axes if axis.size > 1)


def propagated(plan: Plan) -> tuple[PropagateJob, Propagation]:
    terms = decoder(*active_of(plan))
    job = PropagateJob(
        step=StepRef(entry=Entry(kind="script", location="/train.py")),
        axis_names=AXES,
        knobs=plan.knobs,
        sizes=terms.sampled,
        probes=(),
        platform="gpu",
    )
    notes = ("random tokens balance the experts",)
    return job, Propagation(
        terms=terms, failed_probes=(), notes=notes, lower_s=1.0, propagate_s=1.0
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("explain") / "train-gpu-h100-16-0123abcd")


def test_what_the_step_refused_is_told_apart_from_what_was_not_reached(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", estimated=4, refused=2)
    tried = "9 plans: 4 estimated only, 2 refused by the step, 1 not reached"
    assert tried in " ".join(api.show(folder).table(width=200).split())
    # One that is compiled all the same counts as failed, and no longer as refused.
    place = parse_storage("", folder)
    with open_study(place, folder.name, source_hash="abc", versions=VERSIONS) as study:
        study.lead()
        trial = study.compile.begin(UNREACHED)
        assert trial is not None
        study.compile.finish(trial, Failed(stage="build", reason="4 is no multiple of 8"))
    tried = "9 plans: 1 failed, 4 estimated only, 1 refused by the step, 1 not reached"
    assert tried in " ".join(api.show(folder).table(width=200).split())


def test_a_mesh_stands_for_its_fastest_plan_unless_knobs_follow(study: Path) -> None:
    account = api.explain(study, "tp:4,fsdp:-1")
    assert str(account.found.one.plan) == "fsdp:4,tp:4 remat=full"
    assert account.found.notices == (
        "fsdp:4,tp:4 remat=full is one of 2 plans with that mesh: knobs after the mesh, as here, "
        "choose another",
        "random tokens balance the experts",
    )
    named = api.explain(study, "fsdp:4,tp:4 remat=none").found
    assert str(named.one.plan) == "fsdp:4,tp:4 remat=none"
    assert named.notices == ("random tokens balance the experts",)
    assert named.study == str(study / "study.db")


def test_two_meshes(study: Path) -> None:
    account = api.explain(study, "fsdp:4,tp:4 remat=full", against="fsdp:16 remat=full")
    assert account.why.startswith("Estimated, fsdp:16 is ")
    assert account.to_json()["against"]["plan"] == "fsdp:16 remat=full"


def test_the_other_mesh_gets_the_same_knobs(study: Path) -> None:
    found = api.explain(study, "fsdp:4,tp:4 remat=none", against="fsdp:16").found
    assert found.against is not None
    assert str(found.against.plan) == "fsdp:16 remat=none"
    other = api.explain(study, "fsdp:4,tp:4 remat=none", against="fsdp:16 remat=full").found
    assert other.against is not None
    assert str(other.against.plan) == "fsdp:16 remat=full"


@pytest.mark.parametrize(
    ("mesh", "against", "message", "hint"),
    [
        (
            "dp:16",
            "",
            "the mesh `dp:16` is none of the 4 meshes that are legal here",
            "the closest that are: `dp:4,fsdp:4`, `fsdp:16`, `fsdp:4,tp:4`",
        ),
        (
            "dp:4,fsdp:4",
            "",
            "the study holds no terms for `dp:4,fsdp:4 remat=full`: its estimate was not reached, "
            "or failed",
            f"run its search again: {COMMAND}",
        ),
        (
            "tp:8",
            "",
            "the sizes of mesh `tp:8` multiply to 8, but there are 16 devices",
            "let one size be -1 to have it inferred",
        ),
        (
            "tp:16 remat=fll",
            "",
            "no plan of the mesh `tp:16` has the settings `remat=fll`",
            "there are for example `remat=full`, `remat=none`",
        ),
        (
            "",
            "",
            "`` in mesh `` is not of the form `axis:size` or `dcn.axis:size`",
            "write for example `dp:2,tp:4` or `dcn.dp:2,fsdp:8`",
        ),
        (
            "tp:16 remat=full",
            "tp:16 remat=full",
            "both are the plan `tp:16 remat=full`: there is nothing to compare",
            "give another mesh, or knobs after the mesh, to --against",
        ),
    ],
)
def test_what_is_refused(study: Path, mesh: str, against: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        api.explain(study, mesh, against=against)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_options_of_a_script_do_not_belong_to_a_study(study: Path) -> None:
    with pytest.raises(UsageError, match="is a study, which has its target"):
        api.explain(study, "tp:16", target="cpu:8")


def test_no_such_study(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no study in"):
        api.explain(tmp_path / "nothing", "tp:16")


def test_a_study_without_estimates(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "old", fabric=None)
    with pytest.raises(UsageError) as caught:
        api.explain(folder, "tp:16")
    assert "keeps no terms: nothing in it was estimated, or the script" in caught.value.message
    assert caught.value.hint == f"run its search again: {COMMAND}"


def test_terms_of_another_script_are_not_used(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "changed", source_hash="another")
    with pytest.raises(UsageError, match="keeps no terms"):
        api.explain(folder, "tp:16")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command(
    study: Path,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["explain", str(study), "fsdp:16", "--against", "tp:16", *["--json"] * as_json]
    monkeypatch.setattr(sys, "argv", ["automesh", *command])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    if as_json:
        assert json.loads(out)["changes"]["collectives"]
    else:
        assert "why       Estimated, fsdp:16 is " in out
        assert max(map(len, out.splitlines())) <= 80


def test_a_script_that_no_search_has_seen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOOD)
    account = api.explain(tmp_path / "train.py", "dp:2,tp:2", against="dp:4", target="cpu:4")
    collectives = account.found.one.cost.collectives
    assert {one.kind for one in collectives} == {"all-reduce"}
    assert all(one.source.startswith("train.py:") for one in collectives)
    assert account.found.study == ""
    assert account.found.against is not None
    assert account.found.against.plan.knobs == account.found.one.plan.knobs
    with pytest.raises(UsageError, match="none of the 3 meshes that are legal here"):
        api.explain(tmp_path / "train.py", "sp:4", target="cpu:4")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
