"""Pipelines on attached devices: compiles their programs and prepares them for visits (jax)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.outcomes import PipelineOutcome, StageProgram
from automesh.program.execute.arguments import maker, plan_leaves
from automesh.program.execute.prepare import Ready, abstract, covered_by_init, forms_by_argument
from automesh.program.execute.value_domains import Domain
from automesh.program.lower.compiled import (
    compile_lowered,
    count_serialized,
    read_memory,
    serialized,
)
from automesh.program.lower.static_args import Split, is_concrete
from automesh.program.script.build import Built
from automesh_pipeline.search.stage_needs import describe_pipeline

if TYPE_CHECKING:
    from automesh_pipeline.search.lower import Options, StagedProgram


def compile_here(program: StagedProgram, options: Options) -> Any:
    """Compiles all programs of a pipeline, with the plan's compiler options.

    Raises:
      StepRefused: with `OutOfMemory`, or with `Failed` for an option that this compiler does not
        accept.
    """
    return program.compile(lambda lowered, _stage, _action: compile_lowered(lowered, options))


def count_here(program: StagedProgram, trained: Any) -> PipelineOutcome:
    """Describes the stages of a pipeline that was compiled for attached devices.

    Args:
      trained: the result of `compile_here`.

    Raises:
      StepRefused: a program cannot be read.
    """
    found: dict[tuple[int, str], StageProgram] = {}
    for (stage, action), compiled in trained.programs.items():
        mesh = trained.meshes[stage]
        found[stage, action] = StageProgram(
            stage=stage,
            action=action,
            memory=read_memory(compiled, platform=mesh.devices.flat[0].platform),
            counts=count_serialized(serialized(compiled, {}), list(mesh.shape.items())),
        )
    return describe_pipeline(trained, found, axis=program.axis)


def prepare_pipeline(
    program: StagedProgram,
    trained: Any,
    *,
    fingerprint: str,
    build_again: Callable[[], Built],
) -> Ready:
    """Prepares a pipeline for visits; decides where the values of each leaf come from.

    Leaves that `init` does not return are made up: parameters and batch as for any step, the
    optimizer's state by the optimizer.

    Args:
      trained: the result of `compile_here`.
      build_again: calls the user's `build` again with the same mesh and knobs.

    Raises:
      UsageError: the results of `init` do not fit the arguments.
    """
    workload = program.built.workload
    args = (trained.state, program.args[1])
    leaves = jax.tree.leaves((args, {}))
    covered = covered_by_init(program)
    concrete = [is_concrete(leaf) for leaf in jax.tree.leaves((program.args, {}))]
    synthetic = tuple(k for k in range(len(leaves)) if not covered[k] and not concrete[k])
    has_arrays = any(one and not init for one, init in zip(concrete, covered, strict=True))
    return Ready(
        mesh=program.built.mesh,
        ambient=program.built.ambient,
        workload=abstract(workload),
        split=Split(),
        tree=(args, {}),
        shardings=tuple(
            leaf.sharding if is_state else None
            for leaf, is_state in zip(leaves, program.donated, strict=True)
        ),
        synthetic=synthetic,
        make=_maker(program, trained, synthetic),
        build_again=build_again if has_arrays else None,
        donated=program.donated,
        carry=program.carry,
        settled=True,
        values="synthetic" if synthetic else "user",
        compiled=trained,
        loss_dtype=program.loss_dtype,
        fingerprint=fingerprint,
        compared_outputs=_loss_alone,
        forms=forms_by_argument(workload),
    )


def _loss_alone(outputs: Any) -> Any:
    """Selects the loss among the outputs of a step. Other metrics may differ from those of the step
    without a pipeline, with which this step is compared."""
    return outputs[1]["loss"]


def _maker(
    program: StagedProgram, trained: Any, synthetic: tuple[int, ...]
) -> Callable[[], list[jax.Array]]:
    """Returns a function that makes the leaves at these positions of (state, batch)."""
    if not synthetic:
        return list[jax.Array]
    state, batch = trained.state, program.args[1]
    in_state = [k for k in synthetic if k < len(jax.tree.leaves(state))]
    if in_state and len(in_state) < len(jax.tree.leaves(state)):
        raise UsageError(
            "a part of the pipeline's state has values, and the rest has none",
            hint="let `init` return the whole state: `step.init(params, batch)`",
        )
    tree = (state.params, batch)
    # A made-up batch is on every device of the first stage, which splits it.
    everywhere = NamedSharding(trained.meshes[0], PartitionSpec())
    places = (
        jax.tree.map(lambda leaf: leaf.sharding, state.params),
        jax.tree.map(lambda _: everywhere, batch),
    )
    flat, structure = jax.tree.flatten(tree)
    make = maker(plan_leaves(tree, places, [Domain()] * len(flat), program.built.mesh))

    def made() -> list[jax.Array]:
        params, rows = structure.unflatten(make())
        leaves = jax.tree.leaves((trained.init(params) if in_state else state, rows))
        return [leaves[k] for k in synthetic]

    return made
