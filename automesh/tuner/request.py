"""The request for a search: the options as a user gives them, and the checked request."""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from automesh.errors import UsageError, did_you_mean
from automesh.hardware.reserve import parse_reserve
from automesh.launch.cluster import ALONE, Cluster, ClusterOptions, cluster_of
from automesh.limits import SCRIPT_BYTES
from automesh.mesh.axes import Scalar
from automesh.options.option import (
    COMPILER_OPTIONS,
    MESH,
    NEW_FILE,
    SPACE,
    SPLITS,
    read_values,
)
from automesh.options.table import BY_NAME, SEARCH
from automesh.plugins.framework import framework_at, framework_called, is_framework
from automesh.plugins.offered import FRAMEWORKS, offered
from automesh.program.capture.nouns import AxisSplit, parse_splits
from automesh.program.nouns import Entry
from automesh.program.script.notebook import code_of
from automesh.program.script.own_build import defines
from automesh.program.script.payload import pickle_entry
from automesh.program.script.started import file_of, is_started
from automesh.reading import Unreadable, kind_of_file, read_bytes
from automesh.report.export.baseline import read_baseline
from automesh.report.search_command import SearchCommand
from automesh.space.curated import CURATED
from automesh.space.options import knobs_of, parse_options
from automesh.space.space import Knob
from automesh.texts.user_text import check_text, user_path
from automesh.tuner.command.timed_command import TimedCommand, read_command
from automesh.worker.temporary import folder_until_exit

_FINALISTS = 8
_COMMAND_FINALISTS = 4
_COMPILED_AHEAD = 10
_RULES = "mesh_rules.toml"


def usual_top(*, is_ahead: bool, is_command: bool = False) -> int:
    """Returns the number of finalists of a race, or of plans to compile for absent devices."""
    if is_command:
        return _COMMAND_FINALISTS
    return _COMPILED_AHEAD if is_ahead else _FINALISTS


class SearchOptions(ClusterOptions, total=False):
    """The options of a search as a user gives them, on the command line and in Python alike.

    The records of `automesh.options.table` describe them, and help(automesh.search) prints that;
    missing options have their defaults.
    """

    command: str
    step_time: str
    skip_steps: int | None
    timed_steps: int | None
    hardware: str | Path
    space: str | Path
    step: str
    split: Sequence[str]
    infer: bool
    budget: str
    top: int | None
    baseline: str
    args: Sequence[str]
    rules: str | Path | None
    results: str | Path
    storage: str
    workers: int
    timeout: str
    worker_memory: str
    reserve_hbm: str
    xla: Mapping[str, Scalar | Sequence[Scalar]] | Sequence[str] | None
    dry_run: bool
    new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The inputs of one search, checked as far as possible without a worker.

    Attributes:
      subject: the entry that builds the step, or the command that is run for each plan.
      again: the command that the user typed, which is shown as the way to continue; None from
        Python.
      target: `local`, `cpu:N` for N virtual CPU devices, or absent devices.
      space: name of a shipped search space or path of a TOML file; for a command, empty for the
        axes in its template.
      budget_s: seconds for everything after the inspection; the final confirmation may overrun it.
      top: number of finalists of one race, or of plans to compile for absent devices, without the
        baseline. 0 for the default.
      baseline: the script's own mesh in text form, knobs may follow (`dp:8 remat=full`); empty for
        the workload's own.
      rules: file that the rule is merged into; empty to write none.
      results: folder that holds the study's folder.
      storage: Optuna storage URL or journal file; empty for SQLite in the study's folder.
      dry_run: whether to stop after the estimates.
      new: whether to start another study even if one can be resumed.
      workers: number of compile workers; 0 for one per core, as far as the memory allows.
      timeout_s: limit of one job of a worker.
      memory_limit_bytes: limit of one worker; 0 for its share of the free memory.
      hardware: TOML file with the user's own clusters; empty for none.
      reserve: memory of a device to keep free, `1GiB` or `5%`; empty for the default.
      xla: compiler options in addition to those of the space.
      curated: whether to add the compiler options that automesh ships; see
        `automesh.space.curated`.
      step: for a script without `build`, the name of the step function; empty for the function that
        looks like the step.
      splits: for such a script, axes of its mesh to split into several.
      infer: whether to search how its arrays are split even if it makes a mesh itself.
      notices: notices for the user about the script.
      used_s: seconds of the budget that runs of the script have used to find the step.
      cluster: the hosts of the search.
      shared_terms: folders of other searches for the same script, whose terms may be used here as
        well.

    Raises:
      UsageError: `reserve` is wrong.
    """

    subject: Entry | TimedCommand
    again: SearchCommand | None = None
    target: str = "local"
    space: str = "auto"
    budget_s: float = 600.0
    top: int = 0
    baseline: str = ""
    rules: str = ""
    results: Path = Path("results")
    storage: str = field(default="", repr=False)  # The URL may contain a password.
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
    infer: bool = False
    notices: tuple[str, ...] = ()
    used_s: float = 0.0
    cluster: Cluster = ALONE
    shared_terms: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.reserve:
            parse_reserve(self.reserve)

    @property
    def entry(self) -> Entry:
        """The entry that builds the step.

        Raises:
          TypeError: the search runs a command.
        """
        if isinstance(self.subject, TimedCommand):
            raise TypeError("a command has no function that builds its step")
        return self.subject

    @property
    def command(self) -> TimedCommand:
        """The command that is run for each plan.

        Raises:
          TypeError: the search does not run a command.
        """
        if isinstance(self.subject, Entry):
            raise TypeError("a step that is built has no command")
        return self.subject


def read_request(
    build: str | Path | Callable[..., Any] | None,
    options: SearchOptions,
    *,
    targets: Sequence[str] = ("local",),
    again: SearchCommand | None = None,
    spelled: Callable[[str], str] = str,
) -> SearchRequest:
    """Checks the options of a user, as far as possible without a worker.

    Args:
      build: as for `automesh.search`; None for a search by a command.
      targets: the targets; the request has the first one.
      again: the command that the user typed; None from Python.
      spelled: gives the user's spelling of an option: `--step-time` for `step_time`.

    Raises:
      UsageError: an option is unknown or wrong, or belongs to another kind of search.
    """
    _check_options(build, options, targets, spelled)
    _check_words(options, targets, spelled)
    top = options.get("top")
    if top is not None and top < 1:
        raise UsageError(f"`top` is {top}; at least one finalist must be measured")
    subject, xla = _subject(build, options), options.get("xla") or ()
    values = read_values(
        (option for option in SEARCH if option.group == "search"),
        options,
        spelled,
        special={
            SPACE: lambda given: str(given) or _usual_space(subject),
            SPLITS: lambda given: parse_splits(given or ()),
            MESH: partial(read_baseline, target=targets[0] if len(targets) == 1 else ""),
            NEW_FILE: lambda given: _rules(subject, given),
            COMPILER_OPTIONS: _compiler_options,
        },
    )
    return SearchRequest(
        subject=subject,
        again=again,
        target=targets[0],
        curated=not isinstance(xla, Mapping) and CURATED in xla,
        cluster=cluster_of(options, spelled),
        **values,
    )


def _compiler_options(
    given: Mapping[str, Scalar | Sequence[Scalar]] | Sequence[str] | None,
) -> tuple[Knob, ...]:
    if isinstance(given, Mapping):
        return knobs_of(given)
    return parse_options(one for one in given or () if one != CURATED)


def _check_options(
    build: object, options: SearchOptions, targets: Sequence[str], spelled: Callable[[str], str]
) -> None:
    """Checks that the user has given exactly one subject to search, and only options that belong to
    it."""
    known = list(SearchOptions.__annotations__)
    for name in options:
        if name not in known:
            raise UsageError(f"there is no option `{name}`{did_you_mean(name, known)}")
    command = options.get("command", "")
    if build is not None and command:
        raise UsageError(
            "a script and a command were both given, and only one of them can be searched",
            hint="a script has a function `build`; what has none is run: "
            "--command 'python train.py --fsdp {fsdp}'",
        )
    if build is None and not command:
        raise UsageError(
            "it was not said what to search",
            hint="`automesh search train.py`, or "
            "`automesh search --command 'python train.py --fsdp {fsdp}'`",
        )
    other = "build" if command else "command"
    given = ((BY_NAME[name], value) for name, value in options.items())
    of_other = (
        option for option, value in given if option.searches == other and option.is_given(value)
    )
    wrong = next((spelled(option.name) for option in of_other), "")
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


def _check_words(
    options: SearchOptions, targets: Sequence[str], spelled: Callable[[str], str]
) -> None:
    """Checks that each text of the options can be sent to workers and stored in studies, and that
    each path is a possible one.

    Raises:
      UsageError: names the option.
    """

    def check(name: str, value: object) -> None:
        try:
            if BY_NAME[name].is_path and value:
                user_path(str(value))
            elif isinstance(value, str):
                check_text(value)
            elif isinstance(value, Mapping):
                check(name, [*value, *value.values()])
            elif isinstance(value, list | tuple):
                for one in value:
                    check(name, one)
        except UsageError as error:
            raise UsageError(f"{spelled(name)}: {error.message}", hint=error.hint) from None

    for name, value in (*options.items(), ("target", list(targets))):
        check(name, value)


def _subject(
    build: str | Path | Callable[..., Any] | None, options: SearchOptions
) -> Entry | TimedCommand:
    if build is None:
        return read_command(options.get("command", ""), options)
    if isinstance(build, str | Path):
        return parse_entry(str(build), options.get("args", ()))
    return pickle_entry(build, folder_until_exit("build") / "build.pickle")


def _usual_space(subject: Entry | TimedCommand) -> str:
    """Returns the default search space; for a command, that of its template."""
    if isinstance(subject, TimedCommand):
        return ""
    framework = framework_at(subject.location) if subject.kind == "module" else None
    return "auto" if framework is None else framework.space


def _rules(subject: Entry | TimedCommand, given: str | Path | None) -> str:
    """Returns the file for the rule: by default a file in the folder of the script; none for a
    function."""
    if given is not None:
        return str(user_path(given).absolute())
    if isinstance(subject, Entry) and subject.kind == "script" and not subject.start:
        return str((Path(subject.location).parent / _RULES).absolute())
    is_function = isinstance(subject, Entry) and subject.kind != "module"
    return "" if is_function else str(Path(_RULES).absolute())


_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FUNCTION = re.compile(r"[A-Za-z_]\w*")
_NAME_A_SCRIPT = (
    "give the path of a Python file with a function `build(mesh)`, `package.module:function`, "
    f"or a framework: {', '.join(offered(FRAMEWORKS))}"
)
UNMODIFIED = ""
"""The function name of a script without `build`, which is captured; see
`automesh.program.capture`."""


def parse_entry(text: str, argv: Sequence[str] = ()) -> Entry:
    """Reads `train.py`, `train.py:make_step`, `pkg.module:fn`, `train.ipynb`, `-m pkg.train`,
    `--entry NAME` of a console script, or the name of a framework.

    If only a script is named and it has no function `build`, it is run unchanged: its function is
    `UNMODIFIED`.

    Raises:
      UsageError: there is no such script, or the text names a folder, or neither a script nor a
        module.
    """
    if is_started(text):
        file = str(file_of(text))
        check_text(file)
        return Entry(
            kind="script", location=file, function=UNMODIFIED, argv=tuple(argv), start=text
        )
    location, colon, function = text.rpartition(":")
    if not colon:
        location, function = text, "build"
    if not location.strip():
        raise UsageError(f"`{text}` names no script", hint=_NAME_A_SCRIPT)
    if all(map(_FUNCTION.fullmatch, function.split("."))) and "." in function:
        raise UsageError(
            f"`{function}` in `{text}` is no function at the top level of the script",
            hint="write one that calls it: `def build(mesh): return Trainer().build(mesh)`",
        )
    if not _FUNCTION.fullmatch(function):
        raise UsageError(
            f"`{function}` in `{text}` is not the name of a function",
            hint="write `train.py`, `train.py:make_step` or `package.module:function`",
        )
    path = user_path(location)
    kind = kind_of_file(path)
    # A clone of the framework's repository probably has a folder of that name.
    if not colon and not path.is_file() and is_framework(location):
        module = framework_called(location).module
        return Entry(kind="module", location=module, argv=tuple(argv))
    if kind == "a folder":
        raise UsageError(
            f"`{location}` is a folder, not a script",
            hint=f"name the script in it: `{location}/train.py`",
        )
    if kind:
        raise UsageError(f"`{location}` is {kind}, not a script", hint=_NAME_A_SCRIPT)
    if path.suffix == ".ipynb" and path.is_file() and colon:
        raise UsageError(
            f"`{text}` names a function of a notebook, and a notebook is run as it is",
            hint=f"leave `:{function}` out, or call `automesh.search({function})` inside of it",
        )
    if path.is_file():
        check_text(str(path.resolve()))
        _check_source(path, location)
        if not colon and (path.suffix == ".ipynb" or not defines(path, function)):
            function = UNMODIFIED
        return Entry(
            kind="script", location=str(path.resolve()), function=function, argv=tuple(argv)
        )
    if colon and _MODULE.fullmatch(location) and path.suffix != ".py":
        return Entry(kind="module", location=location, function=function, argv=tuple(argv))
    ending = f":{function}" if colon else ""
    raise UsageError(f"there is no script `{location}`", hint=_suggestion(path, ending))


def _check_source(path: Path, location: str) -> None:
    """Checks that a file can be Python source, before a worker is started for it.

    Raises:
      UsageError: the file cannot be read, is too large, is an archive, contains NUL bytes, or is a
        broken notebook.
    """
    try:
        content = read_bytes(path, limit_bytes=SCRIPT_BYTES)
    except Unreadable as error:
        raise UsageError(
            error.message, hint="name a Python file that you may read, or change its permissions"
        ) from None
    if content.startswith(b"PK\x03\x04"):
        raise UsageError(
            f"`{location}` is a zip archive, not a script",
            hint="unpack it, and name the script in it",
        )
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError(
            f"`{location}` is UTF-16 text, and Python reads UTF-8", hint="save it as UTF-8"
        )
    if b"\0" in content:
        # The wording of Python.
        raise UsageError(
            f"{path.resolve()}: source code string cannot contain null bytes",
            hint="mend the syntax error",
        )
    if path.suffix == ".ipynb":
        code_of(content, location)


def _suggestion(path: Path, ending: str) -> str:
    try:
        scripts = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return f"the folder `{path.parent}` does not exist either"
    close = difflib.get_close_matches(path.name, scripts, n=1)
    if close:
        return f"did you mean `{path.parent / close[0]}{ending}`?"
    return _NAME_A_SCRIPT
