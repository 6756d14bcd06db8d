"""The programs of a pipeline's stages as ordinary steps, and the bytes of what they keep (jax).

Shardings are those that the user gave; what none is given for is left to the propagation, as the
compiler is left to choose it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from automesh.cost.terms import Monomial, Sum
from automesh.pipeline.actions import ActionKind
from automesh.pipeline.runtime.split.arguments import Struct, Structs
from automesh.pipeline.runtime.split.parts import Parts
from automesh.pipeline.runtime.stages.optimizer import StageUpdate
from automesh.pipeline.runtime.training import TrainStep
from automesh.program.script.build import Built
from automesh.program.script.contexts import Ambient
from automesh.program.script.workload import Workload

StageProgram = ActionKind | str  # an action's kind, or `finish`
FINISH = "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage, before anything is compiled.

    Attributes:
      params, batch: as its submesh gets them.
      inputs: the values that it reads.
      saved: what its forward pass saves.
      outputs: the values that it makes.
      state: of the optimizer, for the parameters that the stage owns.
      call: what `build` was called with for this step.
      owned: places of those among `params`.
    """

    number: int
    parts: Parts
    step: TrainStep
    params: Structs
    batch: Structs
    inputs: Structs
    saved: Structs
    outputs: Structs
    owned: tuple[int, ...]
    state: Any
    call: Hashable

    @property
    def mesh(self) -> Mesh:
        return self.parts.meshes[self.number]

    @property
    def sums(self) -> Structs:
        """What gradients are summed in: at least float32."""
        return tuple(
            Struct(one.shape, jnp.promote_types(one.dtype, jnp.float32), sharding=one.sharding)
            for one in self.params
        )

    @property
    def gradients(self) -> tuple[Structs, ...]:
        """Of each output with a gradient what every reader sends back."""
        split, function = self.parts.splits[self.number], self.parts.functions[self.number]
        # The last stage's output is the loss, which is no value.
        outputs = zip(function.part.outputs, self.outputs, function.outputs_with_gradient)
        return tuple(
            (like,) * len(split.values[value].consumers) for value, like, has in outputs if has
        )

    def built(self, kind: StageProgram) -> Built:
        """One of its programs as the step of a workload."""
        step, args = self._finish() if kind == FINISH else self._call(kind)
        return Built(
            mesh=self.mesh,
            axis_types=(),
            workload=Workload(step, args),
            ambient=Ambient(mesh=self.mesh, call=self.call),
        )

    def _call(self, kind: StageProgram) -> tuple[Any, tuple[Any, ...]]:
        function = self.parts.functions[self.number]
        if kind == "F":
            return jax.jit(function.forward), (self.params, self.batch, self.inputs)
        assert kind in ("B", "I", "W")
        sums = self.sums if kind != "I" else ()
        jitted = jax.jit(
            function.backward(kind),
            donate_argnums=5,
            out_shardings=(tuple(one.sharding for one in sums), None, None),
        )
        return jitted, (self.params, self.batch, self.inputs, self.saved, self.gradients, sums)

    def _finish(self) -> tuple[Any, tuple[Any, ...]]:
        structure, optimizer = self.parts.structures[0], self.step.optimizer
        places = [self.parts.functions[self.number].part.params[place] for place in self.owned]

        def tree(leaves: Sequence[Any]) -> Any:
            own = dict(zip(places, leaves, strict=True))
            return jax.tree.unflatten(structure, map(own.get, range(structure.num_leaves)))

        def finish(params: Any, gradients: Any, state: Any, norm: Any) -> Any:
            # Their squares are a part of the norm over all stages.
            squares = sum(jnp.sum(jnp.square(one)) for one in gradients)
            added, state = optimizer.update(
                tree([one * norm for one in gradients]), state, tree(params)
            )
            moved = [
                one + change.astype(one.dtype)
                for one, change in zip(params, jax.tree.leaves(added), strict=True)
            ]
            return tuple(moved), state, squares

        params, sums = ([own[place] for place in self.owned] for own in (self.params, self.sums))
        shardings = jax.tree.map(lambda like: like.sharding, (tuple(params), self.state))
        jitted = jax.jit(finish, donate_argnums=(0, 2), out_shardings=(*shardings, None))
        return jitted, (tuple(params), tuple(sums), self.state, Struct((), jnp.float32))


def stage_of(step: TrainStep, parts: Parts, number: int, call: Hashable) -> Stage:
    """One stage of a step.

    Raises:
      UsageError: an array cannot be split as it is said to be on the stage's submesh.
    """
    function, split, mesh = parts.functions[number], parts.splits[number], parts.meshes[number]
    part = function.part
    params, batch = parts.params.structs(part.params, mesh), parts.batch.structs(part.batch, mesh)
    inputs = tuple(split.values[value].like for value in part.inputs)
    with jax.set_mesh(mesh):
        outputs, saved = jax.eval_shape(function.forward, params, batch, inputs)
    owned = tuple(part.params.index(leaf) for leaf in parts.owned[number])
    update = StageUpdate(
        optimizer=step.optimizer,
        clip_norm=step.clip_norm,
        mesh=mesh,
        structure=parts.structures[0],
        leaves=parts.owned[number],
        likes=tuple(params[place] for place in owned),
    )
    return Stage(
        number=number,
        parts=parts,
        step=step,
        params=params,
        batch=batch,
        inputs=inputs,
        saved=saved,
        outputs=outputs,
        owned=owned,
        state=update.state(),
        call=call,
    )


def signature_of(stage: Stage) -> tuple[object, ...]:
    """What stages that do the same have in common."""
    function = stage.parts.functions[stage.number]
    arrays = (
        stage.params,
        stage.batch,
        stage.inputs,
        stage.gradients,
        jax.tree.leaves(stage.state),
    )
    return (
        str(function.part.program),
        function.residuals,
        function.is_last,
        function.with_gradient,
        function.outputs_with_gradient,
        stage.owned,
        *(tuple(map(_described, jax.tree.leaves(one))) for one in arrays),
    )


def _described(one: Any) -> tuple[object, ...]:
    spec = one.sharding.spec if isinstance(one.sharding, NamedSharding) else None
    return (one.shape, str(one.dtype), spec)


def bytes_of(structs: Iterable[Any]) -> Sum:
    """Bytes of arrays on one device, by the shardings that were given."""
    found: dict[tuple[tuple[str, int], ...], float] = {}
    for one in structs:
        size = float(one.dtype.itemsize)
        for dimension in one.shape:
            size *= dimension
        axes = sorted(_axes(one.sharding))
        powers = tuple((axis, -1) for axis in axes)
        found[powers] = found.get(powers, 0.0) + size
    return tuple(Monomial(coefficient=size, powers=powers) for powers, size in found.items())


def _axes(sharding: Any) -> list[str]:
    if not isinstance(sharding, NamedSharding):
        return []
    entries = (one if isinstance(one, tuple) else (one,) for one in sharding.spec if one)
    return [str(axis) for entry in entries for axis in entry]
