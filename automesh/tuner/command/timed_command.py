"""A command to search: the program that runs for each plan, and the steps that are timed."""

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
    """The command of a search, checked as far as possible without running it.

    Attributes:
      program: the path of the program.
      source: the source of the step times.
      skip: number of first steps of a run that do not count.
      steps: number of steps that count; a run is ended after them.
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
    """Reads the options of a search by a command.

    Args:
      template: as for `command` of `automesh.search`.
      options: the options of a search; only those of a search by a command are read.

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
