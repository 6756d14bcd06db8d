"""One stage of a pipeline: the computations of its programs, and their arguments (jax).

The runtime compiles the programs for the stage's submesh; a search propagates shardings through
them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.pipeline.actions import ActionKind
from automesh_pipeline.runtime.split.arguments import Struct, Structs
from automesh_pipeline.runtime.split.parts import Parts
from automesh_pipeline.runtime.split.programs import StageFunctions

T = TypeVar("T")


class Optimizer(Protocol):
    """An optimizer: any `optax.GradientTransformation`.

    It is called once for each stage, with trees in which None replaces the leaves of other stages.
    So it must not combine all gradients: `train_step` clips by the global norm itself.
    """

    @property
    def init(self) -> Any:
        """`params -> state`."""
        ...

    @property
    def update(self) -> Any:
        """`(gradients, state, params) -> (changes to add to the parameters, state)`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """A stage, with the shapes, types and shardings of its arguments and results.

    A sharding is None if the compiler chooses it.

    Attributes:
      parts: the loss that contains it.
      number: its number among the stages.
      params, batch, inputs, outputs: the arguments and results of its forward pass.
      saved: the values that the forward pass saves for the backward pass.
    """

    parts: Parts
    number: int
    params: Structs
    batch: Structs
    inputs: Structs
    outputs: Structs
    saved: Structs

    @property
    def function(self) -> StageFunctions:
        """Its computations."""
        return self.parts.functions[self.number]

    @property
    def mesh(self) -> Mesh:
        """Its submesh."""
        return self.parts.meshes[self.number]

    @property
    def sums(self) -> Structs:
        """The arrays in which the gradients of its parameters are summed; at least float32."""
        return tuple(
            Struct(
                param.shape, jnp.promote_types(param.dtype, jnp.float32), sharding=param.sharding
            )
            for param in self.params
        )

    @property
    def gradients(self) -> tuple[Structs, ...]:
        """For each output with a gradient, one gradient from each stage that reads it."""
        function, values = self.function, self.parts.split.values
        # The last stage's output is the loss, which is no value.
        outputs = zip(function.part.outputs, self.outputs, function.outputs_with_gradient)
        return tuple((like,) * len(values[value].consumers) for value, like, has in outputs if has)

    def owned(self, of_params: Sequence[T]) -> tuple[T, ...]:
        """Selects the entries for the parameters that the stage owns, from one entry for each
        parameter that it reads."""
        of_leaf = dict(zip(self.function.part.params, of_params, strict=True))
        return tuple(of_leaf[leaf] for leaf in self.parts.owned[self.number])

    def action(self, kind: ActionKind) -> tuple[Any, tuple[Any, ...]]:
        """Returns the program of an action as a jitted function, and its arguments."""
        function = self.function
        if kind == "F":
            return jax.jit(function.forward), (self.params, self.batch, self.inputs)
        pairs = zip(self.inputs, function.with_gradient, strict=True)
        inputs = [like for like, has in pairs if has and kind != "W"]
        sums = self.sums if kind != "I" else ()
        jitted = jax.jit(
            function.backward(kind),
            donate_argnums=5,
            out_shardings=(shardings_of(sums), shardings_of(tuple(inputs)), None),
        )
        return jitted, (self.params, self.batch, self.inputs, self.saved, self.gradients, sums)

    def finish(
        self, own: Sequence[Any], others: Sequence[Sequence[Any]]
    ) -> tuple[tuple[Any, ...], Any]:
        """Turns sums into gradients.

        Args:
          own: the sums of the parameters that the stage keeps.
          others: for each of them, the sums of other stages.

        Returns:
          The gradients, in the types of the parameters; and the sum of their squares.
        """
        scale = self.parts.options.scale
        totals = [
            functools.reduce(operator.add, more, total) * scale
            for total, more in zip(own, others, strict=True)
        ]
        squares = (jnp.sum(jnp.square(one), dtype=jnp.float32) for one in totals)
        pairs = zip(totals, self.owned(self.params), strict=True)
        gradients = tuple(total.astype(like.dtype) for total, like in pairs)
        return gradients, sum(squares, start=jnp.zeros((), jnp.float32))


def given_arguments(parts: Parts, number: int) -> tuple[Structs, Structs, Structs]:
    """Returns parameters, batch and inputs of a stage, with the given shardings.

    Raises:
      UsageError: an array cannot have its given sharding on the stage's submesh.
    """
    part, split, mesh = parts.functions[number].part, parts.splits[number], parts.meshes[number]
    return (
        parts.params.structs(part.params, mesh),
        parts.batch.structs(part.batch, mesh),
        tuple(split.values[value].like for value in part.inputs),
    )


def given_stage(parts: Parts, number: int) -> Stage:
    """Returns a stage with the given shardings; compiles nothing.

    Raises:
      UsageError: see `given_arguments`.
    """
    params, batch, inputs = given_arguments(parts, number)
    with jax.set_mesh(parts.meshes[number]):
        outputs, saved = jax.eval_shape(parts.functions[number].forward, params, batch, inputs)
    return Stage(
        parts=parts,
        number=number,
        params=params,
        batch=batch,
        inputs=inputs,
        outputs=outputs,
        saved=saved,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageUpdate:
    """The update of one stage's parameters.

    Attributes:
      parts, number: see `Stage`.
      likes: the parameters that it keeps, with their shardings.
      clip_norm: the largest norm; None does not clip.
    """

    parts: Parts
    number: int
    likes: Structs
    optimizer: Optimizer
    clip_norm: float | None

    @property
    def leaves(self) -> tuple[int, ...]:
        """The numbers of the parameters that the stage keeps."""
        return self.parts.owned[self.number]

    @property
    def mesh(self) -> Mesh:
        """The stage's submesh."""
        return self.parts.meshes[self.number]

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding with a copy on every device of the submesh."""
        return NamedSharding(self.mesh, PartitionSpec())

    def state(self) -> Any:
        """Returns shapes and shardings of the state: leaves that are like parameters have their
        shardings."""
        params = self._tree(self.likes)
        structure = jax.tree.structure(params)
        with jax.set_mesh(self.mesh):
            state = jax.eval_shape(self.optimizer.init, params)

        def is_like_params(node: Any) -> bool:
            return jax.tree.structure(node) == structure

        def place(node: Any) -> Any:
            leaves, inner = jax.tree.flatten(node)
            models = self.likes if is_like_params(node) else (None,) * len(leaves)
            placed = [self._struct(leaf, like) for leaf, like in zip(leaves, models, strict=True)]
            return jax.tree.unflatten(inner, placed)

        return jax.tree.map(place, state, is_leaf=is_like_params)

    def lower_init(self) -> jax.stages.Lowered:
        """Lowers `params -> state`."""

        def init(params: tuple[Any, ...]) -> Any:
            return self.optimizer.init(self._tree(params))

        with jax.set_mesh(self.mesh):
            return jax.jit(init, out_shardings=shardings_of(self.state())).lower(self.likes)

    def lower_update(self) -> jax.stages.Lowered:
        """Lowers `(params, gradients, state, norm) -> (params, state)`; params and state are
        donated."""
        state = self.state()

        # The program's name must not change: stored fingerprints contain it.
        def _update(params: Any, gradients: Any, state: Any, norm: Any) -> Any:
            return self.update(params, gradients, state, norm)

        jitted = jax.jit(
            _update, donate_argnums=(0, 2), out_shardings=shardings_of((self.likes, state))
        )
        scalar = Struct((), jnp.float32, sharding=self.everywhere)
        with jax.set_mesh(self.mesh):
            return jitted.lower(self.likes, self.likes, state, scalar)

    def update(
        self, params: Sequence[Any], gradients: Sequence[Any], state: Any, norm: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Computes new parameters and state.

        Args:
          norm: the norm of the gradients of all stages together.
        """
        shrink = _shrink(norm, self.clip_norm)
        gradients = tuple(gradient * shrink.astype(gradient.dtype) for gradient in gradients)
        added, state = self.optimizer.update(self._tree(gradients), state, self._tree(params))
        moved = tuple(
            param + change.astype(param.dtype)
            for param, change in zip(params, jax.tree.leaves(added), strict=True)
        )
        return moved, state

    def _tree(self, leaves: Sequence[Any]) -> Any:
        """Returns the whole tree, with None for the leaves of other stages."""
        own, structure = dict(zip(self.leaves, leaves, strict=True)), self.parts.structures[0]
        return jax.tree.unflatten(structure, map(own.get, range(structure.num_leaves)))

    def _struct(self, leaf: Any, like: Struct | None) -> Struct:
        same = like is not None and like.shape == leaf.shape
        sharding = like.sharding if same and like else self.everywhere
        return Struct(leaf.shape, leaf.dtype, sharding=sharding)


def _shrink(norm: Any, clip_norm: float | None) -> Any:
    """Returns the factor that reduces the norm of the gradients to at most `clip_norm`."""
    if clip_norm is None:
        return jnp.ones(())
    return jnp.where(norm > clip_norm, clip_norm / norm, 1.0)


def shardings_of(tree: Any) -> Any:
    """Returns the sharding of each leaf; None where the compiler chooses it."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
