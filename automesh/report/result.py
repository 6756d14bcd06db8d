"""The nouns of a finished (or interrupted) search."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Outcome
from automesh.report.comparison import Comparison, Verification
from automesh.report.facts import StudyFacts

NOT_ENDED = "the search has not ended yet"
"""The stop reason of a search that has stored none: it still runs, or was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with the strongest evidence that there is for it.

    Attributes:
      outcome: Measured before Compiled before a failure; Estimated only if nothing was compiled, or
        at low effort alone.
      standing: against the exported plan; of predictions, against the best.
      bound_by: largest cause of the predicted time, e.g. `compute`, `memory`, `tp`; empty if there
        is no prediction.
      peak_bytes: per device, from the device where it says, else from the compiler, else estimated;
        0 if unknown.
      is_baseline: True for the script's own mesh.
      is_scripts: False for a baseline of a script that has no mesh.
      compiled: what the compiler said of a plan that went further than that, or, at low effort, of
        one that did not; None if it never compiled, or if `outcome` itself is `Compiled`.
      estimated: its estimate, if it has one and went further.
      partly_counted: True if the predicted time leaves out work that those of other plans do not:
        it is ranked behind them.
    """

    plan: Plan
    outcome: Outcome
    standing: Comparison
    bound_by: str = ""
    peak_bytes: int = 0
    is_baseline: bool = False
    is_scripts: bool = True
    compiled: Compiled | None = None
    estimated: Estimated | None = None
    partly_counted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """The numbers of plans that reached each rung. `ruled_out` counts by rule, most frequent first.

    enumerated = sum(ruled_out) + legal;
    legal = compiled + duplicates + failed + out_of_memory + timed_out + waiting, where a command is
    run, which nobody compiles, with measured in the place of the first two;
    of `waiting`, `screened` were compiled at low effort, `estimated` others have an estimate, and
    `refused` have none because the step refuses them.
    `failed_in_run` of the compiled ones fell out when they were run, for whatever reason.
    """

    enumerated: int
    ruled_out: tuple[tuple[str, int], ...]
    legal: int
    compiled: int
    duplicates: int
    out_of_memory: int
    failed: int
    timed_out: int
    waiting: int
    measured: int
    estimated: int = 0
    screened: int = 0
    failed_in_run: int = 0
    refused: int = 0

    @property
    def not_reached(self) -> int:
        """The number of plans of which nothing is known."""
        return self.waiting - self.screened - self.estimated - self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """The end of the last run of a search.

    Attributes:
      stop_reason: why, one or two sentences.
      rules_path: where the rule was written; empty if none was.
      interrupted: True if somebody has stopped it.
      certificate: what is certain of the plans that were not measured, by the sound bound alone.
      belief: what the model thinks of them, with its error.
      made: UTC time in ISO 8601; empty while it runs.
    """

    stop_reason: str
    rules_path: str
    interrupted: bool
    certificate: str = ""
    belief: str = ""
    made: str = ""


STILL_OPEN = Footer(stop_reason=NOT_ENDED, rules_path="", interrupted=False)
"""The footer of a search that has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """All results of a search, ready to be shown.

    Attributes:
      facts: what was searched, for which devices, by what.
      candidates: best first; failures last.
      reference: whose losses the others are compared with, in words.
      verifications: empty while nothing is confirmed, else one.
      footer: how the search ended.
      notices: what the user should know, one sentence each: those of the facts, and what was found
        when the study was read.
      command: what to run to go on or look again.
      is_ahead: True if times are predicted from compiled schedules, and the rule says so.
      best_command: the command that runs the best plan; empty without a template or a best plan.
    """

    facts: StudyFacts
    candidates: tuple[Candidate, ...]
    funnel: Funnel
    reference: str = ""
    verifications: tuple[Verification, ...] = ()
    footer: Footer = STILL_OPEN
    notices: tuple[str, ...] = ()
    command: str = ""
    is_ahead: bool = False
    best_command: str = ""
