"""The classes of dimensions of a step without shardings (no jax).

Dimensions that must be split alike form a class, which is a logical axis without a given name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """The role of an array in the training, found from the data flow of one iteration."""

    PARAMETER = "parameter"
    """Is carried and changed by its own gradient; or has a gradient but is frozen."""
    MOMENT = "moment"
    """State of an optimizer: computed from the gradient of a parameter, mostly with its shape; or
    a statistic that the optimizer multiplies gradients with."""
    COPY = "copy"
    """Is carried as a mean of itself and a parameter: EMA, target, slow weights."""
    STATISTIC = "statistic"
    """Is carried without a gradient: running means, codebook counts."""
    KEY = "key"
    """Key of a random number generator; never split."""
    COUNTER = "counter"
    """A number without dimensions that is carried and made of itself alone, such as the number of a
    step or a rate that decays; or a whole number without dimensions."""
    DATA = "data"
    """New in every step, or the same array in all of them: rows, labels, a data set."""
    FROZEN = "frozen"
    """Weights that are used and never changed, such as those that a LoRA adapts."""
    DEAD = "dead"
    """No result is computed from it, but for what replaces it: an unused argument, or a parameter
    that the loss is not computed from."""
    LOSS = "loss"
    """A result without dimensions."""
    OUTPUT = "output"
    """A result that is not carried."""


class CautionKind(StrEnum):
    """The kinds of facts that users should know before a class is split."""

    PACKED = "packed"
    """One dimension is a concatenation of several parts (gates; q, k and v), which a split
    crosses."""
    STACKED_BATCHES = "stacked-batches"
    """Batches are concatenated and divided again: an all-to-all in each direction over dp."""
    GRADIENT_IN_LOOP = "gradient-in-loop"
    """A gradient is summed over the batch in each turn of a loop: a backward loop, or one over
    micro-batches."""
    PER_EXAMPLE_GRADIENTS = "per-example-gradients"
    """Gradients have a batch dimension."""
    INNER_STEPS = "inner-steps"
    """Each of a batch of tasks trains weights of its own inside the step."""
    INNER_BATCH = "inner-batch"
    """The batch is the inner part of the rows that the step computes with, such as after a tile."""
    GROUPED_BATCH = "grouped-batch"
    """The batch is the number of groups in which the step takes its rows."""
    OPTIMIZER_MATRICES = "optimizer-matrices"
    """An optimizer multiplies or factorizes matrices of the parameters' sizes."""
    UNTRAINED = "untrained"
    """No gradient reaches an array of the state."""
    NO_LOSS = "no-loss"
    """The step returns no loss, so numerics are compared by the state."""
    MANY_STEPS = "many-steps"
    """One call is several steps of training."""
    NO_BATCH = "no-batch"
    """No class is a batch."""
    BATCH_INSIDE = "batch-inside"
    """No argument has the batch: it needs a constraint inside the step."""
    GATHERS_DATA_SET = "gathers-data-set"
    """The step looks up rows of a data set: if its rows are split, each lookup gathers all of
    them."""
    TIED = "tied"
    """An array is used as a lookup and as a product: one decision for both."""
    UNKNOWN_OPERATION = "unknown-operation"
    """An operation is unknown, so its dimensions stay whole."""
    SMALL = "small"
    """So few parameters that one device may be right."""
    KEPT_BY_NOBODY = "kept-by-nobody"
    """A large result that is not carried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """A sentence to show, with its kind.

    Attributes:
      about: the class or array concerned; empty for the whole step.
    """

    kind: CautionKind
    text: str
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionClass:
    """Dimensions that must be split alike.

    Attributes:
      name: readable, unique name: `batch`, `embed`, `heads`, ... else `d0`.
      size: size of one dimension. Others may be multiples of it, whose inner part is not split:
        (8 * 64) columns of `heads`.
      parts: number of equal parts into which it may be split so that operations stay local: n
        devices are legal if n divides it. 1 if it stays whole.
      stored: number of equal parts for state of this class that is gathered before its use (fsdp);
        larger than `parts` if a dimension such as 3136 = 7 * 7 * 64 is divided by a reshape.
      whole: why it is never split; empty if it may be.
      cure: what to do about that, or empty.
      pieces: classes whose concatenation it is, (name or empty, size); empty if it is no
        concatenation.
      is_batch: whether results of the step are sums over it, so that a split over it needs an
        all-reduce of gradients.
    """

    name: str
    size: int
    parts: int
    stored: int = 1
    whole: str = ""
    cure: str = ""
    pieces: tuple[tuple[str, int], ...] = ()
    is_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayClasses:
    """An argument, a held array or a result.

    Attributes:
      name: the user's name: `params['embed']`, `args[1]['rest'][4]`.
      dtype: type as numpy prints it.
      dims: class of each dimension; empty for none (size 1, a key).
      state_of: number of the result that replaces this argument in the next iteration.
      of: number of the argument that this one belongs to: the parameter of a moment or a copy.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]
    state_of: int | None = None
    of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """An array inside the step that needs a constraint.

    Attributes:
      path: numbers of equations, outermost first; all but the last hold programs.
      bodies: for each of these but the last, the number of its program (in the order of
        `jax.extend.core.jaxprs_in_params`).
      output: number of the last equation's output; -1 for its first operand.
      dims: class of each dimension; empty for a whole one.
      leaves_others: whether the compiler decides about dimensions without a class, and about those
        whose class is not split.
      is_gathered: whether it is gathered if none of its classes is split, however it is stored.
    """

    path: tuple[int, ...]
    bodies: tuple[int, ...]
    output: int
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    why: str
    leaves_others: bool = False
    is_gathered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClasses:
    """The classes of a step.

    Attributes:
      classes: the classes, the most used first.
      arguments: leaves of the arguments, in order.
      held: other arrays that the step holds: leading inputs of its program.
      results: leaves of the results.
      inner: places that need a constraint.
      activations: constraints where data meet parameters, so that parameters which fsdp splits are
        gathered; else the compiler may split activations like the parameters.
      steps_per_call: training steps in one call; 0 if only a run shows it.
      loss: number of the result that looks like a loss; None without one.
    """

    classes: tuple[DimensionClass, ...]
    arguments: tuple[ArrayClasses, ...]
    held: tuple[ArrayClasses, ...] = ()
    results: tuple[ArrayClasses, ...] = ()
    inner: tuple[Inner, ...] = ()
    activations: tuple[Inner, ...] = ()
    cautions: tuple[Caution, ...] = field(default=())
    steps_per_call: int = 1
    loss: int | None = None

    def named(self, name: str) -> DimensionClass:
        """Returns the class with a name.

        Raises:
          KeyError: there is none.
        """
        for one in self.classes:
            if one.name == name:
                return one
        raise KeyError(name)

    def split_names(self, dims: Iterable[str]) -> tuple[str, ...]:
        """Returns for each dimension the class that decides how it is split: several batches end to
        end, which the step computes with as one, are split like one of them."""
        names = {
            one.name: one.pieces[0][0]
            for one in self.classes
            if one.is_batch and len({name for name, _ in one.pieces}) == 1 and one.pieces[0][0]
        }
        return tuple(names.get(name, name) for name in dims)

    @property
    def batches(self) -> tuple[DimensionClass, ...]:
        """Classes over which the step sums gradients."""
        return tuple(one for one in self.classes if one.is_batch)
