"""The storage argument, trials as Optuna stores them, and what the modules cost to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, Plan
from automesh.tuner.study.optuna_records import extended, new_trial, read_trial
from automesh.tuner.study.storage import parse_storage
from tests.support.samples.storage_cases import SOURCE, VERSIONS, compiled, measured, opened, plans

FOLDER = Path("/results/lm-cpu-8-1234")


@pytest.mark.parametrize(
    ("text", "kind", "location"),
    [
        ("", "sqlite", "/results/lm-cpu-8-1234/study.db"),
        ("sqlite:////a/b.db", "sqlite", "/a/b.db"),
        ("sqlite:///b.db", "sqlite", "{here}/b.db"),
        ("sqlite+pysqlite:////a/b.db?timeout=3", "sqlite", "/a/b.db"),
        ("/a/b.sqlite3", "sqlite", "/a/b.sqlite3"),
        ("journal:///nfs/a", "journal", "/nfs/a"),
        ("journal:a", "journal", "{here}/a"),
        ("/nfs/a.journal", "journal", "/nfs/a.journal"),
        ("a.log", "journal", "{here}/a.log"),
        ("postgresql+psycopg://u:p@h/d", "server", "postgresql+psycopg://u:***@h/d"),
        ("postgresql+psycopg2://u@h/d", "server", "postgresql+psycopg2://u@h/d"),
        ("postgresql://u@h/d", "server", "postgresql+psycopg://u@h/d"),
        ("postgres://u@h/d", "server", "postgresql+psycopg://u@h/d"),
        ("mysql+pymysql://u@h/d", "server", "mysql+pymysql://u@h/d"),
    ],
)
def test_a_storage_is_read(text: str, kind: str, location: str) -> None:
    storage = parse_storage(text, FOLDER)
    assert (storage.kind, storage.location) == (kind, location.format(here=Path.cwd()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("redis://h", "`redis://h` is not a storage"),
        ("study.txt", "`study.txt` is not a storage"),
        ("oracle://u:secret@h/d", "`oracle://u:***@h/d` is not a storage"),
        ("postgresql:", "names no server"),
        ("postgresql://", "names no server"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("journal:", "names no file"),
    ],
)
def test_a_bad_storage(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_storage(text, FOLDER)
    assert words in caught.value.message
    assert "postgresql+psycopg://user@host/database" in caught.value.hint


names = st.sampled_from(["remat", "tp", "flag", "x.y"])
scalars = st.one_of(
    st.booleans(), st.integers(-3, 3), st.floats(-2, 2, allow_nan=False), st.text(max_size=3)
)
settings_of = st.dictionaries(names, scalars, max_size=3).map(lambda found: tuple(found.items()))


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=1, max_size=4))
    axes = tuple(
        MeshAxis(name=f"a{number}", ici=ici, dcn=dcn) for number, (ici, dcn) in enumerate(sizes)
    )
    return Plan(axes=axes, knobs=draw(settings_of), compiler_options=draw(settings_of))


# On a busy machine the first examples take seconds.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(any_plan(), min_size=1, max_size=4))
def test_a_plan_comes_back_from_its_trial_and_from_its_parameters(tried: list[Plan]) -> None:
    choices = extended(extended({}, tried[:1]), tried)
    assert {
        name: values[: len(old)]
        for name, values in choices.items()
        for old in [extended({}, tried[:1]).get(name, [])]
    } == {name: extended({}, tried[:1]).get(name, []) for name in choices}
    for plan in tried:
        frozen = new_trial(plan, choices, source_hash=SOURCE, versions=VERSIONS)
        trial = read_trial("compile", frozen)
        assert repr(trial.plan) == repr(plan)  # repr tells True from 1 from 1.0
        assert trial.matches(SOURCE, VERSIONS)
        chosen = {
            name: choices[name][index]
            for name, index in frozen.params.items()
            if name.startswith(("knob.", "option."))
        }
        wanted = {f"knob.{name}": value for name, value in plan.knobs}
        wanted |= {f"option.{name}": value for name, value in plan.compiler_options}
        assert {name: json.dumps(value) for name, value in chosen.items() if value is not None} == {
            name: json.dumps(value) for name, value in wanted.items()
        }
        for axis in plan.axes:
            assert frozen.params[axis.name] == axis.ici
            assert frozen.params.get(f"dcn.{axis.name}", 1) == axis.dcn


def test_impossible_times_are_refused(tmp_path: Path) -> None:
    with opened(parse_storage("", tmp_path)) as study:
        study.lead()
        trial = study.measure.begin(plans(1)[0])
        for step_s in (float("nan"), float("inf"), 0.0, -1.0):
            with pytest.raises(ValueError, match="a step cannot take"):
                study.measure.finish(trial, measured(step_s))


def test_optuna_reads_the_file_by_itself(tmp_path: Path) -> None:
    with opened(parse_storage("", tmp_path)) as study:
        study.lead()
        axes = [(8, 1), (4, 2), (2, 4), (1, 8)]
        tried = [
            Plan(
                axes=(MeshAxis(name="dp", ici=dp), MeshAxis(name="tp", ici=tp)),
                knobs=(("remat", remat),),
            )
            for dp, tp in axes
            for remat in ("none", "full")
        ]
        study.compile.enqueue(tried)
        for trial in iter(study.compile.claim, None):
            tp = trial.plan.sizes["tp"]
            study.compile.finish(trial, compiled(0.1 * tp + 0.01 * trial.number))
    by_itself = optuna.load_study(
        study_name="lm-cpu-8-1234/compile", storage=f"sqlite:///{tmp_path}/study.db"
    )
    assert by_itself.best_trial.user_attrs["plan"] == "dp:8 remat=none"
    assert by_itself.trials_dataframe()["value"].notna().all()
    importances = optuna.importance.get_param_importances(
        by_itself, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )
    assert set(importances) == {"dp", "tp", "knob.remat"}
    assert importances["knob.remat"] < importances["tp"]
    by_itself._storage.remove_session()


def test_importing_the_study_is_cheap() -> None:
    code = (
        "import sys, automesh.tuner.study.study; "
        "print([name for name in ('optuna', 'sqlalchemy', 'pandas', 'jax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
