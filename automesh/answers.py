"""The answers of the Python API: results of searches, accounts of meshes, lists of targets and
presets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automesh.errors import NoFeasibleMesh
from automesh.mesh.config import MeshConfig
from automesh.report.blocks.reportable import Reportable
from automesh.report.blocks.terminal import told
from automesh.report.result import SearchResult
from automesh.texts.user_text import user_path
from automesh.tuner.request import usual_top

if TYPE_CHECKING:
    import pandas as pd

    from automesh.hardware.catalogue import Listed
    from automesh.hardware.compilers import Compiler
    from automesh.mesh.rules.shipped import Preset
    from automesh.report.blocks.nouns import Report
    from automesh.report.explain.nouns import Explanation
    from automesh.report.lint.nouns import LintReport
    from automesh.report.pages.several import Several
    from automesh.report.script_check.nouns import CheckedScript


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Reportable):
    """The result of a search.

    Attributes:
      found: the full record: every candidate with its evidence, the funnel, notices.
      storage: the --storage of its search; empty for the study's own folder.
      folder: of the study; None for the one that `found` names, as seen from where it was made.
    """

    found: SearchResult
    storage: str = field(default="", repr=False)  # it may hold a password
    folder: Path | None = None

    @property
    def interrupted(self) -> bool:
        return self.found.footer.interrupted

    @property
    def best(self) -> MeshConfig:
        """The winner, ready for `create_device_mesh()`, with its knobs and compiler options.

        Raises:
          NoFeasibleMesh: nothing was measured and confirmed, or compiled for devices that are not
            here; the message says why.
        """
        return self.require_best()

    def require_best(self) -> MeshConfig:
        """Returns `best`, or raises if there is none."""
        from automesh.report.files.rule import config_of

        return config_of(self.found)

    def to_report(self, *, top: int = 0, verbose: bool = False) -> Report:
        """Makes the ranking, the table of plans that fell out with the reasons, and the answer in
        words.

        Args:
          top: rows of the ranking; 0 for as many as a search looks at closely.
          verbose: say how the estimates were made, too.
        """
        from automesh.report.table import report_of

        rows = top or usual_top(is_ahead=self.found.is_ahead)
        return report_of(self.found, top=rows, verbose=verbose)

    def table(
        self,
        *,
        top: int = 0,
        width: int | None = None,
        colour: bool | None = None,
        verbose: bool = False,
    ) -> str:
        """Returns what `text` shows; `top` and `verbose` are those of `to_report`."""
        return told(self.to_report(top=top, verbose=verbose), width=width, colour=colour)

    def dataframe(self) -> pd.DataFrame:
        """Returns a table with a row for each candidate."""
        from automesh.report.files.csv import dataframe

        return dataframe(self.found)

    def report(self, path: str | Path = "") -> Path:
        """Writes the study as one HTML page that needs no network, and returns its path.

        Args:
          path: the file; by default `report.html` in the study's folder.

        Raises:
          UsageError: the study is not there any more, or the file cannot be written.
        """
        from automesh.tuner.page.collect import write_report

        folder = self.folder or Path(self.found.facts.provenance.results_dir)
        out = user_path(path) if str(path) else None
        return write_report(folder, out, results=folder.parent, storage=self.storage)

    def _repr_html_(self) -> str:
        """Returns HTML for a notebook, without scripts: the answer, the best plans and the rule."""
        from automesh.report.html.notebook import summary_html

        return summary_html(self.found, top=usual_top(is_ahead=self.found.is_ahead))

    def save_rules(self, path: str | Path = "mesh_rules.toml") -> Path:
        """Merges the winner's rule into a rule file, keeping everything else that is in it.

        Raises:
          NoFeasibleMesh: there is no winner to write.
          UsageError: the file is broken or cannot be written; it is left as it was.
        """
        from automesh.report.files.rule import save_rule

        return save_rule(self.found, Path(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Reportable):
    """The results of searches for several targets.

    Attributes:
      found: the full record.
      storage: the --storage of the searches; empty for folders of their own.
    """

    found: Several
    storage: str = field(default="", repr=False)

    @property
    def interrupted(self) -> bool:
        return self.found.interrupted

    def __getitem__(self, target: str) -> Result:
        """Returns the result for a target; `target` is the name that the search was given.

        Raises:
          KeyError: no such target.
          NoFeasibleMesh: its search ended without a result; the message says why.
        """
        one = next((search for search in self.found.searches if search.target == target), None)
        if one is None:
            raise KeyError(target)
        if one.result is None:
            raise NoFeasibleMesh(f"{target}: {one.reason}", hint=one.hint)
        return Result(found=one.result, storage=self.storage)

    def require_all(self) -> None:
        """Checks that every target has its rule.

        Raises:
          NoFeasibleMesh: names those that have none, and why.
        """
        if self.found.not_found:
            said = "; ".join(f"{one.target}: {one.reason}" for one in self.found.not_found)
            hints = [one.hint for one in self.found.not_found if one.hint]
            raise NoFeasibleMesh(f"nothing was found for {said}", hint=hints[0] if hints else "")

    def to_report(self) -> Report:
        """Makes a line for each target."""
        from automesh.report.pages.several import report_of

        return report_of(self.found)

    def table(
        self,
        *,
        top: int = 0,
        width: int | None = None,
        colour: bool | None = None,
        verbose: bool = False,
    ) -> str:
        """Returns the table of each target's `Result`, then a summary."""
        found = [Result(found=search.result) for search in self.found.searches if search.result]
        tables = [one.table(top=top, width=width, colour=colour, verbose=verbose) for one in found]
        return "\n".join([*tables, self.text(width=width, colour=colour)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(Reportable):
    """An account of a mesh: where its time goes, or why one of two meshes is faster.

    Attributes:
      found: the full record.
    """

    found: Explanation

    @property
    def why(self) -> str:
        """The reason in words."""
        from automesh.report.explain.words import verdict_sentence, why_sentence

        return verdict_sentence(self.found) or why_sentence(self.found.one)

    def to_report(self) -> Report:
        """Makes tables of causes, collectives and memory, and the reason in words."""
        from automesh.report.explain.table import report_of

        return report_of(self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint(Reportable):
    """The findings of `lint`: what the compiler adds to a step although nobody asked for it.

    Attributes:
      found: every finding with its mesh, line, cost and cure.
    """

    found: LintReport

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not self.found.findings

    def to_report(self) -> Report:
        """Makes a section for each finding."""
        from automesh.report.lint.text import report_of

        return report_of(self.found)

    def to_sarif(self) -> dict[str, Any]:
        """Returns the findings as the object of a SARIF 2.1.0 file."""
        from automesh.report.lint.sarif import to_sarif

        return to_sarif(self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCheck(Reportable):
    """The answer to whether a script can be searched, and what must be mended first.

    Attributes:
      found: the full record.
    """

    found: CheckedScript

    @property
    def is_ready(self) -> bool:
        """Whether a search can begin: nothing must be mended."""
        return self.found.is_ready

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems that must be mended, one sentence each."""
        return tuple(problem.what for problem in self.found.problems)

    def to_report(self, *, show_all: bool = False) -> Report:
        """Makes a table of the step's arrays, and sentences about the script.

        Args:
          show_all: a line for each array, instead of one for those that are alike.
        """
        from automesh.report.script_check.table import report_of

        return report_of(self.found, show_all=show_all)

    def table(
        self, *, width: int | None = None, colour: bool | None = None, show_all: bool = False
    ) -> str:
        """Returns the record as the text that a terminal shows; `show_all` as in `to_report`."""
        return told(self.to_report(show_all=show_all), width=width, colour=colour)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetList(Reportable):
    """The answer of `targets`.

    Attributes:
      found: the targets with their facts.
      pattern: what the user asked for: a name, or a part of names; empty for all.
      compilers: the compilers for absent devices, installed or not.
    """

    found: tuple[Listed, ...]
    pattern: str
    compilers: tuple[Compiler, ...]

    def to_report(self) -> Report:
        """Makes a table of the targets, with the sources of their figures."""
        from automesh.report.pages.targets import report_of

        return report_of(self.found, pattern=self.pattern, compilers=self.compilers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetList(Reportable):
    """The answer of `presets`.

    Attributes:
      found: the presets with their rules, and how they were made.
    """

    found: tuple[Preset, ...]

    def to_report(self) -> Report:
        """Makes a table for each preset."""
        from automesh.report.pages.presets import report_of

        return report_of(self.found)
