"""A command that is searched: what is run for each plan, and which of its steps are timed."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from automesh.errors import UsageError
from automesh.tuner.command.step_times import JsonLines, Source, parse_source
from automesh.tuner.command.template import RUN_DIR, Template, find_program, parse_template

SKIP_STEPS = 2
TIMED_STEPS = 10


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


def read_command(
    template: str,
    *,
    step_time: str = "",
    skip_steps: int | None = None,
    timed_steps: int | None = None,
) -> TimedCommand:
    """Reads what is searched by a command; arguments as of `automesh.search`.

    Raises:
      UsageError: the template, the source of step times or a number is wrong, or there is no such
        program.
    """
    skip = SKIP_STEPS if skip_steps is None else skip_steps
    steps = TIMED_STEPS if timed_steps is None else timed_steps
    if skip < 0:
        raise UsageError(f"{skip} steps cannot be skipped", hint="0 counts the first one, too")
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be timed", hint="time at least one")
    parsed = parse_template(template)
    source = parse_source(step_time or "capture")
    _check_run_dir(parsed, source)
    return TimedCommand(
        template=parsed, program=find_program(parsed), source=source, skip=skip, steps=steps
    )


def _check_run_dir(template: Template, source: Source) -> None:
    names = [placeholder.name for placeholder in template.placeholders]
    if isinstance(source, JsonLines) and f"{{{RUN_DIR}}}" in source.file and RUN_DIR not in names:
        raise UsageError(
            f"the step times are expected in `{source.file}`, but the command does not know that "
            "folder",
            hint="put {run_dir} into the command, too: `--metrics {run_dir}/metrics.jsonl`",
        )
