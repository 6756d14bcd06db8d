"""The nouns of a lint: findings with what their cures save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A cure that was applied in a lowered copy of the step; all figures are estimated.

    Attributes:
      change: what was changed, as one would write it in the script.
      memory_bytes: of a device, before and after.
      step_s: before and after.
      is_gone: the finding is not found any more.
    """

    change: str
    memory_bytes: tuple[float, float]
    step_s: tuple[float, float]
    is_gone: bool

    @property
    def saved_bytes(self) -> float:
        return self.memory_bytes[0] - self.memory_bytes[1]

    @property
    def saved_s(self) -> float:
        return self.step_s[0] - self.step_s[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """A finding on the mesh where it costs most.

    Attributes:
      rule, title: its name and its heading.
      plan: the mesh, knobs after it.
      plans: of those that were looked at, how many have it.
      array, axes, source: see `cost.terms.Finding`.
      file: of `source`, as the user would open it; empty if it is not known.
      line: of `source`; 0 if it is not known.
      what, why, cure: sentences without a full stop.
      bytes: on one device: of what is gathered, sent or kept.
      count: how often in a step.
      seconds: of the collectives of its line over its axes, as if nothing else ran at the same
        time; 0: there are none.
      tried: the cure that saves most; None: there is only advice.
    """

    rule: str
    title: str
    plan: str
    plans: int
    array: str
    axes: tuple[str, ...]
    source: str
    file: str
    line: int
    what: str
    why: str
    cure: str
    bytes: float
    count: float
    seconds: float
    tried: Tried | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LintReport:
    """The findings of `automesh lint`.

    Attributes:
      script: as the user gave it.
      plans: that were looked at, in text form.
      findings: the most expensive first.
      smaller: findings below the threshold, of which nothing else is said.
      missing: plans that have no estimate, and why.
      notices: what the user should know, one sentence each.
      speeds: where those of the estimates come from, in words.
    """

    script: str
    workload: str
    target: str
    device: str
    device_count: int
    plans: tuple[str, ...]
    findings: tuple[Linted, ...]
    smaller: int = 0
    missing: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()
    speeds: str = ""
