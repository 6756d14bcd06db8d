"""Times single pieces of work while all devices are busy (jax).

A program does the work n times in a loop whose length is an argument. A sample is the difference
between a long and an empty loop, so that the time to start a program is not included. The time to
start a kernel is the difference between loops of many tiny kernels and of three times as many: on a
GPU both run as one graph, while a few kernels would be started one by one. The overhead of one turn
of the loop is the time of a single tiny kernel without its start. It is subtracted, since it
exceeds the time of most kernels if the host controls every turn. Several processes do the same
work: they agree on the lengths of the loops, and begin each loop together.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.hardware.calibration.points import (
    CollectiveProbe,
    KernelProbe,
    MatmulProbe,
    Point,
    Probe,
    StreamProbe,
)
from automesh.hardware.calibration.probes import PROBE_AXES
from automesh.mesh.axes import MeshAxis
from automesh.mesh.granules import granules_of
from automesh.mesh.layout.devices import create_mesh_for
from automesh.program.execute.team import Team

_MOST_LOOPS = 1_000_000
_LEAST_CALL_S = 1e-6
_GROUP = PROBE_AXES[1]
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_ROW = 64  # columns of the matrices in `reduce` and `transpose`
_CHAIN = 16  # tiny kernels in one turn of the shorter loop: enough for a graph of a GPU
_LONG_CHAIN = 3 * _CHAIN
_LARGEST = 0.75
_LINK = 16  # elements of a tiny kernel: longer ones are reduced in several steps

State = tuple[Any, ...]


# The work of one device for each probe: the body of the loop.


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work that a program repeats.

    Attributes:
      arrays: (shape, dtype) of the arrays on one device.
      step: maps the state of one device to the next, in `shard_map`; its result depends on all of
        its work.
      least: smallest initial value of the arrays; the largest is `_LARGEST`.
      group_size, stride, granules: properties of the mesh; see `CollectiveProbe`.
    """

    arrays: tuple[tuple[tuple[int, ...], str], ...]
    step: Callable[[State], State]
    least: float = 0.25
    group_size: int = 1
    stride: int = 1
    granules: int = 1


def work_of(probe: Probe) -> Work:
    """Makes the loop's body for a probe."""
    match probe:
        case MatmulProbe():
            return _matmul(probe)
        case StreamProbe():
            return _stream(probe)
        case KernelProbe():
            return _kernels(_LONG_CHAIN)
        case CollectiveProbe():
            return _collective(probe)


def _matmul(probe: MatmulProbe) -> Work:
    dtype = _DTYPES[probe.dtype]
    left = ((probe.batch, probe.m, probe.k), dtype)
    right = ((probe.batch, probe.k, probe.n), dtype)
    result = ((probe.batch, probe.m, probe.n), dtype)

    def step(state: State) -> State:
        x, y, before = state
        # One element that is updated in place makes each product depend on the one before, at
        # almost no cost.
        x = lax.dynamic_update_slice(x, before[:1, :1, :1], (0, 0, 0))
        product = lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))
        return x, y, product

    # Values of both signs below 1: otherwise the chain of single elements would grow without limit.
    return Work(arrays=(left, right, result), step=step, least=-_LARGEST)


def _stream(probe: StreamProbe) -> Work:
    rows = max(probe.bytes // (2 * 4 * _ROW), 1)
    array = ((rows, _ROW), "float32")

    def step(state: State) -> State:
        x, before = state
        # One element of the last result, as above. With all of it, work that cannot be done in
        # place would be copied back in every turn.
        x = lax.dynamic_update_slice(x, before[:1, :1], (0, 0))
        match probe.form:
            case "copy":
                return x, x + 1e-3
            case "map":
                return x, jax.nn.sigmoid(x)
            case "reduce":
                return x, x / (jnp.sum(x, axis=-1, keepdims=True) + 1.0)
            case "transpose":
                return x, x.T.reshape(x.shape)

    return Work(arrays=(array, array), step=step)


def _kernels(chain: int) -> Work:
    array = ((_LINK,), "float32")

    def step(state: State) -> State:
        now, constant = state
        for _ in range(chain):
            # Each sum is fused into the next reduction, and no further: one kernel per link.
            now = constant + jnp.max(now)
        return now, constant

    return Work(arrays=(array, array), step=step)


def _collective(probe: CollectiveProbe) -> Work:
    size = probe.num_devices
    part = max(math.ceil(probe.payload_bytes / (4 * size)), 1)
    whole = part * size
    held = {
        "all-reduce": (whole,),
        "all-gather": (part, whole),
        "reduce-scatter": (whole,),
        # The payload of a group is the data of all its devices together.
        "all-to-all": (max(math.ceil(part / size), 1) * size,),
        "collective-permute": (max(probe.payload_bytes // 4, 1),),
    }[probe.collective]

    def step(state: State) -> State:
        mine = state[0]
        match probe.collective:
            case "all-reduce":
                return (lax.psum(mine, _GROUP) * (1 / size),)
            case "all-gather":
                gathered = lax.all_gather(mine, _GROUP, tiled=True)
                return gathered[:part], gathered
            case "reduce-scatter":
                scattered = lax.psum_scatter(mine, _GROUP, tiled=True) * (1 / size)
                return (lax.dynamic_update_slice(mine, scattered, (0,)),)
            case "all-to-all":
                return (lax.all_to_all(mine, _GROUP, 0, 0, tiled=True),)
            case "collective-permute":
                ring = [(place, (place + 1) % size) for place in range(size)]
                return (lax.ppermute(mine, _GROUP, ring),)

    return Work(
        arrays=tuple(((elements,), "float32") for elements in held),
        step=step,
        group_size=probe.group_size,
        stride=probe.stride,
        granules=probe.granules,
    )


@dataclass(slots=True)
class ProbeTrial:
    """A probe that is compiled and warmed up, with its samples so far.

    Attributes:
      run: runs a number of turns of the loop, and returns their seconds.
      loops: number of turns in one sample.
      full_s, empty_s: seconds of samples, and of loops without a turn.
    """

    run: Callable[[int], float]
    loops: int
    full_s: list[float] = field(default_factory=list[float])
    empty_s: list[float] = field(default_factory=list[float])

    @property
    def turns_s(self) -> list[float]:
        """Seconds of one turn, from each sample."""
        # The median of empty loops: on a busy machine a single slow one would give a wrong
        # difference.
        empty_s = statistics.median(self.empty_s)
        return [(full - empty_s) / self.loops for full in self.full_s]


def calibrate(
    probes: Sequence[Probe],
    *,
    rounds: int,
    sample_s: float,
    done: Callable[[int], object],
    team: Team,
) -> tuple[Point, ...]:
    """Measures the probes in rounds, in another order in every round.

    Args:
      sample_s: intended length of one sample's loop, in seconds.
      done: is called after each probe is ready and after each round, with the number of finished
        parts of `len(probes) + rounds`.
      team: the processes that measure together.
    """
    one, few, many = (_ready(_kernels(chain), sample_s, team) for chain in (1, _CHAIN, _LONG_CHAIN))
    trials: dict[Probe, ProbeTrial] = {}
    for probe in probes:
        known = many if isinstance(probe, KernelProbe) else None
        trials[probe] = known or _ready(work_of(probe), sample_s, team)
        done(len(trials))
    everything = [one, few, many, *(trial for trial in trials.values() if trial is not many)]
    order = random.Random(len(trials))
    for number in range(rounds):
        order.shuffle(everything)
        for trial in everything:
            _sample(trial)
        done(len(probes) + number + 1)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    single_s, few_s = (statistics.median(trial.turns_s) for trial in (one, few))
    kernels_s = [(spent - few_s) / (_LONG_CHAIN - _CHAIN) for spent in many.turns_s]
    turn_s = max(single_s - max(statistics.median(kernels_s), 0.0), 0.0)
    return tuple(
        _point(
            probe,
            kernels_s
            if isinstance(probe, KernelProbe)
            else [spent - turn_s for spent in trials[probe].turns_s],
            made,
        )
        for probe in probes
    )


def _ready(work: Work, sample_s: float, team: Team) -> ProbeTrial:
    """Compiles a program, warms it up, and finds the length of its loop."""
    run = compile_work(work, team)
    team.gather("probe")
    run(1)
    loops, least_s = 1, team.slowest(run(0))
    while loops < _MOST_LOOPS:
        # The faster of two: on a busy machine a single run may be slow for another reason.
        took_s = team.slowest(min(run(loops), run(loops))) - least_s
        if took_s >= 0.6 * sample_s:
            break
        # A short loop predicts a long one badly, so the length grows at most eight times.
        wanted = loops * sample_s / max(took_s, _LEAST_CALL_S)
        loops = min(int(max(2 * loops, min(8 * loops, wanted))), _MOST_LOOPS)
    return ProbeTrial(run=run, loops=loops)


def _sample(trial: ProbeTrial) -> None:
    trial.empty_s.append(trial.run(0))
    trial.full_s.append(trial.run(trial.loops))


def _point(probe: Probe, samples_s: Sequence[float], made: str) -> Point:
    """Returns the seconds of one execution of a probe; 0 if they are below the noise."""
    middle = max(statistics.median(samples_s), 0.0)
    spread = 0.0
    if len(samples_s) > 1 and middle > 0:
        low, _, high = statistics.quantiles(samples_s, n=4, method="inclusive")
        spread = (high - low) / 2 / middle
    return Point(probe=probe, seconds=middle, spread=spread, samples=len(samples_s), made=made)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLoop:
    """A compiled loop; a call with a number of turns returns their seconds."""

    compiled: Any
    state: Any
    count: NamedSharding
    team: Team

    def __call__(self, loops: int) -> float:
        # Each process uses its own number: `device_put` would compare them by a collective.
        number = jax.make_array_from_callback((), self.count, lambda _: np.int32(loops))
        jax.block_until_ready((number, self.state))
        self.team.align()
        begin = perf_counter()
        # Waits at once: several running programs block each other on virtual CPU devices.
        jax.block_until_ready(self.compiled(number, self.state))
        return perf_counter() - begin


def compile_work(work: Work, team: Team) -> CompiledLoop:
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
            lambda shape=shape, dtype=dtype: _scattered((mesh.size, *shape), dtype, work.least),
            out_shardings=sharding,
        )()
        for shape, dtype in work.arrays
    )
    count = NamedSharding(mesh, P())
    turns = jax.ShapeDtypeStruct((), jnp.int32, sharding=count)
    compiled = jax.jit(spread_out).lower(turns, state).compile()
    return CompiledLoop(compiled=compiled, state=state, count=count, team=team)


def _scattered(shape: tuple[int, ...], dtype: str, least: float) -> Any:
    """Returns pseudo-random values between `least` and `_LARGEST`, by a program that compiles fast.

    A chip that multiplies the same number again and again uses less power and is faster than in
    training (docs/accuracy.md, "Against one H200").
    """
    count = math.prod(shape)
    # The last step of MurmurHash3 (fmix32): each bit of the index affects every bit of the hash.
    hashed = lax.iota(jnp.uint32, count)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ (hashed >> shift)) * jnp.uint32(factor)
    share = (hashed >> 8).astype(jnp.float32) / 2**24
    return (least + (_LARGEST - least) * share).astype(dtype).reshape(shape)


def _mesh(work: Work) -> Mesh:
    # Granules that no group spans are on the outermost axis.
    granules = len(granules_of(jax.devices()))
    outside = jax.device_count() // (granules * work.group_size * work.stride)
    sizes = (outside, work.group_size, work.stride)
    between = (granules // work.granules, work.granules, 1)
    return create_mesh_for(
        [
            MeshAxis(name=name, ici=ici, dcn=dcn)
            for name, ici, dcn in zip(PROBE_AXES, sizes, between, strict=True)
        ]
    )
