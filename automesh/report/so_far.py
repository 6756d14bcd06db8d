"""The ranking while estimates are still being made: its first rows, and what it does not have yet.

A display shows it after each set of active axes, and a study keeps it, so that somebody who stops a
search, or looks at it from elsewhere, sees a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from automesh.report.blocks.nouns import Report, Section, Sentence
from automesh.report.blocks.terminal import render
from automesh.report.columns import ranking_table, varying_knobs
from automesh.report.result import Candidate
from automesh.report.words import count, step_s
from automesh.texts.terminal import clean
from automesh.units import format_seconds

MOST_NAMED = 4  # axes and settings
SETTLED_ROWS = 10  # of which it is said when they are those of the end
SETTLED = f"the first {SETTLED_ROWS} are settled"
# What a plan uses: axes larger than 1, and settings.
Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """The best plans by the estimates so far.

    Attributes:
      rows: best first; behind them the script's own plan, if it is estimated.
      estimated: how many plans have an estimate, those that are not in `rows` included.
      plans: how many are to have one.
      missing: what those without one have in common, in words: `meshes with tp`, and how many
        others there are; empty if all have one.
      stop_reason: why nothing more was estimated; empty while estimates are made.
      is_settled: True if the first ten plans are those of the complete ranking: no plan without an
        estimate can come among them.
    """

    rows: tuple[Candidate, ...]
    estimated: int
    plans: int
    missing: str = ""
    stop_reason: str = ""
    is_settled: bool = False

    @property
    def first(self) -> str:
        """The plan that is first now, as text."""
        return clean(str(self.rows[0].plan))

    @property
    def extent(self) -> str:
        """`10 of 24 plans estimated; meshes with tp: not estimated yet`."""
        known = f"{self.estimated} of {count(self.plans, 'plan')} estimated"
        if not self.missing:
            return known
        known = f"{known}; {self.missing}: not estimated yet"
        return (
            f"{known}; {SETTLED}: none of these can come among them" if self.is_settled else known
        )

    def __str__(self) -> str:
        """Returns a line such as `dp:8, 20.3 ms estimated (10 of 24 plans estimated)`."""
        seconds = format_seconds(step_s(self.rows[0]) or 0.0)
        return f"{self.first}, {seconds} estimated ({self.extent})"


def drawn(so_far: SoFar, *, width: int, rows: int) -> str:
    """Draws the table under a line of its own, and says what is missing in it.

    Args:
      width: columns of the terminal; no line is longer (fewer than 40 are treated as 40).
      rows: as many as may be shown; the script's own plan is always among them.
    """
    shown = list(so_far.rows[:rows])
    shown += [row for row in so_far.rows[rows:] if row.is_baseline]
    knobs = varying_knobs(so_far.rows)
    blocks = (ranking_table(shown, knobs, tokens_per_step=0), Sentence(text=f"* {so_far.extent}"))
    report = Report(sections=(Section(blocks=blocks),))
    return "\n" + render(report, width=width, colour=False)


def what_is_missing(
    known: frozenset[str], waiting: Mapping[Parts, int], example: Callable[[Parts], str]
) -> str:
    """Says what plans without an estimate have in common.

    Args:
      known: parts of plans that have an estimate.
      waiting: by what they use, how many plans have none.
      example: gives one of the plans that use these parts.

    Returns:
      `meshes with tp or sp`, `3 plans, such as dp:4,tp:2`, or both; empty if none waits.
    """
    named, others = common_parts(known, waiting)
    said = [f"meshes with {' or '.join(named)}"] if named else []
    if others:
        number = sum(waiting[parts] for parts in others)
        said.append(f"{count(number, 'plan')}, such as {example(others[0])}")
    return ", and ".join(said)


def common_parts(
    known: frozenset[str], waiting: Mapping[Parts, int]
) -> tuple[tuple[str, ...], tuple[Parts, ...]]:
    """Finds parts that plans without an estimate use, and no plan that has an estimate.

    Args:
      known, waiting: as for `what_is_missing`.

    Returns:
      These parts, those that most plans use first; nothing if they are too many to be named. Then
      what the other plans without an estimate use.
    """
    numbers: dict[str, int] = {}
    for parts, number in waiting.items():
        for part in parts:
            if part not in known:
                numbers[part] = numbers.get(part, 0) + number
    named: list[str] = []
    left = dict.fromkeys(waiting)
    for part in sorted(numbers, key=lambda part: -numbers[part]):
        if any(part in parts for parts in left):
            named.append(part)
            left = dict.fromkeys(parts for parts in left if part not in parts)
    if len(named) > MOST_NAMED:
        return (), tuple(waiting)
    return tuple(named), tuple(left)
