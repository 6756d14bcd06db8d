"""The summary of a study for lists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["unread", "running", "interrupted", "stopped", "ended", "unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """The summary of one study in a list of studies.

    Attributes:
      state: `running` while a search runs; `ended` by itself, `interrupted` by a user, `stopped`
        without a footer; `unread` until it was read, `unreadable` if that fails.
      sentence: one sentence about the best plan.
      evidence: measured, compiled, estimated or none.
      step_s: seconds per step of the best plan; None without one.
      speedup: speedup over the script's own plan, from fresh processes; None if not measured.
      legal, compiled, measured, failed, waiting: numbers of plans.
      has_rule: whether there is a rule.
      made: when the rule was decided, as text; empty before.
      problem: why the study cannot be read; empty if it can.
    """

    name: str
    workload: str = ""
    target: str = ""
    device: str = ""
    device_count: int = 0
    state: State = "unread"
    sentence: str = ""
    evidence: str = "none"
    plan: str = ""
    step_s: float | None = None
    speedup: float | None = None
    legal: int = 0
    compiled: int = 0
    measured: int = 0
    failed: int = 0
    waiting: int = 0
    has_rule: bool = False
    made: str = ""
    changed_s: float = 0.0
    stop_reason: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStudy:
    """A study as it was read last.

    Attributes:
      folder: the folder with its logs and estimates.
      storage: the storage that it is in; empty for SQLite in its folder.
      rule: the text of its rule file; empty without a rule.
      missing: why there is no rule.
      stamp: a text that changes whenever the study changes; empty before it is read.
      words: the words in which a user's search looks, in lower case.
      text: the summary as JSON.
    """

    summary: StudySummary
    folder: Path
    storage: str
    rule: str
    missing: str
    stamp: str
    words: str
    text: str
