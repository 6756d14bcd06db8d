"""Pipelines as simulated and as run: `python -m benchmarks.pipeline [--ranks N] [--width D]`.

Each rank is one virtual device with one thread, so that ranks do not share a core while there are
as many cores as ranks and nothing else to do. Stages are timed alone first; the simulator makes a
step of that, and the same programs are then run under each schedule. The last line of standard
output is JSON: per schedule `simulated_s`, `measured_s`, `bubble` (simulated), `peak_live` and
`peak_held` (activations per rank, simulated and counted in live buffers), and for all
`dispatch_us`, what the controller needs per dispatched step, and whether the pairs whose times
differ by more than the noise are in the simulated order.

The layers are wide, so that work prevails over memory traffic: the simulator does not know that
what GPipe keeps of many microbatches has left the caches when it is needed again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule.

    Attributes:
      noise_s: the standard error of `measured_s`, which is a median.
    """

    schedule: str
    simulated_s: float
    measured_s: float
    noise_s: float
    bubble: float
    peak_live: tuple[int, ...]
    peak_held: tuple[float, ...]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, help="default: four per rank")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--rows", type=int, default=64, help="of a microbatch")
    parser.add_argument("--layers", type=int, default=4, help="of a stage")
    parser.add_argument("--rounds", type=int, default=21)
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

    width = options.width
    rng = np.random.default_rng(0)
    layers = rng.standard_normal((ranks * options.layers, width, width)).astype(np.float32)
    params = pipeline.split_layers(layers / width**0.5, ranks)
    batch = rng.standard_normal((count * options.rows, width)).astype(np.float32)
    loss = pipeline.chain(pipeline.repeat_layer(_layer, ranks), lambda y, _: jax.numpy.mean(y**2))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("pp",))
    step = pipeline.microbatch(
        loss, mesh=mesh, schedule="gpipe", num_microbatches=count, residuals="save"
    )
    compiled = step.compile(params, batch)
    schedules = [
        pipeline.make_schedule(name, num_ranks=ranks, num_microbatches=count) for name in SCHEDULES
    ]
    runs = {one.name: compiled.with_schedule(one) for one in schedules}
    placed = jax.tree.leaves(compiled.place(params))
    # All share their programs: once every kind is compiled, any of them is timed with all.
    alone = functools.partial(pipeline.measure_costs, runs[SCHEDULES[-1]], repeats=3)
    measured, all_costs, dispatch = _measure(runs, placed, batch, alone, options.rounds)
    costs = _medians(all_costs)
    devices = [set(one.devices.flat) for one in pipeline.MpmdMesh(mesh).submeshes]
    rows: list[Row] = []
    for one in schedules:
        simulated = pipeline.simulate(one, costs)
        times = measured[one.name]
        row = Row(
            schedule=one.name,
            simulated_s=simulated.makespan_s,
            measured_s=statistics.median(times),
            noise_s=_noise(times),
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


def _layer(weights: Any, x: Any) -> Any:
    import jax

    return jax.numpy.tanh(x @ weights)


def _medians(rounds: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Of each stage the median of its costs over the rounds."""
    from automesh.pipeline import StageCost

    def median(stage: int, name: str) -> Any:
        return statistics.median(getattr(one[stage], name) for one in rounds)

    names = [field.name for field in fields(StageCost)]
    return tuple(
        StageCost(**{name: median(stage, name) for name in names})
        for stage in range(len(rounds[0]))
    )


def _measure(
    runs: Mapping[str, Any],
    params: Sequence[Any],
    batch: Any,
    alone: Callable[[], Any],
    rounds: int,
) -> tuple[dict[str, list[float]], list[Any], float]:
    """Seconds of training steps, the schedules and the stages alone in turns.

    Returns:
      Of each schedule its seconds, what `alone` gave each time, and the seconds that one step of a
      plan takes to dispatch.
    """
    import jax

    times: dict[str, list[float]] = {name: [] for name in runs}
    dispatches: list[float] = []
    costs: list[Any] = []
    for number in range(rounds + 1):
        # Among the steps, so that other work on the machine slows both down alike.
        costs.append(alone())
        for name, one in runs.items():
            begun = time.perf_counter()
            ran = one.run(params, batch)
            dispatched = time.perf_counter() - begun
            jax.block_until_ready((ran.losses, ran.sums))
            if number:
                times[name].append(time.perf_counter() - begun)
                dispatches.append(dispatched / len(one.steps))
    return times, costs, statistics.median(dispatches)


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


def _noise(times: Sequence[float]) -> float:
    """The standard error of a median, from the quartiles, as if the times were normal."""
    first, _, third = statistics.quantiles(times, n=4)
    # sqrt(pi / 2) standard deviations over sqrt(n); the quartiles are 1.349 of them apart.
    return math.sqrt(math.pi / 2) * (third - first) / 1.349 / math.sqrt(len(times))


def _ordered(rows: Sequence[Row]) -> dict[str, int]:
    """Pairs whose simulated times differ by more than the noise, and those measured that way."""
    pairs = [
        (some, other)
        for some, other in itertools.combinations(rows, 2)
        if abs(some.simulated_s - other.simulated_s) > 2 * math.hypot(some.noise_s, other.noise_s)
    ]
    right = sum(
        (some.simulated_s < other.simulated_s) == (some.measured_s < other.measured_s)
        for some, other in pairs
    )
    return {"pairs": len(pairs), "pairs_in_order": right}


if __name__ == "__main__":
    main()
