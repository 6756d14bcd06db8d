"""The trace of a replay, against the trace event format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from automesh.cost.replay.replay import replay
from automesh.cost.replay.trace import trace_json
from automesh.hardware.model import HardwareModel
from tests.support.samples.replay_samples import (
    Nominal,
    begin,
    collective,
    end,
    layouts_of,
    loop,
    mesh,
    product,
    schedule,
    slice_fabric,
)

NUMBER = (int, float)
# "Trace Event Format" (catapult): what each phase must and may have.
COMMON: dict[str, tuple[type, ...]] = {"name": (str,), "ph": (str,), "pid": (int,), "tid": (int,)}
REQUIRED: dict[str, dict[str, tuple[type, ...]]] = {
    "X": {"ts": NUMBER, "dur": NUMBER, "cat": (str,)},
    "M": {"args": (dict,)},
    "s": {"ts": NUMBER, "id": (int, str), "cat": (str,)},
    "f": {"ts": NUMBER, "id": (int, str), "cat": (str,)},
}
OPTIONAL: dict[str, dict[str, tuple[type, ...]]] = {
    "X": {"args": (dict,), "cname": (str,), "tts": NUMBER, "tdur": NUMBER},
    "M": {},
    "s": {"args": (dict,)},
    "f": {"args": (dict,), "bp": (str,)},
}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
TOP = {"traceEvents", "displayTimeUnit", "otherData"}


def check(trace: Any) -> None:
    """Raises what is wrong with a trace in the JSON object form."""
    assert set(trace) <= TOP
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    for event in trace["traceEvents"]:
        phase = event["ph"]
        known = COMMON | REQUIRED[phase] | OPTIONAL[phase]
        for key in COMMON | REQUIRED[phase]:
            assert key in event, (key, event)
        for key, value in event.items():
            assert isinstance(value, known[key]), (key, event)
            assert not isinstance(value, bool)
        if phase != "M":
            assert event["ts"] >= 0
        if phase == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}
        if phase == "X":
            assert event["dur"] >= 0
            assert all(isinstance(text, str) for text in event["args"].values())
        if phase == "f":
            assert event.get("bp", "e") == "e"


def test_the_checker_sees_what_is_wrong() -> None:
    good: dict[str, Any] = {"ph": "X", "name": "a", "cat": "work", "ts": 0, "dur": 1}
    good |= {"pid": 1, "tid": 0, "args": {}}
    top = {"displayTimeUnit": "ms", "otherData": {}}
    check(top | {"traceEvents": [good]})
    for wrong in (
        {key: value for key, value in good.items() if key != "dur"},
        good | {"ts": -1},
        good | {"ts": "0"},
        good | {"colour": "red"},
        good | {"ph": "Q"},
    ):
        with pytest.raises((AssertionError, KeyError)):
            check(top | {"traceEvents": [wrong]})


def test_a_replay_is_a_trace() -> None:
    axes, fabric = mesh(fsdp=4, tp=4), slice_fabric("v5e:4x4")
    gather = collective("all-gather", axes, "tp", 4_000_000)
    layer = (begin(gather), product("dot", 500), end(gather))
    result, timeline = replay(
        schedule(axes, product("first", 250), loop(80, *layer)),
        axes=axes,
        hardware=HardwareModel(fabric=fabric, layouts=layouts_of(fabric, axes), speeds=Nominal()),
    )
    text = trace_json(timeline, name="fsdp:4,tp:4 on v5e:4x4", notes=(("kind", "compiled"),))
    trace = json.loads(text)
    check(trace)
    events = trace["traceEvents"]
    assert trace["otherData"]["kind"] == "compiled"
    named = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(named) == ["core", "x+", "x-"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(result.step_s * 1e6)
    # Nothing overlaps on a track.
    for track in named.values():
        ends = 0.0
        for event in sorted((e for e in drawn if e["tid"] == track), key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 1e-6
            ends = event["ts"] + event["dur"]
    work = [event for event in drawn if event["name"] == "dot"]
    assert work[0]["args"] == {"cause": "compute", "source": "step.py:7"}
    assert [e["name"] for e in drawn if e["cat"] == "repeats"] == [
        f"{80 - len(work)} more trips of layers"
    ]
    arrows = [event for event in events if event["ph"] in "sf"]
    waits = [event for event in drawn if event["cat"] == "wait"]
    assert len(arrows) == 2 * len(waits) > 0
