"""What a search is asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from automesh.program.nouns import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The inputs of one search.

    Attributes:
      command: what was typed, to be shown as the way to go on; empty from Python.
      target: `local`, `cpu:N` for N virtual CPU devices, or absent ones for a dry run.
      space: name of a shipped search space or path of a TOML file.
      budget_s: seconds for everything after the inspection; the final confirmation may overrun it.
      top: finalists of one race, the baseline not counted.
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
    """

    entry: Entry
    command: str = ""
    target: str = "local"
    space: str = "auto"
    budget_s: float = 600.0
    top: int = 8
    baseline: str = ""
    rules: str
    results: Path
    storage: str = ""
    dry_run: bool = False
    new: bool = False
    workers: int = 0
    timeout_s: float = 300.0
    memory_limit_bytes: int = 0
