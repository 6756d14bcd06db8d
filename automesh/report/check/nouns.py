"""`RuleCheck` and `RulesChecked`: what became of every rule of a file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from automesh.mesh.evidence import ProgramFacts
from automesh.report.blocks.columns import figures_column
from automesh.report.blocks.nouns import Block, KeyValues, Line, Report, Section, Sentence, Table
from automesh.report.blocks.reportable import Reportable
from automesh.report.check.facts import Change
from automesh.texts.terminal import clean
from automesh.units import format_change

Status = Literal["holds", "regressed", "unknown"]

_INDENT = 12  # Behind the longest of:
SAID: dict[Status, str] = {"holds": "holds", "regressed": "REGRESSED", "unknown": "not checked"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCheck:
    """One rule, compared with what the script is today.

    Attributes:
      match: of the rule.
      plan: its mesh with knobs; empty if it is no plan.
      target: the devices that it was compiled for; empty if it names none.
      status: `unknown` where nothing could be compared.
      reason: one sentence; empty where the rule holds.
      changes: every figure then and now; empty where nothing was compiled.
      notes: what else to know: versions that differ, figures that an old rule does not have.
      explain: a command that says where the time goes now; empty if there is none.
      now: figures of today's step; None where nothing was compiled.
    """

    match: str
    plan: str = ""
    target: str = ""
    status: Status
    reason: str = ""
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    explain: str = ""
    now: ProgramFacts | None = None

    @property
    def name(self) -> str:
        """The target and the plan of the rule."""
        return f"{self.match}: {self.plan}" if self.plan else self.match

    @property
    def told(self) -> tuple[Change, ...]:
        """The figures that have changed."""
        return tuple(change for change in self.changes if change.verdict != "same")


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesChecked(Reportable):
    """A file of rules, compared with what the script is today.

    Attributes:
      script: as the user named it.
      against: where the earlier figures come from: the rules file, or a version of the script.
    """

    script: str
    against: str
    rules: tuple[RuleCheck, ...]

    @property
    def exit_code(self) -> int:
        """1 if a rule has regressed, else 2 if one could not be compared, else 0."""
        statuses = {rule.status for rule in self.rules}
        return 1 if "regressed" in statuses else 2 if "unknown" in statuses or not statuses else 0

    def to_report(self) -> Report:
        """Makes a paragraph for each rule, with the figures that differ."""
        return Report(
            title=clean(f"{self.script} against {self.against}"),
            sections=(
                Section(blocks=tuple(block for rule in self.rules for block in _blocks(rule))),
                Section(blocks=(Sentence(text=self.summary),)),
            ),
            facts=lambda: {
                "script": self.script,
                "against": self.against,
                "exit_code": self.exit_code,
                "rules": [asdict(rule) for rule in self.rules],
            },
            is_folded=False,
        )

    @property
    def summary(self) -> str:
        """Says in a phrase how many rules hold.

        >>> RulesChecked(script="train.py", against="mesh_rules.toml", rules=()).summary
        'no rules'
        """
        statuses = [rule.status for rule in self.rules]
        said = {"holds": "hold", "regressed": "regressed", "unknown": "not checked"}
        found = [f"{statuses.count(one)} {said[one]}" for one in SAID if one in statuses]
        return f"{len(statuses)} rules: {', '.join(found)}" if found else "no rules"


def _blocks(rule: RuleCheck) -> tuple[Block, ...]:
    rows = [row_of(change) for change in rule.told]
    names = ("", "then", "now", "change", "")
    columns = [
        figures_column(name, [clean(row[at]) for row in rows], justify="left")
        for at, name in enumerate(names)
    ]
    notes = [("", f"note: {note}") for note in rule.notes]
    if rule.explain and rule.status == "regressed":
        notes.append(("", f"next: {rule.explain}"))
    return (
        _lines((SAID[rule.status], rule.name), ("", rule.reason)),
        Table(columns=tuple(columns), is_ruled=False, indent=_INDENT),
        _lines(*notes),
    )


def _lines(*lines: Line) -> KeyValues:
    said = tuple((label, clean(text)) for label, text in lines if text)
    return KeyValues(lines=said, width=_INDENT - 1)


def row_of(change: Change) -> tuple[str, ...]:
    mark = "worse" if change.verdict == "regressed" else ""
    return (change.what, change.then, change.now, _ratio(change), mark)


def _ratio(change: Change) -> str:
    if change.ratio:
        return format_change(change.ratio)
    return "appeared" if change.then == "-" else "gone" if change.now == "-" else ""
