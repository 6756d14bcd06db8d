"""Pipelines for devices that are not here: their stages become scheduled programs (jax).

All ranks lie on submeshes of one shape, so each stage is compiled for the first of them: libtpu
compiles for the first devices of a topology alone, and collectives between slices only for all of
its slices together (for two of four, 0.0.42 gives up or dies). Stages that are the same program are
compiled once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from automesh.hardware.absent import AbsentDevices
from automesh.outcomes import Failed, PipelineOutcome, StageProgram
from automesh.pipeline.runtime.training import TrainStep
from automesh.program.absent.client import devices_of
from automesh.program.absent.compile import Module, Order, all_options, find_part, keep_part
from automesh.program.lower.compiled import compile_lowered
from automesh.program.lower.lowered import fingerprint
from automesh.program.pipeline.lower import StagedProgram, lower_pipeline
from automesh.program.pipeline.stage_needs import describe_pipeline
from automesh.program.refused import Refused
from automesh.program.script.build import Built


def lower_for_absent(
    built: Built, step: TrainStep, one: AbsentDevices
) -> tuple[StagedProgram, AbsentDevices]:
    """Lowers each stage for the submesh of the first rank, or one that is wired as that is.

    Args:
      one: all devices of the pipeline.

    Returns:
      The pipeline; and what it was lowered for: of several slices as many as a rank spans.

    Raises:
      UsageError: see `lower_pipeline`.
      Refused: the submeshes differ in shape, or are no parts of the mesh along one of its axes; or
        as `devices_of`.
    """
    submeshes = step.mesh.submeshes
    if step.mesh.axis not in built.mesh.axis_names:
        reason = "a pipeline whose submeshes are given one by one is not compiled for devices that"
        raise Refused(Failed(stage="build", reason=f"{reason} are not here"))
    if len({submesh.abstract_mesh for submesh in submeshes}) > 1:
        reason = "submeshes of different shapes are not compiled for devices that are not here"
        raise Refused(Failed(stage="build", reason=reason))
    first = submeshes[0]
    chosen: list[Any] = list(first.devices.flat)
    part = first_granules(one, len({_granule(device) for device in chosen}))
    if part != one:
        chosen = moved_to(devices_of(part), chosen)
    moved: Any = np.array(first_devices(chosen, devices_of(part)))
    fake_mesh = Mesh(
        moved.reshape(first.devices.shape), first.axis_names, axis_types=first.axis_types
    )
    return lower_pipeline(built, step, on=lambda _: fake_mesh), part


def first_granules(one: AbsentDevices, count: int) -> AbsentDevices:
    """The first slices of several TPU slices; GPUs as they are, whose nodes are compiled for alike.

    >>> slices = AbsentDevices(platform="tpu", device_kind="TPU v5e", num_devices=64,
    ...                        num_granules=4, num_hosts=16, topology="v5e:4x4")
    >>> (first_granules(slices, 2).num_devices, first_granules(slices, 2).num_hosts)
    (32, 8)
    """
    if one.platform != "tpu" or count == one.num_granules:
        return one
    return replace(
        one,
        num_granules=count,
        num_devices=one.num_devices * count // one.num_granules,
        num_hosts=one.num_hosts * count // one.num_granules,
    )


def moved_to(devices: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
    """Of the devices of fewer slices those at the places of the chosen ones, slice by slice."""
    granules = sorted({_granule(device) for device in chosen})
    places = {_place(device, device.coords): device for device in devices}
    return [
        places[granules.index(_granule(device)), *_place(device, device.coords)[1:]]
        for device in chosen
    ]


def first_devices(chosen: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
    """Chosen devices of a torus, turned so that they are the first ones of their granules.

    A part of a torus has the same links in whichever direction it lies.

    Args:
      devices: all that there are.

    Returns:
      As many devices in the same order; the chosen ones themselves where no turn makes them the
      first ones, or where there is no torus.
    """
    if chosen[0].platform != "tpu":
        return list(chosen)
    places = {_place(device, device.coords): device for device in devices}
    wanted = _first_of_granules(devices, chosen)
    corner = np.min([device.coords for device in chosen], axis=0)
    for order in itertools.permutations(range(len(corner))):
        turned = [(np.array(one.coords) - corner)[list(order)] for one in chosen]
        moved = [
            places.get(_place(one, place.tolist()))
            for one, place in zip(chosen, turned, strict=True)
        ]
        if {device.id for device in moved if device is not None} == wanted:
            return moved
    return list(chosen)


def _granule(device: Any) -> int:
    return getattr(device, "slice_index", 0)


def _place(device: Any, coords: Sequence[int]) -> tuple[int, ...]:
    return (_granule(device), *coords, getattr(device, "core_on_chip", 0))


def _first_of_granules(devices: Sequence[Any], chosen: Sequence[Any]) -> set[int]:
    """The ids of as many first devices of each granule as are chosen of it."""
    found: set[int] = set()
    for granule in {_granule(device) for device in chosen}:
        ids = sorted(device.id for device in devices if _granule(device) == granule)
        found.update(ids[: sum(_granule(one) == granule for one in chosen)])
    return found


# The action whose program says how arguments are split that nobody has said it of.
_SHARDED = "F"


def fingerprint_of_part(
    lowered: jax.stages.Lowered, order: Order, device_ids: Sequence[int]
) -> str:
    """Of one of several programs that make up a step.

    Args:
      device_ids: of its submesh, in its order: meshes of equal sizes may lie on the same devices
        in different ways.
    """
    program: Any = lowered
    return fingerprint(
        lowered,
        device_ids=device_ids,
        # Of programs that are the same, the arguments may be grouped in other ways.
        compiler_options=(*order.options, ("trees", f"{program.in_tree}")),
        platform=order.one.platform,
    )


@dataclass(slots=True)
class _Compiler:
    """Compiles the programs of one plan; what is the same program is compiled once.

    Attributes:
      order: with the axes of a submesh.
      device_ids: of that submesh, in its order.
      modules: by stage and action.
    """

    order: Order
    device_ids: tuple[int, ...]
    modules: dict[tuple[int, str], Module] = field(default_factory=dict[tuple[int, str], Module])
    _known: dict[str, tuple[Any, Module]] = field(default_factory=dict[str, tuple[Any, Module]])

    def compile_one(self, lowered: jax.stages.Lowered, stage: int | None, action: str) -> Any:
        """The executable of a program; see `CompileOne`."""
        key = fingerprint_of_part(lowered, self.order, self.device_ids)
        if key not in self._known:
            self._known[key] = self._found(lowered, key, action) or self._made(lowered, key)
        compiled, module = self._known[key]
        if stage is not None:
            self.modules[stage, action] = module
        return compiled

    def _made(self, lowered: jax.stages.Lowered, key: str) -> tuple[Any, Module]:
        compiled = compile_lowered(lowered, all_options(self.order, self.order.effort))
        return compiled, keep_part(lowered, compiled, self.order, fingerprint=key)

    def _found(
        self, lowered: jax.stages.Lowered, key: str, action: str
    ) -> tuple[Any, Module] | None:
        """What an earlier job has kept, which may have ended before its last program."""
        module = find_part(self.order, fingerprint=key)
        if module is None:
            return None
        if action != _SHARDED:
            return None, module
        # Shardings are not kept, and are the same at any effort.
        return compile_lowered(lowered, all_options(self.order, "low")), module


def obtain_pipeline(program: StagedProgram, order: Order) -> PipelineOutcome:
    """Compiles the programs of a pipeline that work through microbatches, and the updates.

    Args:
      order: for the whole plan.

    Returns:
      The stages, with what their compiled programs need.

    Raises:
      Refused: with `OutOfMemory`, if one program alone does not fit; or with `Failed` for an option
        that this compiler does not take, or a store that cannot be written.
    """
    cut = [name == program.axis for name, _ in order.axes]
    submesh = replace(
        order.at_known_effort(),
        axes=tuple((name, 1 if no else size) for (name, size), no in zip(order.axes, cut)),
        dcn=tuple(1 if no else size for size, no in zip(order.dcn, cut)),
    )
    # Every stage is lowered for the same stand-in.
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
