"""Plans the probes of a calibration: which ones, in which order, for which devices."""

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
    group_words,
)
from automesh.hardware.calibration.speeds import sent_between, sent_inside
from automesh.hardware.fabric.fabric import Fabric, Floats, Layouts, Route
from automesh.hardware.fabric.routes import routes
from automesh.mesh.plan_arrays import Batch

# Numbers of devices: outside of a group, in the group, between neighbours of the group.
PROBE_AXES = ("outside", "group", "inside")
_KIB, _MIB = 2**10, 2**20
Matrices = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """The probes of one job.

    Attributes:
      name: what they measure, in words.
    """

    name: str
    probes: tuple[Probe, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes that are worth measuring on a platform.

    Attributes:
      matmuls: (batch, m, n, k): squares, skinny ones, batches of small ones.
      streams: bytes read and written.
      payloads: bytes of collectives.
    """

    matmuls: tuple[Matrices, ...]
    streams: tuple[int, ...]
    payloads: tuple[int, ...]


# Shards of small models, as one tries them out on a laptop; all devices share a few cores.
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
    # Sizes that fit into caches, and larger ones.
    streams=(_MIB, 16 * _MIB, 512 * _MIB, 1024 * _MIB, 2048 * _MIB),
    payloads=(64 * _KIB, _MIB, 16 * _MIB, 128 * _MIB),
)


def probe_shapes(fabric: Fabric) -> tuple[tuple[int, ...], ...]:
    """Lists the shapes, inside one granule, of the meshes on which collectives are measured.

    Every size that a mesh axis can have is measured as a group, on the innermost axis, and on the
    outermost one unless all devices share one memory, where none is nearer than another. With
    several granules, also groups with one device in each.
    """
    count = fabric.granule_devices
    shapes = {(count // size, size, 1): None for size in _divisors(count)}
    if fabric.kind != "shared":
        shapes |= {(1, size, count // size): None for _, size, _ in tuple(shapes)}
    if fabric.num_granules > 1:
        shapes[count, 1, 1] = None
    return tuple(sorted(shapes, key=lambda shape: (shape[1], shape[2])))


def plan_lots(fabric: Fabric, layouts: Layouts) -> tuple[Lot, ...]:
    """Plans all probes for some devices, the most informative ones first.

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
        *_lots_inside(fabric, layouts, sizes.payloads),
        *_lots_between(fabric, layouts, sizes.payloads),
        last,
    )


def link_seconds(kind: str, payload_bytes: Floats, route: Route) -> Floats:
    """Returns the seconds of a collective's bytes inside one granule, at the nominal speed of its
    links.

    Returns:
      [meshes]; 0 where the group is one device.
    """
    sent = sent_inside(kind, payload_bytes, route)
    return np.where(route.ici_size > 1, sent / route.ici_bytes_per_s, 0.0)


def between_seconds(kind: str, payload_bytes: Floats, route: Route) -> Floats:
    """Returns the seconds of a collective's bytes between granules, at the nominal speed of the
    network.

    Returns:
      [meshes]; 0 where the group is inside one granule.
    """
    sent = sent_between(kind, payload_bytes, route)
    return np.where(route.dcn_size > 1, sent / route.dcn_bytes_per_s, 0.0)


def _matmul_lot(dtype: str, matrices: Sequence[Matrices]) -> Lot:
    probes = tuple(
        MatmulProbe(dtype=dtype, batch=batch, m=m, n=n, k=k) for batch, m, n, k in matrices
    )
    return Lot(name=f"{dtype} multiplications", probes=probes)


def _lots_inside(fabric: Fabric, layouts: Layouts, payloads: Sequence[int]) -> tuple[Lot, ...]:
    """Makes one lot per group size, so that probes which are compared are measured together."""
    lots: dict[int, list[Probe]] = {}
    for shape in _possible(fabric, layouts):
        if shape[1] > 1:
            probes = _collectives(fabric, layouts, payloads, shape, granules=1)
            lots.setdefault(shape[1], []).extend(probes)
    return tuple(
        Lot(name=f"collectives over {size} devices", probes=tuple(probes))
        for size, probes in lots.items()
    )


def _lots_between(fabric: Fabric, layouts: Layouts, payloads: Sequence[int]) -> tuple[Lot, ...]:
    """Makes one lot per number of granules and devices in each; all granules and extremes first."""
    whole = fabric.granule_devices
    sizes = {shape[1]: shape for shape in _possible(fabric, layouts) if shape[2] == 1}
    ordered = sorted(sizes, key=lambda size: (size not in (1, whole), size))
    return tuple(
        Lot(
            name=f"collectives over {group_words(size, granules)}",
            probes=tuple(_collectives(fabric, layouts, payloads, sizes[size], granules=granules)),
        )
        for granules in reversed(_divisors(fabric.num_granules))
        for size in ordered
    )


def _possible(fabric: Fabric, layouts: Layouts) -> tuple[tuple[int, ...], ...]:
    refused = {shape for shape, _ in layouts.refused}
    return tuple(shape for shape in probe_shapes(fabric) if shape not in refused)


def _collectives(
    fabric: Fabric,
    layouts: Layouts,
    payloads: Sequence[int],
    shape: tuple[int, ...],
    *,
    granules: int,
) -> list[Probe]:
    """Makes probes of every kind, over the groups along the middle axis of a shape."""
    batch = Batch(
        names=PROBE_AXES,
        ici=np.array([shape], np.int64),
        dcn=np.array([(fabric.num_granules // granules, granules, 1)], np.int64),
    )
    route = routes(fabric, layouts, batch, PROBE_AXES[1:2])
    probes: list[Probe] = []
    for kind in MEASURED:
        for payload in payloads:
            array = np.array([float(payload)])
            nominal_s = link_seconds(kind, array, route) + between_seconds(kind, array, route)
            probes.append(
                CollectiveProbe(
                    collective=kind,
                    group_size=shape[1],
                    stride=shape[2],
                    payload_bytes=payload,
                    link_s=float(nominal_s[0]),
                    granules=granules,
                )
            )
    return probes


def _divisors(count: int) -> list[int]:
    """Lists the divisors of a number except 1, ascending."""
    return [size for size in range(2, count + 1) if count % size == 0]
