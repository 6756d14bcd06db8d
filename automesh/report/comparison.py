"""One plan against another, in one vocabulary: from races and fresh processes to the sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal[
    "kept",
    "new",
    "best",
    "faster",
    "slower",
    "equal",
    "no faster",
    "undecided",
    "not_measured",
    "excluded",
    "failed",
]
EXPORTED: tuple[Verdict, ...] = ("kept", "new", "best")
COMPARED: tuple[Verdict, ...] = ("faster", "slower", "equal", "no faster", "undecided")
Basis = Literal["", "fresh processes", "race", "first visits", "step times", "replay", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of a plan with another one: in a result with the exported plan, among
    predictions with the best.

    Attributes:
      verdict: of the exported plan `kept` if it is the script's own, `new` if it replaces that,
        `best` where there is none. For other plans that were measured: `faster`; `slower`; `equal`
        within a margin, as a test of equality says; `no faster`, if only that is known; `undecided`
        while it may be faster. `excluded` if it ran but may not become a rule (numerics differ or
        unverified); `not_measured` if it was compiled or estimated only; `failed`.
      ratio: its step time over the other's: measured over measured in the same processes or rounds,
        compiled over compiled, estimated over estimated; 1 if unknown.
      interval: of `ratio`, at 95 % however often the data were looked at; (ratio, ratio) where
        there is none.
      basis: what the ratio comes from; empty where it is unknown, or of the exported plan itself.
      processes: fresh processes in which both ran.
      more_processes: further ones that should decide it, if what they say stays as it is; 0 where
        it is decided.
      more_s: seconds that these should take; 0 if unknown.
      step_s: `ratio` times the measured step time of the exported plan; 0 where the outcome says
        it, or if nothing was measured.
    """

    verdict: Verdict
    ratio: float = 1.0
    interval: tuple[float, float] = (1.0, 1.0)
    basis: Basis = ""
    processes: int = 0
    more_processes: int = 0
    more_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The exported plan compared with the baseline, measured by fresh processes. These are the
    figures that a rule states.

    Attributes:
      processes: number of fresh processes that measured it, together with the baseline if there is
        one.
      baseline: the script's own plan, as text; empty if there is none.
      gain: the baseline compared with the exported plan; None if they are the same, or there is no
        baseline.
      most_faster: the share by which no measured plan is faster than the exported one, as its
        interval says; nothing where an interval is unbounded, or in older studies.
    """

    processes: int
    baseline: str
    gain: Comparison | None = None
    most_faster: tuple[float, ...] = ()

    @property
    def speedup(self) -> float:
        """Returns the baseline's time over the exported plan's; 1 if equal or unknown."""
        return self.gain.ratio if self.gain is not None else 1.0

    @property
    def speedup_interval(self) -> tuple[float, float]:
        """Returns the 95 % interval of `speedup`; (1, 1) in the same cases."""
        return self.gain.interval if self.gain is not None else (1.0, 1.0)

    @property
    def is_tie(self) -> bool:
        """Whether the exported plan is not the baseline, and neither was shown to be faster."""
        return self.gain is not None and self.gain.verdict not in ("slower", "faster")
