"""Wrong calls of the mesh and partitioning libraries, by name; what is said is a golden file.

The calls are made where jax has eight CPU devices (`tests.support.fakes.worlds.cpu_world`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import automesh
from automesh import HybridMeshShape, MeshConfig, MeshRule
from automesh.errors import UsageError
from tests.support import paths
from tests.support.cases.wrong_partition_calls import PARTITION
from tests.support.fakes.worlds import cpu_world, cpus, gpus, sliced, tpus, world

GOLDEN = paths.GOLDEN / "wrong_calls.txt"
# What a user may pass is not what the types allow: that is the point of these calls.
Wrong = Callable[[], Any]
create_mesh: Any = automesh.create_mesh
parse: Any = automesh.parse_mesh_from_string
host_shape: Any = automesh.calculate_host_mesh_shape
hybrid: Any = HybridMeshShape
infer: Any = automesh.infer_mesh_shape
ddp: Any = automesh.make_ddp_mesh_config
fsdp: Any = automesh.make_fsdp_mesh_config


def config(shape: Any, names: Any = ("data", "model"), **more: Any) -> MeshConfig:
    return MeshConfig(mesh_shape=shape, mesh_axis_names=names, **more)


def ruled(*rules: Any) -> MeshConfig:
    return config((-1, 1), mesh_rules=rules)


def on(devices: Any, shape: Any, names: Any = ("data", "model")) -> Any:
    return config(shape, names).create_device_mesh(devices)


def among(processes: int, each: int, slices: int, *arguments: Any, **more: Any) -> Any:
    """`create_mesh` in a job of several processes and slices."""
    with world(sliced(processes, each, slices), processes=processes):
        return create_mesh(*arguments, **more)


SHAPES: Mapping[str, Wrong] = {
    "hybrid-lengths": lambda: hybrid((1, 8), (2,)),
    "hybrid-zero": lambda: hybrid((0, 8), (2, 1)),
    "hybrid-negative": lambda: hybrid((1, 8), (-2, 1)),
    "hybrid-two-unknown": lambda: hybrid((-1, -1), (2, 1)),
    "hybrid-text": lambda: hybrid("1,8", (2, 1)),
    "hybrid-float": lambda: hybrid((1.0, 8), (2, 1)),
    "hybrid-bool": lambda: hybrid((True, 8), (2, 1)),
    "hybrid-number": lambda: hybrid(8, 2),
    "infer-two-unknown": lambda: infer((1, -1, 1, -1), num_devices=64),
    "infer-no-multiple": lambda: infer((-1, 1, 8, 1), num_devices=4),
    "infer-product": lambda: infer((2, 2), num_devices=8),
    "infer-zero": lambda: infer((-1, 0), num_devices=8),
    "infer-negative": lambda: infer((-2, -1), num_devices=8),
    "infer-nested": lambda: infer(((4,), 4), num_devices=16),
    "infer-devices-are-text": lambda: infer((-1, 2), num_devices="8"),
    "infer-no-devices": lambda: infer((-1, 2), num_devices=0),
}

CONFIGS: Mapping[str, Wrong] = {
    "config-lengths": lambda: config((2, 2, 2)),
    "config-hybrid-lengths": lambda: config(hybrid((1, 2, 4), (1, 1, 1))),
    "config-repeated-names": lambda: config((2, 4), ("data", "data")),
    "config-no-names": lambda: config((), ()),
    "config-name-is-number": lambda: config((2, 4), ("data", 1)),
    "config-names-are-text": lambda: config((2, 4), "ab"),
    "config-batch-axis": lambda: config((2, 4), batch_axis_names="dta"),
    "config-batch-axis-twice": lambda: config((2, 4), batch_axis_names=("data", "data")),
    "config-mapping-is-number": lambda: config((2, 4), mapping=5),
    "config-mapping-is-text": lambda: config((2, 4), mapping="ab"),
    "config-mapping-is-no-pairs": lambda: config((2, 4), mapping=[("a",)]),
    "config-mapped-name-is-number": lambda: config((2, 4), mapping={1: "model"}),
    "config-mapped-to-number": lambda: config((2, 4), mapping={"mlp": 5}),
    "config-mapped-to-numbers": lambda: config((2, 4), mapping={"mlp": [1]}),
    "config-mapped-twice": lambda: config((2, 4), mapping={"mlp": ["model", "model"]}),
    "config-mapped-to-nothing-known": lambda: config((2, 4), mapping={"mlp": "modl"}),
    "config-knobs-are-number": lambda: config((2, 4), knobs=5),
    "config-knob-is-list": lambda: config((2, 4), knobs={"remat": ["full"]}),
    "config-option-is-number": lambda: config((2, 4), compiler_options={1: True}),
    "config-text-shape": lambda: config("not a MeshShape"),
    "config-zero": lambda: config((0, 4)),
    "config-rule-lengths": lambda: ruled(("tpu-.*", (1, 2, 4))),
    "config-rule-pattern": lambda: ruled(("tpu-(", (1, 8))),
    "config-rule-is-no-pair": lambda: ruled("tpu-.*"),
    "config-rule-sizes": lambda: ruled(("tpu-.*", (0, 8))),
    "rule-without-sizes": lambda: MeshRule(match="a", mesh_shape=8),  # pyright: ignore
    "config-selector-is-number": lambda: ruled(("tpu-.*", (1, 8))).create_device_mesh(selector=8),  # pyright: ignore
    "mesh-types-length": lambda: config((2, 4)).create_device_mesh(axis_types=["auto"] * 3),
    "mesh-type-unknown": lambda: config((2, 4)).create_device_mesh(axis_types="automatic"),
    "mesh-product": lambda: config((2, 2)).create_device_mesh(),
    "mesh-no-multiple": lambda: config((3, -1)).create_device_mesh(),
    "mesh-too-many": lambda: on(cpus(4), (2, 4)),
    "mesh-no-devices": lambda: on([], (1, 1)),
    "mesh-devices-are-numbers": lambda: on([0, 1], (1, 2)),
    "mesh-mixed-platforms": lambda: on([*cpus(4), *gpus(1, 4)], (2, 4)),
    "mesh-uneven-granules": lambda: on(gpus(2, 8)[:12], (2, 6)),
    "mesh-first-axis-over-slices": lambda: on(
        tpus("TPU v4", (4, 4, 1), slices=6), (4, 24), ("a", "b")
    ),
    "mesh-hybrid-dcn-product": lambda: on(gpus(8, 8), hybrid((4, 2), (2, 2))),
    "mesh-hybrid-ici-product": lambda: on(gpus(8, 8), hybrid((4, 4), (8, 1))),
    "mesh-torus-without-layout": lambda: on(
        [one for one in tpus("TPU v4", (2, 2, 2)) if one.coords != (0, 0, 0)], (7, 1)
    ),
}

PRESETS: Mapping[str, Wrong] = {
    "ddp-no-axes": lambda: ddp(mesh_axis_names=()),
    "ddp-batch-axis": lambda: ddp(mesh_axis_names=("replica",), batch_axis_names="data"),
    "fsdp-repeated-names": lambda: fsdp(mesh_axis_names=("data", "data")),
    "fsdp-rule-lengths": lambda: fsdp(
        mesh_axis_names=("data", "model"), mesh_rules=[("a", (1, 2, 4))], mesh_selector="a"
    ),
}

CREATION: Mapping[str, Wrong] = {
    "create-lengths": lambda: create_mesh((8,), ("a", "b")),
    "create-more-sizes": lambda: create_mesh((2, 4), ("a",)),
    "create-repeated-names": lambda: create_mesh((2, 4), ("a", "a")),
    "create-name-is-number": lambda: create_mesh((2, 4), ("a", 2)),
    "create-names-are-text": lambda: create_mesh((2, 4), "ab"),
    "create-product": lambda: create_mesh((2, 2), ("a", "b")),
    "create-product-by-jax": lambda: create_mesh((2, 2), ("a", "b"), use_jax=True),
    "create-no-multiple": lambda: create_mesh((3, -1), ("a", "b")),
    "create-two-unknown": lambda: create_mesh((-1, -1), ("a", "b")),
    "create-zero": lambda: create_mesh((0, 8), ("a", "b")),
    "create-float": lambda: create_mesh((2.0, 4), ("a", "b")),
    "create-backend": lambda: create_mesh((2, 4), ("a", "b"), backend="abacus"),
    "create-types-length": lambda: create_mesh((2, 4), ("a", "b"), axis_types=["auto"] * 3),
    "create-type-unknown": lambda: create_mesh((2, 4), ("a", "b"), axis_types="automatic"),
    "create-type-is-number": lambda: create_mesh((2, 4), ("a", "b"), axis_types=[1, 2]),
    "create-sort-is-list": lambda: create_mesh((8,), ("a",), should_sort_granules_by_key=[1]),
    "create-split-is-number": lambda: create_mesh((8,), ("a",), allow_split_physical_axes=1),
    "create-by-jax-is-text": lambda: create_mesh((8,), ("a",), use_jax="yes"),
    "create-dcn-one-granule": lambda: create_mesh((4, 2), ("a", "b"), dcn_mesh_dims=(3, -1)),
    "create-dcn-lengths": lambda: among(2, 4, 0, (2, 4), ("a", "b"), dcn_mesh_dims=(2,)),
    "create-dcn-product": lambda: among(2, 4, 0, (2, 4), ("a", "b"), dcn_mesh_dims=(2, 2)),
    "create-dcn-two-unknown": lambda: among(2, 4, 0, (2, 4), ("a", "b"), dcn_mesh_dims=(-1, -1)),
    "create-dcn-no-multiple": lambda: among(2, 4, 0, (2, 4), ("a", "b"), dcn_mesh_dims=(3, -1)),
    "create-dcn-zero": lambda: among(2, 4, 0, (2, 4), ("a", "b"), dcn_mesh_dims=(0, -1)),
    "create-dcn-does-not-divide": lambda: among(2, 4, 0, (1, 8), ("a", "b"), dcn_mesh_dims=(2, 1)),
    "create-no-axis-for-slices": lambda: among(3, 4, 3, (2, 2, -1), ("a", "b", "c"), (1, 3, 1)),
    "parse-empty": lambda: parse("", ["a"]),
    "parse-unknown-axis": lambda: parse("dp:2,pt:4", ["dp", "tp"]),
    "parse-unused-axis": lambda: parse("dp:8", ["dp", "tp"]),
    "parse-twice": lambda: parse("dp:2,tp:2,dp:2", ["dp", "tp"]),
    "parse-too-many": lambda: parse("2,4,1", ["a", "b"]),
    "parse-three-parts": lambda: parse("dp:2:3,tp:4", ["dp", "tp"]),
    "parse-no-number": lambda: parse("dp:two,tp:4", ["dp", "tp"]),
    "parse-zero": lambda: parse("dp:0,tp:8", ["dp", "tp"]),
    "parse-two-unknown": lambda: parse("dp:-1,tp:-1", ["dp", "tp"]),
    "parse-product": lambda: parse("3,2", ["a", "b"]),
    "parse-number": lambda: parse(8, ["a"]),
    "parse-order": lambda: parse("8", ["a"], order="names first"),
    "parse-types-length": lambda: parse("2,4", ["a", "b"], axis_types=["auto"] * 3),
    "host-product": lambda: host_shape((2, 4), total_devices=4, num_processes=3),
    "host-no-devices": lambda: host_shape((2, 4), total_devices=0, num_processes=2),
    "host-unknown": lambda: host_shape((-1, 4), total_devices=4, num_processes=2),
    "host-half-a-process": lambda: host_shape((2, 4), total_devices=4, num_processes=2.0),
    "cpu-mesh-product": lambda: automesh.create_cpu_mesh((3, 2), ("a", "b")),
}


def place(batch: Any, **more: Any) -> Any:
    """A batch on the mesh data:4, model:2."""
    return automesh.host_to_global_device_array(batch, mesh=data4_model2(), **more)


def data4_model2() -> Any:
    return create_mesh((4, 2), ("data", "model"))


def on_columns() -> Any:
    """An array that is split along its columns."""
    spec = jax.sharding.PartitionSpec(None, "data")
    return jax.device_put(np.ones((4, 8)), jax.sharding.NamedSharding(data4_model2(), spec))


fetch: Any = automesh.global_to_host_array
BATCHES: Mapping[str, Wrong] = {
    "batch-without-mesh": lambda: automesh.input_partition_spec(),
    "batch-mesh-is-text": lambda: automesh.input_partition_spec(mesh="data:8"),  # pyright: ignore
    "batch-axis-unknown": lambda: place(np.ones(8), batch_axis_names="dta"),
    "batch-axis-is-number": lambda: place(np.ones(8), batch_axis_names=5),
    "batch-traced": lambda: jax.jit(place)({"tokens": np.ones((8, 2))}),
    "batch-axis-twice": lambda: place(np.ones(8), batch_axis_names=("data", "data")),
    "batch-rows": lambda: place({"tokens": np.ones((12, 2))}),
    "batch-no-rows": lambda: place({"tokens": np.ones((0, 2))}),
    "batch-scalar": lambda: place({"count": 3}),
    "batch-text": lambda: place({"name": "train"}),
    "batch-partition": lambda: place(np.ones(8), partition="full"),
    "fetch-list": lambda: fetch({"tokens": [1, 2]}),
    "fetch-traced": lambda: jax.jit(fetch)({"w": np.ones(8)}),
    "fetch-columns": lambda: fetch({"w": on_columns()}),
    "fetch-split-as-replicated": lambda: fetch(
        place(np.ones(8)), partition=automesh.DataPartitionType.REPLICATED
    ),
    "fetch-scalar": lambda: fetch(jax.numpy.ones(())),
}


def constrain(spec: Any, array: Any = None) -> Any:
    """A constraint on an array of shape (8, 6), where the mesh is data:4, model:2."""
    held = np.ones((8, 6)) if array is None else array
    return automesh.with_sharding_constraint(jax.numpy.asarray(held), spec, mesh=data4_model2())


def create_mesh_of_one() -> Any:
    return on(cpus(1), (1, 1))


unchecked: Any = automesh.with_sharding_constraint
P = jax.sharding.PartitionSpec
CONSTRAINTS: Mapping[str, Wrong] = {
    "constraint-unknown-axis": lambda: constrain(P("dta")),
    "constraint-twice": lambda: constrain(P("data", "data")),
    "constraint-does-not-divide": lambda: constrain(P(None, "data")),
    "constraint-too-many": lambda: constrain(P("data", None, "model")),
    "constraint-is-text": lambda: constrain("data"),
    "constraint-tree": lambda: constrain({"w": P("data")}),
    "constraint-no-array": lambda: unchecked({"name": "s"}, P(), mesh=data4_model2()),
    "constraint-is-number-without-mesh": lambda: unchecked(np.ones(8), 5),
    "constraint-one-device": lambda: unchecked(np.ones(8), P("nope"), mesh=create_mesh_of_one()),
    "constraint-abstract-mesh": lambda: unchecked(
        np.ones(8), P("data"), mesh=data4_model2().abstract_mesh
    ),
}

CALLS: Mapping[str, Wrong] = {
    **SHAPES,
    **CONFIGS,
    **PRESETS,
    **CREATION,
    **BATCHES,
    **CONSTRAINTS,
    **PARTITION,
}


def said(name: str) -> str:
    """What the call says, as the golden file has it; `nothing` if it is not refused."""
    with cpu_world(8):
        try:
            CALLS[name]()
        except UsageError as error:
            kind = f" [{type(error).__name__}]" if type(error) is not UsageError else ""
            return "\n  ".join([f"{name}{kind}", *str(error).splitlines()])
    return f"{name}\n  nothing"


def all_said() -> str:
    """The golden file."""
    return "\n".join(f"{said(name)}\n" for name in CALLS)


def write() -> None:
    """Writes the golden file anew."""
    assert len(jax.devices()) >= 8
    GOLDEN.write_text(all_said(), encoding="utf-8")
