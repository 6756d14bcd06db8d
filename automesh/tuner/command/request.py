"""What a search by a command is asked to do, and what tells one such search from another."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from automesh.errors import UsageError
from automesh.mesh.evidence import relevant_environment
from automesh.tuner.command.step_times import JsonLines, Source, parse_source
from automesh.tuner.command.template import (
    RUN_DIR,
    Template,
    find_program,
    parse_template,
)

SKIP_STEPS = 2
TIMED_STEPS = 10
FINALISTS = 4
# What decides what a command computes; a file that it writes must not make its own figures stale.
_SOURCES = (
    *(".py", ".sh", ".toml", ".yaml", ".yml", ".json", ".ini", ".cfg", ".conf", ".gin"),
    *(".libsonnet", ".jsonnet", ".star", ".txtpb", ".textproto", ".env"),
)
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?|pypy(\d+(\.\d+)*)?")
_ASK_LIMIT_S = 30.0
_ASK_VERSIONS = """
import importlib.metadata, json, platform
found = {"python": platform.python_version()}
for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print("\\n" + json.dumps(found))
"""
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A search by a command, checked as far as can be without running it.

    Attributes:
      template: of the command.
      program: path of what it runs.
      source: of the step times.
      skip: first steps of a run that do not count.
      steps: steps that do; a run is ended after them.
      command: what to type to go on, for the table.
      target: `local` or `cpu:N`.
      space: shipped search space or TOML file; empty for the axes that the template names.
      top: finalists of one race, beside the baseline.
      baseline: plan as text; empty for none.
      rules: file that the rule is merged into.
      results: folder that holds the study's folder.
      storage: Optuna storage URL or journal file; empty for SQLite in the study's folder.
      timeout_s: limit of one run.
      memory_limit_bytes: of one run; 0 for nine tenths of what is free.
      dry_run: say what would be run, and stop.
      new: start another study even if one can be resumed.
    """

    template: Template
    program: str
    source: Source
    skip: int
    steps: int
    rules: str
    results: Path
    command: str = ""
    target: str = "local"
    space: str = ""
    budget_s: float = 600.0
    top: int = FINALISTS
    baseline: str = ""
    storage: str = ""
    timeout_s: float = 300.0
    memory_limit_bytes: int = 0
    dry_run: bool = False
    new: bool = False

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


def check_subject(
    script: object,
    command: str,
    targets: Sequence[str],
    *,
    of_commands: Mapping[str, object],
    of_builds: Mapping[str, object],
) -> None:
    """Checks that it is said what to search, once, and with the options that belong to it.

    Args:
      script: what builds the step, or nothing.
      of_commands: option -> what was given for it, if anything, of those that only a search by a
        command has.
      of_builds: the same for those that it lacks.

    Raises:
      UsageError: neither or both are given, or options of the other.
    """
    if script is not None and command:
        raise UsageError(
            "a script and a command were both given, and only one of them can be searched",
            hint="a script has a function `build`; what has none is run: "
            "--command 'python train.py --fsdp {fsdp}'",
        )
    if script is None and not command:
        raise UsageError(
            "it was not said what to search",
            hint="`automesh search train.py`, or "
            "`automesh search --command 'python train.py --fsdp {fsdp}'`",
        )
    given = of_builds if command else of_commands
    wrong = next((name for name, value in given.items() if value), "")
    if wrong and command:
        raise UsageError(
            f"`{wrong}` is for a step that automesh compiles, and a command is run as it is",
            hint=f"leave `{wrong}` out; what the program needs belongs into the command",
        )
    if wrong:
        raise UsageError(
            f"`{wrong}` is for a search by a command",
            hint="a step that `build` makes is timed by automesh itself",
        )
    if command and len(targets) > 1:
        raise UsageError(
            "a command is searched for one target at a time", hint="run a search for each"
        )


def make_command_request(
    template: str,
    *,
    step_time: str = "",
    skip_steps: int | None = None,
    timed_steps: int | None = None,
    rules: Path | None,
    results: Path,
    command: str,
    target: str,
    space: str,
    budget_s: float,
    top: int | None,
    baseline: str,
    storage: str,
    timeout_s: float,
    memory_limit_bytes: int,
    dry_run: bool,
    new: bool,
) -> CommandRequest:
    """Checks the arguments of a search by a command.

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
    if top is not None and top < 1:
        raise UsageError(f"`top` is {top}; at least one finalist must be measured")
    parsed = parse_template(template)
    source = parse_source(step_time or "capture")
    _check_run_dir(parsed, source)
    return CommandRequest(
        template=parsed,
        program=find_program(parsed),
        source=source,
        skip=skip,
        steps=steps,
        rules=str((rules or Path("mesh_rules.toml")).absolute()),
        results=results.absolute(),
        command=command,
        target=target,
        space=space,
        budget_s=budget_s,
        top=top or FINALISTS,
        baseline=baseline,
        storage=storage,
        timeout_s=timeout_s,
        memory_limit_bytes=memory_limit_bytes,
        dry_run=dry_run,
        new=new,
    )


def study_name(request: CommandRequest, *, selector: str, axes: tuple[str, ...]) -> str:
    """`<workload>-<target>-<hash>`; hashed are the template, where it runs, where its step times
    come from, the target, the space and the axes."""
    identity = [
        "command",
        str(request.template),
        str(Path.cwd()),
        str(request.source),
        selector,
        request.space,
        list(axes),
    ]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
    return f"{request.workload}-{selector}-{digest}"


def source_hash(request: CommandRequest) -> str:
    """Hash of the scripts and settings that the command names, as far as they exist.

    Programs that are found on PATH belong to the versions, data and what runs write to neither.
    """
    digest = hashlib.sha256()
    for path in _named_files(request):
        digest.update(f"{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _named_files(request: CommandRequest) -> list[Path]:
    words = request.template.constants
    found = [Path(words[0])] if "/" in words[0] else []
    for before, word in zip(("", *words), words, strict=False):
        if before == "-m":
            module = Path(*word.split("."))
            found += [module.with_suffix(".py"), module / "__main__.py"]
        # Also in `--config=base.yml`.
        found += [Path(text) for text in (word, word.partition("=")[2]) if text.endswith(_SOURCES)]
    written = Path(request.source.file) if isinstance(request.source, JsonLines) else None
    return [path for path in dict.fromkeys(found) if path != written and path.is_file()]


def provenance(request: CommandRequest, environ: Mapping[str, str]) -> Pairs:
    """Versions of what runs the command, as far as they can be asked, and the environment."""
    versions = {"automesh": version("jax-automesh")} | _versions(request.program)
    return tuple(sorted((*versions.items(), *relevant_environment(environ).items())))


def _versions(program: str) -> dict[str, str]:
    """What the Python that runs a command has installed; nothing if it is not known to be one."""
    python = program if _PYTHON.fullmatch(Path(program).name) else _interpreter(program)
    if not python:
        return {}
    try:
        asked = subprocess.run(
            [python, "-c", _ASK_VERSIONS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_LIMIT_S,
            check=True,
        )
        found: dict[str, str] = json.loads(asked.stdout.decode().strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}  # It may still run the command: then the versions are not known.
    return found


def _interpreter(program: str) -> str:
    """The Python in the first line of a script, such as pip installs; empty for anything else."""
    try:
        with Path(program).open("rb") as file:
            first = file.readline(512)
    except OSError:
        return ""
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return words[0] if len(words) == 1 and _PYTHON.fullmatch(Path(words[0]).name) else ""


def _check_run_dir(template: Template, source: Source) -> None:
    names = [one.name for one in template.placeholders]
    if isinstance(source, JsonLines) and f"{{{RUN_DIR}}}" in source.file and RUN_DIR not in names:
        raise UsageError(
            f"the step times are expected in `{source.file}`, but the command does not know that "
            "folder",
            hint="put {run_dir} into the command, too: `--metrics {run_dir}/metrics.jsonl`",
        )
