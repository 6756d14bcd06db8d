"""A search whose study others have damaged goes on with what is whole, and names the rest."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import automesh
from automesh import api
from automesh.outcomes import Measured
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.long  # Two real searches.

TWO_AXES = "[axes]\ndp = {}\nfsdp = { size = 1 }\ntp = {}\n"


def search(folder: Path) -> automesh.Result:
    space = folder / "two_axes.toml"
    space.write_text(TWO_AXES)
    return api.search(
        str(SCRIPTS / "adamw.py"),
        target="cpu:4",
        space=space,
        budget="1m",
        top=2,
        rules=folder / "mesh_rules.toml",
        results=folder / "results",
    )


def test_damage_is_named_and_the_search_goes_on(tmp_path: Path) -> None:
    before = search(tmp_path).found
    assert before.notices == search(tmp_path).found.notices
    (study,) = (tmp_path / "results").glob("*/")
    terms = sorted((study / "terms").glob("*.json"))
    terms[0].write_bytes(b"[" * 100_000)
    connection = sqlite3.connect(study / "study.db")
    with connection:
        trial = "SELECT trial_id FROM trials WHERE number = 0 ORDER BY study_id LIMIT 1"
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = '\"{\"' "
            f"WHERE key = 'plan_json' AND trial_id = ({trial})"
        )
        connection.execute(
            "UPDATE study_user_attributes SET value_json = '\"[]\"' WHERE key LIKE '%.records.%'"
        )
    connection.close()
    after = search(tmp_path).found
    said = "\n".join(after.notices)
    assert f"`terms/{terms[0].name}` is damaged and left out: " in said
    assert "trial 0 of `compile` is damaged and left out: " in said
    assert "the note `records` is damaged and left out: " in said
    assert len([one for one in after.candidates if isinstance(one.outcome, Measured)]) >= 1
    assert terms[0].read_bytes() != b"[" * 100_000, "it is made again"
    assert {one.plan for one in after.candidates} == {one.plan for one in before.candidates}
