"""`MeshRule`, and which rule applies: `re.fullmatch`, the first that matches wins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from automesh.errors import UsageError
from automesh.mesh.axes import Plan
from automesh.mesh.evidence import NO_EVIDENCE, Evidence
from automesh.mesh.settings import NO_SETTINGS, Settings
from automesh.mesh.shape import HybridMeshShape

_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRule:
    """The mesh and the settings for the targets whose whole name `match` matches.

    Attributes:
      match: regular expression.
      mesh_shape: sizes in the order of the axes of the rules or config that hold the rule.

    Raises:
      UsageError: `match` is not a regular expression.
    """

    match: str
    mesh_shape: HybridMeshShape
    knobs: Settings = NO_SETTINGS
    compiler_options: Settings = NO_SETTINGS
    evidence: Evidence = NO_EVIDENCE

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(
                f"the rule's match `{self.match}` is not a regular expression: {error}",
                hint="a backslash before a special character makes it plain",
            ) from None


def rule_for(plan: Plan, *, selector: str, evidence: Evidence) -> MeshRule:
    """The rule that gives `plan` to the target named `selector`, and to no other."""
    return MeshRule(
        match=escape(selector),
        mesh_shape=HybridMeshShape(
            tuple(axis.ici for axis in plan.axes), tuple(axis.dcn for axis in plan.axes)
        ),
        knobs=Settings(plan.knobs),
        compiler_options=Settings(plan.compiler_options),
        evidence=evidence,
    )


def escape(selector: str) -> str:
    """A regular expression for exactly `selector`, more readable than that of `re.escape`.

    >>> escape("gpu-p5.48xlarge-64")
    'gpu-p5\\\\.48xlarge-64'
    """
    return _SPECIAL.sub(r"\\\g<0>", selector)


def first_match(rules: Sequence[MeshRule], selector: str) -> int:
    """Index of the first rule that matches; the number of rules if none does."""
    matching = (i for i, rule in enumerate(rules) if re.fullmatch(rule.match, selector))
    return next(matching, len(rules))


def explain_match(rule: MeshRule, selector: str) -> str:
    """Whether a rule matches, and if not, how near it comes: one phrase."""
    if re.fullmatch(rule.match, selector):
        return "matches"
    found = re.match(rule.match, selector)
    if found and found[0]:
        return f"matches only the beginning, `{found[0]}`"
    found = re.search(rule.match, selector)
    if found and found[0]:
        return f"matches only a part, `{found[0]}`"
    if re.fullmatch(rule.match, selector, re.IGNORECASE):
        return "matches only if upper and lower case are the same"
    return "does not match"
