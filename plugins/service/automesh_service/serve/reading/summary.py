"""What lists show of a study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["unread", "running", "interrupted", "stopped", "ended", "unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """What a list of studies shows of one.

    Attributes:
      state: `running` while somebody searches; `ended` by itself, `interrupted` by somebody,
        `stopped` without a word; `unread` until it was looked at.
      sentence: what is known of the best plan.
      evidence: measured, compiled, estimated or none.
      step_s: of the best plan; None without one.
      speedup: over the script's own plan, from fresh processes; None without.
      legal, compiled, measured, failed, waiting: numbers of plans.
      has_rule: a rule was earned.
      made: when it was decided, as text; empty before.
      problem: why it cannot be read; empty if it can.
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
      folder: where its logs and estimates are.
      storage: that it is in; empty for SQLite in its folder.
      rule: the text of its rule file; empty without a rule.
      missing: why there is none.
      stamp: by which a change is told; empty before it is read.
      words: in which a search looks, in small letters.
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
