"""Pipelines on devices that are here: their programs, and what makes one ready for visits (jax)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from automesh.program.pipeline.lower import Options, StagedProgram
from automesh.program.pipeline.stage_needs import describe_pipeline
from automesh.program.script.build import Built


def compile_here(program: StagedProgram, options: Options) -> Any:
    """Compiles all programs of a pipeline, with the plan's compiler options.

    Raises:
      Refused: with `OutOfMemory`, or with `Failed` for an option that this compiler does not take.
    """
    return program.compile(lambda lowered, _stage, _action: compile_lowered(lowered, options))


def count_here(program: StagedProgram, trained: Any) -> PipelineOutcome:
    """The stages of a pipeline that was compiled for the devices that are here.

    Args:
      trained: what `compile_here` gave.

    Raises:
      Refused: a program cannot be read.
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
    """Decides for every leaf of the state and of the batch where its values come from.

    What `init` does not give is made up: parameters and batch as for any step, the optimizer's
    state by the optimizer.

    Args:
      trained: what `compile_here` gave.
      build_again: calls the user's `build` on the same mesh and knobs.

    Raises:
      UsageError: what `init` gives does not fit the arguments.
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
        told=_loss_alone,
        forms=forms_by_argument(workload),
    )


def _loss_alone(outputs: Any) -> Any:
    """Of what a step returns the loss: other metrics are not those of the step without a pipeline,
    with which it is compared."""
    return outputs[1]["loss"]


def _maker(
    program: StagedProgram, trained: Any, synthetic: tuple[int, ...]
) -> Callable[[], list[jax.Array]]:
    """What makes the leaves of these positions of (state, batch)."""
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
    # A batch that is made up lies on every device of the first stage, which cuts it.
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
