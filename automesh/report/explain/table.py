"""An explanation: causes, collectives, memory, and the reason in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from automesh.cost.breakdown import CollectiveCost, MeshCost
from automesh.cost.comparison import (
    CollectiveChange,
    compare_causes,
    compare_collectives,
)
from automesh.outcomes import ReplayOutcome
from automesh.report.blocks.columns import GLUE, Column, figures_column, text_column
from automesh.report.blocks.nouns import Note, Report, Section, Table, lines_of
from automesh.report.explain.json import facts_of
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
_HIDDEN = "estimated; what other work hides is not counted"
_ALONE = "estimated, each as if nothing ran beside it"
_CAUSES = {"memory": "device memory"}


def report_of(explanation: Explanation) -> Report:
    """Reports where the time of a mesh goes, or why one of two is faster."""
    one, against = explanation.one, explanation.against
    return Report(
        title=_title(explanation),
        sections=(
            *(_one_mesh(one) if against is None else _two_meshes(one, against)),
            Section(blocks=(lines_of(*_summary(explanation)),)),
        ),
        facts=lambda: facts_of(explanation),
    )


def _title(explanation: Explanation) -> str:
    devices = f"{explanation.device_count} x {clean(explanation.device)}"
    return f"{clean(explanation.workload)} on {clean(explanation.target)} ({devices})"


def _one_mesh(one: Explained) -> Iterator[Section]:
    yield Section(blocks=(lines_of(*_evidence(one)),))
    if one.estimated.causes:
        notes = [Note(mark="*", text=_HIDDEN)]
        if one.replay is not None:
            text = "replayed: the same, from the schedule of the compiled program"
            notes.append(Note(mark="", text=text))
        yield _table(_cause_columns(one), notes, "amount *")
    notes = [Note(mark="*", text=_ALONE)]
    if rest := one.cost.collectives[_MOST:]:
        left = format_seconds(sum(other.seconds for other in rest))
        text = f"and {count(len(rest), 'more collective')}, {left} together"
        notes.append(Note(mark="", text=text))
    columns = _collective_columns(one.cost.collectives[:_MOST])
    yield _table(columns, notes, "array", "bytes", "runs")


def _two_meshes(one: Explained, against: Explained) -> Iterator[Section]:
    yield Section(blocks=(lines_of(*_evidence(one, "A"), *_evidence(against, "B")),))
    yield _table(_cause_changes(one, against), [Note(mark="*", text=_HIDDEN)])
    if one.replay is not None and against.replay is not None:
        text = "replayed from the schedules of the compiled programs, not measured"
        yield _table(_replay_changes(one.replay, against.replay), [Note(mark="*", text=text)])
    changes = [
        change for change in compare_collectives(one.cost, against.cost) if change.change != "same"
    ]
    notes = [Note(mark="*", text=_ALONE)]
    if len(changes) > _MOST:
        text = f"and {count(len(changes) - _MOST, 'more change')}, smaller ones"
        notes.append(Note(mark="", text=text))
    yield _table(_change_columns(changes[:_MOST]), notes, "in B")


def _table(columns: Sequence[Column], notes: Sequence[Note], *dropped: str) -> Section:
    """Makes a table whose words are folded further where it would not fit."""
    narrow = (replace(one, floor=min(one.floor, _FOLDED)) for one in columns if one.floor)
    table = Table(columns=tuple(columns), dropped=dropped, narrow=tuple(narrow), notes=tuple(notes))
    return Section(blocks=(table,))


def _evidence(one: Explained, name: str = "") -> list[tuple[str, str]]:
    """Lists the plan and its step time by every kind of evidence, the strongest first."""
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
    if one.placement:
        lines.append(("links", clean("; ".join(one.placement))))
    lines.append(("memory", _memory(one)))
    return lines


def _memory(one: Explained) -> str:
    """Lists the peak by every kind of evidence, and the parts of the estimate."""
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
    """Returns the range in which the compiler's figure is expected."""
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
    """Says how much work a cause has in one step on one device."""
    kind, _, axes = cause.partition(" ")
    match kind:
        case "compute":
            return _flop(cost.flops)
        case "memory":
            return format_bytes(cost.memory_traffic_bytes)
        case "ici" | "dcn":
            # What the stages of a pipeline send each other is no collective.
            moved = cost.collective_bytes(tuple(axes.split("+")))
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
        figures_column("bytes", [format_bytes(row.device_bytes) for row in rows]),
        figures_column("time *", [format_seconds(row.seconds) for row in rows]),
    ]


def _name(row: CollectiveCost) -> str:
    crosses = " (DCN)" if row.granules > 1 else ""
    return f"{row.kind} {','.join(row.axes)}{crosses}"


def _places(rows: Sequence[CollectiveCost]) -> Column:
    """Lists source lines, `step.py:123` in one piece unless there is no room; see `_table`."""
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
    """Lists the causes in which two replays differ, and their whole waits for communication."""
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
    return lines


def _findings(explanation: Explanation) -> list[tuple[str, str]]:
    """Lists the findings of each mesh; those of both meshes are listed once."""
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
