"""Wrong calls of `automesh.partition`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from automesh import partition
from tests.conformance.groups.partition import DATA4_MODEL2, mesh_named

Wrong = Callable[[], Any]
Dim1, Dim2, Dim3 = hax.make_axes(dim1=8, dim2=16, dim3=32)
shard: Any = partition.shard
named_jit: Any = partition.named_jit
fsdp: Any = partition.fsdp
axis_mapping: Any = partition.axis_mapping
names_by_path: Any = partition.names_by_path


@dataclass
class Unregistered:
    """Says the names of its array, and is no pytree."""

    w: Any = field(metadata={"axis_names": ("dim1",)})


def inside(call: Wrong) -> Wrong:
    """The call where a mesh `data:4, model:2` is set."""

    def wrong() -> Any:
        with jax.set_mesh(mesh_named(DATA4_MODEL2)):
            return call()

    return wrong


def jitted(call: Callable[[Any], Any], value: Any) -> Wrong:
    """The call inside of `jit`, where a mesh is set."""
    return inside(lambda: jax.jit(call)(value))


def tree() -> Any:
    """A tree in which only one array is at fault."""
    return {"layers": [{"w": hax.ones((Dim1, Dim2))}, {"w": hax.ones((hax.Axis("dim2", 6), Dim3))}]}


def enter(*arguments: Any, **more: Any) -> None:
    with axis_mapping(*arguments, **more):
        pass


def own(**mapping: Any) -> Wrong:
    """`shard` of one array of the dimensions dim1=8, dim2=16."""
    return inside(lambda: shard(hax.ones((Dim1, Dim2)), mapping))


PARTITION: Mapping[str, Wrong] = {
    "shard-does-not-divide": inside(lambda: shard(tree(), {"dim2": "data"})),
    "shard-does-not-divide-in-jit": jitted(lambda x: shard(x, {"dim2": "data"}), tree()),
    "shard-does-not-divide-by-two": inside(
        lambda: shard(hax.ones((hax.Axis("vocab", 12),)), {"vocab": ("data", "model")})
    ),
    "shard-twice": own(dim1="data", dim2="data"),
    "shard-twice-in-jit": jitted(
        lambda x: shard(x, {"dim1": "data", "dim2": ("model", "data")}), hax.ones((Dim1, Dim2))
    ),
    "shard-twice-in-one": own(dim1=("data", "data")),
    "shard-unknown-axis": own(dim1="dta"),
    "shard-unknown-axis-in-jit": jitted(lambda x: shard(x, {"dim1": "fsdp"}), hax.ones((Dim1,))),
    "shard-mapping-is-text": inside(lambda: shard(hax.ones((Dim1,)), "data")),
    "shard-axis-is-number": own(dim1=4),
    "shard-name-is-axis": inside(lambda: shard(hax.ones((Dim1,)), {Dim1: "data"})),
    "shard-mesh-is-dict": lambda: shard(hax.ones((Dim1,)), {"dim1": "data"}, {"data": 4}),
    "output-does-not-divide": inside(
        lambda: named_jit(lambda x: x, out_axis_resources={"dim": "data"})(
            hax.ones(hax.Axis("dim", 6))
        )
    ),
    "input-does-not-divide": inside(
        lambda: named_jit(lambda x: x, in_axis_resources={"dim": "data"})(
            hax.ones(hax.Axis("dim", 6))
        )
    ),
    "jit-unknown-axis": inside(
        lambda: named_jit(lambda x: x, axis_resources={"dim1": "fsdp"})(hax.ones((Dim1,)))
    ),
    "jit-without-mesh": lambda: named_jit(lambda x: x, {"dim1": "data"})(hax.ones((Dim1,))),
    "jit-of-a-number": lambda: named_jit(8, {"dim1": "data"}),
    "jit-donates-too-many": inside(
        lambda: named_jit(lambda x: x, {}, donate_args=(True, False, True))(hax.ones((Dim1,)))
    ),
    "fsdp-without-mappings": lambda: fsdp(lambda x: x),
    "fsdp-misspelt": lambda: fsdp(lambda x: x, parameter_mappings={}, compute_mapping={}),
    "fsdp-four-arguments": lambda: fsdp(lambda x: x, {}, {}, {}),
    "mapping-is-a-list": lambda: enter([("embed", "fsdp")]),
    "mapping-of-a-number": lambda: enter({"embed": 2}),
    "mapping-keyword-of-a-number": lambda: enter({}, embed=2),
    "round-without-mesh": lambda: partition.round_axis_for_partitioning(
        hax.Axis("embed", 10), {"embed": "data"}
    ),
    "round-unknown-axis": inside(
        lambda: partition.round_axis_for_partitioning(hax.Axis("embed", 10), {"embed": "absent"})
    ),
    "size-without-mesh": lambda: partition.physical_axis_size("batch", {"batch": "data"}),
    "size-unknown-axis": inside(lambda: partition.physical_axis_size("b", {"b": "absent"})),
    "sharding-twice": inside(
        lambda: partition.sharding_for_axis((Dim1, Dim2), {"dim1": "data", "dim2": "data"})
    ),
    "sharding-without-mesh": lambda: partition.sharding_for_axis(Dim1, {"dim1": "data"}),
    "spec-without-mapping": lambda: partition.pspec_for(hax.ones((Dim1,))),
    "infer-without-mapping": inside(lambda: partition.infer_resource_partitions(hax.ones((Dim1,)))),
    "infer-without-mesh": lambda: partition.infer_resource_partitions(
        {"w": jnp.ones(4)}, {"dim1": "data"}
    ),
    "size-twice-in-one": inside(lambda: partition.physical_axis_size("b", {"b": ("data", "data")})),
    "shard-strict-without-names": inside(
        lambda: shard({"w": jnp.ones(4)}, {"dim1": "data"}, strict=True)
    ),
    "shard-unregistered": inside(lambda: shard({"up": Unregistered(jnp.ones(4))}, {})),
    "jit-donates-by-text": lambda: named_jit(lambda x: x, donate_args=("x",))(jnp.ones(4)),
    "jit-donates-by-number": lambda: named_jit(lambda x: x, donate_kwargs={"x": 1})(x=jnp.ones(4)),
    "rules-are-a-number": lambda: names_by_path(5, {"w": jnp.ones(4)}),
    "rules-without-names": lambda: names_by_path(["w"], {"w": jnp.ones(4)}),
    "rules-of-numbers": lambda: names_by_path([("w", (1, 2))], {"w": jnp.ones(4)}),
    "rules-not-regex": lambda: names_by_path([("(", ("a",))], {"w": jnp.ones(4)}),
    "rules-leave-one-out": lambda: names_by_path([("x", ("a",))], {"w": jnp.ones(4)}),
    "mesh-context-of-text": lambda: partition.mesh_context("data4"),  # pyright: ignore
}
