"""What changed since the last search: seen, named, and decided by the program that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import automesh
from automesh.mesh.axes import MeshAxis, Plan
from automesh.report.progress import Silent
from automesh.report.result import SearchResult
from automesh.tuner.study.freshness import (
    MOST_LOWERED,
    NOTE,
    Grounds,
    changed_versions,
    changes,
    settle,
)
from automesh.tuner.study.storage import Storage
from automesh.tuner.study.study import open_study
from tests.support.paths import ROOT
from tests.support.samples.storage_cases import compiled

pytest_plugins = ("tests.support.storage_fixtures",)

VERSIONS = (("jax", "0.12.0"),)
GROUNDS = Grounds(
    source_hash="first",
    program="p",
    files=(("/x/train.py", "aa"), ("/x/config.json", "bb")),
    variables=(("MODE", "cc"),),
    packages=(("optax", "0.2.5"),),
)
EDITED = replace(GROUNDS, source_hash="second", files=(GROUNDS.files[0], ("/x/config.json", "ee")))


def plan(size: int, remat: str = "none") -> Plan:
    return Plan(axes=(MeshAxis(name="dp", ici=size),), knobs=(("remat", remat),))


def searched(storage: Storage, programs: dict[Plan, str]) -> None:
    """A study in which plans were compiled for the first grounds."""
    with open_study(storage, "s", source_hash="first", versions=VERSIONS) as study:
        assert study.lead()
        assert settle(study, GROUNDS, VERSIONS, never).source_hash == "first"
        study.compile.enqueue(programs)
        while (trial := study.compile.claim()) is not None:
            fingerprint = programs[trial.plan]
            study.compile.finish(trial, compiled(1.0, fingerprint), fingerprint=fingerprint)


def never(plan: Plan) -> str:
    raise AssertionError(f"{plan} is lowered though nothing changed")


def settled(storage: Storage, now: Grounds, lower: Callable[[Plan], str] | None):
    with open_study(storage, "s", source_hash=now.source_hash, versions=VERSIONS) as study:
        return settle(study, now, VERSIONS, lower)


kinds = pytest.mark.parametrize("kind", ["sqlite"], indirect=True)


@kinds
def test_nothing_is_lowered_while_nothing_changes(storage: Storage) -> None:
    searched(storage, {plan(2): "f"})
    assert settled(storage, GROUNDS, never).source_hash == "first"
    # A clone in another folder is the same script.
    moved = tuple((path.replace("/x/", "/y/"), inside) for path, inside in GROUNDS.files)
    found = settled(storage, replace(GROUNDS, source_hash="moved", files=moved), never)
    assert (found.source_hash, found.notices) == ("first", ())


@kinds
def test_figures_hold_where_every_choice_of_knobs_is_the_same_program(storage: Storage) -> None:
    programs = {plan(2): "f", plan(2, "full"): "g", plan(1): "h"}
    searched(storage, programs)
    lowered: list[Plan] = []

    def lower(one: Plan) -> str:
        lowered.append(one)
        return programs[one]

    found = settled(storage, EDITED, lower)
    assert found.source_hash == "first"
    assert found.notices == (
        "`/x/config.json` has changed since the last search, the step has not: its figures hold",
    )
    assert [one.knobs for one in lowered] == [plan(2).knobs, plan(2, "full").knobs]
    assert settled(storage, EDITED, never).notices == ()


@kinds
def test_another_program_is_another_script_until_the_change_is_taken_back(
    storage: Storage,
) -> None:
    searched(storage, {plan(2): "f"})
    found = settled(storage, EDITED, lambda _: "other")
    assert found.source_hash == "second"
    assert found.notices == (
        "`/x/config.json` has changed since the last search, and the step is another program: what "
        "was found before is kept, not ranked",
    )
    assert settled(storage, EDITED, never).notices == ()
    back = settled(storage, GROUNDS, never)
    assert (back.source_hash, back.notices) == ("first", ())


@kinds
def test_a_step_that_changed_though_nothing_that_it_reads_did(storage: Storage) -> None:
    searched(storage, {plan(2): "f"})
    found = settled(storage, replace(GROUNDS, source_hash="new", program="q"), never)
    assert found.source_hash == "new"
    assert found.notices[0].startswith("nothing that it reads has changed since")


@kinds
@pytest.mark.parametrize("reason", ["absent", "too many", "no time"])
def test_what_cannot_be_lowered_is_taken_over_by_program_alone(
    storage: Storage, reason: str
) -> None:
    many = MOST_LOWERED + 1 if reason == "too many" else 1
    searched(storage, {plan(2, f"{number}"): f"f{number}" for number in range(many)})
    lower = {"absent": None, "too many": never, "no time": lambda _: ""}[reason]
    found = settled(storage, EDITED, lower)
    assert found.source_hash == "second"
    assert found.notices[0].endswith(
        ": what was found before is kept, and taken over where the program is the same"
    )


@kinds
def test_a_study_without_trials_has_nothing_to_say(storage: Storage) -> None:
    searched(storage, {})
    found = settled(storage, EDITED, never)
    assert (found.source_hash, found.notices) == ("second", ())


@pytest.mark.slow
@kinds
def test_notes_do_not_grow_without_end(storage: Storage) -> None:
    searched(storage, {plan(2): "f"})
    for number in range(30):
        now = replace(GROUNDS, source_hash=f"n{number}", variables=(("MODE", f"{number}"),))
        settled(storage, now, lambda _: "f")
    with open_study(storage, "s", create=False) as study:
        assert len(study.noted(NOTE)) == 20


def test_changes_are_named_one_by_one() -> None:
    now = replace(
        GROUNDS,
        files=(("/x/train.py", "zz"), ("/x/other.json", "dd")),
        variables=(("MODE", ""), ("SEED", "ff")),
        packages=(("flax", "0.12.0"), ("optax", "0.2.6")),
    )
    assert changes(GROUNDS, now) == (
        "`/x/train.py`",
        "`/x/other.json` (not read before)",
        "`/x/config.json` (not read any more)",
        "the variable MODE",
        "the variable SEED",
        "flax 0.12.0 (not imported before)",
        "optax 0.2.5 (now 0.2.6)",
    )
    assert changed_versions((("jax", "1"), ("XLA_FLAGS", "a")), (("jax", "2"),)) == (
        "XLA_FLAGS was a, is not there",
        "jax was 1, is 2",
    )


WATCHED = """
import os, sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from automesh.program.script.sources import watching
with watching() as watch:
    import reader
    if {whole}:
        reader.copy()
code = ((str(Path({folder!r}) / "reader.py"), "00"),)
reads = watch.reads((Path({folder!r}),), code)
print([Path(path).name for path, _ in reads.files])
print([name for name, _ in reads.variables], dict(reads.variables)["UNSET"] == "")
print([name for name, _ in reads.distributions])
"""
READER = """
import os
from pathlib import Path

here = Path(__file__).parent
(here / "config.json").read_text()
open(here / "log.txt", "w").close()
open(here / "log.txt").close()
try:
    open(here / "absent.toml")
except FileNotFoundError:
    pass
os.environ["MODE"], os.getenv("UNSET"), "SEEN" in os.environ
import optax


def copy():
    return dict(os.environ)
"""


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_what_a_script_reads_is_seen_and_nothing_else(tmp_path: Path, whole: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "reader.py").write_text(READER)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(folder=str(tmp_path), whole=whole)],
        env={**os.environ, "MODE": "a", "SEEN": "b", "OTHER": "c"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    files, variables, packages = done.stdout.splitlines()
    assert files == "['absent.toml', 'config.json']"
    assert variables == "['MODE', 'SEEN', 'UNSET'] True"
    assert "'optax'" in packages
    assert "pytest" not in packages


SCRIPT = """
import json, os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

RATE = json.loads((Path(__file__).parent / "config.json").read_text())["rate"]


def build(mesh):
    scale = float(os.environ.get("SCALE", "1"))

    def step(w, x):
        return w - RATE * scale * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return jax.jit(step), (struct((16, 16), None, "tp"), struct((8, 16), "dp"))
"""


class StopBeforeMeasuring(Silent):
    """Presses Ctrl-C when the compile rung is done."""

    def phase(
        self,
        name: str,
        *,
        total: int,
        done: int = 0,
        note: str = "",
        took_s: float = 0.0,
        lanes: int = 1,
    ) -> None:
        if name == "measure":
            raise KeyboardInterrupt


@pytest.mark.long
def test_an_edited_config_makes_figures_stale_and_every_run_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, config = tmp_path / "train.py", tmp_path / "config.json"
    script.write_text(SCRIPT)
    (tmp_path / "space.toml").write_text("[axes]\ndp = {}\ntp = {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCALE", raising=False)

    def run() -> SearchResult:
        return automesh.search(
            script,
            target="cpu:2",
            space=tmp_path / "space.toml",
            budget="60s",
            results=tmp_path / "results",
            progress=StopBeforeMeasuring(),
        ).found

    def said(result: SearchResult) -> str:
        return "\n".join(one for one in result.notices if "since the last" in one)

    config.write_text(json.dumps({"rate": 0.1}))
    first = run()
    assert (first.funnel.compiled, said(first)) == (2, "")
    # Another text, the same number.
    config.write_text(json.dumps({"rate": 0.10, "comment": "the same"}))
    assert said(run()) == (
        "`config.json` has changed since the last search, the step has not: its figures hold"
    )
    config.write_text(json.dumps({"rate": 0.2}))
    changed = run()
    assert said(changed).startswith("`config.json` has changed since the last search, and the step")
    assert "2 trials of an older script kept, not ranked" in changed.notices
    assert changed.funnel.compiled == 2
    monkeypatch.setenv("SCALE", "3")
    assert said(run()).startswith("the variable SCALE has changed since")
