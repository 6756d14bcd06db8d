"""`RuleCheck` and `RulesChecked`: what became of every rule of a file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from automesh.mesh.evidence import ProgramFacts
from automesh.report.check.facts import Change

Status = Literal["holds", "regressed", "unknown"]


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
    def told(self) -> tuple[Change, ...]:
        """The figures that are not the same."""
        return tuple(change for change in self.changes if change.verdict != "same")


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesChecked:
    """A file of rules, compared with what the script is today.

    Attributes:
      script: as the user named it.
      against: what the figures before are of: the rules file, or a version of the script.
    """

    script: str
    against: str
    rules: tuple[RuleCheck, ...]

    @property
    def exit_code(self) -> int:
        """1 if a rule has regressed, else 2 if one could not be compared, else 0."""
        statuses = {rule.status for rule in self.rules}
        return 1 if "regressed" in statuses else 2 if "unknown" in statuses or not statuses else 0

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "script": self.script,
            "against": self.against,
            "exit_code": self.exit_code,
            "rules": [asdict(rule) for rule in self.rules],
        }
