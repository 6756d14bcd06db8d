"""What a search is asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from automesh.program.capture.nouns import AxisSplit
from automesh.program.nouns import Entry
from automesh.space.space import Knob

_FINALISTS = 8
_COMPILED_AHEAD = 10


def usual_top(*, is_ahead: bool) -> int:
    """Finalists of a race, or plans to compile for devices that are not here."""
    return _COMPILED_AHEAD if is_ahead else _FINALISTS


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The inputs of one search.

    Attributes:
      command: what was typed, to be shown as the way to go on; empty from Python.
      target: `local`, `cpu:N` for N virtual CPU devices, or devices that are not here.
      space: name of a shipped search space or path of a TOML file.
      budget_s: seconds for everything after the inspection; the final confirmation may overrun it.
      top: finalists of one race, or plans to compile for devices that are not here; the baseline
        not counted. 0 for what is usual.
      baseline: the script's own mesh in text form, knobs may follow (`dp:8 remat=full`); empty for
        the workload's own.
      rules: file that the rule is merged into; empty to write none.
      results: folder that holds the study's folder.
      storage: Optuna storage URL or journal file; empty for SQLite in the study's folder.
      dry_run: stop after the estimates.
      new: start another study even if one can be resumed.
      workers: compile workers side by side; 0 for one per core that the memory allows.
      timeout_s: limit of one job of a worker.
      memory_limit_bytes: limit of one worker; 0 for its share of the free memory.
      hardware: TOML file with clusters of the user's own; empty for none.
      reserve: memory of a device to keep free, `1GiB` or `5%`; empty for what is usual.
      xla: compiler options beside those of the space.
      curated: True for those that come with automesh as well, see `automesh.space.curated`.
      step: of a script without `build`, the function that is its step; empty for the one that looks
        like it.
      splits: of such a script, axes of its mesh that are to be several.
      notices: what the user should know of the script.
      shared_terms: folders of other searches for the same script, whose terms may do here as well.
    """

    entry: Entry
    command: str = ""
    target: str = "local"
    space: str = "auto"
    budget_s: float = 600.0
    top: int = 0
    baseline: str = ""
    rules: str
    results: Path
    storage: str = ""
    dry_run: bool = False
    new: bool = False
    workers: int = 0
    timeout_s: float = 300.0
    memory_limit_bytes: int = 0
    hardware: str = ""
    reserve: str = ""
    xla: tuple[Knob, ...] = ()
    curated: bool = False
    step: str = ""
    splits: tuple[AxisSplit, ...] = ()
    notices: tuple[str, ...] = ()
    shared_terms: tuple[Path, ...] = ()
