"""A step, stored as a script's first run stores it, and the same step built on a mesh (jax)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from automesh.mesh.axes import MeshAxis
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import (
    AxisSplit,
    Capture,
    CarriedBy,
    ScriptMesh,
    ScriptStep,
    SourceLine,
    split_mesh,
)
from automesh.program.capture.step_call import TracedCall, place_of, trace, workload_of
from automesh.program.carry.build import carried_build
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.stored_step import LARGEST_STORED_BYTES, StoredStep, store
from automesh.program.lower.any_step import lower_any
from automesh.program.nouns import Entry
from automesh.program.script.build import Built, build_on
from tests.support.paths import ROOT

# What the code of a script does on its mesh: the jitted function, its arguments and keyword ones.
Make = Callable[[Mesh], tuple[Any, tuple[Any, ...], dict[str, Any]]]
Sizes = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step on one mesh.

    Attributes:
      sizes: of the mesh of the script.
      kind: of all its axes: `auto` or `explicit`; a mesh with explicit axes is in force.
      enters: whether the script calls the step inside of `with mesh:`.
      settings: with which the step's function is jitted again, from which it is stored; None if
        it is stored as its trace alone.
    """

    make: Make
    sizes: Sizes
    kind: str = "auto"
    enters: bool = False
    settings: dict[str, Any] | None = None

    def mesh(self, sizes: Sizes | None = None) -> Mesh:
        sizes = sizes or self.sizes
        types = (AxisType.Explicit if self.kind == "explicit" else AxisType.Auto,) * len(sizes)
        count = int(np.prod(list(sizes.values())))
        return jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=types, devices=jax.devices()[:count]
        )

    def call(self, mesh: Mesh) -> TracedCall:
        with self._in_force(mesh):
            jitted, args, kwargs = self.make(mesh)
            function = jitted if self.settings is None else jitted.__wrapped__
            call = Call(
                jitted=jitted,
                args=args,
                kwargs=kwargs,
                run=lambda: None,
                function=function,
                settings=self.settings,
            )
            return trace(call)

    def _in_force(self, mesh: Mesh) -> AbstractContextManager[Any]:
        if self.enters:
            return mesh
        return jax.set_mesh(mesh) if self.kind == "explicit" else nullcontext()

    def stored(self, folder: Path, *, with_values: bool = True) -> StoredStep:
        """Stores the step of the script's own mesh."""
        own = self.mesh()
        call = self.call(own)
        placed = [place_of(leaf) for leaf in call.leaves]
        return store(
            call,
            folder,
            own=own,
            placed=placed,
            most_bytes=LARGEST_STORED_BYTES if with_values else 0,
        )

    def entry(
        self,
        folder: Path,
        *,
        without_arrays: bool = True,
        splits: tuple[AxisSplit, ...] = (),
        by: CarriedBy = "trace",
        location: str = "/home/me/train.py",
    ) -> Entry:
        """A script whose step is in the folder."""
        line = SourceLine(file=location, line=1)
        mesh = ScriptMesh(
            axes=tuple(self.sizes.items()),
            axis_types=(self.kind,) * len(self.sizes),
            made_at=line,
        )
        step = ScriptStep(name="train_step", defined_at=line, called_at=line, argument_bytes=1)
        capture = Capture(
            mesh=mesh,
            step=step,
            splits=splits,
            folder=str(folder),
            carried_by=by,
            without_arrays=without_arrays,
        )
        return Entry(kind="script", location=location, function="train_step", capture=capture)

    def built(self, build: Any, sizes: Sizes, splits: tuple[AxisSplit, ...] = ()) -> Built:
        axes = tuple(MeshAxis(name=name, ici=size) for name, size in sizes.items())
        line = SourceLine()
        own = ScriptMesh(
            axes=tuple(self.sizes.items()),
            axis_types=(self.kind,) * len(self.sizes),
            made_at=line,
        )
        count = int(np.prod(list(sizes.values())))
        return build_on(
            build,
            axes,
            axis_types=split_mesh(own, splits).axis_types,
            devices=jax.devices()[:count],
        )

    def carried(self, folder: Path, sizes: Sizes, **more: Any) -> Built:
        """The stored step on a mesh."""
        entry = self.entry(folder, **more)
        build = carried_build(entry, refused, is_strict=True)
        return self.built(build, sizes, more.get("splits", ()))

    def real(self, folder: Path, sizes: Sizes) -> Built:
        """The step as the script makes it on a mesh."""
        capture = self.entry(folder).capture
        assert capture is not None

        def build(mesh: Mesh) -> Any:
            return workload_of(self.call(mesh), capture, mesh)

        return self.built(build, sizes)


def refused(why: str) -> Any:
    """In place of what runs a script."""
    raise CannotCarry(why)


def text(built: Built) -> str:
    """The program of a step, as it is compared."""
    program = lower_any(built)
    return "\n".join(line.text for line in program.lines()) + program.fingerprint(())


def places(built: Built) -> list[Any]:
    """Shape, type and sharding of each leaf of the arguments."""
    found: list[Any] = []
    for leaf in jax.tree.leaves((built.workload.args, dict(built.workload.kwargs))):
        at = getattr(leaf, "sharding", None)
        named = (at.mesh, _whole(at, np.ndim(leaf))) if isinstance(at, NamedSharding) else None
        found.append((np.shape(leaf), str(jax.numpy.result_type(leaf)), named))
    return found


def _whole(at: NamedSharding, ndim: int) -> tuple[Any, ...]:
    """Names per dimension; those of size 1 say nothing."""
    found: list[Any] = []
    for part in (*at.spec, *(None,) * (ndim - len(at.spec))):
        names = part if isinstance(part, tuple) else () if part is None else (part,)
        found.append(tuple(name for name in names if at.mesh.shape[name] > 1))
    return tuple(found)


def carried_scripts(what: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Does a job of `tests.support.jobs.carried_scripts` on eight CPU devices; returns what it
    prints, by script."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.jobs.carried_scripts", what, str(folder)],
        cwd=ROOT,
        env=dict(os.environ) | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
