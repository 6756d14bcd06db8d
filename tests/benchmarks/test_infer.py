"""What is kept of the searches of steps for one device."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from benchmarks.infer import command
from benchmarks.infer.summary import summary_of

GIB = 1 << 30


def candidate(plan: str, step_s: float, peak_bytes: int, **more: Any) -> dict[str, Any]:
    outcome = {"kind": "estimated", "step_s": step_s} | more.pop("outcome", {})
    return {
        "plan": plan,
        "mapping": {"batch": "dp", "mlp": "tp"},
        "is_baseline": False,
        "outcome": outcome,
        "peak_bytes": peak_bytes,
    } | more


def result(**more: Any) -> dict[str, Any]:
    candidates = [
        candidate("tp:8 mlp:tp", 0.002, GIB),
        candidate("dp:8 mlp:none", 0.005, 12 * GIB, is_baseline=True),
    ]
    best = {"plan": "tp:8 mlp:tp", "evidence": "estimated", "step_s": 0.002}
    funnel = {"legal": 7, "measured": 0, "refused": 0}
    return {
        "best": best,
        "candidates": candidates,
        "funnel": funnel,
        "device_memory_bytes": 16 * GIB,
        "reserve_bytes": GIB,
    } | more


def test_the_best_plan_is_compared_with_the_batch_alone() -> None:
    found = summary_of(result())
    assert found["best"] == "tp:8 mlp:tp"
    assert found["faster_than_dp"] == pytest.approx(2.5)
    assert (found["dp"], found["dp_fits"]) == ("dp:8", True)
    assert found["searched"] == ["batch", "mlp"]
    # Nothing was measured, so nothing is said of numerics.
    assert "refused" not in found


def test_a_baseline_above_the_memory_of_a_device_does_not_fit() -> None:
    assert not summary_of(result(device_memory_bytes=12 * GIB))["dp_fits"]
    failed = result()
    failed["candidates"][1]["outcome"] = {"kind": "out_of_memory"}
    found = summary_of(failed)
    assert not found["dp_fits"]
    assert "faster_than_dp" not in found


def test_plans_whose_numerics_differ_are_counted() -> None:
    found = summary_of(result(funnel={"legal": 7, "measured": 3, "refused": 1}))
    assert (found["measured"], found["refused"]) == (3, 1)


def test_a_failed_search_says_why() -> None:
    assert summary_of({"error": "no plan"}) == {"error": "no plan"}


def test_at_least_twenty_steps_say_what_they_are() -> None:
    steps = command._chosen([])
    assert len(steps) >= 20
    for step in steps:
        text = ast.get_docstring(ast.parse(step.read_text(encoding="utf-8")))
        assert text, step
        assert "make_mesh" not in step.read_text(encoding="utf-8"), step
    with pytest.raises(SystemExit, match="no step is called unheard_of"):
        command._chosen(["unheard_of"])
