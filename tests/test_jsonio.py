"""JSON that every reader takes, whatever text is in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.errors import AutomeshError
from automesh.jsonio import dumps, from_json, read_json, to_checked_json, to_json, to_text
from automesh.outcomes import Failed

ANY = st.text(st.characters(codec=None, exclude_categories=[]))


def test_a_lone_surrogate_is_told_apart_from_a_pair() -> None:
    text = dumps({"caf\udce9": ["\ud83d", "\U0001f600", '"\\ud83d']})
    assert text.isascii()
    assert json.loads(text) == {"caf\\xe9": ["\\ud83d", "\U0001f600", '"\\ud83d']}


@given(ANY, ANY)
def test_any_text_becomes_strict_json(key: str, value: str) -> None:
    found = json.loads(dumps({key: value}, indent=1))
    # Raises if what is read back could not be written.
    json.dumps(found, ensure_ascii=False).encode()


def test_what_is_not_finite_is_refused_where_it_must_be() -> None:
    assert dumps(float("nan")) == "NaN"
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps(float("inf"), allow_nan=False)


def test_an_outcome_with_bytes_in_its_reason_arrives() -> None:
    """A worker tells of what a script raised: former versions blamed the script for the message."""
    failed = Failed(stage="build", reason="no file caf\udce9", log_tail="\ud800")
    arrived = from_json(to_json(failed, Failed), Failed)
    assert arrived == Failed(stage="build", reason="no file caf\\xe9", log_tail="\\ud800")
    # What a former version has stored.
    stored = {"kind": "failed", "stage": "build", "reason": "caf\udce9", "log_tail": "", "hint": ""}
    assert from_json(stored, Failed).reason == "caf\\xe9"
    # And what is written without the detour over plain values is read by the strictest reader.
    assert read_json(to_text(failed, Failed), Failed) == arrived


def test_what_could_not_be_read_back_is_not_written() -> None:
    outcome = Failed(stage="build", reason="no")
    assert to_checked_json(outcome, Failed) == to_json(outcome, Failed)
    wrong = Failed(stage="build", reason=3)  # pyright: ignore[reportArgumentType]
    with (
        pytest.warns(UserWarning, match="serializer"),
        pytest.raises(AutomeshError, match="reason"),
    ):
        to_checked_json(wrong, Failed)


def test_what_is_wrong_as_a_whole_has_no_name() -> None:
    with pytest.raises(AutomeshError) as caught:
        read_json("null", Failed)
    assert caught.value.message == "Input should be an object, got None"
