"""A lint as text: a block for each finding, the most expensive first."""

from __future__ import annotations

import textwrap

from automesh.report.lint.nouns import Linted, LintReport, Tried
from automesh.report.words import count
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_seconds

_LABEL = 9
_LEAST_S = 1e-9


def render(report: LintReport, width: int) -> str:
    """The report as lines that fit a terminal of `width` columns."""
    on = f"{clean(report.target)} ({report.device_count} x {clean(report.device)})"
    where = f"mesh {clean(report.plans[0])}" if len(report.plans) == 1 else ""
    where = where or count(len(report.plans), "plan")
    lines = [f"{clean(report.workload)} on {on}, {where}", ""]
    for one in report.findings:
        lines += _finding(one, report, width)
    lines += _labelled("found", _total(report), width)
    for plan, why in report.missing[:3]:
        lines += _labelled("missing", f"{clean(plan)}: {clean(why)}", width)
    if len(report.missing) > 3:
        lines += _labelled("", f"and {len(report.missing) - 3} more", width)
    if report.speeds and report.findings:
        lines += _labelled("speeds", clean(report.speeds), width)
    for notice in report.notices:
        lines += _labelled("note", clean(notice), width)
    return "\n".join(lines) + "\n"


def _finding(one: Linted, report: LintReport, width: int) -> list[str]:
    place = f"{clean(one.file)}:{one.line}" if one.file else clean(one.source) or "the step"
    lines = [f"{place}: {one.rule}: {_cost(one)}"]
    if len(report.plans) > 1:
        lines += _labelled("mesh", f"{clean(one.plan)}, and {_others(one, report)}", width)
    lines += _labelled("what", one.what, width)
    lines += _labelled("why", one.why, width)
    lines += _labelled("cure", one.cure, width)
    if one.tried is not None:
        lines += _labelled("tried", f"{one.tried.change}: {saving(one.tried)}", width)
    return [*lines, ""]


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
    """What a cure saves, in words: `saves 7.00 MiB of 19.0 MiB (estimated)`."""
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


def _labelled(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=f"  {label:<{_LABEL - 2}}"[:_LABEL].ljust(_LABEL) + " ",
        subsequent_indent=" " * (_LABEL + 1),
        break_long_words=False,
        break_on_hyphens=False,
    )
