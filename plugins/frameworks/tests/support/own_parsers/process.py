"""The process that reads with a framework's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plugins.frameworks.tests.support.cases.exports import Read
from plugins.frameworks.tests.support.own_parsers.sources import file_of
from tests.support.paths import ROOT

# The files that must be there, and one definition that tells a version that is meant.
NEEDED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "maxtext": (
        ("maxtext", "configs/pyconfig.py", "def initialize_pydantic"),
        ("omegaconf", "__init__.py", ""),
        ("pathwaysutils", "__init__.py", ""),
    ),
    "levanter": (
        ("levanter", "utils/mesh.py", "class MeshConfig"),
        ("draccus", "__init__.py", ""),
    ),
    "easydel": (
        ("eformer", "escale/mesh/creation.py", "dcn_mesh_dims"),
        ("easydel", "trainers/base_trainer.py", "def training_batch_size"),
        ("contextlib2", "__init__.py", ""),
    ),
    "tunix": (
        ("tunix", "cli/config.py", "def parse_mesh_config"),
        ("omegaconf", "__init__.py", ""),
    ),
    "axlearn": (
        ("axlearn", "common/trainer_config_modifier.py", "class GradientAccumulationModifier"),
    ),
    "loadax": (("loadax", "sharding/mesh_shape.py", "class MeshConfig"),),
}


def missing(name: str) -> str:
    """What a framework's own reading lacks here; empty if it is all there."""
    for package, path, definition in NEEDED[name]:
        file = file_of(package, path)
        if file is None or definition not in file.read_text():
            return f"{package}/{path}"
    return ""


@dataclass(kw_only=True)
class OwnParser:
    """A framework's own code in a process of its own."""

    name: str
    process: subprocess.Popen[str] | None = None

    def read(
        self,
        text: str,
        *,
        selector: str = "",
        num_devices: int,
        num_granules: int,
        words: Sequence[str] = (),
    ) -> Read:
        """What the framework would train with.

        Args:
          words: more arguments of the command that trains (MaxText's).

        Raises:
          AssertionError: it refuses the text.
        """
        process = self.process = self.process or self._start()
        assert process.stdin and process.stdout
        order = {
            "text": text,
            "selector": selector,
            "num_devices": num_devices,
            "num_granules": num_granules,
            **({"words": list(words)} if words else {}),
        }
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the process of {self.name} has ended"
        answer: dict[str, Any] = json.loads(line)
        assert "refused" not in answer, f"{self.name}: {answer['refused']}\n{text}"
        sizes = {name: (ici, dcn) for name, (ici, dcn) in answer.pop("sizes").items()}
        return Read(sizes=sizes, **answer)

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-m", "plugins.frameworks.tests.support.own_parsers", self.name],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def end(self) -> None:
        if self.process is not None:
            self.process.communicate(timeout=600)
