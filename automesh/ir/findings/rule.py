"""A rule: what it looks at, and its words for people.

Each module of this folder that finds something has its rules in `RULES`; `registry` collects these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from automesh.cost.terms import Finding, value_of
from automesh.ir.findings.nouns import OperationSite, PartitionedProgram
from automesh.texts.terminal import clean
from automesh.units import format_bytes

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StateCheck:
    """A look at arguments and results, before the rewrites of a platform's compiler."""

    find: Callable[[PartitionedProgram], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class OperationCheck:
    """A look at each operation, after the rewrites of a platform's compiler."""

    find: Callable[[PartitionedProgram, OperationSite], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class WholeProgramCheck:
    """A look at all operations together, after the rewrites of a platform's compiler."""

    find: Callable[[PartitionedProgram], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class PricedCheck:
    """None in the program: `automesh.cost.breakdown` finds it where a mesh is priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule and its words.

    Attributes:
      name: as in `Finding.rule`, and the section of docs/lint.md: lower case, with hyphens.
      check: what finds it, and when.
      title: the rule as a heading of a few words.
      what: what is the case on one mesh, without the place; takes the sizes of its axes.
      why: why the compiler does so, one sentence.
      cure: what to change, an imperative.
      is_broken: whether a plan with it is not the loop that the user means to run, which the
        exported rule of a plan says.
      is_always_shown: whether lint also shows it where it costs little memory and time.
    """

    name: str
    check: StateCheck | OperationCheck | WholeProgramCheck | PricedCheck
    title: str
    what: Callable[[Finding, Sizes], str]
    why: str
    cure: Callable[[Finding], str]
    is_broken: bool = False
    is_always_shown: bool = False


def advice(text: str) -> Callable[[Finding], str]:
    """Returns a cure that is the same for every finding of a rule."""
    return lambda _: text


def array_of(finding: Finding) -> str:
    """Returns the array of a finding, fit for a terminal."""
    return clean(finding.array)


def axes_of(finding: Finding) -> str:
    """Lists the axes of a finding: `dp+fsdp`."""
    return "+".join(finding.axes) or "no axis"


def bytes_of(finding: Finding, sizes: Sizes) -> str:
    """Returns the bytes of a finding on one mesh: `8.0 MB`."""
    return format_bytes(value_of(finding.bytes, sizes))


def times_of(finding: Finding, sizes: Sizes) -> str:
    """Says how often a finding occurs in a step; empty for once."""
    times = round(value_of(finding.count, sizes))
    return f", {times} times a step" if times > 1 else ""


def parts(axes: Iterable[str], sizes: Sizes) -> int:
    """Counts the parts into which the axes split."""
    return math.prod(sizes.get(axis, 1) for axis in axes)
