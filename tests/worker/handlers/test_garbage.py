"""Collections of garbage while programs are traced."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from automesh.worker.handlers.garbage import OBJECTS, fewer_collections


@pytest.fixture(autouse=True)
def as_before() -> Generator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_python_collects_seldom_and_then_as_before() -> None:
    gc.set_threshold(700, 10, 10)
    seen: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    gc.collect()  # What is counted so far could start a collection of its own.
    with fewer_collections():
        gc.callbacks.append(note)
        try:
            kept = [[number] for number in range(OBJECTS // 4)]
        finally:
            gc.callbacks.remove(note)
    assert len(kept) == OBJECTS // 4
    assert not seen
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (2 * OBJECTS, 5, 5)])
def test_what_collects_more_seldom_is_left_alone(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with fewer_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_user_code_sets_it_keeps() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="of the user"), fewer_collections():
        gc.set_threshold(50, 5, 5)
        raise ValueError("of the user")
    assert gc.get_threshold() == (50, 5, 5)
