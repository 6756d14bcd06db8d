"""Replays compiled programs from the store on the links of the target."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from automesh.cost.replay.replay import replay
from automesh.cost.replay.timeline import Timeline
from automesh.errors import AutomeshError, UsageError
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.hardware.model import HardwareModel, hardware_model
from automesh.hlo import read_module
from automesh.hlo.schedule.read import read_schedule
from automesh.hlo.schedule.renumber import renumbered
from automesh.hlo.store import LIMIT_VARIABLE, ModuleStore, default_store
from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import (
    Compiled,
    Failed,
    Outcome,
    PipelineOutcome,
    ReplayOutcome,
)
from automesh.tuner.compile.pipelines import replay_pipeline
from automesh.tuner.preparation import Aim
from automesh.units import format_bytes

# Exceptions of reading and replaying a damaged module: others may write to the folder of the store.
_UNREADABLE = (
    AutomeshError,
    ArithmeticError,
    AssertionError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Replays scheduled programs.

    Attributes:
      store: the store that holds them.
      hardware: the devices, with the layouts of the ICI shapes of all plans that will be replayed.
    """

    store: ModuleStore
    hardware: HardwareModel

    def replayed(self, plan: Plan, compiled: Compiled) -> Outcome:
        """Returns the compiled outcome with the step time from its schedule.

        Raises:
          UsageError: the program is not in the store.
        """
        if compiled.pipeline is not None:
            found = self._pipeline(plan, compiled, compiled.pipeline)
            return found if isinstance(found, Failed) else self._signed(found[0])
        played = self.play(plan, compiled)
        if isinstance(played, Failed):
            return played
        return self._signed(replace(compiled, replay=played[0], step_s=played[0].step_s))

    def _signed(self, compiled: Compiled) -> Compiled:
        """Adds the speeds at which the program was replayed."""
        assert compiled.replay is not None
        return replace(
            compiled, replay=replace(compiled.replay, speeds=self.hardware.speeds.origin)
        )

    def play(self, plan: Plan, compiled: Compiled) -> tuple[ReplayOutcome, Timeline] | Failed:
        """Replays the program or programs of a plan; `Failed` if one cannot be read.

        Raises:
          UsageError: a program is not in the store.
        """
        if compiled.pipeline is not None:
            found = self._pipeline(plan, compiled, compiled.pipeline)
            if isinstance(found, Failed):
                return found
            assert found[0].replay is not None
            return found[0].replay, found[1]
        module = self._module(plan, compiled.stored)
        try:
            return self._play(plan, module, plan.axes)
        except _UNREADABLE as error:
            return _unreadable(error)

    def _pipeline(
        self, plan: Plan, compiled: Compiled, pipeline: PipelineOutcome
    ) -> tuple[Compiled, Timeline] | Failed:
        """Replays a pipeline, whose stages are programs; a program that several stages run is
        replayed once."""
        modules = {
            program.stored: self._module(plan, program.stored) for program in pipeline.programs
        }
        own = [
            MeshAxis(name=axis.name) if axis.name == pipeline.axis else axis for axis in plan.axes
        ]
        try:
            played = {key: self._play(plan, module, own)[0] for key, module in modules.items()}
            return replay_pipeline(
                plan,
                compiled,
                pipeline,
                lambda one: played[one.stored],
                hardware=self.hardware,
            )
        except _UNREADABLE as error:
            return _unreadable(error)

    def _module(self, plan: Plan, key: str) -> bytes:
        stored = self.store.find(key) if key else None
        if stored is None or not stored.module:
            raise UsageError(
                f"the compiled program of {plan} is not in `{self.store.folder}`, where it should "
                "have been kept",
                hint=f"it takes {format_bytes(self.store.limit_bytes)} at most: raise "
                f"${LIMIT_VARIABLE}, and search again with --new",
            )
        return stored.module

    def _play(
        self, plan: Plan, module: bytes, own: Sequence[MeshAxis]
    ) -> tuple[ReplayOutcome, Timeline]:
        """Replays one program.

        Args:
          own: the axes of its devices, which may be a part of the mesh.
        """
        schedule = read_schedule(
            read_module(module),
            [(axis.name, axis.size) for axis in own],
            [axis.dcn for axis in own],
        )
        axes = tuple((axis.name, axis.size) for axis in plan.axes)
        return replay(
            # The devices of a part keep their numbers in the whole mesh.
            renumbered(schedule, axes, numbers_of(own, plan.axes)),
            axes=plan.axes,
            hardware=self.hardware,
        )


def player_on(fabric: Fabric, layouts: Layouts, aim: Aim) -> Player:
    """Makes a player for the programs of the user's own store on these devices.

    Args:
      layouts: layouts of the ICI shapes of all plans that will be replayed.

    Raises:
      UsageError: the store's variables are wrong, or a profile cannot be read.
    """
    return Player(
        store=default_store(os.environ),
        hardware=hardware_model(
            fabric,
            layouts,
            platform=aim.platform,
            device_kind=aim.device_kind,
            environ=os.environ,
        ),
    )


def numbers_of(own: Sequence[MeshAxis], axes: Sequence[MeshAxis]) -> tuple[int, ...]:
    """Returns the numbers that the devices of a part of a mesh have in the whole mesh, in order.

    Args:
      own: the axes of the part, in the same order; an axis that was cut has size 1, its first
        element.
    """
    every = np.arange(math.prod(axis.size for axis in axes)).reshape([axis.size for axis in axes])
    taken = every[tuple(slice(axis.size) for axis in own)]
    return tuple(int(number) for number in taken.ravel())


def _unreadable(error: Exception) -> Failed:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Failed(stage="replay", reason=f"the compiled program cannot be replayed: {said}")
