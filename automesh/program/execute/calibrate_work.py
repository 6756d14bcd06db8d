"""What one device does for each probe of a calibration: the body of the loop (jax)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from automesh.hardware.calibration.points import (
    CollectiveProbe,
    KernelProbe,
    MatmulProbe,
    Probe,
    StreamProbe,
)
from automesh.hardware.calibration.probes import PROBE_AXES

_GROUP = PROBE_AXES[1]
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_ROW = 64  # columns of the matrices that `reduce` and `transpose` see
_CHAIN = 16  # tiny kernels in one turn of the loop
_LINK = 16  # elements of a tiny kernel: longer ones are reduced in several steps

State = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a program repeats.

    Attributes:
      arrays: (shape, dtype) of what one device holds.
      step: of the state of one device, in `shard_map`; what it gives depends on all that it does.
      times: executions of the probe in one step.
      group_size, stride: of the mesh, see `CollectiveProbe`.
    """

    arrays: tuple[tuple[tuple[int, ...], str], ...]
    step: Callable[[State], State]
    times: int = 1
    group_size: int = 1
    stride: int = 1


def work_of(probe: Probe) -> Work:
    """The loop's body for a probe."""
    match probe:
        case MatmulProbe():
            return _matmul(probe)
        case StreamProbe():
            return _stream(probe)
        case KernelProbe():
            return _kernels()
        case CollectiveProbe():
            return _collective(probe)


def _matmul(probe: MatmulProbe) -> Work:
    dtype = _DTYPES[probe.dtype]
    left = ((probe.batch, probe.m, probe.k), dtype)
    right = ((probe.batch, probe.k, probe.n), dtype)
    result = ((probe.batch, probe.m, probe.n), dtype)

    def step(state: State) -> State:
        x, y, before = state
        # One element in place ties each product to the one before it, and costs next to nothing.
        x = lax.dynamic_update_slice(x, before[:1, :1, :1], (0, 0, 0))
        product = lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))
        return x, y, product

    return Work(arrays=(left, right, result), step=step)


def _stream(probe: StreamProbe) -> Work:
    rows = max(probe.bytes // (2 * 4 * _ROW), 1)
    array = ((rows, _ROW), "float32")

    def step(state: State) -> State:
        (x,) = state
        match probe.form:
            case "copy":
                return (x + 1e-3,)
            case "map":
                return (jax.nn.sigmoid(x),)
            case "reduce":
                return (x / (jnp.sum(x, axis=-1, keepdims=True) + 1.0),)
            case "transpose":
                return (x.T.reshape(x.shape),)

    return Work(arrays=(array,), step=step)


def _kernels() -> Work:
    array = ((_LINK,), "float32")

    def step(state: State) -> State:
        now, constant = state
        for _ in range(_CHAIN):
            # Each sum is fused into the reduction after it, and no further: a kernel a link.
            now = constant + jnp.max(now)
        return now, constant

    return Work(arrays=(array, array), step=step, times=_CHAIN)


def _collective(probe: CollectiveProbe) -> Work:
    size = probe.group_size
    part = max(math.ceil(probe.payload_bytes / (4 * size)), 1)
    whole = part * size
    held = {
        "all-reduce": (whole,),
        "all-gather": (part, whole),
        "reduce-scatter": (whole,),
        # The payload of a group is what all of its devices hold together.
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
        group_size=size,
        stride=probe.stride,
    )
