"""The schedules by name: how each is made, and what each promises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of
from automesh.pipeline import orders
from automesh.pipeline.actions import Ranks
from automesh.pipeline.costs import StageCost
from automesh.pipeline.schedule import Schedule
from automesh.pipeline.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a schedule is made for."""

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
      stages_per_rank: 0 is any number.
      least_per_rank: times the ranks, the fewest microbatches.
      whole_rounds: whether several stages per rank need microbatches that are a multiple of the
        ranks.
      peak_live: of each rank the most activations that it holds.
      makespan_s: the closed form for stages of equal cost without transfers. It is exact for the
        whole-backward orders, and for the others if `F`, `I` and `W` take equally long and `B`
        twice as long.
    """

    name: str
    about: str
    make: Callable[[Shape], Ranks]
    peak_live: Callable[[Shape], tuple[int, ...]]
    makespan_s: Callable[[Shape, StageCost], float]
    stages_per_rank: int = 1
    least_per_rank: int = 0
    whole_rounds: bool = False


def _by_rank(live: Callable[[Shape, int], int]) -> Callable[[Shape], tuple[int, ...]]:
    return lambda shape: tuple(live(shape, rank) for rank in range(shape.ranks))


def _whole_backward_s(shape: Shape, cost: StageCost) -> float:
    # (m + p - 1)(tF + tB); in times of one of v stages per rank (vm + p - 1)(tF + tB). Where
    # microbatches are fewer than ranks, it is they that go round p stages v times.
    fewer, more = sorted((shape.microbatches, shape.ranks))
    return (shape.per_rank * more + fewer - 1) * (cost.forward_s + cost.backward_s)


def _halves_s(shape: Shape, cost: StageCost) -> float:
    # m(tF + tI + tW) + (p - 1)(tF + tI - tW), with v stages per rank v times the first term.
    work = cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s
    late = cost.forward_s + cost.input_gradient_s - cost.weight_gradient_s
    return shape.microbatches * shape.per_rank * work + (shape.ranks - 1) * late


def _eager_live(shape: Shape, rank: int) -> int:
    return min(2 * (shape.ranks - rank) - 1, shape.microbatches)


def _interleaved_live(shape: Shape, rank: int, *, further_ahead: int = 0) -> int:
    ahead = orders.forwards_ahead(rank, shape.ranks, shape.microbatches, shape.stages)
    return min(ahead + further_ahead + 1, shape.microbatches * shape.per_rank)


def _wavefront_live(shape: Shape, rank: int) -> int:
    ahead = (shape.per_rank - 1) * shape.ranks + 2 * (shape.ranks - 1 - rank)
    return min(ahead + 1, shape.microbatches * shape.per_rank)


_RECIPES = (
    Recipe(
        name="gpipe",
        about="all forwards, then all backwards",
        make=lambda shape: orders.gpipe(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, _: shape.microbatches),
        makespan_s=_whole_backward_s,
    ),
    Recipe(
        name="1f1b",
        about="a forward and a backward in turns: rank s holds p - s activations",
        make=lambda shape: orders.one_forward_one_backward(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, rank: min(shape.ranks - rank, shape.microbatches)),
        makespan_s=_whole_backward_s,
    ),
    Recipe(
        name="eager_1f1b",
        about="1f1b with twice the forwards ahead, to hide transfers",
        make=lambda shape: orders.eager(shape.ranks, shape.microbatches),
        peak_live=_by_rank(_eager_live),
        makespan_s=_whole_backward_s,
    ),
    Recipe(
        name="interleaved",
        about="1f1b with several stages per rank, dealt round: a smaller bubble, more transfers",
        make=lambda shape: orders.interleaved(shape.ranks, shape.microbatches, shape.stages),
        peak_live=_by_rank(_interleaved_live),
        makespan_s=_whole_backward_s,
        stages_per_rank=0,
    ),
    Recipe(
        name="kimi_k2",
        about="interleaved with one more forward ahead",
        make=lambda shape: orders.interleaved(
            shape.ranks, shape.microbatches, shape.stages, further_ahead=1
        ),
        peak_live=_by_rank(functools.partial(_interleaved_live, further_ahead=1)),
        makespan_s=_whole_backward_s,
        stages_per_rank=0,
    ),
    Recipe(
        name="zb_h1",
        about="weight gradients fill the bubble, in the memory of 1f1b's first rank",
        make=lambda shape: orders.zero_bubble_h1(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, _: shape.ranks),
        makespan_s=_halves_s,
        least_per_rank=1,
    ),
    Recipe(
        name="zb_h2",
        about="no bubble between steps that need not wait for each other, in twice the memory",
        make=lambda shape: orders.zero_bubble_h2(shape.ranks, shape.microbatches),
        peak_live=_by_rank(lambda shape, _: min(2 * shape.ranks - 1, shape.microbatches)),
        makespan_s=_halves_s,
        least_per_rank=1,
    ),
    Recipe(
        name="wavefront",
        about="MultiMesh's order by wavefronts, backward first",
        make=lambda shape: orders.wavefront(shape.ranks, shape.microbatches, shape.stages),
        peak_live=_by_rank(_wavefront_live),
        makespan_s=_whole_backward_s,
        stages_per_rank=0,
        whole_rounds=True,
    ),
    Recipe(
        name="dualpipe_v",
        about="two stages per rank, folded: every rank holds 2p + 1 activations of half a rank",
        make=lambda shape: orders.dualpipe_v(shape.ranks, shape.microbatches),
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
      num_microbatches: parts of a batch, m; the zero-bubble schedules need m >= p, `dualpipe_v`
        m >= 2p, and with several stages per rank m // p rounds of equally many.
      num_stages: a multiple of the ranks; only `interleaved`, `kimi_k2` and `wavefront` take
        several stages per rank, and `dualpipe_v` always two. None takes the fewest.

    Returns:
      A schedule that has been checked: it can be run, and its bubble and its activations are what
      it promises.

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
    shape = Shape(ranks=num_ranks, microbatches=num_microbatches, stages=num_stages)
    _check_shape(recipe, shape)
    return _make(name, shape)


@functools.lru_cache(maxsize=4096)
def find_refusal(
    name: str, *, num_ranks: int, num_microbatches: int, num_stages: int | None = None
) -> str:
    """Why there is no such schedule for these numbers; empty if there is one.

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
    shape = Shape(ranks=num_ranks, microbatches=num_microbatches, stages=stages)
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


def _check_shape(recipe: Recipe, shape: Shape) -> None:
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
def _make(name: str, shape: Shape) -> Schedule:
    recipe = RECIPES[name]
    schedule = Schedule(name=name, num_microbatches=shape.microbatches, ranks=recipe.make(shape))
    simulated = simulate(schedule)
    got = (simulated.makespan_s, simulated.peak_live)
    promised = (recipe.makespan_s(shape, StageCost()), recipe.peak_live(shape))
    if got != promised:
        raise AssertionError(f"{name} of {shape} promises {promised} and does {got}")
    return schedule
