"""What starts the agents of the searches that are killed: this machine, Ray, SLURM."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.kill_fleet.blows import Launch, Sign, Victim
from benchmarks.support.paths import ROOT
from tests.support import ray, slurm

_ENGINE = ("--hosts", "2", "--listen", "127.0.0.1", "--launch")


class Cluster(Protocol):
    """Two hosts.

    Attributes:
      options: of a search that uses them.
      variables: of its environment.
    """

    @property
    def options(self) -> tuple[str, ...]: ...
    @property
    def variables(self) -> Mapping[str, str]: ...
    def strike(self, victim: Victim, sign: Sign) -> None:
        """Strikes what the engine calls a node or a step; returns at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Two agents of the search itself; what is struck there are processes."""

    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    def strike(self, victim: Victim, sign: Sign) -> None:
        """See `Cluster`."""
        raise ValueError(f"there is no {victim} here to get SIG{sign}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """A cluster of Ray; a node that dies is replaced."""

    cluster: ray.RayCluster
    options: tuple[str, ...] = (*_ENGINE, "ray")

    @property
    def variables(self) -> Mapping[str, str]:
        """See `Cluster`."""
        return {"RAY_ADDRESS": self.cluster.address, "PYTHONPATH": str(ROOT)}

    def strike(self, victim: Victim, sign: Sign) -> None:
        """See `Cluster`."""
        if (victim, sign) != ("node", "KILL"):
            raise ValueError(f"a {victim} of Ray cannot get SIG{sign}")
        self.cluster.replace_node()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A SLURM; a search on its login node asks it for both of its nodes."""

    variables: Mapping[str, str]
    options: tuple[str, ...] = (*_ENGINE, "slurm")

    def strike(self, victim: Victim, sign: Sign) -> None:
        """See `Cluster`."""
        if victim != "step":
            raise ValueError(f"SLURM knows no {victim}")
        asked = ["squeue", "--noheader", "--name=automesh", "--states=RUNNING", "--format=%A"]
        said = subprocess.run(
            asked, env=dict(self.variables), capture_output=True, text=True, check=True
        )
        for job in said.stdout.split():
            subprocess.run(
                ["scancel", f"--signal={sign}", f"{job}.0"], env=dict(self.variables), check=True
            )


@contextmanager
def cluster_of(launch: Launch) -> Generator[Cluster]:
    """Two hosts, while the body runs.

    Raises:
      OSError: they cannot be started.
    """
    if launch == "ray":
        with ray.ray_cluster() as cluster:
            yield Ray(cluster=cluster)
    elif launch == "slurm":
        with (
            tempfile.TemporaryDirectory() as folder,
            slurm.slurm_cluster(Path(folder)) as variables,
        ):
            yield Slurm(variables={**variables, "PYTHONPATH": str(ROOT)})
    else:
        yield Local(variables={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]})


def missing() -> dict[Launch, str]:
    """The engines that are not installed here, and how that would be mended."""
    found: dict[Launch, str] = {}
    if ray.IS_MISSING:
        found["ray"] = ray.WHY_NOT
    if slurm.MISSING:
        found["slurm"] = slurm.WHY_NOT
    return found
