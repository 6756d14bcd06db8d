"""Wrong calls: what was wrong, what was got, what is allowed, and a hint; held in a golden file."""

from __future__ import annotations

import re

import pytest

from automesh.errors import UsageError
from tests.support.cases import wrong_calls
from tests.support.cases.wrong_calls import CALLS
from tests.support.fakes.worlds import cpu_world

HELD = dict(
    zip(
        re.findall(r"^([a-z-]+)", wrong_calls.GOLDEN.read_text(), re.MULTILINE),
        wrong_calls.GOLDEN.read_text().split("\n\n"),
        strict=True,
    )
)


def test_there_are_at_least_sixty() -> None:
    assert len(CALLS) >= 60
    assert list(HELD) == list(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_said_is_what_is_held(name: str) -> None:
    assert wrong_calls.said(name).strip() == HELD[name].strip()


@pytest.mark.parametrize("name", CALLS)
def test_the_error_is_a_value_error_with_a_hint(name: str) -> None:
    with cpu_world(8), pytest.raises(UsageError) as caught:
        CALLS[name]()
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.hint, "no hint"
    assert re.match(r"[a-z`]|jax|TPU|GPU", error.message), "starts like a sentence of its own"
    assert not error.message.endswith("."), "ends with a full stop"
    for foreign in ("Traceback", "object at 0x", "reshape", "newaxis", "site-packages"):
        assert foreign not in str(error)


def test_wrong_types_are_type_errors_too() -> None:
    with cpu_world(8), pytest.raises(TypeError):
        CALLS["create-type-is-number"]()
