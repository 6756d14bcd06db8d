"""A lint as a report: a section for each finding, the most expensive first."""

from __future__ import annotations

from automesh.report.blocks.nouns import KeyValues, Line, Report, Section, Sentence, lines_of
from automesh.report.lint.json import facts_of
from automesh.report.lint.nouns import Linted, LintReport, Tried
from automesh.report.words import count
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_seconds

_LEAST_S = 1e-9
_MOST_MISSING = 3


def report_of(report: LintReport) -> Report:
    """Returns the report: a section for each finding, and one about all of them."""
    on = f"{clean(report.target)} ({report.device_count} x {clean(report.device)})"
    where = f"mesh {clean(report.plans[0])}" if len(report.plans) == 1 else ""
    where = where or count(len(report.plans), "plan")
    more = len(report.missing) - _MOST_MISSING
    lines = [
        ("found", _total(report)),
        *(("missing", clean(f"{plan}: {why}")) for plan, why in report.missing[:_MOST_MISSING]),
        ("", f"and {more} more" if more > 0 else ""),
        ("speeds", clean(report.speeds) if report.findings else ""),
        *(("note", clean(notice)) for notice in report.notices),
    ]
    return Report(
        title=f"{clean(report.workload)} on {on}, {where}",
        sections=(
            *(_finding(one, report) for one in report.findings),
            Section(blocks=(_lines(*lines),)),
        ),
        facts=lambda: facts_of(report),
    )


def _finding(one: Linted, report: LintReport) -> Section:
    place = f"{clean(one.file)}:{one.line}" if one.file else clean(one.source) or "the step"
    tried = f"{one.tried.change}: {saving(one.tried)}" if one.tried is not None else ""
    mesh = f"{clean(one.plan)}, and {_others(one, report)}" if len(report.plans) > 1 else ""
    lines = [("mesh", mesh), ("what", one.what), ("why", one.why), ("cure", one.cure)]
    heading = Sentence(text=f"{place}: {one.rule}: {_cost(one)}", is_whole=True)
    return Section(blocks=(heading, _lines(*lines, ("tried", tried))))


def _lines(*lines: Line) -> KeyValues:
    return lines_of(*((f"  {label}", text) for label, text in lines))


def _cost(one: Linted) -> str:
    parts = [f"{clean(one.array)}"]
    if one.bytes:
        times = f" x {round(one.count)}" if round(one.count) > 1 else ""
        parts.append(f"{format_bytes(one.bytes)}{times} on a device")
    if one.axes:
        parts.append(f"over {'+'.join(one.axes)}")
    if one.seconds > _LEAST_S:
        parts.append(f"{format_seconds(one.seconds)} of a step")
    return ", ".join(parts)


def _others(one: Linted, report: LintReport) -> str:
    others = one.plans - 1
    return f"{others} more of {len(report.plans)}" if others else "no other"


def saving(tried: Tried) -> str:
    """Says what a cure saves: `saves 7.00 MiB of 19.0 MiB (estimated)`."""
    memory, step = tried.memory_bytes, tried.step_s
    parts = [
        f"{'saves' if saved > 0 else 'costs'} {said(abs(saved))} of {said(before)}"
        for saved, before, said in (
            (tried.saved_bytes, memory[0], format_bytes),
            (tried.saved_s, step[0], format_seconds),
        )
        if abs(saved) > before / 1000
    ]
    for verb in ("saves ", "costs "):  # Said once of both.
        if len(parts) == 2 and parts[1].startswith(verb) and parts[0].startswith(verb):
            parts[1] = parts[1].removeprefix(verb)
    rest = "" if tried.is_gone else "; a part of it remains"
    return f"{' and '.join(parts) or 'the same memory and time'} (estimated){rest}"


def _total(report: LintReport) -> str:
    smaller = f"; {count(report.smaller, 'smaller one')} not shown" if report.smaller else ""
    if not report.findings:
        return f"nothing{smaller}"
    return count(len(report.findings), "finding") + smaller
