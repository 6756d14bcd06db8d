"""Target configurations of GPUs: what they say, and that the CUDA plugin compiles with them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from automesh.hardware import absent_devices_of, parse_target
from automesh.hardware.chips import known_chips
from automesh.hardware.gpu_configurations import (
    configuration_of,
    configured_memory_bytes,
    known_configurations,
    read_configuration,
)

PLUGIN = any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))
KINDS = ("a100-40gb", "a100-80gb", "h100", "h200", "b200")

COMPILE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

for told, text in json.load(sys.stdin):
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name=told["gpu"], target_config=text, topology=told["topology"]
    ).devices
    mesh = Mesh(np.array(devices), ("dp",))
    rows = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("dp")))
    full = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def step(x, w):
        return jax.lax.with_sharding_constraint((x @ w).T @ x, NamedSharding(mesh, P()))

    compiled = jax.jit(step).lower(rows, full).compile(
        compiler_options={"xla_gpu_enable_triton_gemm": False}
    )
    text = compiled.as_text()
    print(json.dumps({
        "kinds": sorted({d.device_kind for d in devices}),
        "processes": [d.process_index for d in devices],
        "cublas": text.count("__cublas"),
        "all_reduce": "all-reduce" in text,
        "peak": compiled.memory_analysis().peak_memory_in_bytes,
    }))
"""


@pytest.mark.parametrize("name", known_configurations())
def test_figures_are_those_of_the_chip(name: str) -> None:
    chip, text = known_chips()[name], read_configuration(name)
    assert configuration_of(chip) == name
    said = dict(re.findall(r"^ *([a-z0-9_]+): (.+)$", text, re.MULTILINE))
    assert int(said["memory_bandwidth"]) == pytest.approx(chip.hbm_bytes_per_s, rel=1e-3)
    assert json.loads(said["device_description_str"]) in chip.device_kinds
    # Programs have a little less than the data sheet says, or more where it counts in GB of 1e9.
    assert configured_memory_bytes(name) == pytest.approx(chip.hbm_bytes, rel=0.08)
    # Dense bf16 over FP32 units x 2 x clock: 16 for A100, 14.8 for H100 and 30 for B200; 4 for the
    # chips of Ada, which has as many FP32 units for smaller tensor cores.
    simple = int(said["core_count"]) * int(said["fpus_per_core"]) * 2 * 1e9
    assert 3 < chip.flops_per_s / (simple * float(said["clock_rate_ghz"])) < 40
    assert all(line.isascii() and len(line) <= 100 for line in text.splitlines())


def test_there_is_one_for_each_kind_of_gpu_that_is_asked_for() -> None:
    assert set(KINDS) <= set(known_configurations())
    assert configuration_of(known_chips()["mi300x"]) == ""


def test_a_cluster_is_told_as_hosts_of_devices() -> None:
    one = absent_devices_of(parse_target("gpu-h100-64", {}).absent)
    assert (one.platform, one.topology, one.gpu) == ("gpu", "8x1x8", "h100")
    assert (one.num_devices, one.num_hosts, one.num_granules) == (64, 8, 8)
    assert one.memory_bytes == configured_memory_bytes("h100")
    assert (one.torus, one.wraps, one.host, one.chip_config) == ((), (), (), "")
    # Domains of NVLink, hosts of each, devices of each; smaller ones where 18 would not be filled.
    assert absent_devices_of(parse_target("gpu-gb200-72", {}).absent).topology == "1x18x4"
    assert absent_devices_of(parse_target("gpu-gb200-144", {}).absent).topology == "2x18x4"
    assert absent_devices_of(parse_target("gpu-gb200-80", {}).absent).topology == "10x2x4"
    assert absent_devices_of(parse_target("gpu-a100-40gb-4", {}).absent).topology == "1x1x4"
    assert absent_devices_of(parse_target("gpu-mi300x-8", {}).absent).gpu == ""


@pytest.mark.gpu
@pytest.mark.skipif(not PLUGIN, reason="needs the `gpu` extra: jax's CUDA plugin")
def test_the_plugin_compiles_with_each() -> None:
    told = [
        dataclasses.asdict(absent_devices_of(parse_target(f"gpu-{kind}-{count}", {}).absent))
        for kind in known_configurations()
        for count in (16,)
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps([(one, read_configuration(one["gpu"])) for one in told]),
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for one, answer in zip(told, answers, strict=True):
        assert answer["kinds"] == [one["device_kind"]]
        # Hosts are what tells granules apart.
        each = one["num_devices"] // one["num_hosts"]
        assert answer["processes"] == [index // each for index in range(one["num_devices"])]
        assert answer["cublas"] >= 1, f"no product of {one['gpu']} is handed to cuBLAS"
        assert answer["all_reduce"]
        assert answer["peak"] > 512 * 512 * 2
