"""The noun `Schedule`: the order of each rank's actions. Every `Schedule` can be run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from automesh.errors import UsageError, WrongType, kind_of
from automesh.pipeline.actions import (
    KIND_WORDS,
    Action,
    ActionKind,
    Ranks,
    format_actions,
    parse_actions,
)


def check_actions(ranks: Ranks, *, num_microbatches: int) -> None:
    """Checks that every stage has one rank and does each microbatch exactly once.

    For each stage and microbatch that is one `F`, and either one `B` or one `I` and one `W`.

    Args:
      ranks: the actions of each rank, in order.

    Raises:
      UsageError: no ranks or microbatches, a rank without work, a stage on two ranks, a gap in the
        numbers, an action missing, unknown or there twice.

    Example:
      >>> from automesh.pipeline import check_actions, parse_actions
      >>> check_actions((parse_actions("F0 B0", rank=0),), num_microbatches=1)
    """
    if num_microbatches < 1:
        raise UsageError(f"a schedule has at least 1 microbatch, got {num_microbatches}")
    if not ranks:
        raise UsageError("a schedule has at least 1 rank, got none")
    home: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        if not actions:
            raise UsageError(f"rank {rank} of {len(ranks)} has nothing to do in this schedule")
        for action in actions:
            _check_numbers(action, rank=rank, num_microbatches=num_microbatches)
            if home.setdefault(action.stage, rank) != rank:
                raise UsageError(
                    f"stage {action.stage} is on rank {home[action.stage]} and, for {action}, on "
                    f"rank {rank}; a stage has one rank, where its weights are"
                )
    absent = set(range(max(home) + 1)) - set(home)
    if absent:
        raise UsageError(
            f"the schedule has a stage {max(home)} but no stage {min(absent)}; stages are "
            "numbered from 0 without gaps"
        )
    counts = Counter(action for actions in ranks for action in actions)
    _check_counts(counts, num_stages=len(home), num_microbatches=num_microbatches)


def _check_numbers(action: Action, *, rank: int, num_microbatches: int) -> None:
    if not 0 <= action.microbatch < num_microbatches:
        raise UsageError(
            f"{action} on rank {rank} is of microbatch {action.microbatch}; there are "
            f"{num_microbatches}, numbered from 0"
        )
    if action.stage < 0:
        raise UsageError(f"{action} on rank {rank} is of stage {action.stage}; stages begin at 0")


def _check_counts(counts: Counter[Action], *, num_stages: int, num_microbatches: int) -> None:
    for action, count in counts.items():
        if count > 1:
            raise UsageError(
                f"{action} is in the schedule {count} times; each action is there once"
            )
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            found = "".join(
                kind
                for kind in KIND_WORDS
                if Action(kind=kind, microbatch=microbatch, stage=stage) in counts
            )
            if found not in ("FB", "FIW"):
                raise UsageError(
                    f"stage {stage} does {' and '.join(found) or 'nothing'} for microbatch "
                    f"{microbatch}; it must do F and B, or F, I and W"
                )


def find_needs(ranks: Ranks) -> dict[Action, tuple[Action, ...]]:
    """Finds what each action needs, in any order: the actions whose results it reads.

    `F` needs the `F` of the stage before; `B` and `I` need their `F` and the `B` or `I` of the
    stage after; `W` needs its `I`.

    Args:
      ranks: as checked by `check_actions`.

    Example:
      >>> from automesh.pipeline import find_needs, parse_actions
      >>> ranks = (parse_actions("F0 B0", rank=0), parse_actions("F0 I0 W0", rank=1))
      >>> {str(action): [str(one) for one in needs] for action, needs in find_needs(ranks).items()}
      ... # doctest: +NORMALIZE_WHITESPACE
      {'F0@0': [], 'B0@0': ['F0@0', 'I0@1'], 'F0@1': ['F0@0'], 'I0@1': ['F0@1'],
       'W0@1': ['I0@1']}
    """
    done = {action for actions in ranks for action in actions}

    def present(kinds: Sequence[ActionKind], action: Action, stage: int) -> list[Action]:
        # Built from `done` alone, so that a stage past either end needs nothing.
        candidates = [
            Action(kind=kind, microbatch=action.microbatch, stage=stage) for kind in kinds
        ]
        return [candidate for candidate in candidates if candidate in done]

    def of(action: Action) -> tuple[Action, ...]:
        stage = action.stage
        match action.kind:
            case "F":
                return tuple(present(("F",), action, stage - 1))
            case "W":
                return tuple(present(("I",), action, stage))
            case "B" | "I":
                return (*present(("F",), action, stage), *present(("B", "I"), action, stage + 1))

    return {action: of(action) for actions in ranks for action in actions}


def order_actions(
    ranks: Ranks, needs: Mapping[Action, tuple[Action, ...]]
) -> tuple[tuple[int, Action], ...]:
    """Merges the ranks' orders into one in which every action comes after those that it needs.

    One controller that dispatches in this order never waits for something that it has not
    dispatched yet. The ranks take turns, one action each.

    Args:
      needs: as `find_needs` returns them.

    Returns:
      The rank and the action, in order.

    Raises:
      UsageError: ranks wait for each other in a circle, or a rank for something it does later.

    Example:
      >>> from automesh.pipeline import find_needs, order_actions, parse_actions
      >>> ranks = (parse_actions("F0 B0", rank=0), parse_actions("F0 B0", rank=1))
      >>> [str(action) for _, action in order_actions(ranks, find_needs(ranks))]
      ['F0@0', 'F0@1', 'B0@1', 'B0@0']
    """
    done: set[Action] = set()
    at = [0] * len(ranks)
    order: list[tuple[int, Action]] = []
    total = sum(map(len, ranks))
    while len(order) < total:
        before = len(order)
        for rank, actions in enumerate(ranks):
            if at[rank] < len(actions) and done.issuperset(needs[actions[at[rank]]]):
                order.append((rank, actions[at[rank]]))
                done.add(actions[at[rank]])
                at[rank] += 1
        if len(order) == before:
            raise _circle(ranks, needs, at=at, done=done)
    return tuple(order)


def _circle(
    ranks: Ranks, needs: Mapping[Action, tuple[Action, ...]], *, at: list[int], done: set[Action]
) -> UsageError:
    """Describes a circle of waiting ranks, found from any stuck rank."""
    home = {action: rank for rank, actions in enumerate(ranks) for action in actions}
    rank = next(rank for rank, actions in enumerate(ranks) if at[rank] < len(actions))
    seen: dict[int, str] = {}
    while rank not in seen:
        head = ranks[rank][at[rank]]
        needed = next(one for one in needs[head] if one not in done)
        seen[rank] = f"rank {rank} is at {head}, which needs {needed} of rank {home[needed]}"
        rank = home[needed]
    waits = list(seen.values())[list(seen).index(rank) :]
    return UsageError(
        f"the schedule can never end: {'; '.join(waits)}",
        hint="on each rank move what others need before what waits for them",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of a pipeline's work, rank by rank, as data.

    Attributes:
      name: for people; `make_schedule` uses its own names, `parse_schedule` the user's.
      num_microbatches: number of parts of a batch.
      ranks: the actions of each rank, in order.
      order: (rank, action) in one order for all ranks together, in which every action comes after
        those that it needs.
      needs: for each action, the actions whose results it reads, as `find_needs` returns them.

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
        """The rank of each stage."""
        home = {action.stage: rank for rank, action in self.order}
        return tuple(home[stage] for stage in range(len(home)))

    def __str__(self) -> str:
        return "\n".join(
            format_actions(actions, rank=rank) for rank, actions in enumerate(self.ranks)
        )


def parse_schedule(lines: Sequence[str], *, name: str = "custom") -> Schedule:
    """Reads a user's own schedule, a line per rank; the inverse of `str(schedule)`.

    Args:
      lines: the actions of each rank, as `parse_actions` reads them: `F` forward, `B` backward, or
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
