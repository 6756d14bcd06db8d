"""How many bytes a TPU's matrix product can write, and read beside its operands, per cycle.

    python -m benchmarks.epilogues

Products with a small inner dimension, to whose results an array is added, are compiled for every
generation (no TPU, but the `tpu` extra): the cycles that the compiler states for them are those of
the epilogue. `automesh/hardware/data/engines.json` has the figures as `epilogue_bytes`, per jax
device. The last line on stdout is JSON: bytes per cycle by topology.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from automesh.hlo import read_module, read_schedule
from automesh.hlo.schedule.nouns import Compute

# A jax device of v4 has two cores unless the topology says otherwise: its figure is that of one.
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
# Rows, inner dimension, columns.
PRODUCTS = ((16384, 64, 1024), (16384, 256, 1024))
_ELEMENT_BYTES = 2
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def bytes_per_cycle(topology: str, product: tuple[int, int, int]) -> float:
    """What one device reads of the added array and writes, over the stated cycles."""
    rows, _, columns = product
    cycles = sum(one.cycles for one in _products(topology, product))
    if not cycles:
        raise SystemExit(f"libtpu states no cycles for a product on {topology}")
    return 2 * rows * columns * _ELEMENT_BYTES / cycles


def _products(topology: str, product: tuple[int, int, int]) -> list[Compute]:
    """The products of the compiled program."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rows, inner, columns = product
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))

    def step(left: Any, right: Any, more: Any) -> Any:
        return left @ right + more

    def array(sharding: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    all_rows = rows * len(devices)
    compiled = (
        jax.jit(step, out_shardings=split)
        .lower(
            array(split, all_rows, inner),
            array(NamedSharding(mesh, PartitionSpec()), inner, columns),
            array(split, all_rows, columns),
        )
        .compile()
    )
    module: Any = compiled.runtime_executable().hlo_modules()[0]
    schedule = read_schedule(
        read_module(module.as_serialized_hlo_module_proto()), [("x", len(devices))], [1]
    )
    return [one for one in schedule.body.operations if isinstance(one, Compute) and one.flops]


def main() -> None:
    """Compiles, and prints a line for every product."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    os.environ |= _ENVIRONMENT
    found: dict[str, list[float]] = {}
    for topology in TOPOLOGIES:
        for product in PRODUCTS:
            each = bytes_per_cycle(topology, product)
            found.setdefault(topology, []).append(round(each, 1))
            print(f"{topology:<12} {'x'.join(map(str, product)):<16} {each:6.1f} bytes per cycle")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
