"""The noun `Schedule`: who does what, in which order. One that exists can be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from automesh.errors import WrongType, kind_of
from automesh.pipeline.actions import Action, Ranks, format_actions, parse_actions
from automesh.pipeline.check import check_actions, find_needs, order_actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of a pipeline's work, rank by rank, as data.

    Attributes:
      name: for people; `make_schedule` gives its own names, `parse_schedule` the user's.
      num_microbatches: into how many parts a batch is cut.
      ranks: of each rank its actions, in the order in which it does them.
      order: of each action its rank and itself: one order for all ranks together in which
        everything comes after what it needs.
      needs: of each action the actions whose results it reads, as `find_needs` gives them.

    Raises:
      UsageError: an action is missing or there twice, a stage has two ranks, or the ranks wait for
        each other in a circle.

    Example:
      >>> from automesh.pipeline import Schedule, parse_actions
      >>> ranks = (parse_actions("F0 F1 B0 B1", rank=0), parse_actions("F0 B0 F1 B1", rank=1))
      >>> schedule = Schedule(name="mine", num_microbatches=2, ranks=ranks)
      >>> schedule.num_ranks, schedule.num_stages, schedule.homes
      (2, 2, (0, 1))
    """

    name: str
    num_microbatches: int
    ranks: Ranks
    order: tuple[tuple[int, Action], ...] = field(init=False, repr=False, compare=False)
    needs: Mapping[Action, tuple[Action, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_actions(self.ranks, num_microbatches=self.num_microbatches)
        needs = MappingProxyType(find_needs(self.ranks))
        object.__setattr__(self, "needs", needs)
        object.__setattr__(self, "order", order_actions(self.ranks, needs))

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return 1 + max(action.stage for actions in self.ranks for action in actions)

    @property
    def homes(self) -> tuple[int, ...]:
        """Stage -> the rank that it is on."""
        home = {action.stage: rank for rank, action in self.order}
        return tuple(home[stage] for stage in range(len(home)))

    def __str__(self) -> str:
        return "\n".join(
            format_actions(actions, rank=rank) for rank, actions in enumerate(self.ranks)
        )


def parse_schedule(lines: Sequence[str], *, name: str = "custom") -> Schedule:
    """Reads a schedule of one's own, a line per rank; the opposite of `str(schedule)`.

    Args:
      lines: of each rank its actions, as `parse_actions` reads them: `F` forward, `B` backward, or
        `I` and `W` for its halves; a microbatch; `@stage` where it is not the rank's number.

    Raises:
      WrongType: not a sequence of lines.
      UsageError: something is not an action, or the schedule cannot be run (see `Schedule`).

    Example:
      >>> from automesh.pipeline import parse_schedule
      >>> schedule = parse_schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"])
      >>> schedule.num_microbatches
      2
      >>> print(schedule)
      F0 F1 B0 B1
      F0 B0 F1 B1
    """
    _check_lines(lines)
    ranks = tuple(parse_actions(line, rank=rank) for rank, line in enumerate(lines))
    last = max((action.microbatch for actions in ranks for action in actions), default=0)
    return Schedule(name=name, num_microbatches=last + 1, ranks=ranks)


def _check_lines(lines: object) -> None:
    if isinstance(lines, Sequence) and not isinstance(lines, str):
        wrong = [line for line in lines if not isinstance(line, str)]
        if not wrong:
            return
        got = f"{kind_of(wrong[0])} among the lines"
    else:
        got = kind_of(lines)
    raise WrongType(
        f"a schedule is given as a sequence of lines of text, one per rank, got {got}",
        hint='write for example `["F0 F1 B0 B1", "F0 B0 F1 B1"]`',
    )
