"""The noun `CompiledPipeline`: a loss as the programs of its stages, ready to run (jax)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from automesh.errors import UsageError
from automesh.pipeline.actions import ActionKind
from automesh.pipeline.runtime.arguments import Arguments, Given, describe
from automesh.pipeline.runtime.compiling import CompiledStages
from automesh.pipeline.runtime.finishing import Finisher, add_losses
from automesh.pipeline.runtime.options import PipelineOptions
from automesh.pipeline.runtime.programs import stage_functions
from automesh.pipeline.runtime.running import Ran, Runner, Watch, cut_rows
from automesh.pipeline.runtime.splitting import Split, split_program
from automesh.pipeline.runtime.steps import Run, Step, plan_steps
from automesh.pipeline.runtime.tracing import trace_loss
from automesh.pipeline.schedule import Schedule

Loss = Callable[[Any, Any], Any]


class CompiledPipeline:
    """A loss compiled as a pipeline, for arrays of given shapes; `microbatch` makes it.

    Attributes:
      schedule: what is done when.
      steps: what is dispatched, in this order.
      stages: their programs and the shapes of what they read and make.
      shardings: a tree like the parameters: where each is kept.
    """

    def __init__(self, loss: Loss, options: PipelineOptions, params: Any, batch: Any) -> None:
        part = cut_rows(batch, num_microbatches=options.num_microbatches, dim=options.dim)
        known = jax.tree_util.tree_map_with_path(_describe_param, params)
        self._options = options
        self._structures = jax.tree.structure(params), jax.tree.structure(batch)
        self._params = _arguments(known, "params", options)
        splits = _split_for_meshes(loss, options, known, part)
        num_stages = len(next(iter(splits.values())).stages)
        self.schedule = options.schedule_for(num_stages)
        meshes = [options.mesh.submeshes[rank] for rank in self.schedule.homes]
        of_stages = [splits[mesh.abstract_mesh] for mesh in meshes]
        residuals = options.residuals_of(num_stages)
        self.stages = CompiledStages(
            [
                stage_functions(split, stage, residuals[stage])
                for stage, split in enumerate(of_stages)
            ],
            of_stages,
            meshes,
            params=self._params,
            batch=_arguments(part, "batch", options),
        )
        self.steps: tuple[Step, ...] = ()
        self._plan()
        self.finisher = Finisher(self.stages, scale=options.scale)
        self.shardings = jax.tree.unflatten(self._structures[0], self._owner_shardings())

    def with_schedule(self, schedule: Schedule) -> CompiledPipeline:
        """The same stages in another order; only what it needs in addition is compiled.

        Raises:
          UsageError: it is for other numbers, or has stages on other ranks.

        Example:
          >>> import jax.numpy as jnp
          >>> from automesh import create_mesh, pipeline
          >>> layer = lambda w, x: jnp.tanh(x @ w)
          >>> loss = pipeline.chain([layer, layer], lambda y, batch: jnp.mean(y**2))
          >>> mesh = create_mesh((2, 4), ("pp", "dp"))
          >>> step = pipeline.microbatch(loss, mesh=mesh, schedule="gpipe", num_microbatches=4)
          >>> params, batch = (jnp.eye(4), jnp.eye(4)), jnp.ones((8, 4))
          >>> other = pipeline.make_schedule("zb_h1", num_ranks=2, num_microbatches=4)
          >>> value, _ = step.compile(params, batch).with_schedule(other)(params, batch)
          >>> round(value.item(), 3)
          0.412
        """
        count = len(self.stages.functions)
        changed = copy.copy(self)
        changed.schedule = self._options.check_schedule(schedule, count)
        if schedule.homes != self.schedule.homes:
            raise UsageError(
                f"the schedule `{schedule.name}` has the stages on the ranks {schedule.homes}, and "
                f"they are compiled for {self.schedule.homes}"
            )
        changed._plan()
        return changed

    def place(self, params: Any, *, copy: bool = False) -> Any:
        """The parameters, each on the stage that owns it.

        Args:
          copy: whether arrays that are there already are copied.

        Raises:
          UsageError: another tree than the pipeline was compiled for, or an array on devices that
            are neither one nor those of its stage.
        """
        leaves = self._leaves(params, 0)
        placed = [
            _placed(leaf, sharding, name, copy=copy)
            for leaf, sharding, name in zip(
                leaves, self._owner_shardings(), self._params.names, strict=True
            )
        ]
        return jax.tree.unflatten(self._structures[0], placed)

    def __call__(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """Value and gradients.

        Args:
          params: as `place` gives them; arrays on a single device are moved.
          batch: a tree of arrays, anywhere.

        Returns:
          The loss, on the last stage, and a tree like `params`, each gradient where its parameter
          is kept.

        Raises:
          UsageError: see `place`.
        """
        ran = self.run(jax.tree.leaves(self.place(params)), batch)
        finished = self.finisher.finish(ran.sums)
        value = add_losses(ran.losses, self._options.scale)
        return value, jax.tree.unflatten(self._structures[0], finished.gradients)

    def run(self, params: Sequence[Any], batch: Any, watch: Watch | None = None) -> Ran:
        """Losses and sums of gradients, before anything is added up.

        Args:
          params: the leaves, as `place` gives them.
          watch: called after each step that is dispatched, with it and with what is held.

        Raises:
          UsageError: another batch than the pipeline was compiled for.
        """
        stages = self.stages
        owners = stages.split.owners

        def put(leaf: int, stage: int, sharding: Any) -> Any:
            # A parameter of several stages goes to those that do not own it, once for each step.
            array = params[leaf]
            return array if owners[leaf] == stage else jax.device_put(array, sharding)

        spread = [
            tuple(
                put(leaf, stage, like.sharding)
                for leaf, like in zip(part.params, stages.shapes[stage].params, strict=True)
            )
            for stage, part in enumerate(stages.split.stages)
        ]
        return self._runner.run(spread, self._leaves(batch, 1), watch)

    def add_losses(self, ran: Ran) -> Any:
        """The loss of a whole batch."""
        return add_losses(ran.losses, self._options.scale)

    @property
    def programs(self) -> Mapping[tuple[int, ActionKind], Any]:
        """Of each stage and kind of action the compiled program: a `jax.stages.Compiled`."""
        return self.stages.programs

    @property
    def meshes(self) -> tuple[jax.sharding.Mesh, ...]:
        """Of each stage its submesh."""
        return self.stages.meshes

    @property
    def structure(self) -> Any:
        """Of the tree of parameters."""
        return self._structures[0]

    def _plan(self) -> None:
        self.steps = plan_steps(self.schedule, self.stages.wiring)
        self.stages.prepare(
            (step.action.stage, step.action.kind)
            for step in self.steps
            if isinstance(step, Run) and step.action.kind != "F"
        )
        self._runner = Runner(
            self.stages,
            self.steps,
            num_microbatches=self._options.num_microbatches,
            dim=self._options.dim,
        )

    def _owner_shardings(self) -> list[Any]:
        stages = self.stages
        found: list[Any] = []
        for leaf, owner in enumerate(stages.split.owners):
            place = stages.split.stages[owner].params.index(leaf)
            found.append(stages.shapes[owner].params[place].sharding)
        return found

    def _leaves(self, tree: Any, which: int) -> list[Any]:
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structures[which]:
            what = ("the parameters", "the batch")[which]
            raise UsageError(
                f"{what} are not of the structure that the pipeline was compiled for: "
                f"{structure} instead of {self._structures[which]}"
            )
        return leaves


def _placed(leaf: Any, sharding: Any, name: str, *, copy: bool) -> Any:
    current = getattr(leaf, "sharding", None)
    if isinstance(current, NamedSharding) and current.device_set != sharding.device_set:
        there = sorted(device.id for device in current.device_set)
        wanted = sorted(device.id for device in sharding.device_set)
        raise UsageError(
            f"{name} is on the devices {there}, and its stage is on {wanted}",
            hint="give the parameters as arrays of the host, or where an earlier step of the same "
            "pipeline has left them",
        )
    placed = leaf if current == sharding else jax.device_put(leaf, sharding)
    # What is put on several devices may share the memory of the one that it comes from, whatever
    # `may_alias` says.
    return jnp.copy(placed) if copy and isinstance(leaf, jax.Array) else placed


def _describe_param(path: Any, leaf: Any) -> Given:
    given = describe(leaf)
    if not jnp.issubdtype(given.dtype, jnp.floating):
        raise UsageError(
            f"params{jax.tree_util.keystr(path)} is of {given.dtype}, which has no gradient",
            hint="give what is not trained as a part of the batch, or close over it",
        )
    return given


def _arguments(tree: Any, root: str, options: PipelineOptions) -> Arguments:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return Arguments(
        given=tuple(leaf for _, leaf in leaves),
        names=tuple(f"{root}{jax.tree_util.keystr(path)}" for path, _ in leaves),
        dropped=options.mesh.axis,
    )


def _split_for_meshes(
    loss: Loss, options: PipelineOptions, params: Any, batch: Any
) -> dict[jax.sharding.AbstractMesh, Split]:
    """The split loss for each shape of submesh: shardings inside it depend on that alone."""
    splits: dict[jax.sharding.AbstractMesh, Split] = {}
    for mesh in options.mesh.submeshes:
        if mesh.abstract_mesh not in splits:
            program = trace_loss(
                loss,
                jax.tree.map(lambda given: given.struct, params),
                jax.tree.map(lambda given: given.struct, batch),
                mesh=mesh,
                rules=options.rules,
            )
            splits[mesh.abstract_mesh] = split_program(program)
    return splits
