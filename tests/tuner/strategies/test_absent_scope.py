"""Studies outlive their spaces and limits: what a later search for absent devices takes over."""

from __future__ import annotations

from pathlib import Path

import pytest

import automesh
from automesh import api
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import OutOfMemory
from automesh.tuner.study.storage import parse_storage
from automesh.tuner.study.study import open_study
from tests.support.fakes.absent_search import SPACE
from tests.support.handlers.absent import GIB
from tests.tuner.strategies.test_absent import Place, place

__all__ = ["place"]

OWN = """\
[clusters.lab]
chip = "mine"
torus = [2, 4]
host = [2, 4]
[chips.mine]
like = "v5e"
hbm_bytes = 10e9
"""


@pytest.mark.long
def test_a_plan_that_the_space_forbids_now_does_not_win(place: Place) -> None:
    space = place.folder / "space.toml"
    assert str(place.search().found.candidates[0].plan) == "dp:4,tp:2"
    done = place.compiles
    space.write_text(SPACE.replace("tp = {}", "tp = { min = 4 }"))
    narrow = place.search().found
    assert {str(one.plan) for one in narrow.candidates} == {"dp:2,tp:4", "tp:8"}
    assert narrow.funnel.legal == 2 and narrow.funnel.waiting == 0
    assert "1 trial of other search spaces kept, not ranked" in narrow.notices
    rules = place.folder / "mesh_rules.toml"
    assert automesh.load(rules).select("v5e-2x4").mesh_shape.ici_mesh_shape == (2, 1, 1, 4, 1)
    # What is read later is the answer of the last search, too.
    assert api.show(place.study).found.candidates == narrow.candidates
    space.write_text(SPACE)
    assert str(place.search().found.candidates[0].plan) == "dp:4,tp:2"
    assert place.compiles == done


@pytest.mark.slow
@pytest.mark.long
def test_what_another_space_left_in_the_queue_is_not_compiled(place: Place) -> None:
    place.search(top=1)
    forbidden = Plan(axes=parse_mesh("dp:2,tp:4"))
    with open_study(parse_storage("", place.study), place.study.name, create=False) as study:
        done = study.compile.trials()[0]
    with open_study(
        parse_storage("", place.study),
        place.study.name,
        source_hash=done.source_hash,
        versions=done.versions,
    ) as study:
        assert study.lead()
        for rung in (study.screen, study.compile):
            rung.enqueue([forbidden])
        left = [one.plan for one in study.compile.trials() if one.is_waiting]
        assert forbidden in left
    (place.folder / "space.toml").write_text(SPACE.replace("dp = {}", "dp = { min = 4 }", 1))
    place.search(top=9)
    with open_study(parse_storage("", place.study), place.study.name, create=False) as study:
        waiting = [one.plan for one in study.compile.trials() if one.is_waiting]
    assert waiting == [forbidden]
    assert not [line for line in place.compiles if "dp:2,tp:4" in line and "default" in line]


@pytest.mark.slow
@pytest.mark.long
def test_other_speeds_replay_again_what_is_compiled(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = place.search().found
    done = place.compiles
    from automesh.hardware.calibration.datasheet import DataSheet

    monkeypatch.setattr(DataSheet, "origin", property(lambda _: "calibrated here"))
    again = place.search().found
    assert again.facts.provenance.speeds == "calibrated here"
    replays = [one.outcome.replay for one in again.candidates if hasattr(one.outcome, "replay")]
    assert {one.speeds for one in replays if one} == {"calibrated here"}
    assert [one.plan for one in again.candidates] == [one.plan for one in first.candidates]
    # From the store: refusals, which it does not keep here, aside.
    ended = {line: times for line, times in place.compiles.items() if line.startswith("end")}
    assert ended == {line: times for line, times in done.items() if line.startswith("end")}


@pytest.mark.slow
def test_the_memory_that_a_file_states_is_the_limit(place: Place) -> None:
    (place.folder / "own.toml").write_text(OWN)
    found = place.search(target="lab", hardware=place.folder / "own.toml", reserve_hbm="0").found
    assert found.facts.devices.memory_bytes == 10_000_000_000
    assert str(found.candidates[0].plan) == "dp:2,tp:4"
    refused = {
        str(one.plan): one.outcome.needed_bytes
        for one in found.candidates
        if isinstance(one.outcome, OutOfMemory)
    }
    # One is refused by the compiler, whose own limit is above that of the file.
    assert refused == {"dp:8": 20 * GIB, "dp:4,tp:2": 12 * GIB * 9 // 10}


@pytest.mark.slow
def test_several_targets_show_what_is_found_when_interrupted(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from automesh.tuner import several_targets

    begun: list[str] = []
    start = several_targets.start

    def stopped(request: object, progress: object) -> object:
        begun.append(request.target)  # pyright: ignore
        if len(begun) == 2:
            raise KeyboardInterrupt
        return start(request, progress)  # pyright: ignore

    monkeypatch.setattr(several_targets, "start", stopped)
    found = place.search(target=["v5e:2x4", "v6e:2x4"])
    assert found.found.interrupted  # pyright: ignore
    first, second = found.found.searches  # pyright: ignore
    assert str(first.result.candidates[0].plan) == "dp:4,tp:2"
    assert (second.target, second.reason) == ("v6e:2x4", "it was not begun")


def test_a_full_disk_is_the_fate_of_one_target(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from automesh.tuner import several_targets

    def refused(*_: object) -> object:
        raise OSError(28, "No space left on device", "terms")

    monkeypatch.setattr(several_targets, "start", refused)
    found = place.search(target=["v5e:2x4", "v6e:2x4"])
    reasons = [one.reason for one in found.found.not_found]  # pyright: ignore
    assert reasons == ["`terms`: no space left on device"] * 2
