"""Lowering a step at small sizes, to see which axes it uses and whether sizes change it (jax)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from automesh.mesh.axes import Knobs, MeshAxis
from automesh.mesh.mapping import LogicalAxes
from automesh.program.lower.lowering import SingleProgram
from automesh.program.notes import in_one_line, note
from automesh.program.pipeline.lower import lower_any
from automesh.program.script.build import build_on
from automesh.sharding.passes import plain
from automesh.sharding.programs import lowered_for, text_of
from automesh.worker.messages import ArraysJob, InspectJob


@dataclass(slots=True, kw_only=True)
class Trials:
    """Lowers the step at sizes that it may refuse; see `Inspection.seen`.

    Attributes:
      devices: those that are here.
      knobs: for `build`.
    """

    build: Callable[..., Any]
    job: InspectJob | ArraysJob
    axis_types: tuple[str, ...]
    devices: Sequence[Any]
    knobs: Knobs = ()
    seen: Counter[str] = field(default_factory=Counter[str])

    def named(
        self, active: tuple[str, ...], size: int, mapping: LogicalAxes
    ) -> tuple[str, ...] | None:
        """Those of `active` that the step names while they have `size`; None if it refuses them."""
        names, platform = self.job.axis_names, self.job.platform
        axes = [MeshAxis(name=one, ici=size if one in active else 1) for one in names]
        try:
            built = build_on(
                self.build,
                axes,
                axis_types=self.axis_types,
                mapping=mapping,
                knobs=self.knobs,
                devices=self.devices,
            )
            program = lower_any(built, platforms=lowered_for(platform) if platform else None)
        # The user's code may refuse these sizes for any reason: that rules no axis out.
        except Exception as error:  # noqa: BLE001
            mesh = ",".join(f"{name}:{size}" for name in active)
            note(f"`{mesh}` cannot be lowered ({in_one_line(error)})")
            return None
        if platform and isinstance(program, SingleProgram):
            self.seen[text_of(plain(program.lowered.compiler_ir("stablehlo")))] += 1
        named = program.named_axes(names)
        return tuple(name for name in active if name in named)


def used_axes(trials: Trials, names: tuple[str, ...], mapping: LogicalAxes = ()) -> tuple[str, ...]:
    """The axes that the step names when they are larger than 1: some scripts leave out the rest.

    As many axes as the devices allow are tried at once. One that is not named then is tried alone:
    the step may use it only while others are 1.

    Judged at the default knobs: another value may end the process, which here would end the search.

    Args:
      mapping: logical axes that are searched: they are not split here, so that what is left are the
        axes that the step uses whatever its mapping.
    """
    unmapped = tuple((name, ()) for name, _ in mapping)
    devices = len(trials.devices)
    size = next((p for p in range(2, devices + 1) if devices % p == 0), 1)
    most = max(1, next(n for n in range(devices + 1) if size ** (n + 1) > devices or size == 1))
    used: set[str] = set()
    for first in range(0, len(names), most):
        together = names[first : first + most]
        if len(together) > 1:
            used.update(trials.named(together, size, unmapped) or ())
    for name in names:
        if name not in used and trials.named((name,), size, unmapped) != ():
            used.add(name)
    return tuple(name for name in names if name in used)
