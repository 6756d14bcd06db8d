"""An example whose arguments are made up on the devices: `--example dense_lm --size mid`.

The examples draw a model's first weights on the host, a quarter of a minute for a billion of them:
too long for every visit where devices are lent by the minute, and nothing to a step's time.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

import automesh

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

_PARSER = argparse.ArgumentParser()
_PARSER.add_argument("--example", required=True)
_EXAMPLE = importlib.import_module(_PARSER.parse_known_args()[0].example)


def build(mesh: Mesh, remat: str = "full", microbatches: int = 1) -> automesh.Workload:
    """As the example's own."""
    workload = _EXAMPLE.build(mesh, remat=remat, microbatches=microbatches)
    return replace(workload, init=None)
