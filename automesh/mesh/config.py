"""`MeshConfig`, which a training script makes its mesh from, and `Rules`, which select it."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.evidence import NO_EVIDENCE, Evidence, StaleEvidenceWarning, differences
from automesh.mesh.rules import MeshRule, explain_match, first_match
from automesh.mesh.settings import NO_SETTINGS, Settings
from automesh.mesh.shape import HybridMeshShape, MeshShape, check_sizes

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """A mesh for any number of devices, with the settings that go with it.

    Attributes:
      mesh_shape: sizes of the axes, over ICI and DCN or in all; in each at most one is -1.
      mesh_axis_names: one name for each size.
      batch_axis_names: axes that the rows of a batch are split over.
      mesh_rules: other meshes for named targets, see `select`.
      knobs: keyword arguments for `build`.
      compiler_options: for `compile`.
      evidence: what the choice rests on.

    Raises:
      UsageError: sizes or names do not fit each other.
    """

    mesh_shape: MeshShape
    mesh_axis_names: tuple[str, ...]
    batch_axis_names: tuple[str, ...] = ()
    mesh_rules: tuple[MeshRule, ...] = ()
    knobs: Settings = NO_SETTINGS
    compiler_options: Settings = NO_SETTINGS
    evidence: Evidence = NO_EVIDENCE

    def __post_init__(self) -> None:
        # Strings, lists and dicts are taken too; what is kept can be hashed.
        batch = self.batch_axis_names
        object.__setattr__(self, "mesh_axis_names", tuple(self.mesh_axis_names))
        object.__setattr__(
            self, "batch_axis_names", (batch,) if isinstance(batch, str) else tuple(batch)
        )
        object.__setattr__(self, "mesh_rules", tuple(self.mesh_rules))
        object.__setattr__(self, "knobs", Settings(self.knobs))
        object.__setattr__(self, "compiler_options", Settings(self.compiler_options))
        if not isinstance(self.mesh_shape, HybridMeshShape):
            object.__setattr__(self, "mesh_shape", tuple(self.mesh_shape))
            check_sizes(tuple(self.mesh_shape))
        check_names(self.mesh_axis_names, self.batch_axis_names)
        for shape in (self.mesh_shape, *(rule.mesh_shape for rule in self.mesh_rules)):
            if len(shape) != len(self.mesh_axis_names):
                raise UsageError(
                    f"mesh shape {shape} has {len(shape)} sizes for the "
                    f"{len(self.mesh_axis_names)} axes {list(self.mesh_axis_names)}"
                )

    def select(self, selector: str) -> MeshConfig:
        """This config with the mesh of its first own rule that matches; itself if none does."""
        index = first_match(self.mesh_rules, selector)
        return self._with(self.mesh_rules[index]) if index < len(self.mesh_rules) else self

    def create_device_mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Infers every -1 and lays the mesh out on all devices (this imports jax).

        Args:
          devices: jax devices; default: all of the default backend.

        Raises:
          UsageError: the sizes do not multiply to the number of devices.
        """
        return _jax_half().create_mesh_of_shape(
            self.mesh_shape, self.mesh_axis_names, devices=devices
        )

    @property
    def hosts(self) -> int:
        """Number of jax processes in the job (this imports jax)."""
        return _jax_half().count_hosts()

    @property
    def host_id(self) -> int:
        """Index of this jax process (this imports jax)."""
        return _jax_half().this_host()

    def _with(self, rule: MeshRule) -> MeshConfig:
        return replace(
            self,
            mesh_shape=rule.mesh_shape,
            knobs=rule.knobs,
            compiler_options=rule.compiler_options,
            evidence=rule.evidence,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a rules file says.

    Attributes:
      axes: names of the mesh axes of every rule, in order.
      batch_axes: axes that the rows of a batch are split over.
      rules: the first that matches wins.
    """

    axes: tuple[str, ...]
    batch_axes: tuple[str, ...] = ()
    rules: tuple[MeshRule, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.axes, self.batch_axes)
        for rule in self.rules:
            if len(rule.mesh_shape) != len(self.axes):
                raise UsageError(f"rule `{rule.match}` does not have a size for each axis")

    def select(self, selector: str, *, default: MeshConfig | None = None) -> MeshConfig:
        """The config of the first rule whose `match` matches the whole of `selector`.

        Warns with `StaleEvidenceWarning` if versions or environment differ from the evidence.

        Args:
          selector: name of a target, such as `tpu-v5p-128` or `cpu-8`.
          default: what to return if no rule matches.

        Raises:
          UsageError: no rule matches and there is no default; lists the rules and why each failed.
        """
        index = first_match(self.rules, selector)
        if index == len(self.rules):
            if default is not None:
                return default
            raise UsageError(self._no_match(selector), hint=_NO_MATCH_HINT)
        rule = self.rules[index]
        stale = differences(rule.evidence, os.environ)
        if stale:
            warnings.warn(
                f"the rule for `{selector}` was {rule.evidence.kind} elsewhere: {'; '.join(stale)}",
                StaleEvidenceWarning,
                stacklevel=2,
            )
        return MeshConfig(
            mesh_shape=rule.mesh_shape,
            mesh_axis_names=self.axes,
            batch_axis_names=self.batch_axes,
            knobs=rule.knobs,
            compiler_options=rule.compiler_options,
            evidence=rule.evidence,
        )

    def explain(self, selector: str) -> tuple[str, ...]:
        """One sentence for each rule, in order: whether it matches `selector`, and if not, why."""
        return tuple(f"`{rule.match}` {explain_match(rule, selector)}" for rule in self.rules)

    def _no_match(self, selector: str) -> str:
        if not self.rules:
            return f"no rule matches `{selector}`: there are no rules"
        return f"no rule matches `{selector}`: {'; '.join(self.explain(selector))}"


_NO_MATCH_HINT = "search for that target with `automesh search`, or give `select` a `default=`"


def check_names(axes: Sequence[str], batch_axes: Sequence[str]) -> None:
    """Accepts distinct axis names, and batch axes among them.

    Raises:
      UsageError: no or repeated axes, or a batch axis that is no axis.
    """
    if not axes or len(set(axes)) < len(axes):
        raise UsageError(f"mesh axes must be distinct names, got {list(axes)}")
    for name in batch_axes:
        if name not in axes:
            raise UsageError(f"batch axis `{name}` is not a mesh axis{did_you_mean(name, axes)}")


def _jax_half() -> Any:
    # The only door to jax: import-linter and the parent process must not see an import of it.
    return importlib.import_module("automesh.mesh.devices")
