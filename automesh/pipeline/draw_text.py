"""Draws a simulated pipeline as plain text."""

from __future__ import annotations

from automesh.errors import UsageError
from automesh.pipeline.actions import KIND_WORDS, ActionKind
from automesh.pipeline.simulate import Simulated, Span
from automesh.units import format_percent, format_seconds

_FILLS: dict[ActionKind, str] = {"F": "-", "B": "=", "I": "~", "W": "+"}
_IDLE = "."
_MIN_WIDTH = 40


def draw_text(simulated: Simulated, *, width: int = 100) -> str:
    """Draws when each rank does what, a line per rank.

    Args:
      width: columns; no line is longer. If there are too few, an action is only a letter, or
        several share a column.

    Raises:
      UsageError: fewer than 40 columns.

    Example:
      >>> from automesh.pipeline import draw_text, make_schedule, simulate
      >>> print(draw_text(simulate(make_schedule("1f1b", num_ranks=2, num_microbatches=3))))
      1f1b: 2 ranks, 2 stages, 3 microbatches
      12.0 s, of which 25 % bubble
      rank 0 |F0-F1-......B0====F2-B1====...B2====| 2 held
      rank 1 |...F0-B0====F1-B1====F2-B2====......| 1 held
      F forward, B backward, . idle; held: the most activations at a time
    """
    if width < _MIN_WIDTH:
        raise UsageError(f"a timeline needs at least {_MIN_WIDTH} columns, got {width}")
    schedule, rows = simulated.schedule, simulated.spans
    names = [f"rank {rank:>{len(str(len(rows) - 1))}} |" for rank in range(len(rows))]
    ends = [f"| {peak} held" for peak in simulated.peak_live]
    room = width - len(names[0]) - max(map(len, ends))
    scale = _find_scale(simulated, room)
    columns = round(simulated.makespan_s * scale)
    lines = [
        name + _draw_row(spans, rank=rank, scale=scale, columns=columns) + end
        for rank, (name, spans, end) in enumerate(zip(names, rows, ends, strict=True))
    ]
    words = ", ".join(f"{kind} {KIND_WORDS[kind]}" for kind in simulated.kinds)
    return "\n".join(
        (
            f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} microbatches",
            f"{format_seconds(simulated.makespan_s)}, of which "
            f"{format_percent(simulated.bubble)} bubble",
            *lines,
            f"{words}, {_IDLE} idle; held: the most activations at a time",
        )
    )


def _find_scale(simulated: Simulated, room: int) -> float:
    """Returns columns per second: each action's text and one more column fit, if there is room."""
    wanted = max(
        (
            (len(_texts(span, rank)[0]) + 1) / (span.end_s - span.start_s)
            for rank, spans in enumerate(simulated.spans)
            for span in spans
            if span.end_s > span.start_s
        ),
        default=0.0,
    )
    return min(wanted, room / simulated.makespan_s) if wanted else 0.0


def _texts(span: Span, rank: int) -> tuple[str, ...]:
    """Lists possible texts for an action, the longest first."""
    action = span.action
    short = f"{action.kind}{action.microbatch}"
    return (short, action.kind) if action.stage == rank else (str(action), short, action.kind)


def _draw_row(spans: tuple[Span, ...], *, rank: int, scale: float, columns: int) -> str:
    row = [_IDLE] * columns
    for span in spans:
        start, end = round(span.start_s * scale), round(span.end_s * scale)
        text = next((one for one in _texts(span, rank) if len(one) <= end - start), "")
        row[start:end] = text.ljust(end - start, _FILLS[span.action.kind])
    return "".join(row)
