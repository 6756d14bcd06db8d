"""The pages of whole searches show what the recorded ones do, which tests open in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from automesh.outcomes import Failed
from automesh.report.html.document import document_of
from automesh.report.html.nouns import StudyPage
from tests.regenerate.record_pages import SEARCHES, page, read, search


def parts(found: StudyPage) -> dict[str, object]:
    """What is drawn at all."""
    return {
        "timelines": {one.kind for one in found.timelines},
        "held": any(one.held for one in found.timelines),
        "placements": bool(found.placements),
        "explained": bool(found.explained),
        "rounds": bool(found.rounds),
        "left out": set(found.left_out or ()),
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.tpu] if one.target.startswith("v5e") else [])
        for name, one in SEARCHES.items()
    ],
)
def test_a_page_of_a_search_is_as_it_was_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path / "cache"))
    found = page(search(name, tmp_path))
    assert parts(found) == parts(read(name))
    assert document_of(found).keys() == document_of(read(name)).keys()


def test_what_is_recorded_is_what_tests_rely_on() -> None:
    """A TPU target and a pipeline that were replayed, a pipeline that was run, and failures."""
    slice_, slices, ranks = (parts(read(name)) for name in ("slice", "slices", "ranks"))
    assert (slice_["timelines"], slice_["held"]) == ({"replay"}, False)
    assert (slices["timelines"], slices["held"]) == ({"replay"}, True)
    assert (ranks["timelines"], ranks["held"], ranks["rounds"]) == ({"schedule"}, True, True)
    failures = read("failures").result
    assert failures.funnel.failed_in_run == len(failures.candidates) == 5
    assert {type(one.outcome) for one in failures.candidates} == {Failed}
