"""Made-up steps and speeds for the tests of explanations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from automesh.collectives import CollectiveName
from automesh.cost.terms import (
    CollectiveTerm,
    Kernel,
    LivenessPoint,
    Matmul,
    Monomial,
    Region,
    Sum,
    Terms,
    Uncounted,
)
from automesh.hardware import chip_for
from automesh.hardware.calibration.speeds import CollectiveSeconds
from automesh.hardware.fabric.fabric import Fabric, Floats, Layouts, Route
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import Plan, parse_mesh
from automesh.program.nouns import Entry, Propagation, StepRef
from automesh.report.explain.nouns import Explained, Explanation
from automesh.tuner.estimate.terms_cache import StoredPropagation
from automesh.tuner.explain.mesh import Ground
from automesh.tuner.explain.mesh import explained as explain_plan
from automesh.worker.messages import PropagateJob

MIB = 2.0**20
LOOP, STEP = 1, 0
LAYERS = 32.0


def monomial(coefficient: float, **powers: int) -> Monomial:
    return Monomial(coefficient=coefficient, powers=tuple(sorted(powers.items())))


def total(coefficient: float, **powers: int) -> Sum:
    return (monomial(coefficient, **powers),)


def matmul(m: Monomial, n: Monomial, k: Monomial) -> Matmul:
    return Matmul(batch=monomial(1.0), m=m, n=n, k=k, dtype="bf16")


def product(one: Matmul, bytes_: Sum, *, source: str, region: int = LOOP) -> Kernel:
    return Kernel(
        region=region,
        count=total(LAYERS if region == LOOP else 1.0),
        bytes=bytes_,
        matmuls=(one,),
        operation="dot_general",
        source=source,
    )


def streaming(bytes_: Sum, *, operation: str, source: str, region: int = LOOP) -> Kernel:
    return Kernel(
        region=region,
        count=total(LAYERS if region == LOOP else 1.0),
        bytes=bytes_,
        operation=operation,
        source=source,
    )


def collective(
    kind: CollectiveName,
    *axes: str,
    payload: Sum,
    source: str,
    region: int = LOOP,
    operand: str = "",
) -> CollectiveTerm:
    return CollectiveTerm(
        region=region,
        count=total(LAYERS if region == LOOP else 1.0),
        kind=kind,
        axes=axes,
        payload_bytes=payload,
        hides=kind == "all-gather",
        source=source,
        operand=operand,
    )


def terms(
    *active: str,
    kernels: tuple[Kernel, ...] = (),
    collectives: tuple[CollectiveTerm, ...] = (),
    uncounted: tuple[Uncounted, ...] = (),
    argument_bytes: Sum = (),
    temporaries: Sum = (),
) -> Terms:
    return Terms(
        active=active,
        sampled=tuple((axis, 2) for axis in active),
        platform="none",
        regions=(
            Region(name="step", trips=total(1.0)),
            Region(name="loop at train.py:20", trips=total(LAYERS)),
        ),
        kernels=kernels,
        collectives=collectives,
        points=(
            LivenessPoint(bytes=total(1.0), source="train.py:1"),
            LivenessPoint(bytes=temporaries or total(1.0), source="train.py:24"),
        ),
        argument_bytes=argument_bytes,
        output_bytes=argument_bytes,
        alias_bytes=argument_bytes,
        uncounted=uncounted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSpeeds:
    """Round figures: 100 TFLOP/s at full width, 1 TB/s of memory, rings over one link."""

    origin: str = "round figures of a test"
    memory_bytes_per_s: float = 1e12
    kernel_overhead_s: float = 1e-6
    near_bytes: float = 0.0
    epilogue_bytes_per_s: float = 0.0
    window_flops_per_byte: float = 0.0
    host_bytes_per_s: float = 1.5e10
    bound_memory_bytes_per_s: float = 1e12

    def bound_flops_per_s(self, dtype: str) -> float:
        return 1e14

    def matmul_s(self, dtype: str, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
        # A side below 128 is padded to it.
        padded = np.maximum(m, 128.0) * np.maximum(n, 128.0) * np.maximum(k, 128.0)
        return np.asarray(2.0 * batch * padded / 1e14)

    def collective_s(self, kind: str, payload_bytes: Floats, route: Route) -> CollectiveSeconds:
        passes = 2.0 if kind == "all-reduce" else 1.0
        inside, between = route.ici_size, route.dcn_size
        ici = passes * payload_bytes * (inside - 1) / inside / route.ici_bytes_per_s
        dcn = passes * payload_bytes * (between - 1) / between / route.dcn_bytes_per_s
        hops = passes * (inside * between - 1)
        return CollectiveSeconds(
            latency_s=hops * 1e-6,
            ici_s=np.where(inside > 1, ici, 0.0),
            dcn_s=np.where(between > 1, dcn / inside, 0.0),
        )


def fabric(num_granules: int = 1, granule_devices: int = 16) -> Fabric:
    return Fabric(
        kind="switch",
        chip=replace(
            chip_for("NVIDIA H100 80GB HBM3", "gpu"),
            link_bytes_per_s=1e11,
            dcn_bytes_per_s=1e9,
        ),
        num_granules=num_granules,
        granule_devices=granule_devices,
    )


AXES = ("dp", "fsdp", "tp")
NO_LAYOUTS = Layouts(shapes=(), spans=())


def plan(mesh: str, **knobs: bool | int | float | str) -> Plan:
    return Plan(axes=parse_mesh(mesh, AXES), knobs=tuple(knobs.items()))


def kept(one: Plan, terms_: Terms) -> StoredPropagation:
    """Terms as a study keeps them."""
    return StoredPropagation(
        source_hash="",
        versions=(),
        job=PropagateJob(
            step=StepRef(entry=Entry(kind="script", location="/train.py")),
            axis_names=AXES,
            knobs=one.knobs,
            sizes=terms_.sampled,
            probes=(),
            platform=terms_.platform,
        ),
        propagation=Propagation(
            terms=terms_, failed_probes=(), notes=(), lower_s=0.0, propagate_s=0.0
        ),
    )


def explained(
    mesh: str, terms_: Terms, *, granules: int = 1, **knobs: bool | int | float | str
) -> Explained:
    """One mesh of a made-up step, priced as a search prices it."""
    one = plan(mesh, **knobs)
    ground = Ground(
        kept=[kept(one, terms_)],
        hardware=HardwareModel(
            fabric=fabric(granules, one.num_devices // granules),
            layouts=NO_LAYOUTS,
            speeds=PlainSpeeds(),
        ),
        command="",
    )
    return explain_plan(one, ground, None)


def explanation(one: Explained, against: Explained | None = None, **changes: object) -> Explanation:
    made = Explanation(
        workload="train",
        target="gpu-h100-16",
        device="NVIDIA H100 80GB HBM3",
        device_count=one.plan.num_devices,
        speeds="round figures of a test",
        one=one,
        against=against,
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]
