"""Random rules for each framework, and what its documentation makes of an exported text.

The readers below are stand-ins for the frameworks: written from each one's documented schema, whose
version stands beside it, they share no code with `automesh.report.export`.
`plugins/frameworks/tests/exports/test_own_parsers.py` asks the frameworks themselves where they are
installed.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import yaml
from hypothesis import strategies as st

from automesh.mesh.config import MeshConfig, Rules
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.shape import HybridMeshShape

Sizes = dict[str, tuple[int, int]]
"""Axis, in the framework's words -> its size inside a granule, and between granules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a framework would train with."""

    sizes: Sizes
    remat: object = None
    accumulation: int = 0
    global_batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class On:
    """The devices that a framework finds when it trains."""

    num_devices: int
    num_granules: int
    selector: str = ""


def used(sizes: Sizes) -> Sizes:
    """Without axes of size 1."""
    return {name: size for name, size in sizes.items() if size != (1, 1)}


def filled(sizes: Sizes, on: On) -> Sizes:
    """With every -1 inferred, at most one inside granules and one between them."""
    ici = _filled([size for size, _ in sizes.values()], on.num_devices // on.num_granules)
    dcn = _filled([size for _, size in sizes.values()], on.num_granules)
    return dict(zip(sizes, zip(ici, dcn, strict=True), strict=True))


def _filled(sizes: Sequence[int], total: int) -> list[int]:
    assert sizes.count(-1) <= 1
    known = math.prod(size for size in sizes if size != -1)
    found = [total // known if size == -1 else size for size in sizes]
    assert math.prod(found) == total, (sizes, total)
    return found


AXES: dict[str, Mapping[str, str]] = {
    "maxtext": {
        "pp": "pipeline", "dp": "data", "fsdp": "fsdp", "fsdp2": "fsdp_transpose",
        "sp": "context", "ep": "expert", "tp": "tensor",
    },
    "axlearn": {
        "pp": "pipeline", "dp": "data", "ep": "expert", "fsdp": "fsdp", "sp": "seq", "tp": "model",
    },
    "levanter": {"dp": "replica", "fsdp": "data", "tp": "model"},
    "easydel": {name: name for name in ("dp", "fsdp", "ep", "tp", "sp")},
    "tunix": {"fsdp": "fsdp", "tp": "tp"},
    "loadax": {name: name for name in ("dp", "fsdp", "ep", "tp", "sp")},
    "json": {name: name for name in ("dp", "fsdp", "ep", "tp", "sp")},
}  # fmt: skip
REMAT: dict[str, Mapping[str, object]] = {
    "maxtext": {"none": "none", "full": "full", "dots": "minimal", "custom": "custom"},
    "axlearn": {
        "none": None,
        "full": "nothing_saveable",
        "dots": "dots_with_no_batch_dims_saveable",
        "dots_saveable": "dots_saveable",
    },
    "levanter": {"none": False, "full": True, "offload": "offload"},
    "easydel": {
        "none": "",
        "full": "nothing_saveable",
        "dots": "dots_with_no_batch_dims_saveable",
    },
    "tunix": {"none": 1, "block": 2, "full": 3},
    "loadax": {},
    "json": {"none": "none", "full": "full", "any-thing": "any-thing"},
}  # fmt: skip
TARGETS = ("tpu-v5p-128", "tpu-v5litepod-256-4", "gpu-a3-megagpu-8g-64", "cpu-8", "tpu-(a|b)-.*")
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "xla_tpu_enable_async_collective_fusion": st.booleans(),
    "xla_tpu_scoped_vmem_limit_kib": st.integers(0, 10**6),
    "xla_tpu_memory_model": st.sampled_from(("auto", "all=1,b=2")),
}
# Their meshes have one size for each axis, none between granules.
WITHOUT_GRANULES = ("tunix",)
# The others have no key for them: they stand in a comment.
WITH_OPTIONS = ("maxtext", "json")
BATCH_AXES = {
    "maxtext": ("dp", "fsdp", "fsdp2", "ep"),
    "axlearn": ("dp", "ep", "fsdp"),
    "levanter": ("dp", "fsdp"),
    "easydel": ("dp", "fsdp"),
    "tunix": ("fsdp",),
    "loadax": ("dp", "fsdp"),
    "json": ("dp", "fsdp"),
}


@st.composite
def rules_for(draw: st.DrawFn, framework: str) -> Rules:
    """One rule that the framework can say, with a batch that its devices share."""
    names = list(AXES[framework])
    axes = draw(st.permutations(names)) if framework != "easydel" else names
    size = st.sampled_from((1, 1, 2, 3, 4, 5, 8, 16))
    ici = [draw(size) for _ in axes]
    dcn = [1] * len(axes)
    if framework == "easydel":
        # Only along the axis that eformer divides: no axis before it is a multiple of the granules.
        along, granules = draw(st.integers(0, 4)), draw(st.sampled_from((1, 2, 4)))
        dcn[along] = granules
        ici = [1 if i < along and one % granules == 0 else one for i, one in enumerate(ici)]
    elif framework not in WITHOUT_GRANULES:
        dcn = [draw(st.sampled_from((1, 1, 1, 2, 4))) for _ in axes]
    knobs: dict[str, Any] = {}
    if REMAT[framework] and draw(st.booleans()):
        knobs["remat"] = draw(st.sampled_from(list(REMAT[framework])))
    if framework not in ("loadax", "json") and draw(st.booleans()):
        steps = draw(st.sampled_from((1, 2, 4)))
        knobs["microbatches"] = steps
        knobs["batch"] = math.prod(ici) * math.prod(dcn) * steps * draw(st.sampled_from((1, 3)))
    options: dict[str, Any] = {}
    if draw(st.integers(0, 3)) == 0:
        options = draw(st.fixed_dictionaries({}, optional=OPTIONS))
    match = draw(st.sampled_from(TARGETS))
    if framework == "easydel" and max(dcn) > 1:
        match = "tpu-v5p-128"
    rule = MeshRule(
        match=match,
        mesh_shape=HybridMeshShape(ici, dcn),
        knobs=knobs,
        compiler_options=options,
    )
    return Rules(axes=tuple(axes), batch_axes=BATCH_AXES[framework], rules=(rule,))


def sizes_of(rules: Rules) -> Sizes:
    """Of the first rule, by automesh's names."""
    shape = rules.rules[0].hybrid_shape
    pairs = zip(shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True)
    return used(dict(zip(rules.axes_of(rules.rules[0]), pairs, strict=True)))


def read_maxtext(text: str, on: On) -> Read:
    """maxtext 0.2.5: `base.yml` gives what is left out, `types.py` the batch."""
    axes = [
        *("diloco", "data", "pipeline", "fsdp", "fsdp_transpose", "sequence", "context"),
        *("context_usp_ulysses", "context_autoregressive", "tensor", "tensor_sequence"),
        *("expert", "autoregressive"),
    ]
    base: dict[str, Any] = {
        f"{net}_{axis}_parallelism": 1 for net in ("ici", "dcn") for axis in axes
    }
    base |= {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}
    base |= {"remat_policy": None, "per_device_batch_size": 0, "gradient_accumulation_steps": 1}
    said = yaml.safe_load(text)
    assert said.keys() <= base.keys() | {"compile_xla_flags", "shard_mode"}
    # Every key of the mesh is written.
    assert {key for key in base if key.endswith("parallelism")} <= said.keys()
    whole = base | said
    sizes = {
        axis: (whole[f"ici_{axis}_parallelism"], whole[f"dcn_{axis}_parallelism"]) for axis in axes
    }
    assert sizes.pop("sequence") == (1, 1)
    assert -1 not in sizes["pipeline"], "it asks for sizes above 1"
    steps = whole["gradient_accumulation_steps"]
    rows = int(on.num_devices * whole["per_device_batch_size"])
    assert rows % math.prod(sizes["pipeline"]) == 0
    return Read(
        sizes=filled(sizes, on),
        remat=whole["remat_policy"],
        accumulation=steps,
        global_batch=rows * steps,
    )


def read_levanter(text: str, on: On) -> Read:
    """marin-levanter 0.2.227: `utils/mesh.py` and `trainer.py`."""
    tree = yaml.safe_load(text)
    trainer = tree["trainer"]
    mesh = trainer["mesh"]
    axes = {"data": -1, "replica": 1, "model": 1} | mesh["axes"]
    dcn = {"replica_dcn": -1} | mesh["dcn_axes"]
    assert not axes.keys() & dcn.keys(), "a name in both is refused"
    assert set(axes) == set(mesh["axes"]) and set(dcn) == set(mesh["dcn_axes"])
    sizes: Sizes = {name: (size, 1) for name, size in axes.items()}
    for name, size in dcn.items():
        base = name.removesuffix("_dcn")
        sizes[base] = (sizes[base][0], size)
    compute = {"batch": ["replica_dcn", "replica", "data"], "mlp": ["model"], "heads": ["model"]}
    params = {"embed": ["data"], "mlp": ["model"], "heads": ["model"]}
    for part in ("shared_mapping", "compute_mapping"):
        compute |= mesh.get(part, {})
    for part in ("shared_mapping", "param_mapping"):
        params |= mesh.get(part, {})
    sizes = filled(sizes, on)
    # What lies between slices splits the same arrays as what lies inside.
    if sizes["data"][1] > 1:
        assert params["embed"] == ["data_dcn", "data"]
        assert compute["batch"] == ["replica_dcn", "replica", "data_dcn", "data"]
    if sizes["model"][1] > 1:
        assert params["mlp"] == compute["heads"] == ["model_dcn", "model"]
    rows, batch = trainer.get("per_device_parallelism", -1), trainer.get("train_batch_size", 0)
    ways = math.prod(math.prod(sizes[name]) for name in ("replica", "data"))
    rows = batch // ways if rows == -1 else rows
    if batch:
        assert rows > 0 and batch % (rows * ways) == 0
    return Read(
        sizes=sizes,
        remat=tree.get("model", {}).get("gradient_checkpointing"),
        accumulation=batch // (rows * ways) if batch else 0,
        global_batch=batch,
    )


def read_easydel(text: str, on: On) -> Read:
    """easydel 0.3.0 `infra/base_config.py`, eformer 0.0.101 `escale/mesh/creation.py`."""
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        assert isinstance(node, ast.Assign)
        found |= ast.literal_eval(node.value)
    dims, dcn = found["sharding_axis_dims"], found["sharding_dcn_axis_dims"]
    sizes = eformer_sizes(dims, dcn, on)
    steps = found.get("gradient_accumulation_steps", 1)
    return Read(
        sizes=dict(zip(found["sharding_axis_names"], sizes, strict=True)),
        remat=found.get("gradient_checkpointing"),
        accumulation=steps,
        # `BaseTrainer.training_batch_size`.
        global_batch=found.get("total_batch_size", 0) * steps,
    )


def eformer_sizes(dims: Sequence[int], dcn: Sequence[int] | None, on: On) -> list[tuple[int, int]]:
    """What eformer makes of the sizes."""
    dims = _filled(dims, on.num_devices)
    if on.num_granules == 1:
        return [(dim, 1) for dim in dims]
    divided = next(index for index, dim in enumerate(dims) if dim % on.num_granules == 0)
    inside = [dim // on.num_granules if i == divided else dim for i, dim in enumerate(dims)]
    if dcn is None:
        return [(size, dim // size) for size, dim in zip(inside, dims, strict=True)]
    return list(zip(inside, _filled(dcn, on.num_granules), strict=True))


def read_tunix(text: str, on: On) -> Read:
    """google-tunix 0.1.7: `cli/config.py`, `cli/utils/model.py`, `sft/peft_trainer.py`."""
    tree = yaml.safe_load(text)
    mesh = tree["model_config"]["mesh"]
    shape, names = ast.literal_eval(mesh["shape"]), ast.literal_eval(mesh["axis_names"])
    assert isinstance(shape, tuple) and isinstance(names, tuple)
    # Nothing is inferred there.
    assert math.prod(shape) == on.num_devices and min(shape) > 0
    steps = tree.get("training_config", {}).get("gradient_accumulation_steps", 0)
    return Read(
        sizes={name: (size, 1) for name, size in zip(names, shape, strict=True)},
        remat=tree["model_config"].get("remat_config"),
        accumulation=steps,
        global_batch=tree.get("batch_size", 0) * (steps or 1),
    )


def _policy_name(policy: object) -> str:
    """What jax calls a policy of its own; those of jax 0.10.2 do not know their names."""
    import jax

    policies = vars(jax.checkpoint_policies)
    return max(name for name, one in policies.items() if one is policy)


def read_axlearn(text: str, on: On) -> Read:
    """AXLearn 34aed43c of July 2026, whose package index has only one of 2024: a stand-in for three
    of its modules records what the text asks for."""
    module = run_python(text, _axlearn_stand_in())
    chain = next(rule for match, rule in module["mesh_rules"] if re.fullmatch(match, on.selector))
    kinds = {one.owner: one.values for one in chain.values["config_modifiers"]}
    shape = kinds["MeshShapeModifier"]["mesh_shape"]
    pairs = zip(shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True)
    policies = kinds.get("RematSpecModifier", {}).get("remat_policies", {})
    spec: Any
    (spec,) = policies.values() or ["nothing"]
    return Read(
        sizes=filled(dict(zip(module["mesh_axis_names"], pairs, strict=True)), on),
        remat=spec if spec in (None, "nothing") else _policy_name(spec["policy"]),
        accumulation=kinds.get("GradientAccumulationModifier", {}).get("grad_acc_steps", 1),
    )


@dataclass
class _Config:
    owner: str
    values: dict[str, Any]

    def set(self, **values: Any) -> _Config:
        return _Config(self.owner, self.values | values)


def _axlearn_stand_in() -> dict[str, ModuleType]:
    modifiers = ModuleType("axlearn.common.trainer_config_modifier")
    for name in (
        "ChainConfigModifier",
        "MeshShapeModifier",
        "RematSpecModifier",
        "GradientAccumulationModifier",
    ):
        kind = type(name, (), {"default_config": staticmethod(lambda name=name: _Config(name, {}))})
        setattr(modifiers, name, kind)
    utils = ModuleType("axlearn.common.utils")
    utils.HybridMeshShape = HybridMeshShape  # pyright: ignore
    layers = ModuleType("axlearn.common.base_layer")
    layers.RematSpec = dict  # pyright: ignore
    parents = {name: ModuleType(name) for name in ("axlearn", "axlearn.common")}
    return parents | {module.__name__: module for module in (modifiers, utils, layers)}


def read_loadax(text: str, on: On) -> Read:
    """loadax 05fcde76 `sharding/mesh_shape.py`, whose classes automesh has under their names."""
    shapes = ModuleType("loadax.sharding.mesh_shape")
    shapes.HybridMeshShape, shapes.MeshConfig = HybridMeshShape, _LoadaxConfig  # pyright: ignore
    parents = {name: ModuleType(name) for name in ("loadax", "loadax.sharding")}
    config = run_python(text, parents | {shapes.__name__: shapes})["mesh_config"]
    assert config.mesh_rules[0][1] == config.mesh_shape
    # The beginning of a selector is enough there.
    shape = next(shape for match, shape in config.mesh_rules if re.match(match, on.selector))
    whole = [match for match, _ in config.mesh_rules if ".*" not in match]
    assert not any(re.match(match, f"{on.selector}-2") for match in whole)
    pairs = zip(shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True)
    return Read(sizes=filled(dict(zip(config.mesh_axis_names, pairs, strict=True)), on))


@dataclass
class _LoadaxConfig:
    mesh_shape: HybridMeshShape
    mesh_axis_names: Sequence[str]
    batch_axis_names: str | Sequence[str] = "data"
    mesh_rules: Sequence[tuple[str, HybridMeshShape]] | None = None

    def __post_init__(self) -> None:
        MeshConfig(
            mesh_shape=self.mesh_shape,
            mesh_axis_names=self.mesh_axis_names,
            batch_axis_names=self.batch_axis_names,
        )


def run_python(text: str, modules: Mapping[str, ModuleType]) -> dict[str, Any]:
    """Runs a text that we have written ourselves, with stand-ins for what it imports."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        found: dict[str, Any] = {}
        exec(compile(text, "exported", "exec"), found)
        return found
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


READERS: dict[str, Callable[[str, On], Read]] = {
    "maxtext": read_maxtext,
    "axlearn": read_axlearn,
    "levanter": read_levanter,
    "easydel": read_easydel,
    "tunix": read_tunix,
    "loadax": read_loadax,
}
