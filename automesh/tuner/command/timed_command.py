"""A command that is searched: what is run for each plan, and which of its steps are timed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automesh.errors import UsageError
from automesh.options.option import TIMES, read_values
from automesh.options.table import SEARCH
from automesh.tuner.command.step_times import JsonLines, Source, parse_source
from automesh.tuner.command.template import RUN_DIR, Template, find_program, parse_template


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCommand:
    """What a search by a command runs, checked as far as can be without running it.

    Attributes:
      program: path of what it runs.
      source: of the step times.
      skip: first steps of a run that do not count.
      steps: steps that do; a run is ended after them.
    """

    template: Template
    program: str
    source: Source
    skip: int
    steps: int

    @property
    def workload(self) -> str:
        """A short name for people: of the first Python file, of the module, or of the program."""
        words = self.template.constants
        names = [Path(word).stem for word in words if word.endswith((".py", ".sh"))]
        modules = [
            after.rpartition(".")[2] for word, after in itertools.pairwise(words) if word == "-m"
        ]
        name = (names or modules or [Path(words[0]).name])[0]
        return re.sub(r"[^A-Za-z0-9_.-]+", "_", name) or "command"


def read_command(template: str, options: Mapping[str, Any] | None = None) -> TimedCommand:
    """Reads what is searched by a command.

    Args:
      template: as `command` of `automesh.search`.
      options: those of a search; the ones that only a search by a command has are read.

    Raises:
      UsageError: the template, the source of step times or a number is wrong, or there is no such
        program.
    """
    of_commands = [option for option in SEARCH if option.group == "command"]
    values = read_values(of_commands, options or {}, str, special={TIMES: _source})
    if values["skip"] < 0:
        raise UsageError(
            f"{values['skip']} steps cannot be skipped", hint="0 counts the first one, too"
        )
    if values["steps"] < 1:
        raise UsageError(f"{values['steps']} steps cannot be timed", hint="time at least one")
    parsed = parse_template(template)
    _check_run_dir(parsed, values["source"])
    return TimedCommand(template=parsed, program=find_program(parsed), **values)


def _source(text: str) -> Source:
    return parse_source(text or "capture")


def _check_run_dir(template: Template, source: Source) -> None:
    names = [placeholder.name for placeholder in template.placeholders]
    if isinstance(source, JsonLines) and f"{{{RUN_DIR}}}" in source.file and RUN_DIR not in names:
        raise UsageError(
            f"the step times are expected in `{source.file}`, but the command does not know that "
            "folder",
            hint="put {run_dir} into the command, too: `--metrics {run_dir}/metrics.jsonl`",
        )
