"""`microbatch`: the value and the gradients of a loss, computed by a pipeline (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from automesh.errors import UsageError, WrongType, check_type, kind_of
from automesh.pipeline.schedule import Schedule
from automesh_pipeline.runtime.compiled import CompiledPipeline
from automesh_pipeline.runtime.mesh import MpmdMesh
from automesh_pipeline.runtime.options import PipelineOptions, Reduce, check_options
from automesh_pipeline.runtime.split.arguments import cut_rows
from automesh_pipeline.runtime.split.parts import Loss, Parts, shapes_key, split_pipeline
from automesh_pipeline.runtime.split.programs import Residuals


class Microbatched:
    """A loss that is run as a pipeline; `microbatch` makes it.

    Attributes:
      options: the options of the pipeline.
    """

    def __init__(self, loss: Loss, options: PipelineOptions) -> None:
        self.options = options
        self._loss = loss
        # Keyed by the shapes of the arguments.
        self._parts: dict[Any, Parts] = {}
        self._compiled: dict[Any, CompiledPipeline] = {}

    def with_schedule(self, schedule: Schedule) -> Microbatched:
        """Returns the same loss with another schedule; compiled programs are used again.

        Raises:
          UsageError: the schedule does not fit the compiled programs; see `CompiledPipeline`.
        """
        changed = Microbatched(self._loss, replace(self.options, schedule=schedule))
        changed._compiled = {
            key: one.with_schedule(schedule) for key, one in self._compiled.items()
        }
        changed._parts = {key: one.parts for key, one in changed._compiled.items()}
        return changed

    def parts(self, params: Any, batch: Any) -> Parts:
        """Cuts the loss into stages for arrays of these shapes; compiles nothing.

        Args:
          params, batch: see `compile`.

        Raises:
          UsageError: see `compile`.
        """
        key = shapes_key(params, batch)
        if key not in self._parts:
            self._parts[key] = split_pipeline(self._loss, self.options, params, batch)
        return self._parts[key]

    def compile(self, params: Any, batch: Any) -> CompiledPipeline:
        """Compiles the programs of all stages for arrays of these shapes, once.

        Args:
          params: arrays, or `jax.ShapeDtypeStruct`s. A `NamedSharding`, on any mesh, determines how
            its parameter is split on the submesh of its stage; XLA chooses the other shardings.
          batch: likewise; its shardings are those of each microbatch.

        Raises:
          UsageError: the batch or the loss cannot be cut, or the schedule does not fit the loss.
        """
        key = shapes_key(params, batch)
        if key not in self._compiled:
            self._compiled[key] = CompiledPipeline(self.parts(params, batch))
        return self._compiled[key]

    def __call__(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """Computes the value and the gradients, like `jax.value_and_grad(loss)(params, batch)`.

        Args:
          params: the parameters as `place` returns them; arrays on a single device are moved.
          batch: a tree of arrays, on any devices.

        Returns:
          The loss, on the last stage; and a tree like `params`, in which each gradient is on the
          stage that keeps its parameter.

        Raises:
          UsageError: see `compile` and `place`.
        """
        return self.compile(params, batch)(params, batch)

    def place(self, params: Any, batch: Any) -> Any:
        """Puts each parameter on the stage that keeps it.

        Args:
          batch: a batch; only its shapes are used.

        Raises:
          UsageError: see `compile`; or an array is on several devices that are not those of its
            stage.
        """
        return self.compile(params, batch).place(params)


def microbatch(
    loss: Loss,
    *,
    num_microbatches: int,
    schedule: Schedule | str = "1f1b",
    mesh: MpmdMesh | Mesh | None = None,
    reduce: Reduce = "mean",
    residuals: Residuals | Sequence[Residuals] = "recompute",
    dim: int = 0,
) -> Microbatched:
    """Computes `jax.value_and_grad` of a loss, stage by stage on the submeshes of a mesh.

    `stage_boundary` or `task` inside the loss, or `register_task` outside of it, define where the
    loss is cut; `chain` makes such a loss from a list of functions. Shardings inside the loss are
    PartitionSpecs, or refer to `MpmdMesh.abstract_mesh`. If several stages read a parameter, such
    as a tied embedding, the first of them keeps it, and its gradients are summed.

    Args:
      loss: `(params, batch) -> scalar`.
      num_microbatches: number of parts that the batch is cut into.
      schedule: the name of a schedule, or a `Schedule`.
      mesh: a mesh with an axis `pp`, along which it is cut, or an `MpmdMesh`, which may have
        another axis; None takes the mesh in force.
      reduce: how the losses of the microbatches, and their gradients, are joined: `mean`, for a
        loss that is a mean over rows, or `sum`, as in MultiMesh.
      residuals: one word for all stages, or one for each. `recompute` keeps the inputs of a stage
        and repeats its forward pass in the backward pass; `save` keeps what the backward pass
        reads, as `jax.checkpoint` inside the loss defines it. With `recompute`, the zero-bubble
        schedules repeat the forward pass twice.
      dim: the dimension of the batch's arrays that is cut. Arrays without dimensions are given to
        every microbatch.

    Raises:
      WrongType: an argument has another type.
      UsageError: there is no mesh, or a number or name is not allowed; when called: the batch
        cannot be cut evenly, the loss cannot be cut, or its stages do not fit the schedule.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from automesh import create_mesh, pipeline
      >>> def loss(params, batch):
      ...     hidden = pipeline.stage_boundary(jnp.tanh(batch @ params[0]))
      ...     return jnp.mean((hidden @ params[1]) ** 2)
      >>> mesh = create_mesh((2, 4), ("pp", "dp"))
      >>> params, batch = [jnp.eye(4), jnp.eye(4)], jnp.ones((8, 4))
      >>> step = pipeline.microbatch(loss, mesh=mesh, schedule="1f1b", num_microbatches=4)
      >>> value, gradients = step(params, batch)
      >>> bool(jnp.allclose(value, loss(params, batch)))
      True
      >>> [sorted(device.id for device in one.devices()) for one in gradients]
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if not callable(loss):
        raise WrongType(f"`microbatch` takes a loss, a function, got {kind_of(loss)}")
    options = check_options(
        mesh=mesh,
        schedule=schedule,
        num_microbatches=num_microbatches,
        reduce=reduce,
        residuals=residuals,
        dim=dim,
        what="microbatch",
    )
    return Microbatched(loss, options)


def accumulate(
    fun: Callable[..., Any], *, num_microbatches: int, argnum: int = 0, dim: int = 0
) -> Callable[..., Any]:
    """Makes a function whose results are summed over parts of one argument, in one program.

    It is MultiMesh's `microbatch` without a schedule. The results of a pipeline are compared with
    it.

    Args:
      fun: any function of arrays, `jax.value_and_grad(loss)` for example.
      num_microbatches: number of parts that each array of the argument is cut into.
      argnum: which argument is cut.
      dim: the dimension that is cut.

    Raises:
      WrongType, UsageError: a number is wrong; when called: an array cannot be cut evenly.

    Example:
      >>> import jax.numpy as jnp
      >>> from automesh import pipeline
      >>> squares = pipeline.accumulate(lambda x: jnp.sum(x * x), num_microbatches=2)
      >>> squares(jnp.arange(4.0)).item()
      14.0
    """
    for name, value, least in (
        ("num_microbatches", num_microbatches, 1),
        ("argnum", argnum, 0),
        ("dim", dim, 0),
    ):
        check_type(value, int, f"`{name}` must be an int")
        if value < least:
            raise UsageError(f"`{name}` is at least {least}, got {value}")

    def run(*args: Any) -> Any:
        if argnum >= len(args):
            raise UsageError(f"argument {argnum} is to be cut, and there are {len(args)}")
        cut = args[argnum]
        cut_rows(cut, num_microbatches=num_microbatches, dim=dim)

        def part(number: Any) -> Any:
            def take(leaf: Any) -> Any:
                if not jax.numpy.ndim(leaf):
                    return leaf
                rows = leaf.shape[dim] // num_microbatches
                return jax.lax.dynamic_slice_in_dim(leaf, number * rows, rows, axis=dim)

            return fun(*args[:argnum], jax.tree.map(take, cut), *args[argnum + 1 :])

        def add(number: Any, total: Any) -> Any:
            return jax.tree.map(jax.numpy.add, total, part(number))

        zeros = jax.tree.map(
            lambda like: jax.numpy.zeros(like.shape, like.dtype), jax.eval_shape(part, 0)
        )
        return jax.lax.fori_loop(0, num_microbatches, add, zeros)

    return run
