"""The schedules by name: how the order of each is made, and what it promises."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of
from automesh.pipeline.actions import Action, ActionKind, Ranks
from automesh.pipeline.costs import StageCost
from automesh.pipeline.schedule import Schedule
from automesh.pipeline.simulate import simulate

# Orders with one stage per rank and whole backward passes: GPipe, 1F1B, eager 1F1B.


def gpipe(num_ranks: int, num_microbatches: int) -> Ranks:
    """Orders all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    return tuple(
        _forwards_ahead(stage, num_microbatches, ahead=num_microbatches)
        for stage in range(num_ranks)
    )


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Ranks:
    """Does as many forwards ahead as there are later ranks (1F1B).

    Narayanan et al. 2019, arXiv:1806.03377.

    Rank s holds at most p - s activations.
    """
    return tuple(
        _forwards_ahead(stage, num_microbatches, ahead=num_ranks - 1 - stage)
        for stage in range(num_ranks)
    )


def eager(num_ranks: int, num_microbatches: int) -> Ranks:
    """Does twice as many forwards ahead, so that a transfer and the next forward overlap.

    Zhuang et al. 2022, arXiv:2211.05322. Rank s holds at most 2 (p - s) - 1 activations.
    """
    return tuple(
        _forwards_ahead(stage, num_microbatches, ahead=2 * (num_ranks - 1 - stage))
        for stage in range(num_ranks)
    )


def _forwards_ahead(stage: int, num_microbatches: int, *, ahead: int) -> tuple[Action, ...]:
    """Orders `ahead` forwards, then a forward and a backward in turns, then the rest."""

    def make(kind: ActionKind, microbatch: int) -> Action:
        return Action(kind=kind, microbatch=microbatch, stage=stage)

    ahead = min(ahead, num_microbatches)
    actions = [make("F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        if microbatch + ahead < num_microbatches:
            actions.append(make("F", microbatch + ahead))
        actions.append(make("B", microbatch))
    return tuple(actions)


# DualPipeV: two stages per rank, folded, so that each microbatch runs down and up again.
#
# Rank k has the stages k and 2p - 1 - k. The eight phases are those that DeepSeek describes for
# DualPipeV (github.com/deepseek-ai/DualPipe, MIT; "cut-in-half" by Qi et al.), written anew.


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Ranks:
    """Makes the order for at least 2p microbatches; a rank holds at most 2p + 1 activations."""
    return tuple(_RankOrder(rank, num_ranks).play(num_microbatches) for rank in range(num_ranks))


class _RankOrder:
    """One rank's order while it is being written."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._next: dict[tuple[ActionKind, int], int] = {}
        self._postponed: deque[Action] = deque()
        self._actions: list[Action] = []

    def play(self, num_microbatches: int) -> tuple[Action, ...]:
        behind = self._num_ranks - 1 - self._rank
        to_turn = self._rank + 1
        for _ in range(2 * behind):
            self._forward(0)
        for _ in range(to_turn):
            self._forward(0)
            self._forward(1)
        for _ in range(behind):
            self._backward(1, split=True)
            self._weights()
            self._forward(1)
        for _ in range(num_microbatches - 2 * self._num_ranks + to_turn):
            self._forward(0)
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for _ in range(behind):
            self._backward(1)
            self._forward(1)
            self._backward(0)
        self._last_backwards(behind, to_turn)
        return tuple(self._actions)

    def _last_backwards(self, behind: int, to_turn: int) -> None:
        # From its middle on, this phase postpones weight gradients to later phases.
        for turn in range(2 * to_turn):
            self._backward(1 - turn % 2, split=turn >= to_turn)
        for _ in range(behind):
            self._weights()
            self._backward(0, split=True)
        while self._postponed:
            self._weights()

    def _forward(self, half: int) -> None:
        self._actions.append(self._make("F", half))

    def _backward(self, half: int, *, split: bool = False) -> None:
        action = self._make("I" if split else "B", half, counted_as="B")
        self._actions.append(action)
        if split:
            self._postponed.append(
                Action(kind="W", microbatch=action.microbatch, stage=action.stage)
            )

    def _weights(self) -> None:
        self._actions.append(self._postponed.popleft())

    def _make(self, kind: ActionKind, half: int, counted_as: ActionKind | None = None) -> Action:
        counter = (counted_as or kind, half)
        microbatch = self._next.get(counter, 0)
        self._next[counter] = microbatch + 1
        return Action(kind=kind, microbatch=microbatch, stage=self._stages[half])


# Orders with several stages per rank in round-robin order: interleaved 1F1B.


def microbatches_per_round(num_ranks: int, num_microbatches: int) -> int:
    """Returns how many microbatches a rank does on one stage before it goes to its next one.

    Raises:
      UsageError: the microbatches do not make whole rounds.
    """
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        raise UsageError(
            f"{num_microbatches} microbatches do not make {rounds} equal rounds over "
            f"{num_ranks} ranks",
            hint=f"take a multiple of {num_ranks}",
        )
    return num_microbatches // rounds


def forwards_ahead(rank: int, num_ranks: int, num_microbatches: int, num_stages: int) -> int:
    """Counts the forwards of a rank before its first backward, for all of its stages."""
    per_round = microbatches_per_round(num_ranks, num_microbatches)
    per_rank = num_stages // num_ranks
    ahead = (per_rank - 1) * per_round + 2 * (num_ranks - 1 - rank)
    return min(ahead, num_microbatches * per_rank)


def interleaved(
    num_ranks: int, num_microbatches: int, num_stages: int, *, further_ahead: int = 0
) -> Ranks:
    """Makes the order of interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): rank k has
    stages k, k + p, k + 2p, ...

    Args:
      further_ahead: further forwards before the first backward than needed; 1 is the order of Kimi
        K2 (arXiv:2507.20534, section 2.4.3), which leaves room to overlap a stage's communication
        with its neighbour's work.

    Raises:
      UsageError: the microbatches do not make whole rounds.
    """
    per_round = microbatches_per_round(num_ranks, num_microbatches)
    per_rank = num_stages // num_ranks
    steps = num_microbatches * per_rank

    def microbatch_of(step: int) -> int:
        return step // (per_round * per_rank) * per_round + step % per_round

    def actions_of(rank: int) -> tuple[Action, ...]:
        def forward(step: int) -> Action:
            stage = step // per_round % per_rank * num_ranks + rank
            return Action(kind="F", microbatch=microbatch_of(step), stage=stage)

        def backward(step: int) -> Action:
            stage = (per_rank - 1 - step // per_round % per_rank) * num_ranks + rank
            return Action(kind="B", microbatch=microbatch_of(step), stage=stage)

        ahead = forwards_ahead(rank, num_ranks, num_microbatches, num_stages) + further_ahead
        ahead = min(ahead, steps)
        actions = [forward(step) for step in range(ahead)]
        for step in range(steps):
            if step + ahead < steps:
                actions.append(forward(step + ahead))
            actions.append(backward(step))
        return tuple(actions)

    return tuple(actions_of(rank) for rank in range(num_ranks))


# MultiMesh's order: all tasks sorted by wavefront, backward first within one.
#
# The rule is that of nv-legate/multimesh-jax (Apache-2.0), loop_scheduler.cc, written anew. The
# tasks of a microbatch are T = [F0 .. F(s-1), B(s-1) .. B0]. Task t of the microbatch at tick k is
# in wavefront t + k; ticks come in spans of one per stage, of which the first p start a
# microbatch.


def wavefront_order(num_ranks: int, num_microbatches: int, num_stages: int) -> tuple[Action, ...]:
    """Lists all actions in the order in which MultiMesh dispatches them.

    Example:
      >>> from automesh.pipeline.catalogue import wavefront_order
      >>> " ".join(str(action) for action in wavefront_order(2, 2, 2))
      'F0@0 F0@1 F1@0 B0@1 F1@1 B0@0 B1@1 B1@0'
    """
    placed: list[tuple[int, int, Action]] = []
    for microbatch in range(num_microbatches):
        tick = microbatch // num_ranks * num_stages + microbatch % num_ranks
        for stage in range(num_stages):
            last = 2 * num_stages - 1
            forward = Action(kind="F", microbatch=microbatch, stage=stage)
            backward = Action(kind="B", microbatch=microbatch, stage=stage)
            placed.append((tick + stage, -stage, forward))
            placed.append((tick + last - stage, stage - last, backward))
    return tuple(action for _, _, action in sorted(placed, key=lambda one: one[:2]))


def wavefront(num_ranks: int, num_microbatches: int, num_stages: int) -> Ranks:
    """Returns each rank's part of `wavefront_order`; stage s is on rank s mod p."""
    order = wavefront_order(num_ranks, num_microbatches, num_stages)
    return tuple(
        tuple(action for action in order if action.stage % num_ranks == rank)
        for rank in range(num_ranks)
    )


# Orders with the backward in two halves, so that weight gradients fill the bubble.
#
# Qi et al. 2023, arXiv:2401.10241. One form serves all of them, whatever number of activations,
# from p to 2p - 1, a rank may hold. Rank s does some forwards ahead; then an input gradient and a
# forward in turns, while its weight gradients are postponed; then input gradient, weight gradient
# and forward in turns, each as long as there are any. If all three take equally long, rank s begins
# s units after rank 0, and its postponed weight gradients keep it busy to the end.


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Ranks:
    """Makes the order in which no rank has more activations than 1F1B on its first rank: p."""
    return _zero_bubble(num_ranks, num_microbatches, most_live=num_ranks)


def zero_bubble_h2(num_ranks: int, num_microbatches: int) -> Ranks:
    """Makes the order with up to 2p - 1 activations per rank, without waits after the first."""
    most_live = min(2 * num_ranks - 1, num_microbatches)
    return _zero_bubble(num_ranks, num_microbatches, most_live=most_live)


def _zero_bubble(num_ranks: int, num_microbatches: int, *, most_live: int) -> Ranks:
    def actions_of(stage: int) -> tuple[Action, ...]:
        behind = num_ranks - 1 - stage
        ahead = 1 + behind + min(most_live - num_ranks, behind)
        return _rotate(stage, num_microbatches, ahead=ahead, in_turns=most_live - ahead)

    return tuple(actions_of(stage) for stage in range(num_ranks))


def _rotate(stage: int, num_microbatches: int, *, ahead: int, in_turns: int) -> tuple[Action, ...]:
    actions: list[Action] = []
    done: dict[ActionKind, int] = {"F": 0, "I": 0, "W": 0}

    def do(kind: ActionKind) -> None:
        if done[kind] < num_microbatches:
            actions.append(Action(kind=kind, microbatch=done[kind], stage=stage))
            done[kind] += 1

    for _ in range(ahead):
        do("F")
    for _ in range(in_turns):
        do("I")
        do("F")
    while done["W"] < num_microbatches:
        do("I")
        do("W")
        do("F")
    return tuple(actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleShape:
    """The numbers that a schedule is made for: ranks, stages, microbatches."""

    ranks: int
    microbatches: int
    stages: int

    @property
    def per_rank(self) -> int:
        """Stages on one rank."""
        return self.stages // self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One kind of schedule.

    Attributes:
      about: one line for help texts.
      stages_per_rank: 0 means any number.
      least_per_rank: fewest microbatches, divided by the ranks.
      whole_rounds: whether several stages per rank need a number of microbatches that is a multiple
        of the ranks.
      peak_live: most activations that each rank holds.
      makespan_s: the closed form for stages of equal cost without transfers. It is exact for the
        whole-backward orders, and for the others if `F`, `I` and `W` take equally long and `B`
        twice as long.
    """

    name: str
    about: str
    make: Callable[[ScheduleShape], Ranks]
    peak_live: Callable[[ScheduleShape], tuple[int, ...]]
    makespan_s: Callable[[ScheduleShape, StageCost], float]
    stages_per_rank: int = 1
    least_per_rank: int = 0
    whole_rounds: bool = False


def _by_rank(
    live: Callable[[ScheduleShape, int], int],
) -> Callable[[ScheduleShape], tuple[int, ...]]:
    return lambda shape: tuple(live(shape, rank) for rank in range(shape.ranks))


def _whole_backward_s(shape: ScheduleShape, cost: StageCost) -> float:
    # (m + p - 1)(tF + tB); in times of one of v stages per rank (vm + p - 1)(tF + tB). If
    # microbatches are fewer than ranks, they go through p stages v times.
    fewer, more = sorted((shape.microbatches, shape.ranks))
    return (shape.per_rank * more + fewer - 1) * (cost.forward_s + cost.backward_s)


def _halves_s(shape: ScheduleShape, cost: StageCost) -> float:
    # m(tF + tI + tW) + (p - 1)(tF + tI - tW), with v stages per rank v times the first term.
    work = cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s
    late = cost.forward_s + cost.input_gradient_s - cost.weight_gradient_s
    return shape.microbatches * shape.per_rank * work + (shape.ranks - 1) * late


def _eager_live(shape: ScheduleShape, rank: int) -> int:
    return min(2 * (shape.ranks - rank) - 1, shape.microbatches)


def _interleaved_live(shape: ScheduleShape, rank: int, *, further_ahead: int = 0) -> int:
    ahead = forwards_ahead(rank, shape.ranks, shape.microbatches, shape.stages)
    return min(ahead + further_ahead + 1, shape.microbatches * shape.per_rank)


def _wavefront_live(shape: ScheduleShape, rank: int) -> int:
    ahead = (shape.per_rank - 1) * shape.ranks + 2 * (shape.ranks - 1 - rank)
    return min(ahead + 1, shape.microbatches * shape.per_rank)


_RECIPES = (
    Recipe(
        name="gpipe",
        about="all forwards, then all backwards",
        make=lambda shape: gpipe(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, _: shape.microbatches),
        makespan_s=_whole_backward_s,
    ),
    Recipe(
        name="1f1b",
        about="a forward and a backward in turns: rank s holds p - s activations",
        make=lambda shape: one_forward_one_backward(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, rank: min(shape.ranks - rank, shape.microbatches)),
        makespan_s=_whole_backward_s,
    ),
    Recipe(
        name="eager_1f1b",
        about="1f1b with twice the forwards ahead, to hide transfers",
        make=lambda shape: eager(shape.ranks, shape.microbatches),
        peak_live=_by_rank(_eager_live),
        makespan_s=_whole_backward_s,
    ),
    Recipe(
        name="interleaved",
        about="1f1b with several stages per rank, dealt round: a smaller bubble, more transfers",
        make=lambda shape: interleaved(shape.ranks, shape.microbatches, shape.stages),
        peak_live=_by_rank(_interleaved_live),
        makespan_s=_whole_backward_s,
        stages_per_rank=0,
    ),
    Recipe(
        name="kimi_k2",
        about="interleaved with one more forward ahead",
        make=lambda shape: interleaved(
            shape.ranks, shape.microbatches, shape.stages, further_ahead=1
        ),
        peak_live=_by_rank(functools.partial(_interleaved_live, further_ahead=1)),
        makespan_s=_whole_backward_s,
        stages_per_rank=0,
    ),
    Recipe(
        name="zb_h1",
        about="weight gradients fill the bubble, in the memory of 1f1b's first rank",
        make=lambda shape: zero_bubble_h1(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, _: shape.ranks),
        makespan_s=_halves_s,
        least_per_rank=1,
    ),
    Recipe(
        name="zb_h2",
        about="no bubble between steps that need not wait for each other, in twice the memory",
        make=lambda shape: zero_bubble_h2(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, _: min(2 * shape.ranks - 1, shape.microbatches)),
        makespan_s=_halves_s,
        least_per_rank=1,
    ),
    Recipe(
        name="wavefront",
        about="MultiMesh's order by wavefronts, backward first",
        make=lambda shape: wavefront(shape.ranks, shape.microbatches, shape.stages),
        peak_live=_by_rank(_wavefront_live),
        makespan_s=_whole_backward_s,
        stages_per_rank=0,
        whole_rounds=True,
    ),
    Recipe(
        name="dualpipe_v",
        about="two stages per rank, folded: every rank holds 2p + 1 activations of half a rank",
        make=lambda shape: dualpipe_v(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, _: 2 * shape.ranks + 1),
        makespan_s=_halves_s,
        stages_per_rank=2,
        least_per_rank=2,
    ),
)
RECIPES = {recipe.name: recipe for recipe in _RECIPES}
SCHEDULES = tuple(RECIPES)


def make_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, num_stages: int | None = None
) -> Schedule:
    """Makes a schedule by its name.

    Args:
      name: one of `SCHEDULES`.
      num_ranks: submeshes of the pipeline, p.
      num_microbatches: parts of a batch, m; the zero-bubble schedules need m >= p, `dualpipe_v` m
        >= 2p, and with several stages per rank m // p rounds of equally many.
      num_stages: a multiple of the ranks; only `interleaved`, `kimi_k2` and `wavefront` take
        several stages per rank, and `dualpipe_v` always two. None takes the fewest.

    Returns:
      A schedule that has been checked: it can be run, and its bubble and its activations are as
        promised.

    Raises:
      WrongType: a number that is no int, a name that is no text.
      UsageError: no such schedule, or not for these numbers.

    Example:
      >>> from automesh.pipeline import make_schedule
      >>> print(make_schedule("zb_h1", num_ranks=2, num_microbatches=3))
      F0 F1 I0 W0 F2 I1 W1 I2 W2
      F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    _check_name(name)
    if name not in RECIPES:
        raise UsageError(
            f"there is no schedule `{name}`{did_you_mean(name, SCHEDULES)}",
            hint=f"take one of {', '.join(SCHEDULES)}, or write your own with `parse_schedule`",
        )
    recipe = RECIPES[name]
    for what, value in (("ranks", num_ranks), ("microbatches", num_microbatches)):
        _check_count(what, value)
    if num_stages is None:
        num_stages = num_ranks * (recipe.stages_per_rank or 1)
    _check_count("stages", num_stages)
    shape = ScheduleShape(ranks=num_ranks, microbatches=num_microbatches, stages=num_stages)
    _check_shape(recipe, shape)
    return _make(name, shape)


@functools.lru_cache(maxsize=4096)
def find_refusal(
    name: str, *, num_ranks: int, num_microbatches: int, num_stages: int | None = None
) -> str:
    """Says why there is no such schedule for these numbers; empty if there is one.

    Args:
      name, num_ranks, num_microbatches, num_stages: as in `make_schedule`.

    Raises:
      KeyError: no schedule has this name.

    Example:
      >>> from automesh.pipeline import find_refusal
      >>> find_refusal("zb_h1", num_ranks=4, num_microbatches=2)
      '`zb_h1` needs at least 4 microbatches for 4 ranks, got 2'
      >>> find_refusal("1f1b", num_ranks=4, num_microbatches=2)
      ''
    """
    recipe = RECIPES[name]
    stages = num_ranks * (recipe.stages_per_rank or 1) if num_stages is None else num_stages
    shape = ScheduleShape(ranks=num_ranks, microbatches=num_microbatches, stages=stages)
    try:
        _check_shape(recipe, shape)
        recipe.make(shape)
    except UsageError as error:
        return error.message
    return ""


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise WrongType(
            f"a schedule is named by a string, got {kind_of(name)}",
            hint=f"take one of {', '.join(SCHEDULES)}",
        )


def _check_count(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongType(f"the number of {what} of a schedule is an int, got {kind_of(value)}")
    if value < 1:
        raise UsageError(f"the number of {what} of a schedule is at least 1, got {value}")


def _check_shape(recipe: Recipe, shape: ScheduleShape) -> None:
    name, wanted = recipe.name, recipe.stages_per_rank
    if shape.stages % shape.ranks:
        raise UsageError(
            f"{shape.stages} stages cannot be divided evenly over {shape.ranks} ranks",
            hint=f"take a multiple of {shape.ranks}",
        )
    if wanted and shape.per_rank != wanted:
        several = ", ".join(one.name for one in _RECIPES if not one.stages_per_rank)
        raise UsageError(
            f"`{name}` has {wanted} stage{'s' * (wanted > 1)} per rank, which is "
            f"{wanted * shape.ranks} for {shape.ranks} ranks, got {shape.stages}",
            hint=f"any number of stages per rank is taken by: {several}",
        )
    least = recipe.least_per_rank * shape.ranks
    if shape.microbatches < least:
        raise UsageError(
            f"`{name}` needs at least {least} microbatches for {shape.ranks} ranks, "
            f"got {shape.microbatches}",
            hint="cut the batch into more microbatches, or take `1f1b`",
        )
    if recipe.whole_rounds and shape.per_rank > 1 and shape.microbatches % shape.ranks:
        raise UsageError(
            f"`{name}` with {shape.per_rank} stages per rank needs a multiple of {shape.ranks} "
            f"microbatches, got {shape.microbatches}",
            hint="with one stage per rank it takes any number",
        )


@functools.lru_cache(maxsize=256)
def _make(name: str, shape: ScheduleShape) -> Schedule:
    recipe = RECIPES[name]
    schedule = Schedule(name=name, num_microbatches=shape.microbatches, ranks=recipe.make(shape))
    simulated = simulate(schedule)
    got = (simulated.makespan_s, simulated.peak_live)
    promised = (recipe.makespan_s(shape, StageCost()), recipe.peak_live(shape))
    if got != promised:
        raise AssertionError(f"{name} of {shape} promises {promised} and does {got}")
    return schedule
