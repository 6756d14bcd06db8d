"""What was checked as text for a terminal, as Markdown for a pull request, and as JUnit XML."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from automesh.report.check.facts import Change
from automesh.report.check.nouns import RuleCheck, RulesChecked, Status
from automesh.texts.terminal import clean
from automesh.units import format_change

_HEAD = ("", "then", "now", "change", "")
_SAID: dict[Status, str] = {"holds": "holds", "regressed": "REGRESSED", "unknown": "not checked"}


def as_text(checked: RulesChecked) -> str:
    """A paragraph for each rule, with the figures that differ."""
    lines = [f"{checked.script} against {checked.against}", ""]
    for rule in checked.rules:
        lines.append(f"{_SAID[rule.status]:<11} {_name(rule)}")
        if rule.reason:
            lines.append(f"            {rule.reason}")
        if rule.told:
            lines += [f"            {line}" for line in _columns([_HEAD, *map(_row, rule.told)])]
        lines += [f"            note: {note}" for note in rule.notes]
        if rule.explain and rule.status == "regressed":
            lines.append(f"            next: {rule.explain}")
    return "\n".join(clean_columns(line) for line in [*lines, "", summary(checked)]) + "\n"


def clean_columns(line: str) -> str:
    """A line whose foreign text is cleaned, and whose blanks in front are kept."""
    body = line.lstrip(" ")
    blanks = line[: len(line) - len(body)]
    return blanks + "  ".join(clean(part) for part in body.split("  "))


def as_markdown(checked: RulesChecked) -> str:
    """A table for a pull request: a row for each figure that differs, one for a rule that holds."""
    lines = [f"### automesh check: {summary(checked)}", ""]
    lines += ["| rule | | figure | then | now | change |", "|---|---|---|---|---|---|"]
    for rule in checked.rules:
        name, said = _cell(_name(rule)), _SAID[rule.status]
        if not rule.told:
            lines.append(f"| {name} | {said} | {_cell(rule.reason)} | | | |")
        for change in rule.told:
            mark = said if change.verdict == "regressed" else "changed"
            cells = [change.what, change.then, change.now, _ratio(change)]
            lines.append(f"| {name} | {mark} | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def as_junit(checked: RulesChecked) -> str:
    """A suite with a case for each rule, as continuous integration reads it."""
    statuses = [rule.status for rule in checked.rules]
    suite = ElementTree.Element(
        "testsuite",
        name="automesh check",
        tests=str(len(statuses)),
        failures=str(statuses.count("regressed")),
        errors=str(statuses.count("unknown")),
    )
    for rule in checked.rules:
        case = ElementTree.SubElement(
            suite, "testcase", classname=clean(checked.script), name=clean(_name(rule))
        )
        if rule.status != "holds":
            kind = "failure" if rule.status == "regressed" else "error"
            found = ElementTree.SubElement(case, kind, message=clean(rule.reason))
            found.text = "\n".join(clean(" ".join(_row(change))) for change in rule.told)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def summary(checked: RulesChecked) -> str:
    """How many rules hold, in a phrase.

    >>> summary(RulesChecked(script="train.py", against="mesh_rules.toml", rules=()))
    'no rules'
    """
    counts = dict.fromkeys(_SAID, 0)
    for rule in checked.rules:
        counts[rule.status] += 1
    said = {"holds": "hold", "regressed": "regressed", "unknown": "not checked"}
    found = [f"{count} {said[status]}" for status, count in counts.items() if count]
    return f"{len(checked.rules)} rules: {', '.join(found)}" if found else "no rules"


def _name(rule: RuleCheck) -> str:
    return f"{rule.match}: {rule.plan}" if rule.plan else rule.match


def _row(change: Change) -> tuple[str, ...]:
    mark = "worse" if change.verdict == "regressed" else ""
    return (change.what, change.then, change.now, _ratio(change), mark)


def _ratio(change: Change) -> str:
    if change.ratio:
        return format_change(change.ratio)
    return "appeared" if change.then == "-" else "gone" if change.now == "-" else ""


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cell(text: str) -> str:
    return clean(text).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
