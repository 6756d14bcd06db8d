"""Pipelines as simulated and as run: `python -m benchmarks.pipeline [--ranks N] [--width D]`.

Each rank is one virtual device with one thread, so that ranks do not share a core while there are
as many cores as ranks. Stages are timed alone first; the simulator makes a step of that, and the
same programs are then run under each schedule. The last line of standard output is JSON: per
schedule `simulated_s`, `measured_s`, `bubble` (simulated), `peak_live` and `peak_held` (activations
per rank, simulated and counted in live buffers), and for all `dispatch_us`, what the controller
needs per dispatched step, and whether the pairs whose times differ by more than the noise are in
the simulated order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule."""

    schedule: str
    simulated_s: float
    measured_s: float
    spread_s: float
    bubble: float
    peak_live: tuple[int, ...]
    peak_held: tuple[float, ...]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, help="default: four per rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64, help="of a microbatch")
    parser.add_argument("--layers", type=int, default=8, help="of a stage")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(options.ranks)
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    count = options.microbatches or 4 * options.ranks
    print(json.dumps(run(options.ranks, count, options)))


def run(ranks: int, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """All schedules, on the same programs."""
    import jax
    import numpy as np

    from automesh import pipeline

    rng = np.random.default_rng(0)
    width = options.width
    layers = rng.standard_normal((ranks * options.layers, width, width)).astype(np.float32)
    params = pipeline.split_layers(layers / width**0.5, ranks)
    batch = rng.standard_normal((count * options.rows, width)).astype(np.float32)
    loss = pipeline.chain(
        pipeline.repeat_layer(lambda w, x: jax.numpy.tanh(x @ w), ranks),
        lambda y, _: jax.numpy.mean(y**2),
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("pp",))
    step = pipeline.microbatch(
        loss, mesh=mesh, schedule="gpipe", num_microbatches=count, residuals="save"
    )
    compiled = step.compile(params, batch)
    schedules = [
        pipeline.make_schedule(name, num_ranks=ranks, num_microbatches=count) for name in SCHEDULES
    ]
    runs = {one.name: compiled.with_schedule(one) for one in schedules}
    costs = _all_costs(runs, pipeline.measure_costs)
    placed = jax.tree.leaves(compiled.place(params))
    measured, dispatch = _measure(runs, placed, batch, options.rounds)
    devices = [set(one.devices.flat) for one in pipeline.MpmdMesh(mesh).submeshes]
    rows: list[Row] = []
    for one in schedules:
        simulated = pipeline.simulate(one, costs)
        times = measured[one.name]
        row = Row(
            schedule=one.name,
            simulated_s=simulated.makespan_s,
            measured_s=statistics.median(times),
            spread_s=statistics.quantiles(times, n=4)[2] - statistics.quantiles(times, n=4)[0],
            bubble=simulated.bubble,
            peak_live=simulated.peak_live,
            peak_held=_peaks(runs[one.name], placed, batch, devices, one.num_stages),
        )
        print(json.dumps(asdict(row)), file=sys.stderr)
        rows.append(row)
    return {
        "ranks": ranks,
        "microbatches": count,
        "cores": os.cpu_count(),
        "stage_costs_s": [
            [one.forward_s, one.backward_s, one.input_gradient_s, one.weight_gradient_s]
            for one in costs
        ],
        "schedules": {row.schedule: asdict(row) for row in rows},
        "dispatch_us": dispatch * 1e6,
        **_ordered(rows),
    }


def _all_costs(runs: Mapping[str, Any], measure: Callable[..., Any]) -> tuple[Any, ...]:
    """One cost per stage with all kinds of action, from pipelines that each have some."""
    # All share their programs: once every kind is compiled, any of them is timed with all.
    return measure(runs[SCHEDULES[-1]], repeats=9)


def _measure(
    runs: Mapping[str, Any], params: Sequence[Any], batch: Any, rounds: int
) -> tuple[dict[str, list[float]], float]:
    """Seconds of training steps, the schedules in turns, and of one step of a plan to dispatch."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in runs}
    dispatches: list[float] = []
    for number in range(rounds + 1):
        for name, one in runs.items():
            begun = time.perf_counter()
            ran = one.run(params, batch)
            dispatched = time.perf_counter() - begun
            jax.block_until_ready((ran.losses, ran.sums))
            if number:
                times[name].append(time.perf_counter() - begun)
                dispatches.append(dispatched / len(one.steps))
    return times, statistics.median(dispatches)


def _peaks(
    one: Any, params: Sequence[Any], batch: Any, devices: Sequence[set[Any]], stages: int
) -> tuple[float, ...]:
    """Of each rank the most inputs of stages that it held at a time, counted in bytes."""
    import jax

    peaks = [0.0] * stages
    likes = [shapes.inputs or shapes.batch for shapes in one.stages.shapes]
    sizes = [sum(like.size * like.dtype.itemsize for like in each) for each in likes]

    def watch(_: Any, held: Mapping[Any, Any]) -> None:
        arrays = jax.tree.leaves(
            [array for slot, array in held.items() if slot.kind in ("value", "batch")]
        )
        for rank, there in enumerate(devices):
            here = sum(array.nbytes for array in arrays if array.devices() == there)
            peaks[rank] = max(peaks[rank], here / sizes[rank])

    one.run(params, batch, watch)
    return tuple(peaks)


def _ordered(rows: Sequence[Row]) -> dict[str, int]:
    """Pairs whose simulated times differ by more than the noise, and those measured that way."""
    noise = max(row.spread_s for row in rows)
    pairs = [
        (some, other)
        for some, other in itertools.combinations(rows, 2)
        if abs(some.simulated_s - other.simulated_s) > noise
    ]
    right = sum(
        (some.simulated_s < other.simulated_s) == (some.measured_s < other.measured_s)
        for some, other in pairs
    )
    return {"pairs": len(pairs), "pairs_in_order": right}


if __name__ == "__main__":
    main()
