"""Writes a timeline as a trace for Perfetto and Chrome.

The format is Chrome's "Trace Event Format" (catapult), which Perfetto reads: complete events (`X`),
flows from a transfer to the wait for it (`s`, `f`), names of tracks (`M`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from automesh.cost.replay.timeline import Slice, Timeline

_PID = 1
_MICROS = 1e6
Event = Mapping[str, Any]


def trace_json(timeline: Timeline, *, name: str, notes: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the JSON text of a trace.

    Args:
      name: of the process: plan and target.
      notes: (what, text) to be shown with the trace.
    """
    tracks = {track: number for number, track in enumerate(timeline.tracks)}
    events = [*_names(name, tracks), *_slices(timeline, tracks), *_flows(timeline, tracks)]
    return json.dumps(
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"step_s": repr(timeline.step_s), **dict(notes)},
        },
        indent=None,
        separators=(",", ":"),
    )


def _names(name: str, tracks: Mapping[str, int]) -> Iterator[Event]:
    yield _metadata("process_name", 0, name=name)
    for track, number in tracks.items():
        yield _metadata("thread_name", number, name=track)
        yield _metadata("thread_sort_index", number, sort_index=number)


def _metadata(what: str, track: int, **values: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": _PID, "tid": track, "args": values}


def _slices(timeline: Timeline, tracks: Mapping[str, int]) -> Iterator[Event]:
    for slice_ in timeline.slices:
        told = {"cause": slice_.cause, "source": slice_.source}
        yield {
            "ph": "X",
            "name": slice_.name,
            "cat": slice_.kind,
            "ts": slice_.start_s * _MICROS,
            "dur": slice_.seconds * _MICROS,
            "pid": _PID,
            "tid": tracks[slice_.track],
            "args": {key: text for key, text in told.items() if text},
        }


def _flows(timeline: Timeline, tracks: Mapping[str, int]) -> Iterator[Event]:
    """Draws an arrow from the last wire of every awaited transfer to its first wait."""
    sent: dict[int, Slice] = {}
    awaited: dict[int, Slice] = {}
    for slice_ in timeline.slices:
        if slice_.kind == "transfer":
            sent[slice_.flight] = slice_
        elif slice_.kind == "wait":
            awaited.setdefault(slice_.flight, slice_)
    for flight, wait in awaited.items():
        if flight in sent:
            ends = (("s", sent[flight], {}), ("f", wait, {"bp": "e"}))
            for phase, at, more in ends:
                yield {
                    "ph": phase,
                    "id": flight,
                    "name": "arrives",
                    "cat": "flow",
                    "ts": at.start_s * _MICROS,
                    "pid": _PID,
                    "tid": tracks[at.track],
                    **more,
                }
