"""Bytes that single operations send, estimated and compiled, where a dimension is split.

    python -m benchmarks.operations [--devices 2 4 8] [--only NAME ...] [--topology v5e:2x4]

Whole models hide what one operation does. Each sample of `samples.py` is compiled for virtual CPU
devices, or for a TPU slice that is not there (`--topology`; needs libtpu), and estimated for the
same. Bytes are what one device sends, by the ring algorithm, by kind of collective. A sample agrees
if no kind differs by more than 15 % and 4 KiB. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from typing import Any

from benchmarks.operations.samples import SAMPLES, Sample

_AXIS = "tp"
_SHARE, _BYTES = 0.15, 4096.0


def compiled_bytes(sample: Sample, devices: Any) -> dict[str, float]:
    """By kind, of the program that the compiler makes for these devices."""
    import numpy as np
    from jax.sharding import Mesh

    from automesh.program.lower.compiled import count_serialized, serialized

    step, arguments = _step(sample, Mesh(np.array(devices), (_AXIS,)))
    compiled = step.lower(*arguments).compile()
    counts = count_serialized(serialized(compiled, {}), ((_AXIS, len(devices)),))
    sent: dict[str, float] = defaultdict(float)
    for one in counts.collectives:
        sent[one.kind] += one.wire_bytes
    return dict(sent)


def estimated_bytes(sample: Sample, parts: int, platform: str) -> dict[str, float]:
    """By kind, without compiling."""
    from automesh.collectives import kind_named
    from automesh.cost.terms import value_of
    from automesh.program.script.build import build_on
    from automesh.sharding.programs import Programs
    from automesh.sharding.propagate import propagate

    programs = Programs(
        build=lambda axes: build_on(lambda mesh: _step(sample, mesh), axes),
        axis_names=(_AXIS,),
        platform=platform,
    )
    terms = propagate(programs, sizes=((_AXIS, parts),), probes=(), enter=lambda _: None).terms
    sent: dict[str, float] = defaultdict(float)
    for one in terms.collectives:
        each = kind_named(one.kind).wire_bytes(
            round(value_of(one.payload_bytes, {_AXIS: parts})), parts
        )
        sent[one.kind] += each * value_of(one.count, {_AXIS: parts})
    return dict(sent)


def agrees(estimated: dict[str, float], compiled: dict[str, float]) -> bool:
    """Whether no kind differs by more than 15 % and 4 KiB."""
    return all(
        abs(estimated.get(kind, 0.0) - compiled.get(kind, 0.0))
        <= max(_BYTES, _SHARE * compiled.get(kind, 0.0))
        for kind in {*estimated, *compiled}
    )


def _step(sample: Sample, mesh: Any) -> tuple[Any, tuple[Any]]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    spec = [_AXIS if d == sample.split else None for d in range(len(sample.shape))]
    array = jax.ShapeDtypeStruct(
        sample.shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    return jax.jit(lambda x: jnp.sum(jnp.sin(sample.work(x)))), (array,)


def _words(sent: dict[str, float]) -> str:
    shown = [
        f"{kind} {round(value / 1024)}" for kind, value in sorted(sent.items()) if value >= 512
    ]
    return ", ".join(shown) or "-"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8], help="counts of CPUs")
    parser.add_argument("--only", nargs="+", default=list(SAMPLES), choices=list(SAMPLES))
    parser.add_argument("--topology", default="", help="of a TPU slice, as v5e:2x4")
    arguments = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(arguments.devices))
    groups = [jax.devices()[:count] for count in arguments.devices]
    platform = "cpu"
    if arguments.topology:
        from jax.experimental import topologies

        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=arguments.topology)
        groups, platform = [list(slice_.devices)], "tpu"
    agreeing, differing = 0, list[dict[str, Any]]()
    for name in arguments.only:
        for group in groups:
            estimated = estimated_bytes(SAMPLES[name], len(group), platform)
            compiled = compiled_bytes(SAMPLES[name], group)
            row = f"{name} / {len(group)}: {_words(estimated)} KiB; compiled {_words(compiled)} KiB"
            if agrees(estimated, compiled):
                agreeing += 1
            else:
                row += "  DIFFERS"
                differing.append(
                    {
                        "operation": name,
                        "devices": len(group),
                        "estimated_bytes": estimated,
                        "compiled_bytes": compiled,
                    }
                )
            print(row, file=sys.stderr)
    print(
        json.dumps(
            {
                "platform": platform,
                "jax": jax.__version__,
                "compared": agreeing + len(differing),
                "agree": agreeing,
                "differ": differing,
            }
        )
    )
    return 0
