"""Hardware and steps for the tests of pricing: simple enough to be checked by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automesh.cost.pipeline.terms import StageTerms
from automesh.cost.terms import (
    CollectiveTerm,
    DivisibilityGuard,
    Kernel,
    LivenessPoint,
    Matmul,
    Monomial,
    Region,
    Sum,
    Terms,
    Windowed,
)
from automesh.hardware.calibration.speeds import CollectiveSeconds
from automesh.hardware.fabric.fabric import Floats, Route
from automesh.mesh.plan_arrays import Batch
from automesh.pipeline.actions import ActionKind

PASSES = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 0.25,
    "collective-permute": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSpeeds:
    """Peak rates, rings within a granule and then between granules."""

    flops_per_s: float = 2.0e14
    memory_bytes_per_s: float = 8.0e11
    kernel_overhead_s: float = 2.0e-7
    near_bytes: float = 0.0
    epilogue_bytes_per_s: float = 0.0
    window_flops_per_byte: float = 0.0
    host_bytes_per_s: float = 1.5e10
    bound_memory_bytes_per_s: float = 1.0e12
    latency_s: float = 1.0e-6
    faster: float = 1.0

    @property
    def origin(self) -> str:
        return "made up"

    def bound_flops_per_s(self, dtype: str) -> float:
        return 0.0 if dtype == "s8" else 2.0 * self.flops_per_s

    def matmul_s(self, dtype: str, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
        rate = self.flops_per_s * (1.0 if dtype == "bf16" else 0.5)
        padded = np.ceil(n / 128.0) * np.ceil(k / 128.0) * 128.0 * 128.0
        return 2.0 * batch * m * padded / rate

    def collective_s(self, kind: str, payload_bytes: Floats, route: Route) -> CollectiveSeconds:
        inside, between = route.ici_size, route.dcn_size
        full = PASSES[kind] * payload_bytes
        sent = full * (inside - 1) / inside
        if kind == "collective-permute":
            sent = np.where(inside > 1, full / route.ici_step_share, 0.0)
        return CollectiveSeconds(
            latency_s=np.where(inside * between > 1, self.latency_s * (1.0 + route.ici_hops), 0.0),
            ici_s=sent / (route.ici_bytes_per_s * self.faster),
            dcn_s=full * (between - 1) / (between * inside) / (route.dcn_bytes_per_s * self.faster),
        )


def simple_routes(batch: Batch, axes: tuple[str, ...]) -> Route:
    """A line of links: an axis is slower the farther its neighbours are apart."""
    columns = [place for place, name in enumerate(batch.names) if name in axes]
    inside = np.prod(batch.ici[:, columns], axis=1, dtype=np.int64).astype(float)
    between = np.prod(batch.dcn[:, columns], axis=1, dtype=np.int64).astype(float)
    stride = np.ones(len(batch))
    for place in range(max(columns) + 1, len(batch.names)):
        stride = stride * np.minimum(batch.ici[:, place], 4)
    return Route(
        ici_size=inside,
        dcn_size=between,
        ici_bytes_per_s=1.0e11 / stride,
        ici_hops=(inside - 1) * stride,
        dcn_bytes_per_s=np.full(len(batch), 6.0e9),
        ici_step_share=1.0 / np.maximum(np.minimum(inside, 3.0), 1.0),
        ici_pair_share=0.5 / np.maximum(np.minimum(inside, 3.0), 1.0),
    )


def mono(coefficient: float, **powers: int) -> Monomial:
    return Monomial(coefficient=coefficient, powers=tuple(sorted(powers.items())))


def times(coefficient: float, **powers: int) -> Sum:
    return (mono(coefficient, **powers),)


def factorizations(exponent: int, axes: int) -> np.ndarray:
    """Every way to write `2**exponent` as an ordered product of powers of two: [ways, axes]."""
    if axes == 1:
        return np.array([[exponent]])
    found = []
    for head in range(exponent + 1):
        tails = factorizations(exponent - head, axes - 1)
        found.append(np.hstack([np.full((len(tails), 1), head), tails]))
    return np.vstack(found)


def powers_of_two(exponent: int, granules: int, names: tuple[str, ...]) -> Batch:
    """All meshes of `2**exponent` devices in `2**granules` granules."""
    ici = 2 ** factorizations(exponent - granules, len(names)).astype(np.int64)
    dcn = 2 ** factorizations(granules, len(names)).astype(np.int64)
    return Batch(
        names=names,
        ici=np.repeat(ici, len(dcn), axis=0),
        dcn=np.tile(dcn, (len(ici), 1)),
    )


def dense_terms(active: tuple[str, ...], *, platform: str = "tpu", layers: int = 32) -> Terms:
    """A train step the size of a real one: some 100 kernels, 45 collectives, 150 memory points."""
    has = set(active)

    def of(coefficient: float, *over: str) -> Sum:
        return times(coefficient, **{axis: -1 for axis in over if axis in has})

    def single(coefficient: float, *over: str) -> Monomial:
        return of(coefficient, *over)[0]

    tokens, width, hidden, vocabulary = 2.0**31, 4096.0, 14336.0, 128256.0
    batch, seq = ("dp", "fsdp", "ep"), "sp"
    kernels, collectives, points = [], [], []
    regions = (
        Region(name="step", trips=times(1)),
        Region(name="loop at model.py:10", trips=times(layers)),
        Region(name="loop at model.py:20", trips=times(layers)),
    )
    for number in range(100):
        region = number % 3
        rows = single(tokens * (1 + number % 7), *batch, seq)
        columns = single(hidden + 128.0 * (number % 5), "tp")
        inner = single(vocabulary if region == 0 else width)
        window = (Windowed(axes=("fsdp",), bytes=of(4.0 * tokens * width, *batch, seq)),)
        is_dot = number % 3 != 2
        kernels.append(
            Kernel(
                region=region,
                count=times(1 if region == 0 else layers),
                bytes=(
                    *of(2.0 * rows.coefficient * inner.coefficient, *batch, seq),
                    *of(2.0 * inner.coefficient * columns.coefficient, "tp"),
                    *of(2.0 * rows.coefficient * columns.coefficient, *batch, seq, "tp"),
                ),
                matmuls=(Matmul(batch=mono(1), m=rows, n=columns, k=inner, dtype="bf16"),)
                if is_dot
                else (),
                windowed=window if "fsdp" in has and number % 10 == 0 else (),
                operation="dot_general" if is_dot else "fusion",
                source=f"model.py:{number}",
            )
        )
    kinds = (
        ("all-gather", ("fsdp",), ("tp",), True),
        ("all-gather", ("fsdp",), ("tp",), True),
        ("all-reduce", ("tp",), (*batch, seq), False),
        ("reduce-scatter", ("fsdp",), ("tp",), False),
        ("all-reduce", ("dp",), ("fsdp", "tp"), False),
        ("all-gather", ("sp",), (*batch, "tp"), True),
        ("all-to-all", ("ep",), ("dp", "fsdp", "sp"), False),
        ("all-reduce", ("dp", "fsdp", "ep", "sp"), ("tp",), False),
        ("collective-permute", ("sp",), (*batch, "tp"), True),
    )
    for number in range(45):
        kind, axes, over, hides = kinds[number % len(kinds)]
        kept = tuple(axis for axis in active if axis in axes)
        if kept:
            collectives.append(
                CollectiveTerm(
                    region=number % 3,
                    count=times(1 if number % 3 == 0 else layers),
                    kind=kind,  # pyright: ignore[reportArgumentType]
                    axes=kept,
                    payload_bytes=of(2.0 * width * hidden + 1024.0 * number, *over),
                    hides=hides,
                    windowed=kept == ("fsdp",) and number % 9 == 1,
                    source=f"model.py:{number}",
                )
            )
    spread = [(), ("tp",), ("fsdp",), ("fsdp", "tp"), (*batch, seq), (*batch, seq, "tp")]
    for number in range(150):
        points.append(
            LivenessPoint(
                bytes=tuple(
                    single(1.0e6 * ((number * 37 + place * 91) % 113), *over)
                    for place, over in enumerate(spread)
                )
            )
        )
    return Terms(
        active=active,
        sampled=tuple((axis, 2) for axis in active),
        platform=platform,
        regions=regions,
        kernels=tuple(kernels),
        collectives=tuple(collectives),
        points=tuple(points),
        argument_bytes=of(1.6e10, "fsdp", "tp"),
        output_bytes=of(1.6e10, "fsdp", "tp"),
        alias_bytes=of(1.6e10, "fsdp", "tp"),
        guards=(DivisibilityGuard(size=1 << 40, axes=tuple(axis for axis in active)),),
    )


def stage(own: Terms, kinds: tuple[ActionKind, ...]) -> StageTerms:
    """A stage of a pipeline whose programs all have the same terms, and that sends nothing."""
    return StageTerms(
        programs=tuple((kind, own) for kind in kinds),
        finish=own,
        params_bytes=(),
        sums_bytes=(),
        state_bytes=(),
        inputs_bytes=(),
        saved_bytes=(),
        outputs_bytes=(),
        gradients_bytes=(),
    )
