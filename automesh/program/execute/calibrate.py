"""Times single pieces of work with all devices busy at once (jax).

A program does the work n times in a loop whose length is an argument; a sample is the difference
between a long and an empty loop, so that what it costs to start a program drops out.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.hardware.calibration.points import Point, Probe
from automesh.hardware.calibration.probes import PROBE_AXES
from automesh.mesh.axes import MeshAxis
from automesh.mesh.granules import granules_of
from automesh.mesh.layout.devices import create_mesh_for
from automesh.program.execute.calibrate_work import Work, work_of

_MOST_LOOPS = 1_000_000
_LEAST_CALL_S = 1e-6


@dataclass(slots=True)
class Trial:
    """A probe that is compiled and warm, with its samples so far.

    Attributes:
      run: does so many turns of the loop, and gives the seconds that they took.
      loops: turns of one sample.
      each: executions of the probe in one turn.
      full_s, empty_s: what samples took, and loops without a turn.
    """

    probe: Probe
    run: Callable[[int], float]
    loops: int
    each: int
    full_s: list[float] = field(default_factory=list[float])
    empty_s: list[float] = field(default_factory=list[float])


def calibrate(
    probes: Sequence[Probe],
    *,
    rounds: int,
    sample_s: float,
    done: Callable[[int], object],
) -> tuple[Point, ...]:
    """Measures the probes in rounds, in another order in every round.

    Args:
      sample_s: how long the loop of one sample shall take.
      done: told after each probe is ready, and after each round, how many of
        `len(probes) + rounds` parts are done.
    """
    trials: list[Trial] = []
    for probe in probes:
        trials.append(ready(probe, sample_s))
        done(len(trials))
    order = random.Random(len(trials))
    for number in range(rounds):
        order.shuffle(trials)
        for trial in trials:
            _sample(trial)
        done(len(probes) + number + 1)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    by_probe = {trial.probe: trial for trial in trials}
    return tuple(_point(by_probe[probe], made) for probe in probes)


def ready(probe: Probe, sample_s: float) -> Trial:
    """Compiles a probe's program, warms it up, and finds out how long its loop must be."""
    work = work_of(probe)
    run = compile_work(work)
    run(1)
    loops, least_s = 1, run(0)
    while loops < _MOST_LOOPS:
        # The faster of two: on a busy machine one alone may be long for no reason of its own.
        took_s = min(run(loops), run(loops)) - least_s
        if took_s >= 0.6 * sample_s:
            break
        # A short loop says little about how long a long one takes: at most eight times longer.
        wanted = loops * sample_s / max(took_s, _LEAST_CALL_S)
        loops = min(int(max(2 * loops, min(8 * loops, wanted))), _MOST_LOOPS)
    return Trial(probe=probe, run=run, loops=loops, each=work.times)


def _sample(trial: Trial) -> None:
    trial.empty_s.append(trial.run(0))
    trial.full_s.append(trial.run(trial.loops))


def _point(trial: Trial, made: str) -> Point:
    # Apart from each other: on a busy machine one slow empty loop would spoil its difference.
    empty_s = statistics.median(trial.empty_s)
    samples_s = [(full - empty_s) / (trial.loops * trial.each) for full in trial.full_s]
    middle = max(statistics.median(samples_s), 0.0)
    spread = 0.0
    if len(samples_s) > 1 and middle > 0:
        low, _, high = statistics.quantiles(samples_s, n=4, method="inclusive")
        spread = (high - low) / 2 / middle
    return Point(
        probe=trial.probe, seconds=middle, spread=spread, samples=len(samples_s), made=made
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled loop; call it with a number of turns to get the seconds that they took."""

    compiled: Any
    state: Any
    count: NamedSharding

    def __call__(self, loops: int) -> float:
        number = jax.device_put(jnp.int32(loops), self.count)
        jax.block_until_ready((number, self.state))
        begin = time.perf_counter()
        # Waited for at once: programs in flight starve each other on virtual CPU devices.
        jax.block_until_ready(self.compiled(number, self.state))
        return time.perf_counter() - begin


def compile_work(work: Work) -> Program:
    """Compiles the loop for all devices."""
    mesh = _mesh(work)
    shards = P(PROBE_AXES)

    def local(loops: Any, state: Any) -> Any:
        held = jax.tree.map(lambda leaf: leaf[0], state)
        held = lax.fori_loop(0, loops, lambda _, now: work.step(now), held)
        return jax.tree.map(lambda leaf: leaf[None], held)

    spread_out: Any = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), shards), out_specs=shards, check_vma=False
    )
    sharding = NamedSharding(mesh, shards)
    state = tuple(
        jax.jit(
            lambda shape=shape, dtype=dtype: jnp.full((mesh.size, *shape), 0.5, dtype),
            out_shardings=sharding,
        )()
        for shape, dtype in work.arrays
    )
    count = NamedSharding(mesh, P())
    turns = jax.ShapeDtypeStruct((), jnp.int32, sharding=count)
    compiled = jax.jit(spread_out).lower(turns, state).compile()
    return Program(compiled=compiled, state=state, count=count)


def _mesh(work: Work) -> Mesh:
    # Granules lie on the outermost axis: what is measured stays inside one.
    granules = len(granules_of(jax.devices()))
    outside = jax.device_count() // (granules * work.group_size * work.stride)
    sizes = (outside, work.group_size, work.stride)
    return create_mesh_for(
        [
            MeshAxis(name=name, ici=size, dcn=granules if name == PROBE_AXES[0] else 1)
            for name, size in zip(PROBE_AXES, sizes, strict=True)
        ]
    )
