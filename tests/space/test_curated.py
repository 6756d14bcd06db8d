"""The compiler options that come with automesh are taken by the compiler that they are for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from automesh.space.curated import curated_options
from automesh.space.space import DEFAULT_OPTION
from automesh.tuner.compile.rung import known_names
from automesh.worker.environment import environment
from automesh.worker.messages import Surroundings

# A topology of each generation that some option is for.
TOPOLOGIES = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore"}),
    "v5litepod": ("v5e:2x2", {}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:2x2", {}),
    "7x": ("tpu7x:2x2x1", {}),
}
COMPILING = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies

name, extra, options = json.loads(sys.argv[1])
devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **extra).devices
one = jax.sharding.SingleDeviceSharding(devices[0])
side = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=one)
lowered = jax.jit(lambda a, b: a @ b).lower(side, side)
for option, value in options:
    lowered.compile(compiler_options={option: value, "optimization_level": 9})
"""


@pytest.mark.tpu
def test_every_option_is_one_of_the_compiler() -> None:
    names = {one.name for one in curated_options() if one.platform == "tpu"}
    assert names <= known_names()


@pytest.mark.tpu
@pytest.mark.parametrize("slug", TOPOLOGIES)
def test_every_value_is_taken_for_its_generation(slug: str) -> None:
    options = [
        (one.name, value)
        for one in curated_options()
        if one.platform == "tpu" and (not one.generations or slug in one.generations)
        for value in one.values
        if value != DEFAULT_OPTION
    ]
    assert options
    variables = (("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"), ("TPU_SKIP_MDS_QUERY", "1"))
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, json.dumps([*TOPOLOGIES[slug], options])],
        env=environment(os.environ, Surroundings(platforms="cpu", variables=variables)),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_few_options_for_each_generation() -> None:
    """Every value doubles the plans to compile."""
    for slug in TOPOLOGIES:
        mine = [
            one
            for one in curated_options()
            if one.platform == "tpu" and (not one.generations or slug in one.generations)
        ]
        assert len([one for one in mine if not one.slices]) <= 3
        assert all(len(one.values) == 2 for one in mine)
