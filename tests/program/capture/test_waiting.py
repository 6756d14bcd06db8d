"""A script that evaluates for long before it trains."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from automesh.program.capture import discover
from automesh.program.capture.flow.finder import StepFinder
from automesh.program.nouns import Entry


def test_a_run_that_waits_for_the_training_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, nothing was said, and after two minutes the evaluation was the step."""
    script = tmp_path / "train.py"
    script.write_text("slopes = jax.grad(loss)(w)")
    monkeypatch.setattr(discover, "_TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(discover, "_LONGEST_BEFORE_GRADIENT_S", 0.2)
    said = list[str]()
    watch = discover._ScriptWatch(
        entry=Entry(kind="script", location=str(script), function=""),
        finder=StepFinder(wanted="", on_long_loop=lambda: None),
        tell=said.append,
    )
    assert watch.may_stop(has_gradient=True)
    assert not watch.may_stop(has_gradient=False)
    time.sleep(0.01)
    assert not watch.may_stop(has_gradient=False)
    assert not watch._waited_in_vain()
    time.sleep(0.2)
    assert watch.may_stop(has_gradient=False)
    assert len(said) == 1
    assert "has trained nothing yet: it is run on until it trains" in said[0]
    assert "`--step NAME` names the function that trains" in watch._waited_in_vain()[0]
