"""The Python API: `search`, `load`, `show`, and the `Result` that they give."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automesh.errors import UsageError
from automesh.ladder.entry import parse_entry
from automesh.ladder.request import SearchRequest
from automesh.mesh.config import MeshConfig, Rules
from automesh.mesh.rules_file import read_rules
from automesh.program.nouns import Entry
from automesh.program.payload import pickle_entry
from automesh.results.result import SearchResult
from automesh.units import parse_duration

_EXPLAIN_S = 600.0

if TYPE_CHECKING:
    import pandas as pd

    from automesh.results.calibration import CalibrationResult
    from automesh.results.explanation import Explanation
    from automesh.results.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a search found.

    Attributes:
      found: the full record: every candidate with its evidence, the funnel, notices.
    """

    found: SearchResult

    @property
    def interrupted(self) -> bool:
        return self.found.interrupted

    @property
    def best(self) -> MeshConfig:
        """The winner, ready for `create_device_mesh()`, with its knobs and compiler options.

        Raises:
          NoFeasibleMesh: nothing was measured and confirmed; the message says why.
        """
        return self.require_best()

    def require_best(self) -> MeshConfig:
        """As `best`, for callers to whom raising is the point."""
        from automesh.results.rule import config_of

        return config_of(self.found)

    def table(self, *, top: int = 8, width: int | None = None) -> str:
        """The result as text that fits the terminal (or `width` columns)."""
        from automesh.results.table import render

        columns = width or shutil.get_terminal_size().columns
        return render(self.found, top=top, width=max(columns, 40), colour=is_colourful())

    def dataframe(self) -> pd.DataFrame:
        """Every candidate as a row."""
        from automesh.results.csv_export import dataframe

        return dataframe(self.found)

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values; what `--json` prints."""
        from automesh.results.json_export import to_json

        return to_json(self.found)

    def save_rules(self, path: str | Path = "mesh_rules.toml") -> Path:
        """Merges the winner's rule into a rule file, keeping everything else that is in it.

        Raises:
          NoFeasibleMesh: there is no winner to write.
          UsageError: the file is broken or cannot be written; it is left as it was.
        """
        from automesh.results.rule import save_rule

        return save_rule(self.found, Path(path))


def is_colourful() -> bool:
    """True if stdout is a terminal that shows colours, and nobody forbids them."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain


def search(
    build: str | Path | Callable[..., Any],
    *,
    target: str = "local",
    space: str | Path = "auto",
    budget: str = "10m",
    top: int = 8,
    baseline: str = "",
    args: Sequence[str] = (),
    rules: str | Path | None = None,
    results: str | Path = "results",
    storage: str = "",
    workers: int = 0,
    timeout: str = "5m",
    dry_run: bool = False,
    new: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Searches the fastest mesh for a training step; the same call resumes an unfinished search.

    Args:
      build: `train.py`, `train.py:make_step`, `package.module:function`, or the function itself.
      target: `local` (the attached devices), `cpu:N` (virtual), or devices that are not here, such
        as `tpu-v5p-128` or `gpu-h100-64`, for a dry run.
      space: a shipped search space (`auto`, `dense_lm`, `moe_lm`, `long_context`) or a TOML file.
      budget: time for the search, as `90s`, `10m`, `1.5h`.
      top: finalists of one race.
      baseline: the mesh in use today, such as `dp:8`; by default the workload's own.
      args: the script's own arguments.
      rules: rule file to merge the winner into; by default beside the script, for a function none.
      results: folder for the study.
      storage: Optuna storage URL or journal file; by default SQLite in the study's folder.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: bad arguments, files or code of the user's.
      NoFeasibleMesh: no mesh is legal.
    """
    request = make_request(
        build,
        args=args,
        target=target,
        space=str(space),
        budget_s=parse_duration(budget),
        top=top,
        baseline=baseline,
        rules=Path(rules) if rules is not None else None,
        results=Path(results),
        storage=storage,
        workers=workers,
        timeout_s=parse_duration(timeout),
        memory_limit_bytes=0,
        dry_run=dry_run,
        new=new,
    )
    from automesh.results.progress import Silent

    return run(request, progress or Silent())


def make_request(
    build: str | Path | Callable[..., Any],
    *,
    args: Sequence[str],
    target: str,
    space: str,
    budget_s: float,
    top: int,
    baseline: str,
    rules: Path | None,
    results: Path,
    storage: str,
    workers: int,
    timeout_s: float,
    memory_limit_bytes: int,
    dry_run: bool,
    new: bool,
    command: str = "",
) -> SearchRequest:
    """Checks the arguments of a search that need no worker; see `SearchRequest`."""
    if top < 1:
        raise UsageError(f"`top` is {top}; at least one finalist must be measured")
    entry = _entry_of(build, args)
    if rules is None and entry.kind == "script":
        rules = Path(entry.location).parent / "mesh_rules.toml"
    elif rules is None and entry.kind == "module":
        rules = Path("mesh_rules.toml")
    return SearchRequest(
        entry=entry,
        command=command,
        target=target,
        space=space,
        budget_s=budget_s,
        top=top,
        baseline=baseline,
        rules=str(rules.absolute()) if rules is not None else "",
        results=results.absolute(),
        storage=storage,
        workers=workers,
        timeout_s=timeout_s,
        memory_limit_bytes=memory_limit_bytes,
        dry_run=dry_run,
        new=new,
    )


def _entry_of(build: str | Path | Callable[..., Any], args: Sequence[str]) -> Entry:
    if isinstance(build, str | Path):
        return parse_entry(str(build), args)
    folder = Path(tempfile.mkdtemp(prefix="automesh-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pickle_entry(build, folder / "build.pickle")


def run(request: SearchRequest, progress: Progress) -> Result:
    """Runs a checked request to its end, or to Ctrl-C: the result then says `interrupted`."""
    from automesh.ladder.interrupts import interrupts_at_rest
    from automesh.ladder.starting import start

    with interrupts_at_rest():
        return Result(found=start(request, progress))


def show(
    study: Path | None = None, *, results: Path = Path("results"), storage: str = ""
) -> Result:
    """Reads a study without running anything.

    Args:
      study: its folder; by default the one that changed last under `results`.

    Raises:
      UsageError: there is none, or it cannot be read.
    """
    from automesh.ladder.run import read_result

    return Result(found=read_result(study, results=results, storage=storage))


def calibrate(
    target: str = "local",
    *,
    out: str | Path | None = None,
    budget: str = "60s",
    progress: Progress | None = None,
) -> CalibrationResult:
    """Measures devices, and keeps what it finds for all later searches on devices of their kind.

    Args:
      target: `local` (the attached devices), `cpu:N` (virtual), or devices that are not here, such
        as `tpu-v5p-128` or `gpu-h100-64`, for a dry run.
      out: file to merge the profile into; by default the one that searches look for.
      budget: time for it, as `60s` or `5m`.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: devices that are not here, a file that cannot be read or written.
    """
    from automesh.ladder.calibration import CalibrationRequest, run_calibration
    from automesh.ladder.interrupts import interrupts_at_rest
    from automesh.results.progress import Silent

    request = CalibrationRequest(
        target=target, out=Path(out) if out is not None else None, budget_s=parse_duration(budget)
    )
    with interrupts_at_rest(), progress or Silent() as shown:
        return run_calibration(request, shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where the time of a mesh goes, or why one of two is faster.

    Attributes:
      found: the full record.
    """

    found: Explanation

    @property
    def why(self) -> str:
        """The reason in words."""
        from automesh.results.explain_words import verdict_sentence, why_sentence

        return verdict_sentence(self.found) or why_sentence(self.found.one)

    def text(self, *, width: int | None = None) -> str:
        """Tables and sentences that fit the terminal (or `width` columns)."""
        from automesh.results.explain import render

        columns = width or shutil.get_terminal_size().columns
        return render(self.found, width=max(columns, 40), colour=is_colourful())

    def to_json(self) -> dict[str, Any]:
        """The account as plain JSON values; what `explain --json` prints."""
        from automesh.results.explain_json import to_json

        return to_json(self.found)


def explain(
    subject: str | Path,
    mesh: str,
    *,
    against: str = "",
    target: str = "",
    space: str | Path = "",
    args: Sequence[str] = (),
    storage: str = "",
    progress: Progress | None = None,
) -> Account:
    """Explains what a mesh costs and why, without compiling or measuring anything.

    Args:
      subject: folder of a study, or a script as in `search`.
      mesh: `dp:2,tp:4`, or with knobs `dp:8 remat=full`.
      against: another mesh to compare with.
      target: for a script: what to estimate for; by default `local`.
      space: for a script: the search space; by default `auto`.
      args: for a script: its own arguments.
      storage: the --storage of the search that made the study, if it had one.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: bad arguments, no such study, or a mesh that it does not hold.
    """
    from automesh.ladder.explanations import explain_script, explain_study
    from automesh.results.progress import Silent

    if is_study(subject):
        if target or space or args:
            raise UsageError(
                f"`{subject}` is a study, which has its target and its search space already",
                hint="give the script instead to explain it for other devices",
            )
        folder = Path(subject)
        found = explain_study(folder, mesh, against, results=folder.parent, storage=storage)
        return Account(found=found)
    request = make_request(
        subject,
        args=args,
        target=target or "local",
        space=str(space) or "auto",
        budget_s=_EXPLAIN_S,
        top=1,
        baseline="",
        rules=None,
        results=Path("results"),
        storage="",
        workers=0,
        timeout_s=_EXPLAIN_S,
        memory_limit_bytes=0,
        dry_run=True,
        new=False,
    )
    return Account(found=explain_script(request, mesh, against, progress or Silent()))


def is_study(subject: str | Path) -> bool:
    """Whether a folder, which only studies are, or nothing that could be a script."""
    text = str(subject)
    return Path(text).is_dir() or not (text.endswith(".py") or ":" in text or Path(text).is_file())


def load(path: str | Path = "mesh_rules.toml") -> Rules:
    """Reads a rule file; `load(path).select("tpu-v5p-128")` gives the `MeshConfig` for a selector.

    Raises:
      UsageError: no such file, or it is not a valid rule file.
    """
    return read_rules(Path(path))


def progress_on_stderr() -> Progress:
    """Bars on a terminal, plain lines in a pipe or a log."""
    from automesh.results.progress import open_progress

    return open_progress(sys.stderr)
