"""The computations of a stage as functions for `jax.jit`: forward, backward, and its two halves
(jax)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from automesh.pipeline.actions import ActionKind
from automesh_pipeline.runtime.split.cut import SplitLoss, StagePart

Residuals = Literal["recompute", "save"]
Arrays = tuple[Any, ...]
_Source = Literal["params", "batch", "inputs", "saved"]
# (params, batch, inputs, saved, gradients of the outputs, sums of weight gradients)
# -> (sums, gradients of the inputs, losses)
Backward = Callable[..., tuple[Arrays, Arrays, Arrays]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptResidual:
    """The source of a residual: an argument, or a value that the forward pass saved."""

    source: _Source
    place: int


@dataclass(slots=True, kw_only=True)
class _Residuals:
    """The facts that tracing the forward pass finds for the backward pass."""

    structure: Any = None
    kept: list[_KeptResidual] = field(default_factory=list[_KeptResidual])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFunctions:
    """The computations of one stage.

    Attributes:
      part: the stage's part of the split loss.
      residuals: whether the backward pass repeats the forward pass, or reads the values that it has
        saved.
      is_last: whether its result is the loss.
      with_gradient: which inputs have a gradient.
      outputs_with_gradient: which outputs have one.
    """

    part: StagePart
    residuals: Residuals
    is_last: bool
    with_gradient: tuple[bool, ...]
    outputs_with_gradient: tuple[bool, ...]
    _found: _Residuals = field(default_factory=_Residuals, repr=False, compare=False)

    @property
    def skips_forward(self) -> bool:
        """Whether the stage has no separate forward pass: the backward pass of the last stage also
        computes the loss."""
        return self.is_last and self.residuals == "recompute"

    def forward(self, params: Arrays, batch: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """Computes the outputs, or the loss, and the values that are saved for the backward
        pass."""
        if self.residuals == "recompute":
            return self._evaluate(params, batch, inputs), ()
        outputs, pullback = self._pull_back(params, batch, inputs)
        leaves, self._found.structure = jax.tree.flatten(pullback)
        arguments: tuple[tuple[_Source, Arrays], ...] = (
            ("params", params),
            ("batch", batch),
            ("inputs", inputs),
        )
        known = {
            id(array): _KeptResidual(source=source, place=place)
            for source, arrays in arguments
            for place, array in enumerate(arrays)
        }
        saved: list[Any] = []
        self._found.kept.clear()
        for leaf in leaves:
            # A residual that is an argument need not be saved again for each microbatch.
            kept = known.get(id(leaf))
            if kept is None:
                kept = known[id(leaf)] = _KeptResidual(source="saved", place=len(saved))
                saved.append(leaf)
            self._found.kept.append(kept)
        return outputs, tuple(saved)

    def backward(self, kind: ActionKind) -> Backward:
        """Returns the function of `B`, `I` or `W`; it adds to the given sums, if there are any."""

        def run(
            params: Arrays,
            batch: Arrays,
            inputs: Arrays,
            saved: Arrays,
            gradients: tuple[Arrays, ...],
            sums: Arrays,
        ) -> tuple[Arrays, Arrays, Arrays]:
            if self.residuals == "recompute":
                outputs, pullback = self._pull_back(params, batch, inputs)
            else:
                outputs, pullback = (), self._restore(params, batch, inputs, saved)
            of_params, of_inputs = pullback(self._seeds(gradients))
            added = (
                tuple(
                    total + new.astype(total.dtype)
                    for total, new in zip(sums, of_params, strict=True)
                )
                if kind != "I"
                else ()
            )
            losses = outputs if self.is_last and kind != "W" else ()
            return added, tuple(of_inputs) if kind != "W" else (), losses

        run.__name__ = run.__qualname__ = {"B": "backward", "I": "input_gradient"}.get(
            kind, "weight_gradient"
        )
        return run

    def _seeds(self, gradients: tuple[Arrays, ...]) -> list[Any]:
        """Returns the gradients of the stage's outputs: 1 for the loss, otherwise summed over the
        stages that read the output."""
        if self.is_last:
            loss: Any = self.part.program.out_avals[0]
            return [jnp.ones((), loss.dtype)]
        return [functools.reduce(operator.add, parts) for parts in gradients]

    def _evaluate(self, params: Arrays, batch: Arrays, inputs: Arrays) -> Arrays:
        return tuple(core.jaxpr_as_fun(self.part.program)(*params, *batch, *inputs))

    def _pull_back(
        self, params: Arrays, batch: Arrays, inputs: Arrays
    ) -> tuple[Arrays, Callable[[list[Any]], Any]]:
        """Returns the outputs, and a function from their gradients to the gradients of parameters
        and inputs."""

        def run(params: Arrays, moving: Sequence[Any]) -> tuple[list[Any], Arrays]:
            left = iter(moving)
            values = tuple(
                next(left) if has else value
                for value, has in zip(inputs, self.with_gradient, strict=True)
            )
            outputs = self._evaluate(params, batch, values)
            if self.is_last:
                return list(outputs), outputs
            moved = [
                output
                for output, has in zip(outputs, self.outputs_with_gradient, strict=True)
                if has
            ]
            return moved, outputs

        moving = [value for value, has in zip(inputs, self.with_gradient, strict=True) if has]
        _, pullback, outputs = jax.vjp(run, params, moving, has_aux=True)
        return outputs, pullback

    def _restore(
        self, params: Arrays, batch: Arrays, inputs: Arrays, saved: Arrays
    ) -> Callable[[list[Any]], Any]:
        arrays = {"params": params, "batch": batch, "inputs": inputs, "saved": saved}
        leaves = [arrays[kept.source][kept.place] for kept in self._found.kept]
        return jax.tree.unflatten(self._found.structure, leaves)


def stage_functions(split: SplitLoss, stage: int, residuals: Residuals) -> StageFunctions:
    """Makes the computations of a stage of a split loss."""
    part = split.stages[stage]
    return StageFunctions(
        part=part,
        residuals=residuals,
        is_last=stage == len(split.stages) - 1,
        with_gradient=tuple(split.values[number].has_gradient for number in part.inputs),
        outputs_with_gradient=tuple(split.values[number].has_gradient for number in part.outputs),
    )
