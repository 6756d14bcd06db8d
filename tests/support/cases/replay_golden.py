"""What the golden files in tests/golden/replay hold: recorded modules, replayed."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from automesh.cost.replay.replay import replay
from automesh.cost.replay.timeline import Timeline
from automesh.hardware import parse_target
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.chips import chip_called
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.model import HardwareModel
from automesh.hlo.read import read_module
from automesh.hlo.schedule.nouns import ScheduledProgram
from automesh.hlo.schedule.read import read_schedule
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.outcomes import ReplayOutcome
from tests.support.paths import DATA, GOLDEN
from tests.support.samples.replay_samples import layouts_of, mesh

FOLDER = GOLDEN / "replay"
MODULES = DATA / "modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A module in tests/data/modules, and what it was compiled for."""

    name: str
    target: str
    axes: tuple[MeshAxis, ...]

    @property
    def fabric(self) -> Fabric:
        if self.target == "cpu:8":
            chip = chip_called("cpu")
            return Fabric(kind="shared", chip=chip, num_granules=1, granule_devices=8)
        absent = parse_target(self.target, {}).absent
        assert absent is not None
        return absent.fabric

    def schedule(self) -> ScheduledProgram:
        text = gzip.decompress((MODULES / f"{self.name}.pb.gz").read_bytes())
        return read_schedule(
            read_module(text),
            [(axis.name, axis.size) for axis in self.axes],
            [axis.dcn for axis in self.axes],
        )


ALL = (
    Recorded(name="tpu_fsdp", target="v5e:4x4", axes=mesh(dp=4, fsdp=4, tp=1)),
    Recorded(name="tpu_ring", target="v5e:4x4", axes=mesh(dp=1, fsdp=4, tp=4)),
    Recorded(name="tpu_overlapped", target="v5e:4x4", axes=mesh(dp=1, fsdp=16, tp=1)),
    Recorded(name="tpu_dcn_dp", target="v5e:4x4*2", axes=mesh(dp=(2, 1), fsdp=16, tp=1)),
    Recorded(name="tpu_dcn_fsdp", target="v5e:4x4*2", axes=mesh(dp=1, fsdp=(2, 16), tp=1)),
    Recorded(name="tpu_dcn_four", target="v5e:2x4*4", axes=mesh(dp=(2, 2), fsdp=(2, 4), tp=1)),
    Recorded(name="tpu_dcn_kinds", target="v5e:2x2*2", axes=mesh(dp=(2, 1), fsdp=4, tp=1)),
    Recorded(name="tpu_dcn_transformer", target="v5e:4x4*2", axes=mesh(dp=(2, 1), fsdp=16, tp=1)),
    Recorded(name="tpu_pallas_bare", target="v5e:4x4", axes=mesh(dp=16, fsdp=1, tp=1)),
    Recorded(name="tpu_offload", target="v5e:4x4", axes=mesh(dp=16, fsdp=1, tp=1)),
    Recorded(name="gpu_fsdp", target="gpu-h100-16", axes=mesh(dp=(2, 1), fsdp=8, tp=1)),
    Recorded(name="gpu_tp", target="gpu-h100-16", axes=mesh(dp=1, fsdp=(2, 1), tp=8)),
    Recorded(name="gpu_cublas", target="gpu-h100-16", axes=mesh(dp=1, fsdp=(2, 1), tp=8)),
    Recorded(name="gpu_offload", target="gpu-h100-8", axes=mesh(dp=8, fsdp=1, tp=1)),
    Recorded(name="gpu_overlapped", target="gpu-h100-8", axes=mesh(dp=1, fsdp=8, tp=1)),
    Recorded(name="cpu_fsdp", target="cpu:8", axes=mesh(dp=2, fsdp=2, tp=2)),
)


@cache
def replayed(one: Recorded, faster: str = "") -> tuple[ReplayOutcome, Timeline]:
    """A module on the data sheet's speeds of its target; one figure of its chip may be doubled."""
    fabric = one.fabric
    if faster == "peak_flops_per_s":
        peaks = tuple((kind, 2 * peak) for kind, peak in fabric.chip.peak_flops_per_s)
        fabric = replace(fabric, chip=replace(fabric.chip, peak_flops_per_s=peaks))
    elif faster:
        doubled = {faster: 2 * getattr(fabric.chip, faster)}
        fabric = replace(fabric, chip=replace(fabric.chip, **doubled))
    return replay(
        one.schedule(),
        axes=one.axes,
        hardware=HardwareModel(
            fabric=fabric,
            layouts=layouts_of(fabric, one.axes),
            speeds=datasheet_speeds(fabric.chip, fabric, cores=4),
        ),
    )


def told(one: Recorded) -> str:
    """The replay in words, microseconds."""
    result, timeline = replayed(one)
    lines = [
        f"{one.name}: {format_mesh(one.axes)} on {one.target}",
        f"step {_micros(result.step_s)}, MFU {result.mfu:.4f}",
        f"bracket {_micros(result.bracket_s[0])} to {_micros(result.bracket_s[1])}",
    ]
    parts = (
        ("causes", result.causes),
        ("communication alone", result.communication_s),
        ("busy", result.busy_s),
    )
    for title, part in parts:
        lines += ["", title, *(f"  {name:<24}{_micros(seconds)}" for name, seconds in part)]
    kinds = [one.kind for one in timeline.slices]
    drawn = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    lines += ["", f"drawn: {drawn} on {', '.join(timeline.tracks)}"]
    lines += ["", "uncounted", *(f"  {text}" for text in result.uncounted)]
    return "\n".join(lines) + "\n"


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:14.3f} us"


CASES: dict[str, Callable[[], str]] = {one.name: partial(told, one) for one in ALL}
