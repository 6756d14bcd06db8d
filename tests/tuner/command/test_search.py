"""Searches by a command, on a program that says what its steps take: no jax, so they are quick."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import automesh
from automesh import api
from automesh.errors import NoFeasibleMesh, UsageError
from automesh.outcomes import Failed, Measured, OutOfMemory, TimedOut
from automesh.tuner.command.search import CommandStrategy
from automesh.tuner.command.start import source_hash
from automesh.tuner.request import SearchOptions, read_request
from automesh.tuner.study import lease
from automesh.tuner.study.rung import Rung
from automesh.tuner.study.study import open_study, parse_storage
from tests.support.cases import bad_inputs_run
from tests.support.paths import SCRIPTS
from tests.support.worker_jobs import living

FLAGS = SCRIPTS / "flags.py"
PATTERN = r"regex:loss (?P<loss>[0-9.]+), (?P<ms>[0-9.]+) ms"
RUN = f"{shlex.quote(sys.executable)} train.py --fsdp {{fsdp}} --tp {{tp}} --runs runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder with the program, in which searches run."""

    folder: Path

    def search(self, words: str = "", **options: object) -> api.Result:
        """Searches for eight devices, and keeps the study in the folder."""
        given = {
            "target": "cpu:8",
            "step_time": PATTERN,
            "budget": "5m",
            "results": self.folder / "results",
            "timed_steps": 3,
            "top": 1,
        }
        result = automesh.search(command=f"{RUN} {words}", **{**given, **options})  # type: ignore
        assert isinstance(result, api.Result)
        return result

    def runs(self) -> Counter[str]:
        """How often the program was begun, by mesh."""
        file = self.folder / "runs"
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter(line.split()[2] for line in lines if line.startswith("begin"))

    @property
    def study(self) -> Path:
        (study,) = (self.folder / "results").glob("train-cpu-8-*")
        return study


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "train.py").write_text(FLAGS.read_text())
    monkeypatch.chdir(tmp_path)
    return Place(folder=tmp_path)


def test_a_search_from_its_beginning_to_its_rule(place: Place) -> None:
    result = place.search(baseline="tp:8", top=2)
    assert living() == []
    found = result.found
    best = found.candidates[0]
    assert best.plan.mesh == "fsdp:8"
    assert isinstance(best.outcome, Measured) and best.outcome.confirmed
    assert len(best.outcome.rounds_s) == 5
    assert 0.0099 < best.outcome.step_s < 0.0103
    (verification,) = found.verifications
    assert verification.baseline == "tp:8" and not verification.is_tie
    assert verification.speedup == pytest.approx(3.1, rel=0.01)
    assert found.funnel.legal == 4 and found.funnel.measured == 4 and not found.funnel.waiting
    assert found.reference == "the baseline tp:8"
    assert {one.outcome.numerics for one in found.candidates} == {"agree", "reference"}
    # The rule, in the working directory.
    rules = (place.folder / "mesh_rules.toml").read_text()
    assert 'kind = "measured"' in rules
    assert "train.py --fsdp {fsdp} --tp {tp} --runs runs" in rules
    config = automesh.load("mesh_rules.toml").select("cpu-8")
    sizes = zip(config.mesh_axis_names, config.mesh_shape.ici_mesh_shape)
    assert dict(sizes) == {"fsdp": 8, "tp": 1}
    # Every run has its log, and nothing else is left of it.
    logs = sorted(path.name for path in (place.study / "logs").iterdir())
    assert logs == [f"run-{number:04d}.log" for number in range(sum(place.runs().values()))]
    # What was explored and confirmed, each in a process of its own; three need no race before.
    with open_study(parse_storage("", place.study), place.study.name, create=False) as study:
        labels = Counter(one.run.partition("-")[0] for one in study.measure.trials())
        assert all(one.state == "done" for one in study.measure.trials())
    # In five fresh turns the baseline and the best are told apart.
    assert labels["first"] == 4 and labels["fresh"] in (10, 15)  # One more where it may be faster.
    assert set(labels) == {"first", "fresh"}


@pytest.mark.slow
def test_the_same_again_runs_nothing_and_says_the_same(place: Place) -> None:
    first = place.search(baseline="tp:8")
    before = place.runs()
    second = place.search(baseline="tp:8")
    assert place.runs() == before
    assert second.found.candidates == first.found.candidates
    shown = bad_inputs_run.run("show", place.folder)
    assert shown.code == 0
    lines = shown.stdout.splitlines()
    assert lines[0] == "train on cpu-8 (8 x cpu)"
    text = " ".join(shown.stdout.split())
    assert "3.10x faster than the script's tp:8" in text
    assert "train.py --fsdp 8 --tp 1 --runs runs" in text
    assert "4 plans: 4 measured" in shown.stdout
    data = json.loads(bad_inputs_run.run("show --json", place.folder).stdout)
    assert data["template"].endswith("train.py --fsdp {fsdp} --tp {tp} --runs runs")
    assert data["best_command"].endswith("train.py --fsdp 8 --tp 1 --runs runs")
    assert data["best"]["evidence"] == "measured"
    explained = bad_inputs_run.run(f"explain {place.study} fsdp:8", place.folder)
    assert explained.code == 2 and "is of a command" in explained.stderr


@pytest.mark.slow
def test_a_changed_script_makes_figures_stale(place: Place) -> None:
    place.search("--sleep 0.001")
    before = place.runs()
    script = place.folder / "train.py"
    script.write_text(script.read_text() + "# changed\n")
    result = place.search("--sleep 0.001")
    # Everything is run again, and what was found before is kept, but not ranked.
    assert all(place.runs()[mesh] > count for mesh, count in before.items())
    stale = sum(before.values())
    assert f"{stale} runs of an older script or other versions kept, not ranked" in " ".join(
        result.found.notices
    )
    again = place.runs()
    script.write_text(script.read_text().removesuffix("# changed\n"))
    place.search("--sleep 0.001")
    assert place.runs() == again


def test_only_what_the_command_names_and_does_not_write_is_its_source(place: Place) -> None:
    def digest(command: str, step_time: str = "capture") -> str:
        return source_hash(
            read_request(
                None, SearchOptions(command=command, step_time=step_time), targets=["cpu:8"]
            )
        )

    (place.folder / "base.yml").write_text("a: 1")
    (place.folder / "pkg").mkdir()
    (place.folder / "pkg" / "train.py").write_text("")
    (place.folder / "run.sh").write_text("#!/bin/sh\n")
    (place.folder / "run.sh").chmod(0o755)
    (place.folder / "m.json").write_text("")
    commands = (
        ("python train.py {tp}", "train.py"),
        ("python -m pkg.train {tp}", "pkg/train.py"),
        ("python train.py --config=base.yml {tp}", "base.yml"),
        ("./run.sh {tp}", "run.sh"),
    )
    for command, file in commands:
        before = digest(command)
        path = place.folder / file
        path.write_text(path.read_text() + "\n")
        assert digest(command) != before, command
    written = "python train.py --metrics m.json {tp}"
    before = digest(written, "jsonl:m.json")
    (place.folder / "m.json").write_text("{}")
    assert digest(written, "jsonl:m.json") == before
    assert digest("python train.py {tp} results.csv") == digest("python train.py {tp} other.csv")


@pytest.mark.slow
def test_plans_that_fail_are_ruled_out_with_their_reason(place: Place) -> None:
    result = place.search("--wrong raise:4", baseline="tp:8")
    by_mesh = {one.plan.mesh: one for one in result.found.candidates}
    failed = by_mesh["fsdp:2,tp:4"].outcome
    assert isinstance(failed, Failed)
    assert "ValueError: heads are not divisible" in failed.reason and "logs/run-" in failed.reason
    assert by_mesh["fsdp:2,tp:4"].standing.verdict == "failed"
    assert result.found.funnel.failed == 1 and result.found.funnel.measured == 3
    assert result.found.candidates[0].plan.mesh == "fsdp:8"
    assert "heads are not" in " ".join(result.table(width=120).split())


@pytest.mark.slow
def test_a_plan_without_memory_and_one_that_hangs(place: Place) -> None:
    first = place.search("--wrong memory:4")
    (bad,) = [one for one in first.found.candidates if one.plan.mesh == "fsdp:2,tp:4"]
    assert isinstance(bad.outcome, OutOfMemory) and bad.outcome.needed_bytes == 4096
    assert first.found.funnel.out_of_memory == 1
    late = place.search("--wrong hang:4", timeout="10s")
    (bad,) = [one for one in late.found.candidates if one.plan.mesh == "fsdp:2,tp:4"]
    assert isinstance(bad.outcome, TimedOut) and bad.outcome.limit_s == 10.0
    # Given more time it is tried again, and nothing else is.
    before = place.runs()
    place.search("--wrong hang:4", timeout="12s")
    assert place.runs() - before == Counter({"2x4": 1})


@pytest.mark.slow
def test_a_plan_with_other_losses_does_not_win(place: Place) -> None:
    result = place.search("--wrong loss:1", baseline="tp:8")
    by_mesh = {one.plan.mesh: one for one in result.found.candidates}
    assert by_mesh["fsdp:8"].standing.verdict == "excluded"
    assert result.found.candidates[0].plan.mesh == "fsdp:4,tp:2"
    assert "1 differs" in result.table(width=200)
    # It was seen before that the losses of the baseline repeat.
    assert place.runs()["1x8"] >= 2 and place.runs()["8x1"] == 1


@pytest.mark.slow
def test_losses_that_never_repeat_are_not_compared(place: Place) -> None:
    result = place.search("--noise 1.0", baseline="tp:8")
    assert result.found.candidates[0].plan.mesh == "fsdp:8"
    assert {one.outcome.numerics for one in result.found.candidates} == {"not_compared"}
    assert any("fix the seeds" in notice for notice in result.found.notices)
    assert "no losses were compared" in result.table(width=200)


@pytest.mark.slow
def test_a_command_that_tells_no_losses(place: Place) -> None:
    result = place.search(step_time=r"regex:([0-9.]+) ms")
    assert result.found.reference == "none: the command tells no losses"
    assert result.best is not None
    assert (
        'reference = "none: the command tells no losses"'
        in (place.folder / "mesh_rules.toml").read_text()
    )


def test_a_command_that_always_fails_is_not_run_for_every_plan(place: Place) -> None:
    with pytest.raises(UsageError, match="failed for each of the 3 plans") as error:
        place.search("--wrong raise")
    assert "ValueError: heads are not divisible" in error.value.message
    assert "results/train-cpu-8-" in error.value.hint and "/logs" in error.value.hint
    assert sum(place.runs().values()) == 3


def test_a_command_whose_steps_are_not_seen_is_run_once(place: Place) -> None:
    with pytest.raises(UsageError, match="no line that the command printed matches") as error:
        place.search("--steps 3", step_time="regex:took ([0-9.]+) s")
    assert "run-0000.log" in error.value.hint
    assert sum(place.runs().values()) == 1


@pytest.mark.slow
def test_a_budget_that_is_too_small_says_how_many_were_not_tried(place: Place) -> None:
    space = place.folder / "space.toml"
    space.write_text('[axes]\nfsdp = {}\ntp = {}\n[knobs]\nremat = ["none", "full", "dots"]\n')
    small = place.search("--remat {remat}", space="space.toml", budget="2s", baseline="tp:8")
    assert "plans were tried" in small.found.footer.stop_reason
    assert 0 < small.found.funnel.waiting < 12
    assert "not reached" in small.table(width=200)
    before = place.runs()  # What is known stays.
    after = place.search("--remat {remat}", space="space.toml", budget="5m", baseline="tp:8")
    assert after.found.footer.stop_reason.startswith("every plan was tried")
    assert not after.found.funnel.waiting
    assert str(after.found.candidates[0].plan) == "fsdp:8 remat=full"
    assert all(place.runs()[mesh] >= count for mesh, count in before.items())
    assert after.found.best_command.endswith("--remat full")


def test_a_dry_run_shows_the_commands_and_runs_none(place: Place) -> None:
    result = place.search("{run_dir}", baseline="tp:8", dry_run=True)
    shown = [notice for notice in result.found.notices if notice.startswith("would run")]
    assert len(shown) == 4
    assert shown[0].endswith("train.py --fsdp 1 --tp 8 --runs runs RUN_DIR")
    assert place.runs() == Counter()
    assert not (place.folder / "results").exists()


def test_a_knob_may_take_words_and_numbers(place: Place) -> None:
    (place.folder / "space.toml").write_text(
        '[axes]\nfsdp = {}\ntp = { max = 1 }\n[knobs]\nremat = ["none", 4, true, "full"]\n'
    )
    result = place.search(
        "--remat {remat}",
        space="space.toml",
        baseline="fsdp:8 remat=4",
        dry_run=True,
    )
    shown = [notice for notice in result.found.notices if notice.startswith("would run")]
    assert shown[0].endswith("--remat 4")
    assert sorted(one.rpartition(" ")[2] for one in shown) == ["4", "full", "none", "true"]


@pytest.mark.slow
def test_json_lines_and_a_space_that_is_shipped(place: Place) -> None:
    result = place.search("--metrics m.jsonl", step_time="jsonl:m.jsonl", space="dense_lm")
    assert result.found.candidates[0].plan.mesh == "fsdp:8"
    assert any("`remat`" in notice and "left out" in notice for notice in result.found.notices)
    assert 0.0099 < result.found.candidates[0].outcome.step_s < 0.0103


@pytest.mark.slow
def test_attached_devices_are_counted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    result = place.search(target="local", budget="1s")
    assert (result.found.facts.devices.target, result.found.facts.devices.count) == ("cpu-2", 2)
    assert {one.plan.mesh for one in result.found.candidates} == {"fsdp:2", "tp:2"}
    assert living() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"build": "train.py", "command": "x {tp}"}, "only one of them can be searched"),
        ({}, "it was not said what to search"),
        ({"command": "x {tp}", "target": ["cpu:4", "cpu:8"]}, "one target at a time"),
        ({"command": "python x {tp}", "target": "tpu-v5p-128"}, "can only be run"),
        ({"command": "x {tp}", "xla": {"a": 1}}, "`xla` is for a step that automesh compiles"),
        ({"build": "train.py", "skip_steps": 0}, "`skip_steps` is for a search by a command"),
        ({"command": "python x {tp}", "skip_steps": -1}, "-1 steps cannot be skipped"),
        ({"command": "python x {tp}", "timed_steps": 0}, "0 steps cannot be timed"),
        ({"command": "python x {tp}", "step_time": "jsonl:{run_dir}/m"}, "does not know that"),
        (
            {"command": "python x {tp}", "target": "cpu:8", "baseline": "tp:8 remat=full"},
            "does not set a knob of the command",
        ),
    ],
)
def test_what_is_refused(place: Place, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        automesh.search(**options)  # type: ignore[arg-type]
    assert error.value.hint


def test_nothing_legal(place: Place) -> None:
    (place.folder / "space.toml").write_text("[axes]\nfsdp = { min = 16 }\ntp = {}\n")
    with pytest.raises(NoFeasibleMesh, match="none is legal"):
        place.search(space="space.toml")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--wrong raise:1"])
def test_a_run_that_was_over_when_its_search_died_is_not_repeated(
    place: Place, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    class Killed(BaseException):
        """What nobody catches, as nobody notices a SIGKILL."""

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        # The run is over, and its trial is not finished.
        patch.setattr(Rung, "finish", die)
        with pytest.raises(Killed):
            place.search(words, baseline="fsdp:8")
    assert place.runs() == Counter({"8x1": 1})
    monkeypatch.setattr(CommandStrategy, "_explore", lambda *_: None)
    # Nothing but what is left of the first run: if it failed there is nothing to confirm.
    result = place.search(words, baseline="fsdp:8")
    (found,) = result.found.candidates
    assert found.plan.mesh == "fsdp:8"
    if words:
        assert isinstance(found.outcome, Failed)
        assert place.runs() == Counter({"8x1": 1})
    else:
        assert isinstance(found.outcome, Measured)
        assert place.runs() == Counter({"8x1": 1 + 5})


def test_what_a_run_of_another_host_has_written_is_left_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all folders of runs were cleared, those of a host that still holds its run too."""

    class Killed(BaseException):
        """What nobody catches."""

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Rung, "finish", die)
        patch.setattr(Rung, "give_all_back", lambda *_: None)
        with pytest.raises(Killed):
            place.search(baseline="fsdp:8")
    folder = place.study / "logs" / "run-0000"
    before = sorted(path.name for path in folder.iterdir())
    assert before
    with monkeypatch.context() as patch:
        # As from another host, of which nobody here can know that it is gone.
        patch.setattr(Rung, "adopt_expired", lambda *_: [])
        patch.setattr(CommandStrategy, "_explore", die)
        with pytest.raises(Killed):
            place.search(baseline="fsdp:8")
    assert sorted(path.name for path in folder.iterdir()) == before
    monkeypatch.setattr(CommandStrategy, "_explore", lambda *_: None)
    monkeypatch.setattr(lease, "is_dead", lambda _: True)
    place.search(baseline="fsdp:8")
    assert place.runs() == Counter({"8x1": 1 + 5})
    assert not folder.exists()
