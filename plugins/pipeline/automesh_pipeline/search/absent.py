"""Compiles pipelines for absent devices: their stages become scheduled programs (jax).

All ranks have submeshes of one shape, so each stage is compiled for the first of them: libtpu only
compiles for the first devices of a topology, and it compiles collectives between slices only for
all slices of the topology (for two of four, 0.0.42 gives up or crashes). Stages with the same
program are compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax

from automesh.outcomes import PipelineOutcome, StageProgram
from automesh.program.absent.compile import (
    CompileOrder,
    ObtainedModule,
    all_options,
    find_part,
    keep_part,
)
from automesh.program.lower.compiled import compile_lowered
from automesh.program.lower.lowered import fingerprint
from automesh_pipeline.search.stage_needs import describe_pipeline

if TYPE_CHECKING:
    from automesh_pipeline.search.lower import StagedProgram

# The action whose compiled program shows the shardings that XLA has chosen for arguments without
# one.
_SHARDED = "F"


def fingerprint_of_part(
    lowered: jax.stages.Lowered, order: CompileOrder, device_ids: Sequence[int]
) -> str:
    """Returns the fingerprint of one of several programs that make up a step.

    Args:
      device_ids: ids of the devices of the program's submesh, in the order of the submesh: meshes
        of equal sizes may lie on the same devices in different ways.
    """
    program: Any = lowered
    return fingerprint(
        lowered,
        device_ids=device_ids,
        # Programs with the same text may group their arguments differently.
        compiler_options=(*order.options, ("trees", f"{program.in_tree}")),
        platform=order.one.platform,
    )


@dataclass(slots=True)
class _Compiler:
    """Compiles the programs of one plan; equal programs are compiled once.

    Attributes:
      order: the order, with the axes of a submesh.
      device_ids: ids of the devices of that submesh, in its order.
      modules: the compiled modules, by stage and action.
    """

    order: CompileOrder
    device_ids: tuple[int, ...]
    modules: dict[tuple[int, str], ObtainedModule] = field(
        default_factory=dict[tuple[int, str], ObtainedModule]
    )
    _known: dict[str, tuple[Any, ObtainedModule]] = field(
        default_factory=dict[str, tuple[Any, ObtainedModule]]
    )

    def compile_one(self, lowered: jax.stages.Lowered, stage: int | None, action: str) -> Any:
        """Returns the executable of a program; see `CompileOne`."""
        key = fingerprint_of_part(lowered, self.order, self.device_ids)
        if key not in self._known:
            self._known[key] = self._found(lowered, key, action) or self._made(lowered, key)
        compiled, module = self._known[key]
        if stage is not None:
            self.modules[stage, action] = module
        return compiled

    def _made(self, lowered: jax.stages.Lowered, key: str) -> tuple[Any, ObtainedModule]:
        compiled = compile_lowered(lowered, all_options(self.order, self.order.effort))
        return compiled, keep_part(lowered, compiled, self.order, fingerprint=key)

    def _found(
        self, lowered: jax.stages.Lowered, key: str, action: str
    ) -> tuple[Any, ObtainedModule] | None:
        """Returns a program that an earlier job has stored; that job may have ended before its last
        program."""
        module = find_part(self.order, fingerprint=key)
        if module is None:
            return None
        if action != _SHARDED:
            return None, module
        # Shardings are not stored; they are the same at any effort.
        return compile_lowered(lowered, all_options(self.order, "low")), module


def obtain_pipeline(program: StagedProgram, order: CompileOrder) -> PipelineOutcome:
    """Compiles the programs of a pipeline that run once for each microbatch, and the updates.

    Args:
      order: the order for the whole plan.

    Returns:
      The stages, with the memory and traffic of their compiled programs.

    Raises:
      Refused: with `OutOfMemory`, if one program alone does not fit; or with `Failed` for an option
        that this compiler does not accept, or a store that cannot be written.
    """
    cut = [name == program.axis for name, _ in order.axes]
    submesh = replace(
        order.at_known_effort(),
        axes=tuple((name, 1 if no else size) for (name, size), no in zip(order.axes, cut)),
        dcn=tuple(1 if no else size for size, no in zip(order.dcn, cut)),
    )
    # All stages are lowered for the same stand-in.
    (fake_mesh,) = set(program.lowered.meshes)
    compiler = _Compiler(
        order=submesh, device_ids=tuple(device.id for device in fake_mesh.devices.flat)
    )
    trained = program.compile(compiler.compile_one, only_programs=True)
    programs = {
        (stage, action): StageProgram(
            stage=stage,
            action=action,
            memory=module.memory,
            counts=module.counts,
            stored=module.key,
        )
        for (stage, action), module in compiler.modules.items()
        if (stage, action) in trained.programs
    }
    return describe_pipeline(trained, programs, axis=program.axis)
