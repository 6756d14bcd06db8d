"""What every search does around its strategy: header, interrupts, footer, rule and CSV file.

A strategy decides which plans are tried and how; the study is where all figures go, so that the
result is read from it in the same way whichever strategy has filled it, and however it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from automesh.errors import UsageError
from automesh.mesh.axes import Plan
from automesh.mesh.rules.file import RuleEdited
from automesh.mesh.rules.rule import MeshRule
from automesh.outcomes import Measured, is_unsteady, is_wide
from automesh.report.files.csv import dataframe, write_table
from automesh.report.files.rule import has_rule, save_rule
from automesh.report.result import SearchResult
from automesh.report.words import best_of, count
from automesh.tuner.measure.leased_pool import LeaseLost
from automesh.tuner.paths import as_seen
from automesh.tuner.strategies.machine_load import said_of_load
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.metadata import Footer, Header, Notebook
from automesh.tuner.study.rung import Rung
from automesh.tuner.study.study import Study
from automesh.units import format_seconds

_TAKEN_OVER = (
    "this search was silent for so long that another one has taken over; "
    "run the same command to see what it found"
)


class Strategy(Protocol):
    """How one kind of search spends its budget; what is measured replaces what a file holds."""

    def climb(self) -> str:
        """Tries plans until nothing is left to try, or the time is over.

        Returns:
          How it ended, in words.

        Raises:
          LeaseLost: another search on the same storage has taken over.
          UsageError: the machine or the script failed, not a plan.
        """
        ...

    def header(self, header: Header) -> Header:
        """The header that the search ends with: what was noticed meanwhile may be added."""
        return header

    def footer(self, result: SearchResult, ending: str, *, interrupted: bool) -> Footer:
        """How the search ended, with what is thought of the plans that were not tried."""
        ...

    def keeps_rule(self, path: Path) -> str:
        """Why the rule that a file holds already must stay; empty if it may be replaced."""
        del path
        return ""


def said_of_doubt(result: SearchResult) -> str:
    """What is said where the time of the best plan is known badly, with how busy the machine was;
    empty if it is known well, or was not measured in fresh processes."""
    best = best_of(result)
    outcome = best.outcome if best is not None else None
    if best is None or not isinstance(outcome, Measured) or not outcome.confirmed:
        return ""
    if is_unsteady(outcome):
        fastest, slowest = map(format_seconds, (min(outcome.rounds_s), max(outcome.rounds_s)))
        return (
            f"undecided: {said_of_load()}, and {best.plan} took {fastest} in one process and "
            f"{slowest} in another: no rule was written; the same command goes on, best while "
            "nothing else runs"
        )
    low, high = outcome.interval_s
    if not is_wide(outcome) or low <= 0.0:
        return ""
    return (
        f"the step time of {best.plan} is known to a factor of {high / low:.1f} only, from "
        f"{count(len(outcome.rounds_s), 'process', 'processes')}: {said_of_load()}; more --budget "
        "narrows it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """One search, from its first note in the study to the rule that it writes.

    Attributes:
      rungs: those that the strategy fills; trials of dead processes are taken over.
      rules: file that the rule is merged into; empty to write none.
      rules_before: what that file said when the search began.
      folder: of the study.
      check_winner: what speaks against a rule for a plan, a sentence; empty if nothing does.
      with_starts: adds to a header how often the script was started until now.
    """

    study: Study
    header: Header
    notebook: Notebook
    rungs: Sequence[Rung]
    rules: str
    rules_before: tuple[MeshRule, ...]
    folder: Path
    check_winner: Callable[[Plan], str] = lambda _: ""
    with_starts: Callable[[Header], Header] = lambda header: header

    def run(self, strategy: Strategy) -> SearchResult:
        """Runs a strategy to its end, or to Ctrl-C; gives what the study then holds.

        Raises:
          UsageError: as `Strategy.climb`, or the rule or the table cannot be written; what is
            measured until then is kept.
        """
        # The measured ones too: a hold of a dead host ends some time after it was first seen.
        for rung in (*self.rungs, self.study.measure):
            rung.adopt_expired()
        self.notebook.note_header(self.header)
        interrupted, ending = False, ""
        try:
            ending = strategy.climb()
        except KeyboardInterrupt:
            # Whatever is in flight is given back when the study closes; the table shows the rest.
            interrupted = True
        except LeaseLost:
            ending = _TAKEN_OVER
        header = strategy.header(self.header)
        result = assemble(self.study, header)
        footer = strategy.footer(result, ending, interrupted=interrupted)
        if not interrupted and (doubt := said_of_doubt(result)):
            footer = replace(footer, stop_reason=f"{footer.stop_reason}; {doubt}")
        self.notebook.note_footer(footer)
        result = assemble(self.study, header)
        try:
            if self.rules and not interrupted and has_rule(result):
                self.notebook.note_footer(self._with_rule(strategy, result, footer))
        except KeyboardInterrupt:  # While the script was run on the winner's mesh.
            reason = f"{footer.stop_reason}; interrupted before the rule was written"
            self.notebook.note_footer(replace(footer, interrupted=True, stop_reason=reason))
        finally:
            header = self.with_starts(header)
            if header is not self.header:
                self.notebook.note_header(header)
            result = assemble(self.study, header)
            # Also without the rule: somebody may have broken its file while the search ran.
            write_table(dataframe(result), self.folder / "trials.csv")
        return result

    def _with_rule(self, strategy: Strategy, result: SearchResult, footer: Footer) -> Footer:
        path = Path(self.rules)
        kept = strategy.keeps_rule(path)
        best = best_of(result)
        if not kept and best is not None and (said := self.check_winner(best.plan)):
            kept = f"no rule is written for {best.plan.mesh}: {said}"
        if kept:
            return replace(footer, stop_reason=f"{footer.stop_reason}; {kept}")
        try:
            written = save_rule(result, path, before=self.rules_before)
        except RuleEdited as edited:
            return replace(footer, stop_reason=f"{footer.stop_reason}; {edited.message}")
        except UsageError as error:
            raise UsageError(
                error.message,
                hint=f"what was found is kept, `automesh show {as_seen(self.folder)}` lists it: "
                "mend the file, or name another with --rules, and run the same command again",
            ) from None
        return replace(footer, rules_path=as_seen(written))
