"""Hardware, speeds and schedules for the tests of the replay: simple enough to check by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from automesh.hardware import parse_target
from automesh.hardware.calibration.speeds import CollectiveSeconds
from automesh.hardware.chips import chip_called
from automesh.hardware.fabric.fabric import Fabric, Floats, Layouts, Route
from automesh.hlo.schedule.nouns import (
    Compute,
    DeviceTransfer,
    Done,
    Operation,
    ScheduledBlock,
    ScheduledLoop,
    ScheduledMatmul,
    ScheduledProgram,
    Start,
)
from automesh.mesh.axes import MeshAxis
from automesh.program.absent.layout import lay_out
from automesh.worker.messages import LayoutJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Nominal:
    """Links at their nominal speed, 100 GFLOP/s, 1 GB/s of memory, no latency."""

    flops_per_s: float = 1e11
    memory_bytes_per_s: float = 1e9
    kernel_overhead_s: float = 0.0
    near_bytes: float = 0.0
    epilogue_bytes_per_s: float = 0.0
    window_flops_per_byte: float = 0.0
    host_bytes_per_s: float = 1.5e10
    bound_memory_bytes_per_s: float = 0.0
    latency_s: float = 0.0

    @property
    def origin(self) -> str:
        return "made up"

    def bound_flops_per_s(self, dtype: str) -> float:
        return 0.0

    def matmul_s(self, dtype: str, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
        return 2.0 * batch * m * n * k / self.flops_per_s

    def collective_s(self, kind: str, payload_bytes: Floats, route: Route) -> CollectiveSeconds:
        inside, between = route.ici_size, route.dcn_size
        passes = 2.0 if kind == "all-reduce" else 1.0
        ici, dcn = (
            passes * payload_bytes * (inside - 1) / inside,
            passes * payload_bytes * (between - 1) / (between * inside),
        )
        if kind == "collective-permute":
            ici = np.where(inside > 1, payload_bytes / route.ici_step_share, 0.0)
            dcn = np.where(between > 1, payload_bytes, 0.0)
        if kind == "all-to-all":
            ici = ici * route.ici_transit / (inside * between)
        return CollectiveSeconds(
            latency_s=np.where(inside * between > 1, self.latency_s, 0.0),
            ici_s=ici / route.ici_bytes_per_s,
            dcn_s=dcn / route.dcn_bytes_per_s,
        )


def mesh(**sizes: int | tuple[int, int]) -> tuple[MeshAxis, ...]:
    """Axes by name; a pair is (between granules, inside)."""
    axes: list[MeshAxis] = []
    for name, size in sizes.items():
        dcn, ici = size if isinstance(size, tuple) else (1, size)
        axes.append(MeshAxis(name=name, ici=ici, dcn=dcn))
    return tuple(axes)


def slice_fabric(name: str, **faster: float) -> Fabric:
    """The fabric of a TPU target with round figures: links of 1 GB/s, 0.1 GB/s between slices."""
    absent = parse_target(name, {}).absent
    assert absent is not None
    fabric = absent.fabric
    chip = replace(
        fabric.chip,
        link_bytes_per_s=1e9 * faster.get("links", 1.0),
        dcn_bytes_per_s=1e8 * faster.get("network", 1.0),
        link_latency_s=0.0,
    )
    return replace(fabric, chip=chip)


def node_fabric(nodes: int, each: int, **faster: float) -> Fabric:
    """Nodes of GPUs with the same round figures."""
    chip = replace(
        chip_called("h100"),
        link_bytes_per_s=1e9 * faster.get("links", 1.0),
        dcn_bytes_per_s=1e8 * faster.get("network", 1.0),
        link_latency_s=0.0,
    )
    return Fabric(kind="switch", chip=chip, num_granules=nodes, granule_devices=each)


def layouts_of(fabric: Fabric, axes: Sequence[MeshAxis]) -> Layouts:
    """Where jax's mesh code puts the axes."""
    return lay_out(
        LayoutJob(
            platform=fabric.chip.platform,
            device_kind=fabric.chip.device_kinds[0],
            torus=fabric.torus,
            devices_per_chip=fabric.devices_per_chip,
            shapes=(tuple(axis.ici for axis in axes),),
        )
    )


def product(name: str, size: int, *, hbm_bytes: int = 0) -> Compute:
    """A product of cubes: 2 * size**3 operations."""
    return Compute(
        name=name,
        kind="matrix",
        opcode="fusion",
        matmuls=(ScheduledMatmul(dtype="bf16", batch=1, m=size, n=size, k=size),),
        flops=2 * size**3,
        dtype="bf16",
        hbm_bytes=hbm_bytes,
        source="step.py:7",
    )


def collective(
    kind: str, axes: Sequence[MeshAxis], over: str, payload_bytes: int
) -> DeviceTransfer:
    """A collective over whole axes, named with + between them."""
    names = tuple(over.split("+"))
    ids = np.arange(int(np.prod([axis.size for axis in axes])))
    ids = ids.reshape([axis.size for axis in axes])
    columns = [column for column, axis in enumerate(axes) if axis.name in names]
    size = int(np.prod([axes[column].size for column in columns]))
    rows = np.moveaxis(ids, columns, range(-len(columns), 0)).reshape(-1, size)
    return DeviceTransfer(
        name=f"{kind}.{over}",
        kind=kind,
        medium="fabric",
        axes=names,
        groups=tuple(map(tuple, rows.tolist())),
        group_size=size,
        payload_bytes=payload_bytes,
        wire_bytes=payload_bytes,
        source="step.py:9",
    )


def ring(axes: Sequence[MeshAxis], over: str, step: int, payload_bytes: int) -> DeviceTransfer:
    """A permute: every device sends to the one `step` further along an axis, round its end."""
    sizes = [axis.size for axis in axes]
    column = [axis.name for axis in axes].index(over)
    ids = np.arange(int(np.prod(sizes))).reshape(sizes)
    targets = np.roll(ids, -step, axis=column)
    return DeviceTransfer(
        name=f"permute.{over}.{step}",
        kind="collective-permute",
        medium="fabric",
        axes=(over,),
        pairs=tuple(zip(ids.ravel().tolist(), targets.ravel().tolist(), strict=True)),
        group_size=sizes[column],
        payload_bytes=payload_bytes,
        wire_bytes=payload_bytes,
    )


def begin(transfer: DeviceTransfer, lane: str = "") -> Start:
    return Start(transfer=transfer, lane=lane or transfer.name)


def end(transfer: DeviceTransfer, lane: str = "") -> Done:
    return Done(name=f"{transfer.name}-done", lane=lane or transfer.name)


def loop(trips: int, *operations: Operation) -> ScheduledLoop:
    return ScheduledLoop(name="layers", trips=trips, body=ScheduledBlock(operations=operations))


def schedule(axes: Sequence[MeshAxis], *operations: Operation) -> ScheduledProgram:
    return ScheduledProgram(
        platform="tpu",
        axes=tuple((axis.name, axis.size) for axis in axes),
        body=ScheduledBlock(operations=operations),
    )
