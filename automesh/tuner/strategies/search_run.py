"""The parts that all searches share, whatever their strategy: header, interrupts, footer, rule, CSV
file.

A strategy decides which plans are tried and how, and writes all figures into the study. So the
result is read from the study in the same way for every strategy and every kind of ending.
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
from automesh.tuner.strategies.machine_load import load_words
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
    """The way in which one kind of search spends its budget."""

    def climb(self) -> str:
        """Tries plans until none is left or the time is over.

        Returns:
          Why it ended, in words.

        Raises:
          LeaseLost: another search on the same storage has taken over.
          UsageError: the machine or the script failed, and not a plan.
        """
        ...

    def header(self, header: Header) -> Header:
        """Returns the final header of the search; a strategy may add notices."""
        return header

    def footer(self, result: SearchResult, ending: str, *, interrupted: bool) -> Footer:
        """Returns the footer: how the search ended, and the belief about the plans that were not
        tried."""
        ...

    def keeps_rule(self, path: Path) -> str:
        """Says why the rule that is already in a file must stay; empty if it may be replaced."""
        del path
        return ""


def unsteady_time_notice(result: SearchResult) -> str:
    """Returns a notice that the time of the best plan is uncertain, with the load of the machine;
    empty if it is certain, or was not measured in fresh processes."""
    best = best_of(result)
    outcome = best.outcome if best is not None else None
    if best is None or not isinstance(outcome, Measured) or not outcome.confirmed:
        return ""
    if is_unsteady(outcome):
        fastest, slowest = map(format_seconds, (min(outcome.rounds_s), max(outcome.rounds_s)))
        return (
            f"undecided: {load_words()}, and {best.plan} took {fastest} in one process and "
            f"{slowest} in another: no rule was written; the same command goes on, best while "
            "nothing else runs"
        )
    low, high = outcome.interval_s
    if not is_wide(outcome) or low <= 0.0:
        return ""
    return (
        f"the step time of {best.plan} is known to a factor of {high / low:.1f} only, from "
        f"{count(len(outcome.rounds_s), 'process', 'processes')}: {load_words()}; more --budget "
        "narrows it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """One search, from its first note in the study to the rule that it writes.

    Attributes:
      rungs: the rungs that the strategy fills; the search takes over trials of dead processes.
      rules: file into which the rule is merged; empty to write none.
      rules_before: rules in that file when the search began.
      folder: folder of the study.
      check_winner: gives a sentence on why a plan must not become a rule; empty if it may.
      with_starts: adds to a header how often the script was started.
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
        """Runs a strategy until it ends or Ctrl-C; returns the result that the study then holds.

        Raises:
          UsageError: as `Strategy.climb`, or the rule or the table cannot be written; measurements
            until then are kept.
        """
        # Also the measured rung: the lease of a dead host ends some time after it was first seen.
        for rung in (*self.rungs, self.study.measure):
            rung.adopt_expired()
        self.notebook.note_header(self.header)
        interrupted, ending = False, ""
        try:
            ending = strategy.climb()
        except KeyboardInterrupt:
            # Unfinished trials are given back when the study closes; the table shows the rest.
            interrupted = True
        except LeaseLost:
            ending = _TAKEN_OVER
        header = strategy.header(self.header)
        result = assemble(self.study, header)
        footer = strategy.footer(result, ending, interrupted=interrupted)
        if not interrupted and (doubt := unsteady_time_notice(result)):
            footer = replace(footer, stop_reason=f"{footer.stop_reason}; {doubt}")
        self.notebook.note_footer(footer)
        result = assemble(self.study, header)
        try:
            if self.rules and not interrupted and has_rule(result):
                self.notebook.note_footer(self._with_rule(strategy, result, footer))
        except KeyboardInterrupt:  # During the run of the script on the winner's mesh.
            reason = f"{footer.stop_reason}; interrupted before the rule was written"
            self.notebook.note_footer(replace(footer, interrupted=True, stop_reason=reason))
        finally:
            header = self.with_starts(header)
            if header is not self.header:
                self.notebook.note_header(header)
            result = assemble(self.study, header)
            # Also if the rule failed: somebody may have damaged its file during the search.
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
