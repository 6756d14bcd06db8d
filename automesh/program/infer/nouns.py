"""What is known of the dimensions of a step that has no shardings (no jax).

Dimensions that must be split alike form a class: a logical axis that nobody had to name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What an array is to the training, told by the flow of one iteration."""

    PARAMETER = "parameter"
    """Comes back, changed by a gradient that is taken of it; or one is taken and it is frozen."""
    MOMENT = "moment"
    """State of an optimizer: made of the gradient of a parameter, in whose shape it is."""
    COPY = "copy"
    """Comes back as a mean of itself and a parameter: EMA, target, slow weights."""
    STATISTIC = "statistic"
    """Comes back without a gradient: running means, codebook counts."""
    KEY = "key"
    """Of a random number generator; never split."""
    COUNTER = "counter"
    """A whole number that comes back, or has no dimensions."""
    DATA = "data"
    """New in every step, or the same array in all of them: rows, labels, a data set."""
    FROZEN = "frozen"
    """Weights that are used and never changed: what a LoRA adapts."""
    DEAD = "dead"
    """No result is made of it."""
    LOSS = "loss"
    """A result of no dimensions."""
    OUTPUT = "output"
    """A result that does not come back."""


class CautionKind(StrEnum):
    """What to know before a class is split."""

    PACKED = "packed"
    """Several things lie end to end in one dimension (gates; q, k and v): a split crosses them."""
    STACKED_BATCHES = "stacked-batches"
    """Batches are put end to end and taken apart: an all-to-all each way over dp."""
    GRADIENT_IN_LOOP = "gradient-in-loop"
    """A gradient is summed over the batch in each turn of a backward loop."""
    PER_EXAMPLE_GRADIENTS = "per-example-gradients"
    """Gradients have a batch dimension."""
    NO_LOSS = "no-loss"
    """The state is compared, as no loss comes out."""
    MANY_STEPS = "many-steps"
    """One call is several steps of training."""
    NO_BATCH = "no-batch"
    """No class is a batch."""
    BATCH_INSIDE = "batch-inside"
    """The batch is in no argument: it needs a constraint inside the step."""
    GATHERS_DATA_SET = "gathers-data-set"
    """A data set is looked up in: to split its rows gathers all of them."""
    TIED = "tied"
    """An array is used as a lookup and as a product: one decision for both."""
    UNKNOWN_OPERATION = "unknown-operation"
    """The rules of an operation are not known: its dimensions stay whole."""
    SMALL = "small"
    """So few parameters that one device may be right."""
    KEPT_BY_NOBODY = "kept-by-nobody"
    """A large result that does not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """A sentence to show, with its kind.

    Attributes:
      about: the class or array that it is about; empty for the whole step.
    """

    kind: CautionKind
    text: str
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionClass:
    """Dimensions that must be split alike.

    Attributes:
      name: readable, unique: `batch`, `embed`, `heads`, ... else `d0`.
      size: of one dimension. Others may be multiples of it, whose inner part is not split: (8 * 64)
        columns of `heads`.
      parts: into how many equal parts it may be split so that operations stay local: n devices are
        legal if n divides this. 1 where it stays whole.
      stored: into how many equal parts state of this class may be kept that is gathered before it
        is used (fsdp): larger than `parts` where 3136 = 7 * 7 * 64 is taken apart.
      whole: why it is never split; empty if it may be.
      cure: what to do about that, or empty.
      pieces: of classes that lie end to end in it, (name or empty, size); empty where there is one.
      is_batch: results of the step are sums over it: a split over it makes an all-reduce of
        gradients.
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
      name: as the user calls it: `params['embed']`, `args[1]['rest'][4]`.
      dtype: as numpy prints it.
      dims: class of each dimension; empty where it has none (size 1, a key).
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
      bodies: for each of these but the last, which of its programs (in the order of
        `jax.extend.core.jaxprs_in_params`).
      output: of the last equation; -1 for its first operand.
      dims: class of each dimension; empty: whole.
      leaves_others: dimensions without a class, and those whose class is not split, are left to the
        compiler.
      is_gathered: it is whole where none of its classes is split, however it is kept.
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
      classes: those that are most used first.
      arguments: leaves of the arguments, in order.
      held: arrays that the step holds besides: leading inputs of its program.
      results: leaves.
      inner: where a constraint is needed.
      activations: constraints where data meets parameters, so that those are gathered which fsdp
        splits; left to itself the compiler may split the activations as the parameters are.
      steps_per_call: of training; 0 where only a run tells.
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
        """The class of a name.

        Raises:
          KeyError: there is none.
        """
        for one in self.classes:
            if one.name == name:
                return one
        raise KeyError(name)

    @property
    def batches(self) -> tuple[DimensionClass, ...]:
        """Classes over which the step sums gradients."""
        return tuple(one for one in self.classes if one.is_batch)
