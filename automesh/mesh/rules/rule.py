"""`MeshRule`, and the choice of a rule: the first whose `match` matches the whole name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automesh import limits
from automesh.errors import UsageError, WrongType, kind_of
from automesh.mesh.axes import Plan
from automesh.mesh.axis_types import as_axis_types, as_words
from automesh.mesh.evidence import NO_EVIDENCE, Evidence
from automesh.mesh.mapping import NO_MAPPING, LogicalMapping
from automesh.mesh.names import as_names, check_names
from automesh.mesh.rules.pattern import check_pattern, matches, nearest
from automesh.mesh.rules.shardings import NO_SHARDINGS, Shardings
from automesh.mesh.settings import NO_SETTINGS, Settings, as_settings
from automesh.mesh.shape import AnyShape, HybridMeshShape, MeshShape, as_shape

if TYPE_CHECKING:
    from automesh.mesh.axes import Scalar
    from automesh.mesh.layout.devices import AxisTypes
    from automesh.mesh.mapping import Spelled
    from automesh.mesh.rules.shardings import SpelledDims

_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRule:
    """The mesh and settings for the targets whose whole name `match` matches.

    Attributes:
      match: regular expression.
      mesh_shape: sizes in the order of the axes of the rules or config that contain the rule. In a
        rules file always a `HybridMeshShape`; among a config's own rules also a plain shape, or
        None for the config's default mesh.
      mapping: logical axis -> mesh axes, for `build` and for frameworks; empty if not given.
      axis_types: `jax.sharding.AxisType`s or the words auto, explicit, manual: one for each axis or
        one for all; empty: those of the config, in a rules file Auto. Kept as words.
      axes: names of the mesh axes; empty: those of the rules or config that contain the rule.
      batch_axes: axes that the rows of a batch are split over; None: those of the rules or config
        that contain the rule.
      shardings: pattern of the paths of arrays -> names of their dimensions, see
        `automesh.mesh.rules.shardings`; empty if not given.

    Raises:
      WrongType: `match` is no string, the shape no sequence of integers, or the mapping or settings
        have another type.
      UsageError: `match` is not a regular expression, or none that can be matched in time; a size
        is not possible; or names or axis types do not fit.

    Example:
      >>> MeshRule(match="tpu-v5p-.*", mesh_shape=(1, 8)).mesh_shape
      (1, 8)
    """

    match: str
    mesh_shape: MeshShape | None
    mapping: LogicalMapping = NO_MAPPING
    knobs: Settings = NO_SETTINGS
    compiler_options: Settings = NO_SETTINGS
    evidence: Evidence = NO_EVIDENCE
    axis_types: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] | None = None
    shardings: Shardings = NO_SHARDINGS

    if TYPE_CHECKING:  # More types are accepted than stored.

        def __init__(
            self,
            *,
            match: str,
            mesh_shape: AnyShape | None,
            mapping: Mapping[str, Spelled] = NO_MAPPING,
            knobs: Mapping[str, Scalar] = NO_SETTINGS,
            compiler_options: Mapping[str, Scalar] = NO_SETTINGS,
            evidence: Evidence = NO_EVIDENCE,
            axis_types: AxisTypes = (),
            axes: Sequence[str] = (),
            batch_axes: Sequence[str] | None = None,
            shardings: Mapping[str, SpelledDims] = NO_SHARDINGS,
        ) -> None: ...

    def __post_init__(self) -> None:
        match: Any = self.match
        if not isinstance(match, str):
            raise WrongType(
                f"the match of a rule must be a string, got {kind_of(match)}: {match!r}",
                hint="give a regular expression for the names of targets, as text",
            )
        if self.mesh_shape is not None:
            object.__setattr__(
                self,
                "mesh_shape",
                as_shape(self.mesh_shape, f"the mesh shape of the rule `{self.match}`"),
            )
        self._read_axes()
        object.__setattr__(self, "mapping", LogicalMapping(self.mapping))
        object.__setattr__(self, "shardings", Shardings(self.shardings))
        object.__setattr__(self, "knobs", as_settings(self.knobs, "knobs"))
        options = as_settings(self.compiler_options, "compiler options")
        object.__setattr__(self, "compiler_options", options)
        check_pattern(self.match)

    def _read_axes(self) -> None:
        about = f"of the rule `{self.match}`"
        axes, sizes = as_names(self.axes, f"the axes {about}"), self.mesh_shape
        if axes:
            check_names(axes, ())
        if axes and sizes is not None and len(sizes) != len(axes):
            raise UsageError(
                f"the mesh {sizes} {about} has {len(sizes)} sizes for its {len(axes)} axes "
                f"{list(axes)}",
                hint="give one size for each axis; 1 for an axis that is not used",
            )
        object.__setattr__(self, "axes", axes)
        if self.batch_axes is not None:
            batch = as_names(self.batch_axes, f"the batch axes {about}")
            if axes:
                check_names(axes, batch)
            object.__setattr__(self, "batch_axes", batch)
        types = as_words(self.axis_types)
        if types and sizes is not None:
            # Without names, the axes are only counted.
            known = axes or [f"axis {number + 1}" for number in range(len(sizes))]
            types = as_axis_types(types, known)
        object.__setattr__(self, "axis_types", types)

    @property
    def hybrid_shape(self) -> HybridMeshShape:
        """Returns the sizes over ICI and DCN, which every rule of a rules file has.

        Raises:
          UsageError: the rule does not state them.
        """
        if not isinstance(self.mesh_shape, HybridMeshShape):
            raise UsageError(
                f"the rule `{self.match}` has the mesh {self.mesh_shape}, which does not say what "
                "lies over ICI and what over DCN",
                hint="rules of a file need a HybridMeshShape",
            )
        return self.mesh_shape


OwnRules = Sequence[MeshRule | tuple[str, AnyShape | None]]
"""The types that a config accepts as its own rules."""


def rule_for(
    plan: Plan,
    *,
    selector: str,
    evidence: Evidence,
    axis_types: Sequence[str] = (),
    batch_axes: Sequence[str] | None = None,
    shardings: Mapping[str, SpelledDims] = NO_SHARDINGS,
) -> MeshRule:
    """Makes the rule that gives `plan` to the target named `selector`, and to no other.

    Args:
      axis_types: of the mesh of the search, one for each axis; empty if unknown.
      batch_axes: axes that the rows of a batch are split over; None if unknown.
      shardings: of the arrays, if the search has found them.
    """
    names = tuple(axis.name for axis in plan.axes)
    return MeshRule(
        match=escape(selector),
        mesh_shape=HybridMeshShape(
            tuple(axis.ici for axis in plan.axes), tuple(axis.dcn for axis in plan.axes)
        ),
        mapping=LogicalMapping(plan.mapping),
        knobs=Settings(plan.knobs),
        compiler_options=Settings(plan.compiler_options),
        evidence=evidence,
        axis_types=axis_types,
        axes=names,
        batch_axes=batch_axes,
        shardings=shardings,
    )


def escape(selector: str) -> str:
    """Escapes `selector` as a regular expression, more readably than `re.escape`.

    >>> escape("gpu-p5.48xlarge-64")
    'gpu-p5\\\\.48xlarge-64'
    """
    return _SPECIAL.sub(r"\\\g<0>", selector)


def matches_only(match: str) -> str:
    """Returns the only selector that a pattern matches; empty if it may match several.

    >>> matches_only("gpu-p5\\\\.48xlarge-64"), matches_only("tpu-v5p-.*")
    ('gpu-p5.48xlarge-64', '')
    """
    plain = re.sub(r"\\(.)", r"\1", match)
    return plain if escape(plain) == match else ""


def check_selector(selector: Any) -> str:
    """Checks the name of a target.

    Raises:
      WrongType: no string.
      UsageError: it is too long.
    """
    if not isinstance(selector, str):
        raise WrongType(
            f"a selector must be a string, got {kind_of(selector)}: {selector!r}",
            hint="give the name of a target, for example `tpu-v5p-128`",
        )
    if len(selector) > limits.TARGET_CHARS:
        raise UsageError(
            f"a selector has {len(selector)} characters, and {limits.TARGET_CHARS} are the most: "
            f"`{selector[:40]}...`",
            hint="give the name of a target, for example `tpu-v5p-128`",
        )
    return selector


def first_match(rules: Sequence[MeshRule], selector: str) -> int:
    """Returns the index of the first rule that matches; the number of rules if none does."""
    matching = (i for i, rule in enumerate(rules) if matches(rule.match, selector))
    return next(matching, len(rules))


def explain_match(rule: MeshRule, selector: str) -> str:
    """Says whether a rule matches, and if not, how closely: one phrase."""
    if matches(rule.match, selector):
        return "matches"
    part, is_beginning = nearest(rule.match, selector)
    if part:
        return f"matches only {'the beginning' if is_beginning else 'a part'}, `{part}`"
    if matches(rule.match, selector, ignore_case=True):
        return "matches only if upper and lower case are the same"
    return "does not match"
