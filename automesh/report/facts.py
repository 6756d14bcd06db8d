"""The facts about a study: what was searched, for which devices, and where its figures come from.

`tuner.study.metadata.facts_of` makes these facts once, when a search starts. The study stores them
in its header; its result, the table, JSON, CSV, rules and pages read them from there.
"""

from __future__ import annotations

from dataclasses import dataclass

from automesh.hardware.fabric.fabric import Fabric
from automesh.program.infer.search.layout import NamedSplit
from automesh.report.search_command import SearchCommand, text_of

Versions = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The workload of a search: a step, or a command.

    Attributes:
      workload: name of the script or function.
      axes: mesh axes of the search space.
      batch_axes: axes that the rows of a batch are split over.
      axis_types: what the step was searched with, a word for each axis; empty if nobody knows.
      tokens_per_step: 0 where nobody says.
      arguments: of a step whose shardings are inferred, how logical axes split them.
      made_up: arguments of the step that nobody gives values for, by name.
      split: the axes of a script's mesh that are several in the search, in the words of `--split`.
      not_searched: what a script does besides its jitted step, in a sentence.
      data_by_mesh: says that its step takes other amounts of data on other meshes, in a clause.
      template: of the command that is run for each plan; empty where a script's step is.
    """

    workload: str
    axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    axis_types: tuple[str, ...] = ()
    tokens_per_step: int = 0
    arguments: tuple[NamedSplit, ...] = ()
    made_up: tuple[str, ...] = ()
    split: str = ""
    not_searched: str = ""
    data_by_mesh: str = ""
    template: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices that the plans are for.

    Attributes:
      target: the selector that a rule is written for, e.g. `cpu-8`.
      platform: cpu, gpu or tpu.
      kind: what one device is, in jax's words.
      count: how many there are.
      are_absent: True if they are not here: nothing can be measured.
      fabric: how they are wired; None if that is unknown.
      memory_bytes: what a program could use of one device; 0 if unknown.
      reserve_bytes: of these, what plans leave free.
    """

    target: str
    platform: str
    kind: str
    count: int
    are_absent: bool = False
    fabric: Fabric | None = None
    memory_bytes: int = 0
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of the figures: how they were made, and where they are stored.

    Attributes:
      source_hash: the hash that identifies trials of the script as it was then.
      versions: of everything whose change makes figures stale, and the environment.
      speeds: where the speeds of the estimates come from, in words; empty without estimates.
      again: the command that goes on with the search; None for a search from Python, and where a
        former version has kept none that can be read.
      location: path or URL that holds the trials, for people; empty for a dry run of a command.
      results_dir: the folder of the study, for people; empty likewise.
    """

    source_hash: str
    versions: Versions
    speeds: str = ""
    again: SearchCommand | None = None
    location: str = ""
    results_dir: str = ""

    @property
    def command(self) -> str:
        """The command that continues the search, as text; empty if there is none."""
        return text_of(self.again)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFacts:
    """The facts about a study.

    Attributes:
      notices: what the user should know of the plans and their estimates, one sentence each.
      details: how the estimates were made, for those who ask.
    """

    searched: Searched
    devices: Devices
    provenance: Provenance
    notices: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
