"""`MeshConfig`, which a training script makes its mesh from, and `Rules`, which select it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from automesh.errors import UsageError, WrongType, kind_of
from automesh.mesh.axis_types import AUTO, as_axis_types
from automesh.mesh.evidence import NO_EVIDENCE, Evidence, StaleEvidenceWarning, differences
from automesh.mesh.lazy_jax import applied_half, attached_selector, jax_half, shardings_half
from automesh.mesh.mapping import NO_MAPPING, LogicalMapping, check_mapped_axes
from automesh.mesh.names import as_names, check_names
from automesh.mesh.rules.explain import explain_mesh, explain_rules, explain_settings
from automesh.mesh.rules.rule import MeshRule, check_selector, explain_match, first_match
from automesh.mesh.rules.shardings import NO_SHARDINGS, Shardings
from automesh.mesh.settings import NO_SETTINGS, Settings, as_settings
from automesh.mesh.shape import AnyShape, MeshShape, as_shape

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from automesh.mesh.axes import Scalar
    from automesh.mesh.layout.devices import AxisTypes
    from automesh.mesh.mapping import Spelled
    from automesh.mesh.rules.rule import OwnRules
    from automesh.mesh.rules.shardings import SpelledDims

SEED_BATCH = ("data",)
"""Loadax's default batch axes; recognized by identity, as a mesh need not have these axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """A mesh for any number of devices, with the settings that go with it.

    Attributes:
      mesh_shape: sizes of the axes, over ICI and DCN (`HybridMeshShape`) or in all (a sequence); in
        each at most one is -1. In a sequence, the first axis larger than 1 spans the granules
        (slices or nodes), see `automesh.mesh.infer.resolve_shape`.
      mesh_axis_names: one name for each size.
      batch_axis_names: axes that the rows of a batch are split over; default: `data`, if there is
        such an axis.
      axis_types: `jax.sharding.AxisType`s or the words auto, explicit, manual: one for each axis or
        one for all; default: Auto. Kept as one word for each axis.
      mesh_rules: other meshes for named targets, see `select`: `MeshRule`s or pairs of a regular
        expression and a mesh shape, of which None means the default mesh.
      mapping: logical axis -> mesh axes, for `build` and for frameworks; empty if not given.
      knobs: keyword arguments for `build`.
      compiler_options: for `compile`.
      evidence: the basis of the choice.
      sharding_patterns: of arrays, by pattern of their paths; see `shardings`.

    Raises:
      WrongType: sizes that are no integers, names that are no strings, or a rule, a mapping or
        settings of another type.
      UsageError: sizes or names do not fit each other.

    Example:
      >>> from automesh import HybridMeshShape
      >>> config = MeshConfig(
      ...     mesh_shape=(-1, 1),
      ...     mesh_axis_names=("data", "model"),
      ...     mesh_rules=[("tpu-v5p-.*", HybridMeshShape((1, -1), (-1, 1)))],
      ... )
      >>> config.select("tpu-v5p-128").mesh_shape
      HybridMeshShape(ici_mesh_shape=(1, -1), dcn_mesh_shape=(-1, 1))
    """

    mesh_shape: MeshShape
    mesh_axis_names: tuple[str, ...]
    batch_axis_names: tuple[str, ...] = SEED_BATCH
    mesh_rules: tuple[MeshRule, ...] = ()
    mapping: LogicalMapping = NO_MAPPING
    knobs: Settings = NO_SETTINGS
    compiler_options: Settings = NO_SETTINGS
    evidence: Evidence = NO_EVIDENCE
    axis_types: tuple[str, ...] = ()
    sharding_patterns: Shardings = NO_SHARDINGS

    if TYPE_CHECKING:  # More types are accepted than stored.

        def __init__(
            self,
            *,
            mesh_shape: AnyShape,
            mesh_axis_names: Sequence[str],
            batch_axis_names: str | Sequence[str] = SEED_BATCH,
            mesh_rules: OwnRules | None = None,
            mapping: Mapping[str, Spelled] = NO_MAPPING,
            knobs: Mapping[str, Scalar] = NO_SETTINGS,
            compiler_options: Mapping[str, Scalar] = NO_SETTINGS,
            evidence: Evidence = NO_EVIDENCE,
            axis_types: AxisTypes = (),
            sharding_patterns: Mapping[str, SpelledDims] = NO_SHARDINGS,
        ) -> None: ...

    def __post_init__(self) -> None:
        # Strings, lists and dicts are accepted, too; the stored values can be hashed.
        names = as_names(self.mesh_axis_names, "mesh axis names")
        batch: Any = self.batch_axis_names
        if batch is SEED_BATCH:
            batch = [name for name in batch if name in names]
        batch = (batch,) if isinstance(batch, str) else as_names(batch, "batch axis names")
        object.__setattr__(self, "mesh_axis_names", names)
        object.__setattr__(self, "batch_axis_names", batch)
        object.__setattr__(self, "mesh_rules", _as_rules(self.mesh_rules))
        object.__setattr__(self, "mapping", LogicalMapping(self.mapping))
        object.__setattr__(self, "sharding_patterns", Shardings(self.sharding_patterns))
        object.__setattr__(self, "knobs", as_settings(self.knobs, "knobs"))
        options = as_settings(self.compiler_options, "compiler options")
        object.__setattr__(self, "compiler_options", options)
        object.__setattr__(self, "mesh_shape", as_shape(self.mesh_shape))
        check_names(names, batch)
        object.__setattr__(self, "axis_types", as_axis_types(self.axis_types, names))
        check_mapped_axes(self.mapping.axes, names)
        _check_length(self.mesh_shape, names, "mesh shape")
        for rule in self.mesh_rules:
            if rule.axes not in ((), names):
                raise UsageError(
                    f"the rule `{rule.match}` is for the axes {', '.join(rule.axes)}, and this "
                    f"config has {', '.join(names)}",
                    hint="select it from its file: `automesh.load(...).select(...)`",
                )
            if rule.mesh_shape is not None:
                _check_length(rule.mesh_shape, names, f"in the rule `{rule.match}` mesh shape")
            check_names(names, rule.batch_axes or ())
            as_axis_types(rule.axis_types, names)

    def select(self, selector: str) -> MeshConfig:
        """Returns this config, changed by its first own rule that matches; itself if none does.

        The rule replaces the mesh of the config, and its knobs one by one.

        Args:
          selector: name of a target; a rule matches the whole of it or not at all.

        Raises:
          WrongType: `selector` is no string.

        Example:
          >>> config = MeshConfig(
          ...     mesh_shape=(-1,), mesh_axis_names=("data",), mesh_rules=[("cpu-8", (8,))]
          ... )
          >>> config.select("cpu-8").mesh_shape, config.select("cpu-80").mesh_shape
          ((8,), (-1,))
        """
        index = first_match(self.mesh_rules, check_selector(selector))
        return self._with(self.mesh_rules[index]) if index < len(self.mesh_rules) else self

    def create_device_mesh(
        self,
        devices: Sequence[Any] | None = None,
        *,
        selector: str | None = None,
        axis_types: AxisTypes = None,
    ) -> Mesh:
        """Infers every -1 and lays the mesh out on all devices (this imports jax).

        Args:
          devices: jax devices; default: all of the default backend.
          selector: name of the target: the first of `mesh_rules` that matches gives the mesh.
          axis_types: `jax.sharding.AxisType`s or the words auto, explicit, manual: one for each
            axis or one for all. Default: those of the config.

        Raises:
          UsageError: the sizes do not multiply to the number of devices, or do not fit their
            granules.
          WrongType: an argument of the wrong type; also a `TypeError`.

        Example:
          >>> config = MeshConfig(mesh_shape=(2, -1), mesh_axis_names=("data", "model"))
          >>> config.create_device_mesh().axis_names
          ('data', 'model')
        """
        config = self if selector is None else self.select(selector)
        return jax_half().create_mesh_of_shape(
            config.mesh_shape,
            config.mesh_axis_names,
            devices=devices,
            axis_types=config.axis_types if axis_types is None else axis_types,
        )

    def explain(self, selector: str | None = None, *, devices: Sequence[Any] | None = None) -> str:
        """Says in words and as a drawing which mesh `create_device_mesh` makes, and why (this
        imports jax).

        The text says which rule matches and why the others do not, and the settings that go with
        the mesh; how every -1 was inferred and which axes span granules; along which physical
        dimensions every axis runs, and the device at each point of the mesh.

        Args:
          selector: name of the target; None: the default mesh.
          devices: jax devices; default: all of the default backend.

        Raises:
          WrongType: `selector` is no string.

        Example:
          >>> config = MeshConfig(mesh_shape=(2, -1), mesh_axis_names=("data", "model"))
          >>> print(config.explain().splitlines()[1])
          mesh shape: data 2, model -1
        """
        rules = explain_rules(self.mesh_rules, selector)
        config = self if selector is None else self.select(selector)
        mesh = explain_mesh(config.mesh_shape, config.mesh_axis_names, devices)
        settings = explain_settings(config.knobs, config.compiler_options, config.mapping)
        if set(config.axis_types) != {AUTO}:
            pairs = zip(config.mesh_axis_names, config.axis_types, strict=True)
            settings.append(f"axis types: {', '.join(f'{name} {kind}' for name, kind in pairs)}")
        return "\n".join((*rules, *settings, *mesh))

    def shardings(self, tree: Any, *, name: str = "", mesh: Mesh | None = None) -> Any:
        """Returns the sharding of each array of a tree, by the patterns of the rule (imports jax).

        A rule of `automesh search --infer` has such patterns. The tree is an argument of the step,
        or a dict of several by their names; the result of `jax.eval_shape` is enough, so that a
        state can be created with its sharding: `jax.jit(init,
        out_shardings=config.shardings(jax.eval_shape(init)))`.

        Args:
          tree: of arrays, or of objects with shapes.
          name: of the tree among the arguments of the step, `params`; empty to find out.
          mesh: default: that of the config on all devices.

        Returns:
          A tree of the same structure, of `jax.sharding.NamedSharding`.

        Raises:
          UsageError: the rule has no shardings; no pattern covers an array, or it does not fit; or
            several arguments have such arrays.

        Example:
          >>> import jax
          >>> config = MeshConfig(
          ...     mesh_shape=(-1,),
          ...     mesh_axis_names=("dp",),
          ...     mapping={"batch": "dp"},
          ...     sharding_patterns={"x": ["batch", ""], "params/**": ["", ""]},
          ... )
          >>> found = config.shardings({"x": jax.ShapeDtypeStruct((8, 4), "float32")})
          >>> found["x"].spec == jax.sharding.PartitionSpec("dp")
          True
        """
        return shardings_half().shardings_of_tree(
            tree,
            self.sharding_patterns,
            mapping=dict(self.mapping.axes),
            mesh=self.create_device_mesh() if mesh is None else mesh,
            name=name,
        )

    def explain_shardings(self, tree: Any, *, name: str = "", mesh: Mesh | None = None) -> str:
        """Lists for each array of a tree its pattern and the mesh axes that split it (imports jax).

        Args:
          tree, name, mesh: as in `shardings`.

        Raises:
          UsageError: as `shardings`.

        Example:
          >>> import jax
          >>> config = MeshConfig(
          ...     mesh_shape=(-1,), mesh_axis_names=("dp",), sharding_patterns={"**/x": ["dp", ""]}
          ... )
          >>> print(config.explain_shardings({"x": jax.ShapeDtypeStruct((8, 4), "float32")}))
          x  by `**/x`: dp, -
        """
        return shardings_half().explain_tree(
            tree,
            self.sharding_patterns,
            mapping=dict(self.mapping.axes),
            mesh=self.create_device_mesh() if mesh is None else mesh,
            name=name,
        )

    def apply(self, step: Any, *, mesh: Mesh | None = None, **options: Any) -> Any:
        """Runs a step for one device on the mesh, with the shardings of the rule (imports jax).

        It is called as before. Arguments with another sharding are moved to that of the rule, the
        results that replace them have it as well, and arrays inside the step are split as in the
        search.

        Args:
          step: a function, or a jitted one; its arguments have the names of those of the searched
            step.
          mesh: default: that of the config on all devices.
          options: for `jax.jit`, of a plain function: `donate_argnums`, `donate_argnames`.

        Returns:
          A function with a method `lower`, like that of `jax.jit`.

        Raises:
          UsageError: the rule has no shardings, or the step is jitted and there are options. At a
            call: no pattern covers an argument, or it does not fit.
          WrongType: `step` is no function.

        Example:
          >>> import jax.numpy as jnp
          >>> config = MeshConfig(
          ...     mesh_shape=(-1,),
          ...     mesh_axis_names=("dp",),
          ...     mapping={"batch": "dp"},
          ...     sharding_patterns={"w": ["", ""], "x": ["batch", ""]},
          ... )
          >>> step = config.apply(lambda w, x: w - 0.1 * (x.T @ x @ w))
          >>> step(jnp.ones((4, 2)), jnp.ones((8, 4))).shape
          (4, 2)
        """
        return applied_half().apply_to(
            step,
            mesh=self.create_device_mesh() if mesh is None else mesh,
            shardings=self.sharding_patterns,
            mapping=dict(self.mapping.axes),
            options=options,
        )

    @property
    def hosts(self) -> int:
        """Returns the number of jax processes in the job (this imports jax)."""
        return jax_half().count_hosts()

    @property
    def host_id(self) -> int:
        """Returns the index of this jax process (this imports jax)."""
        return jax_half().this_host()

    def _with(self, rule: MeshRule) -> MeshConfig:
        keeps_mesh = rule.mesh_shape is None
        return replace(
            self,
            mesh_shape=self.mesh_shape if rule.mesh_shape is None else rule.mesh_shape,
            batch_axis_names=self.batch_axis_names if rule.batch_axes is None else rule.batch_axes,
            axis_types=rule.axis_types or self.axis_types,
            mapping=rule.mapping or self.mapping,
            sharding_patterns=rule.shardings or self.sharding_patterns,
            knobs=Settings({**self.knobs, **rule.knobs}),
            compiler_options=Settings({**self.compiler_options, **rule.compiler_options}),
            evidence=self.evidence if keeps_mesh else rule.evidence,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The content of a rules file.

    Attributes:
      axes: names of the mesh axes, in order, of every rule without its own.
      batch_axes: axes that the rows of a batch are split over; a rule with its own axes uses those
        of them that it has, unless it names others.
      rules: the first that matches wins.

    Raises:
      UsageError: names or sizes do not fit each other.

    Example:
      >>> from automesh import HybridMeshShape
      >>> rule = MeshRule(match="tpu-v5p-.*", mesh_shape=HybridMeshShape((1, 8), (2, 1)))
      >>> rules = Rules(axes=("dp", "tp"), batch_axes=("dp",), rules=(rule,))
      >>> rules.select("tpu-v5p-32").mesh_shape
      HybridMeshShape(ici_mesh_shape=(1, 8), dcn_mesh_shape=(2, 1))
      >>> rules.explain("tpu-v5e-16")
      ('`tpu-v5p-.*` does not match',)
    """

    axes: tuple[str, ...]
    batch_axes: tuple[str, ...] = ()
    rules: tuple[MeshRule, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.axes, self.batch_axes)
        for rule in self.rules:
            axes = self.axes_of(rule)
            if len(rule.hybrid_shape) != len(axes):
                raise UsageError(f"rule `{rule.match}` does not have a size for each axis")
            check_names(axes, rule.batch_axes or ())
            check_mapped_axes(rule.mapping.axes, axes)

    def select(
        self, selector: str | None = None, *, default: MeshConfig | None = None
    ) -> MeshConfig:
        """Returns the config of the first rule whose `match` matches the whole of `selector`.

        Warns with `StaleEvidenceWarning` if versions or environment differ from the evidence.

        Args:
          selector: name of a target, such as `tpu-v5p-128` or `cpu-8`; by default that of all
            devices that jax has (this imports jax), in all its processes.
          default: what to return if no rule matches.

        Raises:
          UsageError: no rule matches and there is no default; lists the rules and why each failed.
        """
        name = attached_selector() if selector is None else check_selector(selector)
        index = first_match(self.rules, name)
        if index == len(self.rules):
            if default is not None:
                return default
            raise self._no_match(name, is_attached=selector is None)
        rule = self.rules[index]
        stale = differences(rule.evidence, os.environ)
        if stale:
            warnings.warn(
                f"the rule for `{name}` was {rule.evidence.kind} elsewhere: {'; '.join(stale)}",
                StaleEvidenceWarning,
                stacklevel=2,
            )
        return MeshConfig(
            mesh_shape=rule.hybrid_shape,
            mesh_axis_names=self.axes_of(rule),
            batch_axis_names=self.batch_axes_of(rule),
            axis_types=rule.axis_types,
            mapping=rule.mapping,
            sharding_patterns=rule.shardings,
            knobs=rule.knobs,
            compiler_options=rule.compiler_options,
            evidence=rule.evidence,
        )

    def axes_of(self, rule: MeshRule) -> tuple[str, ...]:
        """Returns the mesh axis names of one of the rules, in the order of its sizes."""
        return rule.axes or self.axes

    def batch_axes_of(self, rule: MeshRule) -> tuple[str, ...]:
        """Returns the axes over which one of the rules splits the rows of a batch."""
        if rule.batch_axes is not None:
            return rule.batch_axes
        return tuple(name for name in self.batch_axes if name in self.axes_of(rule))

    def explain(self, selector: str) -> tuple[str, ...]:
        """Explains for each rule, in order, whether it matches `selector`, and if not, why."""
        return tuple(f"`{rule.match}` {explain_match(rule, selector)}" for rule in self.rules)

    def _no_match(self, selector: str, *, is_attached: bool) -> UsageError:
        said = "; ".join(self.explain(selector)) or "there are no rules"
        if not is_attached:
            return UsageError(f"no rule matches `{selector}`: {said}", hint=_NO_MATCH_HINT)
        return UsageError(
            f"no rule matches the attached devices, which are `{selector}`: {said}",
            hint="search on these devices with `automesh search`, name the rule to take, as in "
            '`select("tpu-v5p-128")`, or give `select` a `default=`',
        )


_NO_MATCH_HINT = "search for that target with `automesh search`, or give `select` a `default=`"


def _as_rules(rules: Any) -> tuple[MeshRule, ...]:
    if rules is None:
        return ()
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise WrongType(f"mesh rules must be a sequence of rules, got {kind_of(rules)}: {rules!r}")
    return tuple(map(_as_rule, cast("Sequence[Any]", rules)))


def _as_rule(rule: Any) -> MeshRule:
    if isinstance(rule, MeshRule):
        return rule
    if isinstance(rule, (tuple, list)):
        pair = cast("Sequence[Any]", rule)
        if len(pair) == 2 and isinstance(pair[0], str):
            return MeshRule(match=pair[0], mesh_shape=pair[1])
    raise WrongType(
        f"a mesh rule must be a MeshRule or a pair of a regular expression and a mesh shape, got "
        f"{kind_of(rule)}: {rule!r}",
        hint='write for example `("tpu-v5p-.*", (1, 8))`',
    )


def _check_length(shape: MeshShape, names: Sequence[str], what: str) -> None:
    if len(shape) != len(names):
        raise UsageError(
            f"{what} {shape} has {len(shape)} sizes for the {len(names)} axes {list(names)}",
            hint="give one size for each axis; 1 for an axis that is not used",
        )
