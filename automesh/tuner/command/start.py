"""The start of a search by a command: devices, space, plans and study."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from automesh.errors import UsageError
from automesh.hardware import (
    Target,
    parse_target,
    selector_of,
)
from automesh.mesh.axes import Plan
from automesh.mesh.evidence import relevant_environment
from automesh.mesh.rules.rule import MeshRule
from automesh.outcomes import Failed, Failure
from automesh.program.nouns import Attachment
from automesh.program.script.sources import hash_of_file
from automesh.reading import Unreadable, open_regular
from automesh.report.facts import Searched, Versions
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.space.legal import Enumeration
from automesh.space.spec import read_space
from automesh.texts.storage_url import masked_word
from automesh.tuner.choose.baseline import check_baseline, parse_plan
from automesh.tuner.command.order import PlanOrder
from automesh.tuner.command.run import Manner
from automesh.tuner.command.search import CommandStrategy
from automesh.tuner.command.space import CommandSpace, restricted, space_of
from automesh.tuner.command.step_times import JsonLines
from automesh.tuner.command.template import masked_template
from automesh.tuner.compile.memory_limit import NO_LIMIT, DeviceMemory
from automesh.tuner.paths import check_places, make_folder, make_study_folder
from automesh.tuner.preparation import Aim, LegalPlans, aim_of, known_devices, study_folder
from automesh.tuner.request import SearchRequest, usual_top
from automesh.tuner.strategies.search_run import SearchRun
from automesh.tuner.study.metadata import header_of, notebook_of
from automesh.tuner.study.results import nothing_tried, result_of
from automesh.tuner.study.scope import Scope
from automesh.tuner.study.study import open_study, parse_storage
from automesh.tuner.worker_errors import refuse_to_blame
from automesh.tuner.workers import ask, memory_share_bytes, one_worker, refuse_gang, refuse_launcher
from automesh.worker.executables import executables_folder
from automesh.worker.messages import DevicesJob, Surroundings

_SHOWN = 8  # commands that a dry run shows
_LOOK_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCommand:
    """The command, the devices and the study of a search; known before the first run.

    Attributes:
      name: name of the study.
      folder: folder of the study.
      provenance: versions and environment; runs with other ones are stale.
      rules_before: the rules that the rules file had when the search began.
    """

    request: SearchRequest
    target: Target
    searched: Searched
    aim: Aim
    selector: str
    name: str
    folder: Path
    source_hash: str
    provenance: Versions
    rules_before: tuple[MeshRule, ...]
    device_memory: DeviceMemory = NO_LIMIT  # Only a run shows whether a plan fits into the memory.


def search_command(
    request: SearchRequest,
    progress: Progress,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Searches for the fastest mesh of a command.

    Raises:
      UsageError: the input is wrong, or the command fails or shows no steps with every plan.
      NoFeasibleMesh: no plan is legal.
    """
    refuse_launcher(
        "a search",
        hint="let the command start the processes: `--command 'srun python train.py ...'`",
    )
    if not request.top:
        request = replace(request, top=usual_top(is_ahead=False, is_command=True))
    ready, legal = _prepare(request, progress)
    enumeration = legal.enumeration
    for notice in enumeration.notices:
        progress.notice(notice)
    progress.phase(
        "enumerate",
        total=enumeration.num_plans,
        done=enumeration.num_plans,
        note=f"{len(enumeration.legal)} legal",
    )
    if request.dry_run:
        return _dry_run(ready, legal)
    make_study_folder(ready.folder)
    logs = make_folder(ready.folder / "logs")
    limit_bytes = request.memory_limit_bytes or memory_share_bytes(1)
    started_s = clock()
    with (
        executables_folder(ready.folder, os.environ, progress.notice) as cache_dir,
        open_study(
            parse_storage(request.storage, ready.folder),
            ready.name,
            source_hash=ready.source_hash,
            versions=ready.provenance,
            scope=Scope(
                plans=frozenset(legal.plans), timeout_s=request.timeout_s, worker_bytes=limit_bytes
            ),
        ) as study,
    ):
        header = header_of(request, ready, legal, study)
        notebook = notebook_of(study, header)
        strategy = CommandStrategy(
            request=request,
            manner=Manner(
                program=request.command.program,
                surroundings=_surroundings(ready.target),
                source=request.command.source,
                skip=request.command.skip,
                steps=request.command.steps,
                timeout_s=request.timeout_s,
                memory_limit_bytes=limit_bytes,
                cache_dir=cache_dir,
            ),
            plans=legal.plans,
            baseline=legal.baseline,
            study=study,
            notebook=notebook,
            logs=logs,
            progress=progress,
            started_s=started_s,
            clock=clock,
        )
        return SearchRun(
            study=study,
            header=header,
            notebook=notebook,
            rungs=(study.measure,),
            rules=request.rules,
            rules_before=ready.rules_before,
            folder=ready.folder,
        ).run(strategy)


def _prepare(request: SearchRequest, progress: Progress) -> tuple[PreparedCommand, LegalPlans]:
    target = parse_target(request.target, os.environ)
    if target.absent is not None:
        raise UsageError(
            f"target `{request.target}` names devices that are not here, and a command can only be "
            "run",
            hint="search `local` or `cpu:N`; devices that are not here need a script with `build`",
        )
    refuse_gang(target, "a command")
    template = request.command.template
    command_space = (
        restricted(read_space(request.space), template) if request.space else space_of(template)
    )
    # A dry run leaves no files behind.
    rules_before = () if request.dry_run else check_places(request)
    check_baseline(
        request.baseline.strip(), names=command_space.space.names, devices=known_devices(target)
    )
    aim, selector = _aim(target, progress)
    enumeration = command_space.enumerate(
        template,
        num_devices=aim.num_devices,
        num_granules=aim.num_granules,
        platform=aim.platform,
    )
    said = (*target.notices, *command_space.notices, *enumeration.notices)
    enumeration = replace(enumeration, notices=tuple(dict.fromkeys(said)))
    baseline = _baseline(request, command_space, enumeration, aim)
    space = command_space.space
    name = study_name(request, selector=selector, axes=space.names)
    folder = study_folder(request.results, name, new=request.new)
    prepared = PreparedCommand(
        request=request,
        target=target,
        searched=Searched(
            workload=request.command.workload,
            axes=space.names,
            batch_axes=space.batch_axes,
            template=masked_template(str(template)),
        ),
        aim=aim,
        selector=selector,
        name=folder.name,
        folder=folder,
        source_hash=source_hash(request),
        provenance=provenance(request, os.environ),
        rules_before=rules_before,
    )
    return prepared, LegalPlans(enumeration=enumeration, baseline=baseline)


def _surroundings(target: Target) -> Surroundings:
    return Surroundings(platforms=target.platforms, cpu_devices=target.cpu_devices)


def _aim(target: Target, progress: Progress) -> tuple[Aim, str]:
    """Returns the devices, and the target name of the rule; detects attached devices."""
    if target.cpu_devices:
        aim = Aim(
            platform="cpu",
            device_kind="cpu",
            num_devices=target.cpu_devices,
            num_granules=1,
            memory_bytes=0,
        )
        return aim, target.selector
    found = _attached(target, progress)
    return aim_of(target, found), selector_of(found.devices)


def _attached(target: Target, progress: Progress) -> Attachment:
    """Detects the devices that jax finds here. The worker has ended when this returns, because the
    command needs the devices."""
    progress.now("looking at the attached devices")
    with one_worker(_surroundings(target), progress=progress) as pool:
        answer = ask(pool, DevicesJob(), Attachment, _LOOK_LIMIT_S)
    refuse_to_blame(answer)
    if isinstance(answer, Failure):
        reason = answer.reason if isinstance(answer, Failed) else "jax did not answer"
        raise UsageError(
            f"the attached devices cannot be looked at: {reason}",
            hint="check JAX_PLATFORMS, or search virtual devices: `--target cpu:8`",
        )
    return answer


def _baseline(
    request: SearchRequest, found: CommandSpace, enumeration: Enumeration, aim: Aim
) -> tuple[Plan, ...]:
    """Returns the plan of `--baseline`: the legal plan with the same command, if there is one."""
    text = request.baseline.strip()
    if not text:
        return ()
    knobs = {knob.name: knob.values[0] for knob in found.space.knobs}
    plan = parse_plan(
        text,
        names=found.space.names,
        num_devices=aim.num_devices,
        num_granules=aim.num_granules,
        knobs=knobs,
        varied=list(knobs),
        owner="the command",
    )
    words = request.command.template.for_plan(plan, run_dir="")
    same = (
        one
        for one in enumeration.legal
        if request.command.template.for_plan(one, run_dir="") == words
    )
    return (next(same, plan),)


def _dry_run(ready: PreparedCommand, legal: LegalPlans) -> SearchResult:
    """Returns the plans in the order of their runs, if all of them took the same time."""
    template, order = ready.request.command.template, PlanOrder(legal.plans, legal.baseline)
    seconds: dict[Plan, float | None] = {}
    while len(seconds) < _SHOWN and (plan := order.next(seconds)) is not None:
        seconds[plan] = 1.0
    commands = [template.for_plan(plan, run_dir="RUN_DIR") for plan in seconds]
    shown = [f"would run: {shlex.join(map(masked_word, words))}" for words in commands]
    more = len(legal.plans) - len(seconds)
    if more:
        shown.append(f"and {more} more, as far as the budget goes")
    header = header_of(ready.request, ready, legal, None)
    result = result_of(header, (), nothing_tried(header))
    return replace(
        result,
        footer=replace(result.footer, stop_reason="dry run: nothing was run"),
        notices=(*result.notices, *shown),
    )


# The identity of a search by a command: its name, its sources and its versions.

# Files that can change what a command computes. Other files are left out: a file that the command
# writes must not make its own figures stale.
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


def study_name(request: SearchRequest, *, selector: str, axes: tuple[str, ...]) -> str:
    """Returns `<workload>-<target>-<hash>`. The hash covers the template, the place where it runs,
    the source of its step times, the target, the space and the axes."""
    identity = [
        "command",
        str(request.command.template),
        str(Path.cwd()),
        str(request.command.source),
        selector,
        request.space,
        list(axes),
    ]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
    return f"{request.command.workload}-{selector}-{digest}"


def source_hash(request: SearchRequest) -> str:
    """Returns a hash of the scripts and settings that the command names, as far as they exist.

    Programs on PATH are part of the versions; data, and files that runs write, are part of neither.
    """
    digest = hashlib.sha256()
    for path in _named_files(request):
        digest.update(f"{path}\0".encode() + bytes.fromhex(hash_of_file(path)))
    return digest.hexdigest()


def _named_files(request: SearchRequest) -> list[Path]:
    words = request.command.template.constants
    found = [Path(words[0])] if "/" in words[0] else []
    for before, word in zip(("", *words), words, strict=False):
        if before == "-m":
            module = Path(*word.split("."))
            found += [module.with_suffix(".py"), module / "__main__.py"]
        # Also in `--config=base.yml`.
        found += [Path(text) for text in (word, word.partition("=")[2]) if text.endswith(_SOURCES)]
    source = request.command.source
    written = Path(source.file) if isinstance(source, JsonLines) else None
    return [path for path in dict.fromkeys(found) if path != written and path.is_file()]


def provenance(request: SearchRequest, environ: Mapping[str, str]) -> Versions:
    """Returns the versions of the command's Python and packages, as far as they are known, and the
    environment."""
    versions = {"automesh": version("jax-automesh")} | _versions(request.command.program)
    return tuple(sorted((*versions.items(), *relevant_environment(environ).items())))


def _versions(program: str) -> dict[str, str]:
    """Returns the packages that are installed for the Python of a command; empty if its Python is
    not known."""
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
        return {}  # This Python may still run the command, but the versions are not known.
    return found


def _interpreter(program: str) -> str:
    """Returns the Python in the first line of a script, as pip writes it; empty for other files."""
    try:
        with open_regular(Path(program)) as file:
            first = file.readline(512)
    except (OSError, Unreadable):
        return ""
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return words[0] if len(words) == 1 and _PYTHON.fullmatch(Path(words[0]).name) else ""
