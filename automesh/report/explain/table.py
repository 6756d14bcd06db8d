"""An explanation on the terminal: causes, collectives, memory, and the reason in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from automesh.cost.breakdown import CollectiveCost, MeshCost
from automesh.cost.comparison import (
    CollectiveChange,
    compare_causes,
    compare_collectives,
)
from automesh.outcomes import ReplayOutcome
from automesh.report.columns import (
    GLUE,
    Column,
    figures_column,
    fitting,
    least_width,
    text_column,
)
from automesh.report.drawing import MIN_WIDTH, draw, footnotes, glued, labelled, tabulated
from automesh.report.explain.nouns import Explained, Explanation
from automesh.report.explain.words import verdict_sentence, why_sentence, window_sentence
from automesh.report.findings import sentence
from automesh.report.predicted import exposed_s
from automesh.report.words import count, half_of
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_count, format_percent, format_seconds

_MOST = 10
_FOLDED = 12  # characters of words beside each other, where there is little room
_LEAST = 5e-4  # smaller parts of a step are left out of the tables: they would print as 0.0 %
_ALONE = "estimated, each as if nothing ran beside it"
_CAUSES = {"memory": "device memory"}


def render(explanation: Explanation, *, width: int, colour: bool) -> str:
    """Draws an explanation.

    Args:
      width: columns of the terminal; no line is longer (fewer than 40 are treated as 40).
      colour: write colours as ANSI codes; the text is the same without them.

    Returns:
      Lines that end in a line feed.
    """
    width = max(width, MIN_WIDTH)
    one, against = explanation.one, explanation.against
    parts: list[RenderableType] = [Text(glued(_title(explanation)))]
    if against is None:
        parts += [Text(), *_one_mesh(one, width)]
    else:
        parts += [Text(), *_two_meshes(one, against, width)]
    parts += [Text(), labelled(_summary(explanation))]
    return draw(parts, width=width, colour=colour)


def _title(explanation: Explanation) -> str:
    devices = f"{explanation.device_count} x {clean(explanation.device)}"
    return f"{clean(explanation.workload)} on {clean(explanation.target)} ({devices})"


def _one_mesh(one: Explained, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [labelled(_evidence(one))]
    if one.estimated.causes:
        parts += [Text(), tabulated(_fit(_cause_columns(one), width, ("amount *",)), width=width)]
        notes = [("*", "estimated; what other work hides is not counted")]
        if one.replay is not None:
            notes.append(("", "replayed: the same, from the schedule of the compiled program"))
        parts.append(footnotes(notes))
    shown = one.cost.collectives[:_MOST]
    if shown:
        columns = _fit(_collective_columns(shown), width, ("array", "bytes", "runs"))
        parts += [Text(), tabulated(columns, width=width)]
        notes = [("*", _ALONE)]
        rest = one.cost.collectives[_MOST:]
        if rest:
            left = format_seconds(sum(other.seconds for other in rest))
            notes.append(("", f"and {count(len(rest), 'more collective')}, {left} together"))
        parts.append(footnotes(notes))
    return parts


def _two_meshes(one: Explained, against: Explained, width: int) -> list[RenderableType]:
    lines = [*_evidence(one, "A"), *_evidence(against, "B")]
    parts: list[RenderableType] = [labelled(lines)]
    parts += [Text(), tabulated(_cause_changes(one, against), width=width)]
    parts.append(footnotes([("*", "estimated; what other work hides is not counted")]))
    if one.replay is not None and against.replay is not None:
        parts += [Text(), tabulated(_replay_changes(one.replay, against.replay), width=width)]
        note = "replayed from the schedules of the compiled programs, not measured"
        parts.append(footnotes([("*", note)]))
    changes = [
        change for change in compare_collectives(one.cost, against.cost) if change.change != "same"
    ]
    if changes:
        columns = _fit(_change_columns(changes[:_MOST]), width, ("in B",))
        parts += [Text(), tabulated(columns, width=width)]
        notes = [("*", _ALONE)]
        if len(changes) > _MOST:
            notes.append(("", f"and {count(len(changes) - _MOST, 'more change')}, smaller ones"))
        parts.append(footnotes(notes))
    return parts


def _evidence(one: Explained, name: str = "") -> list[tuple[str, str]]:
    """The plan and its step time by every kind of evidence, the strongest first."""
    estimated = one.estimated
    low, high = estimated.bracket_s
    times: list[str] = []
    if one.measured is not None:
        half = half_of(one.measured)
        spread = f" {half}" if half else ""
        times.append(f"{format_seconds(one.measured.step_s)}{spread} measured")
    if one.replay is not None:
        least, most = one.replay.bracket_s
        times.append(
            f"{format_seconds(one.replay.step_s)} predicted by a replay of the compiled program "
            f"(between {format_seconds(least)} and {format_seconds(most)})"
        )
    elif one.compiled is not None:
        times.append(f"{format_seconds(one.compiled.step_s)} predicted from the compiled program")
    times.append(
        f"{format_seconds(estimated.step_s)} estimated "
        f"(between {format_seconds(low)} and {format_seconds(high)})"
    )
    lines = [(name or "mesh", clean(str(one.plan))), ("step", ", ".join(times))]
    if one.failure:
        lines.append(("", clean(one.failure, 240)))
    if one.is_borrowed:
        lines.append(("", "estimated from the program of other sizes: this mesh has its own"))
    lines.append(("memory", _memory(one)))
    return lines


def _memory(one: Explained) -> str:
    """The peak by every kind of evidence, and what the estimate of it is made of."""
    cost = one.cost
    said: list[str] = []
    if one.measured is not None and one.measured.peak_bytes:
        by_compiler = one.compiled and one.compiled.memory.peak_bytes == one.measured.peak_bytes
        if not by_compiler:
            said.append(f"{format_bytes(one.measured.peak_bytes)} measured")
    if one.compiled is not None:
        memory = one.compiled.memory
        first = (
            f" (the first step {format_bytes(memory.first_bytes)})" if memory.first_bytes else ""
        )
        said.append(f"{format_bytes(memory.peak_bytes)} compiled{first}")
    said.append(f"{format_bytes(one.estimated.memory_bytes)} estimated{_interval(one)}")
    where = f" at {clean(cost.peak_source)}" if cost.peak_source else ""
    made = (
        f"{format_bytes(cost.argument_bytes)} of arguments and "
        f"{format_bytes(cost.peak_temporary_bytes)} of temporaries, most{where}"
    )
    if cost.first_bytes:
        made += (
            f"; the first step, which is another program, needs {format_bytes(cost.first_bytes)}"
        )
    return f"{', '.join(said)}: {made}"


def _interval(one: Explained) -> str:
    """Where the compiler's figure is expected to lie."""
    if not one.estimated.memory_interval:
        return ""
    least, most = one.estimated.memory_interval
    if not most:
        return " (a lower bound: some of its operations take what nobody knows)"
    return f" (between {format_bytes(least)} and {format_bytes(most)})"


def _cause_columns(one: Explained) -> list[Column]:
    total = one.estimated.step_s
    replayed = dict(one.replay.causes) if one.replay is not None else {}
    causes = [
        (cause, seconds) for cause, seconds in one.estimated.causes if seconds > _LEAST * total
    ]
    shown = {cause for cause, _ in causes}
    causes += [
        (cause, 0.0)
        for cause, seconds in replayed.items()
        if cause not in shown and seconds > _LEAST * total
    ]
    columns = [
        text_column("cause", [_cause(cause) for cause, _ in causes], most=12),
        figures_column("time *", [_time(seconds) for _, seconds in causes]),
        figures_column("share", [_share(seconds, total) for _, seconds in causes]),
        figures_column("amount *", [_amount(cause, one.cost) for cause, _ in causes]),
    ]
    if one.replay is not None:
        times = [_time(replayed.get(cause, 0.0)) for cause, _ in causes]
        columns.insert(2, figures_column("replayed", times))
    return columns


def _share(seconds: float, total: float) -> str:
    return format_percent(seconds / total) if total > 0 else ""


def _cause(cause: str) -> str:
    return clean(_CAUSES.get(cause, cause))


def _amount(cause: str, cost: MeshCost) -> str:
    """What a cause has to do in one step on one device."""
    kind, _, axes = cause.partition(" ")
    match kind:
        case "compute":
            return _flop(cost.flops)
        case "memory":
            return format_bytes(cost.memory_traffic_bytes)
        case "ici" | "dcn":
            # What the stages of a pipeline send each other is no collective.
            moved = cost.payload_bytes(tuple(axes.split("+")))
            return format_bytes(moved) if moved else ""
        case "host":
            return format_bytes(cost.host_bytes)
        case "latency":
            runs = sum(one.count for one in (*cost.collectives, *cost.kernels))
            return f"{format_count(runs)}{GLUE}starts"
        case _:
            return ""


def _flop(number: float) -> str:
    text = format_count(number)
    return f"{text}FLOP" if text[-1].isalpha() else f"{text}{GLUE}FLOP"


def _collective_columns(rows: Sequence[CollectiveCost]) -> list[Column]:
    return [
        text_column("collective", [_name(row) for row in rows], most=18),
        _places(rows),
        figures_column("array", [clean(row.operand, 30) for row in rows], justify="left"),
        figures_column("runs", [format_count(row.count) for row in rows]),
        figures_column("bytes", [format_bytes(row.payload_bytes) for row in rows]),
        figures_column("time *", [format_seconds(row.seconds) for row in rows]),
    ]


def _name(row: CollectiveCost) -> str:
    crosses = " (DCN)" if row.granules > 1 else ""
    return f"{row.kind} {','.join(row.axes)}{crosses}"


def _places(rows: Sequence[CollectiveCost]) -> Column:
    """Where they are, `step.py:123` in one piece unless there is no room; see `_fit`."""
    cells = [_where(row) for row in rows]
    longest = max((len(word) for cell in cells for word in cell.split()), default=0)
    return text_column("where", cells, most=max(longest, 16))


def _where(row: CollectiveCost) -> str:
    if not row.source:
        return clean(row.region) if row.in_loop else "unknown"
    return f"{clean(row.source)} (loop)" if row.in_loop else clean(row.source)


def _cause_changes(one: Explained, against: Explained) -> list[Column]:
    least_s = _LEAST * max(one.estimated.step_s, against.estimated.step_s)
    changes = [
        change
        for change in compare_causes(one.estimated, against.estimated)
        if max(change.first_s, change.second_s) > least_s
    ]
    rows = [
        *((_cause(change.cause), change.first_s, change.second_s) for change in changes),
        ("step", one.estimated.step_s, against.estimated.step_s),
    ]
    bytes_ = (one.estimated.memory_bytes, against.estimated.memory_bytes)
    memory = _signed(bytes_[1] - bytes_[0], format_bytes)
    return [
        text_column("cause", [*(name for name, _, _ in rows), "peak memory"], most=12),
        figures_column("A *", [*(_time(one_s) for _, one_s, _ in rows), format_bytes(bytes_[0])]),
        figures_column("B *", [*(_time(one_s) for _, _, one_s in rows), format_bytes(bytes_[1])]),
        figures_column(
            "B - A *",
            [*(_signed(two_s - one_s, format_seconds) for _, one_s, two_s in rows), memory],
        ),
    ]


def _replay_changes(one: ReplayOutcome, against: ReplayOutcome) -> list[Column]:
    """The causes of two replays, and what waits for communication in all."""
    first, second = dict(one.causes), dict(against.causes)
    least_s = _LEAST * max(one.step_s, against.step_s)
    names = list(dict.fromkeys([*first, *second]))
    rows = [
        (_cause(name), first.get(name, 0.0), second.get(name, 0.0))
        for name in sorted(names, key=lambda name: -abs(second.get(name, 0) - first.get(name, 0)))
        if max(first.get(name, 0.0), second.get(name, 0.0)) > least_s
    ]
    rows += [
        ("exposed", exposed_s(one), exposed_s(against)),
        ("step", one.step_s, against.step_s),
    ]
    return [
        text_column("cause", [name for name, _, _ in rows], most=12),
        figures_column("A *", [_time(one_s) for _, one_s, _ in rows]),
        figures_column("B *", [_time(two_s) for _, _, two_s in rows]),
        figures_column(
            "B - A *", [_signed(two_s - one_s, format_seconds) for _, one_s, two_s in rows]
        ),
    ]


def _change_columns(changes: Sequence[CollectiveChange]) -> list[Column]:
    shown = [change.shown for change in changes]
    return [
        text_column("collective", [_name(row) for row in shown], most=18),
        _places(shown),
        figures_column("A *", [_time(change.first_s) for change in changes]),
        figures_column("B *", [_time(change.second_s) for change in changes]),
        figures_column("in B", [change.change for change in changes], justify="left"),
    ]


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds > 0 else "-"


def _signed(change: float, said: Callable[[float], str]) -> str:
    return f"{'-' if change < 0 else '+'}{said(abs(change))}" if change else "="


def _summary(explanation: Explanation) -> list[tuple[str, str]]:
    one, against = explanation.one, explanation.against
    if against is None:
        lines = [("why", why_sentence(one))]
    else:
        lines = [
            ("why", verdict_sentence(explanation)),
            ("A", why_sentence(one)),
            ("B", why_sentence(against)),
        ]
    lines.append(("windows", clean(window_sentence(explanation))))
    lines += _findings(explanation)
    lines += _uncounted(explanation)
    lines.append(("speeds", clean(explanation.speeds)))
    lines += [("note", clean(notice)) for notice in explanation.notices]
    return [(label, text) for label, text in lines if text]


def _findings(explanation: Explanation) -> list[tuple[str, str]]:
    """What each mesh has that was not asked for; what both have alike is said once."""
    sides = [side for side in (explanation.one, explanation.against) if side is not None]
    said = [
        {sentence(finding, dict(side.cost.sizes)): None for finding in side.cost.findings}
        for side in sides
    ]
    names = ("A: ", "B: ") if len(sides) > 1 else ("",)
    shared = said[0].keys() & said[-1].keys() if len(sides) > 1 else set[str]()
    lines = [
        f"{name}{text}" for name, texts in zip(names, said) for text in texts if text not in shared
    ]
    return [("finding", text) for text in [*sorted(shared), *lines]]


def _uncounted(explanation: Explanation) -> list[tuple[str, str]]:
    sides = [side for side in (explanation.one, explanation.against) if side is not None]
    missing = {
        (missing.what, missing.why, missing.source): None
        for side in sides
        for missing in side.cost.uncounted
    }
    named = {text: None for side in sides for text in side.estimated.uncounted}
    said = [
        f"{clean(what)}{f' at {clean(source)}' if source else ''}: {clean(why)}"
        for what, why, source in missing
    ] or [clean(text) for text in named]
    return [("uncounted", text) for text in said[:5]] + (
        [("", f"and {len(said) - 5} more")] if len(said) > 5 else []
    )


def _fit(columns: Sequence[Column], width: int, dropped: Sequence[str]) -> list[Column]:
    """As `fitting`; words are folded further if that does not suffice."""
    kept = fitting(columns, width, dropped)
    if least_width(kept) <= width:
        return kept
    return [replace(column, floor=min(column.floor, _FOLDED)) for column in kept]
