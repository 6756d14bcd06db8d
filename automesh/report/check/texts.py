"""The result of a check as Markdown for a pull request, and as JUnit XML."""

from __future__ import annotations

from xml.etree import ElementTree

from automesh.report.check.nouns import SAID, RulesChecked, row_of
from automesh.texts.terminal import clean


def as_markdown(checked: RulesChecked) -> str:
    """Writes a table for a pull request: a row for each figure that differs, or rule that holds."""
    lines = [f"### automesh check: {checked.summary}", ""]
    lines += ["| rule | | figure | then | now | change |", "|---|---|---|---|---|---|"]
    for rule in checked.rules:
        name, said = _cell(rule.name), SAID[rule.status]
        if not rule.told:
            lines.append(f"| {name} | {said} | {_cell(rule.reason)} | | | |")
        for change in rule.told:
            mark = said if change.verdict == "regressed" else "changed"
            cells = row_of(change)[:-1]
            lines.append(f"| {name} | {mark} | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def as_junit(checked: RulesChecked) -> str:
    """Writes a suite with a case for each rule, as continuous integration reads it."""
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
            suite, "testcase", classname=clean(checked.script), name=clean(rule.name)
        )
        if rule.status != "holds":
            kind = "failure" if rule.status == "regressed" else "error"
            found = ElementTree.SubElement(case, kind, message=clean(rule.reason))
            found.text = "\n".join(clean(" ".join(row_of(change))) for change in rule.told)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _cell(text: str) -> str:
    return clean(text).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
