"""Which probes a calibration takes, in which order, for which devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from automesh.collectives import MEASURED
from automesh.hardware.calibration.points import (
    STREAM_FORMS,
    CollectiveProbe,
    KernelProbe,
    MatmulProbe,
    Probe,
    StreamProbe,
)
from automesh.hardware.calibration.speeds import sent_inside
from automesh.hardware.fabric.fabric import Fabric, Floats, Layouts, Route
from automesh.hardware.fabric.routes import routes
from automesh.mesh.plan_arrays import Batch

# Devices beside a group on the outside, the group itself, devices between its members.
PROBE_AXES = ("outside", "group", "inside")
_KIB, _MIB = 2**10, 2**20
Matrices = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """Probes of one job.

    Attributes:
      name: what they measure, in words.
    """

    name: str
    probes: tuple[Probe, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What is worth measuring on a platform.

    Attributes:
      matmuls: (batch, m, n, k): squares, skinny ones, batches of small ones.
      streams: bytes read and written.
      payloads: bytes of collectives.
    """

    matmuls: tuple[Matrices, ...]
    streams: tuple[int, ...]
    payloads: tuple[int, ...]


# Shards of models that one tries out on a laptop; all devices share a few cores.
_CPU = _Sizes(
    matmuls=(
        *((1, size, size, size) for size in (16, 32, 64, 128, 256, 512)),
        (1, 256, 48, 48),
        (1, 2048, 64, 64),
        (1, 1024, 256, 64),
        (1, 1024, 64, 256),
        (1, 64, 64, 1024),
        (1, 16, 256, 256),
        (1, 256, 1024, 256),
        (16, 64, 64, 64),
        (64, 48, 48, 8),
        (64, 48, 8, 48),
        (256, 16, 16, 16),
        (8, 256, 256, 32),
    ),
    streams=(16 * _KIB, 256 * _KIB, 2 * _MIB, 16 * _MIB),
    payloads=(4 * _KIB, 32 * _KIB, 256 * _KIB, 2 * _MIB),
)
_ACCELERATOR = _Sizes(
    matmuls=(
        *((1, size, size, size) for size in (256, 512, 1024, 2048, 4096, 8192)),
        (1, 256, 4096, 4096),
        (1, 8192, 256, 4096),
        (1, 8192, 4096, 256),
        (1, 32768, 1024, 1024),
        (1, 1024, 1024, 32768),
        (1, 64, 8192, 8192),
        (64, 1024, 1024, 128),
        (64, 1024, 128, 1024),
        (256, 128, 128, 128),
        (16, 2048, 2048, 128),
    ),
    streams=(_MIB, 16 * _MIB, 128 * _MIB, 512 * _MIB),
    payloads=(64 * _KIB, _MIB, 16 * _MIB, 128 * _MIB),
)


def probe_shapes(fabric: Fabric) -> tuple[tuple[int, ...], ...]:
    """Sizes inside one granule of the meshes that collectives are measured on.

    Every size that a mesh axis can have is a group, on the innermost axis, and on the outermost one
    unless all devices are in one memory, where no device is nearer than another.
    """
    count = fabric.granule_devices
    shapes = {(count // size, size, 1): None for size in range(2, count + 1) if count % size == 0}
    if fabric.kind != "shared":
        shapes |= {(1, size, count // size): None for _, size, _ in tuple(shapes)}
    return tuple(sorted(shapes, key=lambda shape: (shape[1], shape[2])))


def plan_lots(fabric: Fabric, layouts: Layouts) -> tuple[Lot, ...]:
    """All probes for some devices, those that tell most first.

    Args:
      layouts: of `probe_shapes`; shapes that jax refuses are left out.
    """
    sizes = _CPU if fabric.kind == "shared" else _ACCELERATOR
    streams = [
        StreamProbe(form=form, bytes=size) for form in STREAM_FORMS for size in sizes.streams
    ]
    f32, bf16 = (_matmul_lot(dtype, sizes.matmuls) for dtype in ("f32", "bf16"))
    # Virtual CPU devices mostly try out models in f32, accelerators train in bf16.
    first, last = (f32, bf16) if fabric.kind == "shared" else (bf16, f32)
    return (
        Lot(name="kernels and copies", probes=(KernelProbe(), *streams)),
        first,
        *_group_lots(fabric, layouts, sizes.payloads),
        last,
    )


def link_seconds(kind: str, payload_bytes: Floats, route: Route) -> Floats:
    """What the bytes of a collective inside one granule take at the nominal speed of its links.

    Returns:
      [meshes]; 0 where the group is one device.
    """
    sent = sent_inside(kind, payload_bytes, route)
    return np.where(route.ici_size > 1, sent / route.ici_bytes_per_s, 0.0)


def _matmul_lot(dtype: str, matrices: Sequence[Matrices]) -> Lot:
    probes = tuple(
        MatmulProbe(dtype=dtype, batch=batch, m=m, n=n, k=k) for batch, m, n, k in matrices
    )
    return Lot(name=f"{dtype} multiplications", probes=probes)


def _group_lots(fabric: Fabric, layouts: Layouts, payloads: Sequence[int]) -> tuple[Lot, ...]:
    """One lot per size of group: what is compared with each other is measured side by side."""
    refused = {shape for shape, _ in layouts.refused}
    lots: dict[int, list[Probe]] = {}
    for shape in probe_shapes(fabric):
        if shape in refused:
            continue
        batch = Batch(
            names=PROBE_AXES,
            ici=np.array([shape], np.int64),
            dcn=np.array([(fabric.num_granules, 1, 1)], np.int64),
        )
        route = routes(fabric, layouts, batch, PROBE_AXES[1:2])
        for kind in MEASURED:
            for payload in payloads:
                seconds = link_seconds(kind, np.array([float(payload)]), route)
                probe = CollectiveProbe(
                    collective=kind,
                    group_size=shape[1],
                    stride=shape[2],
                    payload_bytes=payload,
                    link_s=float(seconds[0]),
                )
                lots.setdefault(shape[1], []).append(probe)
    return tuple(
        Lot(name=f"collectives over {size} devices", probes=tuple(probes))
        for size, probes in lots.items()
    )
