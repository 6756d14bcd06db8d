"""Cuts a traced loss into the programs of its stages (jax).

The rules
* An equation that depends on a marked value belongs to the stage after the mark, or to a later one
  if it reads a later value. Work inside a task belongs to the task's stage.
* An equation that reads both parameters and the batch, but no value of a stage, belongs to the
  first stage that needs it: an embedding is looked up where its rows are used.
* An equation that depends on parameters alone, or on the batch alone, is repeated on each stage
  that needs it, and its result is not sent: a parameter that two stages read is a parameter of
  both, and its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from automesh.errors import UsageError
from automesh_pipeline.runtime.split.trace import TracedLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class StageValue:
    """A value that one stage makes and others read.

    Attributes:
      like: its shape and type for one microbatch.
      producer, consumers: the numbers of these stages.
      has_gradient: whether it has a float type and depends on parameters.
    """

    like: jax.ShapeDtypeStruct
    producer: int
    consumers: tuple[int, ...]
    has_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """The program of one stage.

    Attributes:
      params, batch: the leaves of the loss's arguments that it reads.
      inputs: the values that it reads.
      outputs: the values that it makes; the last stage makes the loss instead.
      program: `(*params, *batch, *inputs) -> outputs`.
    """

    params: tuple[int, ...]
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    program: core.ClosedJaxpr


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLoss:
    """A loss as stages."""

    stages: tuple[StagePart, ...]
    values: tuple[StageValue, ...]

    @property
    def num_params(self) -> int:
        return 1 + max((leaf for stage in self.stages for leaf in stage.params), default=-1)

    @property
    def owners(self) -> tuple[int, ...]:
        """The first stage that reads each parameter: this stage updates it."""
        return tuple(users[0] for users in self.users)

    @property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The stages that read each parameter."""
        found: list[list[int]] = [[] for _ in range(self.num_params)]
        for number, stage in enumerate(self.stages):
            for leaf in stage.params:
                found[leaf].append(number)
        return tuple(map(tuple, found))


class _Origin(Flag):
    PARAMS = 1
    BATCH = 2
    BOTH = 3


def split_program(program: TracedLoss) -> SplitLoss:
    """Cuts a loss into its stages.

    Raises:
      UsageError: the loss has both marks and tasks; the result of a mark is not used; a task reads
        a value of a later one; a stage is empty; or the loss does not depend on the batch or the
        parameters.
    """
    homes = _Homes(program)
    count = homes.num_stages
    plans = [_plan_stage(program, homes, stage) for stage in range(count)]
    crossing = _find_crossing(plans, homes)
    numbers = {var: number for number, var in enumerate(crossing)}
    values = tuple(
        StageValue(
            like=jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype),
            producer=homes.makers[var],
            consumers=tuple(stage for stage, plan in enumerate(plans) if var in plan.values),
            has_gradient=homes.has_gradient(var),
        )
        for var in crossing
    )
    unread = set(program.params).difference(*(plan.reads for plan in plans))
    stages = tuple(
        _build(program, plan, homes, numbers, extra=unread if not stage else set())
        for stage, plan in enumerate(plans)
    )
    return SplitLoss(stages=stages, values=values)


class _Homes:
    """The stage of each equation.

    Attributes:
      stage_of: equation -> its stage; without equations that are repeated on each stage that needs
        them.
      makers: variable -> the stage that makes it.
      aliases: result of a mark -> the marked value.
    """

    def __init__(self, program: TracedLoss) -> None:
        self._program = program
        self._origins: dict[Any, _Origin] = {}
        self._available: dict[Any, int] = {}
        self.aliases: dict[Any, Any] = {}
        self.stage_of: dict[int, int] = {}
        self._anchors = _find_anchors(program)
        self.num_stages = _count_stages(program, self._anchors)
        self._place_after_anchors()
        self._place_before_anchors()
        self.makers = {
            var: stage
            for index, stage in sorted(self.stage_of.items())
            if program.equations[index].mark is None
            for var in program.equations[index].eqn.outvars
        }

    def resolve(self, atom: Any) -> Any:
        """Returns the original variable of a marked value."""
        while not isinstance(atom, core.Literal) and atom in self.aliases:
            atom = self.aliases[atom]
        return atom

    def has_gradient(self, var: Any) -> bool:
        is_float = jnp.issubdtype(var.aval.dtype, jnp.inexact)
        return is_float and _Origin.PARAMS in self._origins[var]

    def _place_after_anchors(self) -> None:
        origins = self._origins
        origins.update(dict.fromkeys(self._program.params, _Origin.PARAMS))
        origins.update(dict.fromkeys(self._program.batch, _Origin.BATCH))
        for index, equation in enumerate(self._program.equations):
            reads = _variables(equation.eqn.invars)
            origin = _Origin(0)
            for var in reads:
                origin |= origins.get(var, _Origin(0))
            if equation.mark is not None:
                self.aliases[equation.eqn.outvars[0]] = equation.eqn.invars[0]
            origins.update(dict.fromkeys(equation.eqn.outvars, origin))
            there = max(
                (self._available[var] for var in reads if var in self._available), default=-1
            )
            stage = self._anchors.get(index, there)
            if stage < 0:
                continue
            if there > stage:
                raise UsageError(
                    f"work of stage {stage} reads what stage {there} makes",
                    hint="stages go on from each other in the order of their numbers",
                )
            self.stage_of[index] = stage
            is_mark = equation.mark is not None
            self._available.update(dict.fromkeys(equation.eqn.outvars, stage + is_mark))

    def _place_before_anchors(self) -> None:
        """Assigns stages to the remaining equations, beginning with the last, and drops those that
        nothing needs."""
        program = self._program
        wanted: dict[Any, int] = {}
        if not isinstance(program.result, core.Literal):
            wanted[program.result] = self.num_stages - 1
        used_marks = set[int]()
        for index in reversed(range(len(program.equations))):
            eqn = program.equations[index].eqn
            stages = [wanted[var] for var in eqn.outvars if var in wanted]
            if not stages and not eqn.effects:
                self.stage_of.pop(index, None)
                continue
            origin = self._origins[eqn.outvars[0]] if eqn.outvars else _Origin(0)
            if index not in self.stage_of and origin is _Origin.BOTH:
                self.stage_of[index] = min(stages, default=0)
            if index in self.stage_of:
                stage = self.stage_of[index]
                if program.equations[index].mark is not None:
                    used_marks.add(stage)
                for var in _variables(eqn.invars):
                    wanted[var] = min(wanted.get(var, stage), stage)
        self._check_used(used_marks)

    def _check_used(self, used_marks: set[int]) -> None:
        marked = {
            self._anchors[index]
            for index, equation in enumerate(self._program.equations)
            if equation.mark is not None
        }
        unused = marked - used_marks
        if unused:
            raise UsageError(
                f"the loss does not go on with what `stage_boundary` number {min(unused) + 1} "
                "returns",
                hint="write `x = stage_boundary(x)`, and use `x` after it",
            )
        result = self.resolve(self._program.result)
        if isinstance(result, core.Literal) or self._origins.get(result) is not _Origin.BOTH:
            raise UsageError(
                "the loss does not depend on both the parameters and the batch",
                hint="it is called as loss(params, batch)",
            )


def _find_anchors(program: TracedLoss) -> dict[int, int]:
    """Finds the equations whose stage is given: marks, and equations inside tasks."""
    anchors: dict[int, int] = {}
    marks = 0
    for index, equation in enumerate(program.equations):
        if equation.mark is not None:
            leaf, _ = equation.mark
            marks += leaf == 0
            anchors[index] = marks - 1
        elif equation.task is not None:
            anchors[index] = equation.task
    if marks and any(equation.task is not None for equation in program.equations):
        raise UsageError(
            "the loss has both `stage_boundary` marks and tasks",
            hint="cut it in one of these ways",
        )
    return anchors


def _count_stages(program: TracedLoss, anchors: Mapping[int, int]) -> int:
    has_marks = any(equation.mark is not None for equation in program.equations)
    return 1 + max(anchors.values(), default=-1) + has_marks if anchors else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagePlan:
    """The work of a stage, before its program is built.

    Attributes:
      equations: its equations in order.
      reads: all variables that it reads from outside.
      values: the variables that other stages make.
    """

    equations: tuple[int, ...]
    reads: frozenset[Any]
    values: frozenset[Any]


def _plan_stage(program: TracedLoss, homes: _Homes, stage: int) -> _StagePlan:
    own = {index for index, home in homes.stage_of.items() if home == stage}
    needed: set[Any] = set()
    if stage == homes.num_stages - 1:
        needed.add(homes.resolve(program.result))
    chosen: list[int] = []
    made: set[Any] = set()
    for index in reversed(range(len(program.equations))):
        equation = program.equations[index]
        if equation.mark is not None:
            continue
        is_repeated = index not in homes.stage_of and not needed.isdisjoint(equation.eqn.outvars)
        if index in own or is_repeated:
            chosen.append(index)
            made.update(equation.eqn.outvars)
            needed.update(_variables(map(homes.resolve, equation.eqn.invars)))
    reads = frozenset(needed - made)
    values = frozenset(var for var in reads if var in homes.makers)
    if not own.intersection(chosen):
        raise UsageError(
            f"stage {stage} of {homes.num_stages} has nothing to do",
            hint="between two marks, and before the first and after the last one, something has to "
            "be computed from parameters and the batch",
        )
    return _StagePlan(equations=tuple(reversed(chosen)), reads=reads, values=values)


def _find_crossing(plans: Sequence[_StagePlan], homes: _Homes) -> list[Any]:
    """Returns the variables that one stage makes and another reads, in the order of their
    makers."""
    crossing = {var for plan in plans for var in plan.values}
    return [var for var in homes.makers if var in crossing]


def _build(
    program: TracedLoss,
    plan: _StagePlan,
    homes: _Homes,
    numbers: Mapping[Any, int],
    *,
    extra: set[Any],
) -> StagePart:
    """Builds the program of one stage.

    Args:
      extra: parameters that nothing reads, which the first stage keeps.
    """
    reads = plan.reads | extra
    params = [leaf for leaf, var in enumerate(program.params) if var in reads]
    batch = [leaf for leaf, var in enumerate(program.batch) if var in reads]
    constants = [var for var in program.constants if var in reads]
    inputs = sorted(numbers[var] for var in plan.values)
    by_number = {number: var for var, number in numbers.items()}
    equations = [program.equations[index].eqn for index in plan.equations]
    made = {var for eqn in equations for var in eqn.outvars}
    result = homes.resolve(program.result)
    is_last = result in made
    outputs = [] if is_last else sorted(numbers[var] for var in made if var in numbers)
    jaxpr = core.Jaxpr(
        constvars=constants,
        invars=[
            *(program.params[leaf] for leaf in params),
            *(program.batch[leaf] for leaf in batch),
            *(by_number[number] for number in inputs),
        ],
        outvars=[result] if is_last else [by_number[number] for number in outputs],
        eqns=[
            eqn.replace(invars=[homes.resolve(atom) for atom in eqn.invars]) for eqn in equations
        ],
        effects=set().union(*(eqn.effects for eqn in equations)),
        debug_info=program.debug_info,
    )
    return StagePart(
        params=tuple(params),
        batch=tuple(batch),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        program=core.ClosedJaxpr(jaxpr, [program.constants[var] for var in constants]),
    )


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]
