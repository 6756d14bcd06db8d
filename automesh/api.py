"""The Python API: `search`, `load`, `show`, and the `Result` that they give."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from automesh.answers import (
    Account,
    Lint,
    PresetList,
    Result,
    Results,
    ScriptCheck,
    TargetList,
)
from automesh.errors import UsageError
from automesh.hardware import clusters_in, parse_target
from automesh.launch.cluster import ClusterOptions
from automesh.mesh.config import Rules
from automesh.mesh.rules.file import check_mergeable, read_rules
from automesh.mesh.rules.shipped import is_preset, rules_path
from automesh.options.option import described
from automesh.options.table import SEARCH
from automesh.platforms import COMPILED_ABSENT
from automesh.program.nouns import Entry
from automesh.program.script.started import words_of
from automesh.reading import read_text
from automesh.texts.storage_url import has_secret
from automesh.texts.user_text import check_text, user_path
from automesh.tuner.command.timed_command import TimedCommand
from automesh.tuner.request import SearchOptions, SearchRequest, read_request

__all__ = [
    "Account",
    "ClusterOptions",
    "Lint",
    "PresetList",
    "Result",
    "Results",
    "ScriptCheck",
    "SearchOptions",
    "TargetList",
    "calibrate",
    "check",
    "check_script",
    "explain",
    "export",
    "import_rules",
    "is_study",
    "join_processes",
    "lint",
    "load",
    "presets",
    "progress_on_stderr",
    "read_request",
    "run",
    "run_all",
    "run_calibration",
    "search",
    "show",
    "targets",
    "write_jobset",
    "write_report",
    "write_trace",
]

if TYPE_CHECKING:
    from automesh.report.check.facts import Bounds
    from automesh.report.check.nouns import RulesChecked
    from automesh.report.pages.calibration import CalibrationResult
    from automesh.report.progress import Progress
    from automesh.tuner.calibration import CalibrationRequest

_Shared = TypeVar("_Shared", "SearchRequest", "CalibrationRequest")


@overload
def search(
    build: str | Path | Callable[..., Any] | None = ...,
    *,
    target: str = ...,
    progress: Progress | None = ...,
    **options: Unpack[SearchOptions],
) -> Result: ...


@overload
def search(
    build: str | Path | Callable[..., Any] | None = ...,
    *,
    target: list[str] | tuple[str, ...],
    progress: Progress | None = ...,
    **options: Unpack[SearchOptions],
) -> Results: ...


@described(SEARCH)
def search(
    build: str | Path | Callable[..., Any] | None = None,
    *,
    target: str | list[str] | tuple[str, ...] = "local",
    progress: Progress | None = None,
    **options: Unpack[SearchOptions],
) -> Result | Results:
    """Searches for a training step's fastest mesh; the same call resumes an unfinished search.

    Args:
      build: `train.py`, `train.py:make_step`, `package.module:function`, `train.ipynb`,
        `-m package.train` for what is run by `python -m`, `--entry NAME` for a console script, or
        the function itself.
      target: `local` (the attached devices), `cpu:N` (virtual), `cpu:N*P` (P processes of N virtual
        ones, with DCN between them), or devices that are not here, such as `tpu-v5p-128` or
        `gpu-h100-64`; a list of them gives `Results`, with one rule each.
      options: of `SearchOptions`; help(automesh.search) and docs/api say what each means.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: bad arguments, files or code of the user's.
      NoFeasibleMesh: no mesh is legal.

    Example:
      >>> import tempfile
      >>> import jax
      >>> def build(mesh):
      ...     both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", "tp"))
      ...     batch = jax.ShapeDtypeStruct((16, 64), "float32", sharding=both)
      ...     return lambda batch: (batch @ batch.T).sum(), (batch,)
      >>> result = search(build, target="cpu:4", results=tempfile.mkdtemp(), dry_run=True)
      >>> sorted(result.dataframe().mesh)
      ['dp:2,tp:2', 'dp:4', 'tp:4']
    """
    from automesh.report.progress import Silent

    shown = progress or Silent()
    targets = [target] if isinstance(target, str) else list(target)
    request = read_request(build, options, targets=targets)
    if isinstance(target, str) or isinstance(request.subject, TimedCommand):
        return run(request, shown)
    return run_all(request, targets, lambda: shown)


def run(request: SearchRequest, progress: Progress) -> Result:
    """Runs a checked request to its end, or to Ctrl-C: the result then says `interrupted`."""
    from automesh.tuner.interrupts import interrupts_at_rest
    from automesh.tuner.start import start

    with interrupts_at_rest():
        return Result(found=start(request, progress), storage=request.storage)


def join_processes(request: _Shared) -> _Shared | None:
    """Does the part of this process, if an engine has started it several times: `srun automesh
    search`.

    Args:
      request: of a search, or of a calibration.

    Returns:
      The request of the process that searches; None once this one has served it as an agent.

    Raises:
      UsageError: the processes do not go with what is searched, or the search was lost.
    """
    from automesh.launch.cluster import ranked, spread
    from automesh.launch.ranks import devices_of, find_rank

    rank = find_rank(os.environ)
    if rank is None or request.cluster.launch:
        return request
    if isinstance(request, SearchRequest) and not isinstance(request.subject, Entry):
        return request
    request = replace(request, cluster=ranked(request.cluster, rank))
    # All of them refuse alike what cannot be searched, and none waits for the others then.
    clusters = clusters_in(request.hardware) if isinstance(request, SearchRequest) else None
    spread(parse_target(request.target, os.environ, clusters), request.cluster)
    os.environ.update(devices_of(rank, os.environ))
    if rank.number == 0:
        return request
    from automesh.launch.agent import serve_search

    serve_search(
        request.cluster.listen,
        wait_s=request.cluster.wait_s or 300.0,
        ca=request.cluster.ca,
    )
    return None


def write_jobset(
    request: SearchRequest, file: Path, *, image: str, volume: str, is_applied: bool
) -> str:
    """Writes the JobSet that runs a search in a Kubernetes cluster; `is_applied` also applies it.

    Args:
      request: with the command that the user typed.
      file: for the JobSet.
      image, volume: see `automesh.launch.engines.jobset.read_placing`.

    Returns:
      What was done, and what is next.

    Raises:
      UsageError: the command cannot run there, the file cannot be written, or kubectl refuses.
    """
    from automesh.launch.engines import jobset

    placing = jobset.read_placing(image, volume)
    if has_secret(request.storage):
        raise UsageError(
            "the password of --storage does not belong into a file that others read",
            hint="leave it out, and put it into a Secret: kubectl create secret generic "
            f"{jobset.PASSWORD_SECRET[0]} --from-file={jobset.PASSWORD_SECRET[1]}=FILE",
        )
    if not isinstance(request.subject, Entry) or request.again is None:
        raise UsageError("a JobSet searches a script with `build`, named on the command line")
    target = parse_target(request.target, os.environ, clusters_in(request.hardware))
    pods = jobset.pods_of(target, request.cluster)
    here = [option.word for option in SEARCH if not option.has_jobset]
    # There the devices are attached: `local` finds them. Virtual ones have to be named.
    words = request.again.without(*here, *(["target"] if target.absent else [])).words
    path = user_path(file)
    name = jobset.name_of(request.again.script)
    # As it was typed: a path in the pods, and none of this host.
    ca = dict(request.again.options).get("ca", "")
    jobset.write(jobset.jobset_of(name, ["search", *words], pods, placing, ca=ca), path)
    if is_applied:
        return f"{jobset.apply(path)}\nfollow it: kubectl logs --follow job/{name}-search-0"
    return f"{path} is written; start it: kubectl apply --filename {shlex.quote(str(path))}"


def run_all(
    request: SearchRequest,
    targets: Sequence[str],
    open_progress: Callable[[], Progress],
    *,
    on_each: Callable[[Result], None] = lambda _: None,
) -> Results:
    """Runs a checked request for several targets, one after the other; `on_each` gets the result
    for each as soon as it is there."""
    from automesh.tuner.interrupts import interrupts_at_rest
    from automesh.tuner.several_targets import start_all

    with interrupts_at_rest():
        found = start_all(
            request,
            targets,
            open_progress,
            on_each=lambda one: on_each(Result(found=one, storage=request.storage)),
        )
        return Results(found=found, storage=request.storage)


def check_script(
    build: str | Path | Callable[..., Any],
    *,
    target: str = "local",
    hardware: str | Path = "",
    space: str | Path = "",
    step: str = "",
    split: Sequence[str] = (),
    baseline: str = "",
    args: Sequence[str] = (),
    timeout: str = "2m",
    progress: Progress | None = None,
) -> ScriptCheck:
    """Looks at a script as a search would, in seconds and without searching.

    Args:
      build: as in `search`.
      target: as in `search`; on a machine with a single CPU device, `local` is `cpu:8`.
      hardware: TOML file with clusters of your own.
      space: a shipped search space or a TOML file; by default `auto`, for a framework its own.
      step: of a script without `build`, as in `search`.
      split: of a script without `build`, as in `search`.
      baseline: the mesh in use today, such as `dp:8`; by default the workload's own.
      args: the script's own arguments.
      timeout: limit for calling `build` and tracing the step once.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: bad arguments, or a script that cannot be loaded.

    Example:
      >>> import jax
      >>> def build(mesh):
      ...     rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
      ...     batch = jax.ShapeDtypeStruct((16, 64), "float32", sharding=rows)
      ...     return lambda batch: (batch @ batch.T).sum(), (batch,)
      >>> check = check_script(build, target="cpu:2")
      >>> check.is_ready, check.found.step.arguments[0].spec
      (True, "P('dp')")
    """
    from automesh.report.progress import Silent
    from automesh.tuner.interrupts import interrupts_at_rest
    from automesh.tuner.script_check import check_script as check

    given = SearchOptions(
        hardware=hardware,
        space=space,
        step=step,
        split=split,
        baseline=baseline,
        args=args,
        timeout=timeout,
        top=1,
        dry_run=True,
    )
    request = read_request(build, given, targets=[target])
    request = replace(request, budget_s=request.timeout_s)
    is_script = isinstance(build, str | Path)
    name = str(build) if is_script else getattr(build, "__name__", "build")
    options = [("hardware", hardware), ("space", space), ("baseline", baseline), ("step", step)]
    options += [("split", one) for one in split]
    changed = [(key, str(value)) for key, value in options if str(value) not in ("", "auto")]

    def command(target: str) -> str:
        given = [("target", target), *changed] if target != "local" else changed
        if is_script:
            flags = [part for key, value in given for part in (f"--{key}", value)]
            rest = ["--", *args] if args else []
            return shlex.join(["automesh", "search", *words_of(name), *flags, *rest])
        return f"automesh.search({', '.join([name, *(f'{k}={v!r}' for k, v in given)])})"

    with interrupts_at_rest(), progress or Silent() as shown:
        found = check(request, script=name, command=command, progress=shown)
    return ScriptCheck(found=found)


def check(
    script: str | Path,
    *,
    rules: str | Path | None = None,
    select: Sequence[str] = (),
    against: str = "",
    args: Sequence[str] = (),
    hardware: str | Path = "",
    step: str = "",
    timeout: str = "10m",
    bounds: Bounds | None = None,
    update: bool = False,
    progress: Progress | None = None,
) -> RulesChecked:
    """Compiles the script's step as it is today for every rule of a file, and compares it with the
    rule's evidence.

    Args:
      script: `train.py`, or `train.py:make_step`.
      rules: the rules file, or a preset as in `load`; by default `mesh_rules.toml` beside the
        script.
      select: targets whose rules are checked; by default all rules.
      against: a version of the script in git to compare with, in place of the evidence.
      args: the script's own arguments.
      hardware: TOML file with clusters of your own.
      step: of a script without `build`, as in `search`.
      timeout: limit for one compile.
      bounds: by how much figures may differ; by default `automesh.report.check.facts.BOUNDS`.
      update: write the figures of today into the rules that could be compiled.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: no such file, rule or version of the script; with `update` also a rules file that
        cannot be written. If that shows only at the end, the error has the result: `error.checked`.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> _ = (folder / "train.py").write_text('''
      ... import jax
      ... def build(mesh):
      ...     rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
      ...     batch = jax.ShapeDtypeStruct((16, 64), "float32", sharding=rows)
      ...     return lambda batch: (batch @ batch.T).sum(), (batch,)
      ... ''')
      >>> _ = (folder / "mesh_rules.toml").write_text('''
      ... schema = 1
      ... axes = ["dp"]
      ... [[rule]]
      ... match = "cpu-4"
      ... ici = { dp = 4 }
      ... ''')
      >>> check(folder / "train.py", update=True).exit_code
      2
      >>> check(folder / "train.py").exit_code
      0
    """
    from automesh.report.check.facts import BOUNDS
    from automesh.report.progress import Silent
    from automesh.tuner.check.rules import CheckOrder, check_rules, write_facts
    from automesh.tuner.interrupts import interrupts_at_rest
    from automesh.tuner.script.capture import check_capture_options

    options = SearchOptions(hardware=hardware, args=args, timeout=timeout, step=step, dry_run=True)
    request = read_request(script, options, targets=["local"])
    # What is wrong for all rules is refused once, and before a worker starts.
    check_capture_options(request)
    clusters_in(str(hardware))
    check_text(against)
    if rules is None and not request.rules:
        raise UsageError("it was not said which rules to check", hint="name the file of the rules")
    given = request.rules if rules is None else rules
    if update and is_preset(given):
        raise UsageError(
            f"`{given}` comes with automesh, and its figures stay as they are",
            hint="leave out --update, or name a rules file of your own",
        )
    path = user_path(rules_path(given))
    if update:
        check_mergeable(path)
    known = read_rules(path)
    order = CheckOrder(
        request=request,
        script=str(script),
        source=path.name,
        select=tuple(select),
        against=against,
        bounds=bounds or BOUNDS,
    )
    with interrupts_at_rest(), progress or Silent() as shown:
        checked = check_rules(known, order, shown)
    if update:
        write_facts(path, known, checked)
    return checked


def show(
    study: Path | None = None, *, results: Path = Path("results"), storage: str = ""
) -> Result:
    """Reads a study without running anything.

    Args:
      study: its folder; by default the one that changed last under `results`.
      results: folder of studies.
      storage: the --storage of the search that made the study, if it had one.

    Raises:
      UsageError: there is none, or it cannot be read.

    Example:
      >>> import tempfile
      >>> import jax
      >>> def build(mesh):
      ...     rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
      ...     batch = jax.ShapeDtypeStruct((16, 64), "float32", sharding=rows)
      ...     return lambda batch: (batch @ batch.T).sum(), (batch,)
      >>> folder = Path(tempfile.mkdtemp())
      >>> best = search(build, target="cpu:2", results=folder, budget="20s", top=1).best
      >>> show(results=folder).best == best
      True
    """
    from automesh.tuner.paths import newest_study
    from automesh.tuner.run import read_result

    where = user_path(results)
    folder = user_path(study) if study is not None else newest_study(where, storage)
    shown = read_result(folder, results=where, storage=storage)
    return Result(found=shown, storage=storage, folder=folder)


def write_report(
    study: Path | None = None,
    out: Path | None = None,
    *,
    results: Path = Path("results"),
    storage: str = "",
) -> Path:
    """Writes a study as one HTML page that needs no network.

    Args:
      study: its folder; by default the one that changed last under `results`.
      out: the file; by default `report.html` in the study's folder.
      results: folder of studies.
      storage: the --storage of the search that made the study, if it had one.

    Returns:
      Where the page is.

    Raises:
      UsageError: there is no such study, it cannot be read, or the file cannot be written.
    """
    from automesh.tuner.page import collect

    return collect.write_report(
        user_path(study) if study is not None else None,
        user_path(out) if out is not None else None,
        results=user_path(results),
        storage=storage,
    )


def calibrate(
    target: str = "local",
    *,
    out: str | Path | None = None,
    budget: str = "60s",
    progress: Progress | None = None,
    **hosts: Unpack[ClusterOptions],
) -> CalibrationResult:
    """Measures devices, and keeps what it finds for all later searches on devices of their kind.

    Args:
      target: `local` (the attached devices), `cpu:N` (virtual), or `cpu:N*P` in P processes.
      out: file to merge the profile into; by default the one that searches look for.
      budget: time for it, as `60s` or `5m`.
      progress: where to report to; by default nowhere.
      hosts: options about the hosts of the devices, as in `search`: `launch`, `hosts`, `listen`.

    Raises:
      UsageError: devices that are not here, a file that cannot be read or written.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "profile.json"
      >>> calibrate("cpu:2", out=file, budget="5s").measured > 0
      True
    """
    from automesh.report.progress import Silent
    from automesh.tuner.calibration import read_calibration

    request = read_calibration(target, out=out, budget=budget, hosts=hosts)
    return run_calibration(request, progress or Silent())


def run_calibration(request: CalibrationRequest, progress: Progress) -> CalibrationResult:
    """Runs a checked request to its end, or to Ctrl-C: the result then says `interrupted`."""
    from automesh.tuner.calibration import run_calibration as take
    from automesh.tuner.interrupts import interrupts_at_rest

    with interrupts_at_rest(), progress as shown:
        return take(request, shown)


def targets(pattern: str = "", *, hardware: str | Path = "") -> TargetList:
    """Lists devices that a search may be aimed at without having them.

    Args:
      pattern: the name of a target, or a part of names (`v5p`, `h100`, `tpu-v5*`); empty: all.
      hardware: TOML file with clusters of your own.

    Raises:
      UsageError: nothing is called so, or the file is wrong.

    Example:
      >>> [one.name for one in targets("tpu-v5p-128").found]
      ['tpu-v5p-128']
    """
    from automesh.hardware.catalogue import find_targets
    from automesh.hardware.compilers import compiler_for

    return TargetList(
        found=find_targets(pattern, clusters_in(str(hardware))),
        pattern=pattern,
        compilers=tuple(compiler_for(one.name) for one in reversed(COMPILED_ABSENT)),
    )


def load(path: str | Path = "mesh_rules.toml") -> Rules:
    """Reads a rule file; `load(path).select("tpu-v5p-128")` gives the `MeshConfig` for a selector.

    Args:
      path: the file; or a preset that comes with automesh, `preset:maxtext/qwen3-1.7b` (see
        `presets`); or its URL on a service (`automesh serve`), as
        `https://mesh.example.com/v1/studies/NAME/rules.toml`. The token for it is in
        AUTOMESH_SERVER_TOKEN, or in the file that AUTOMESH_SERVER_TOKEN_FILE names.

    Raises:
      UsageError: no such file or preset, or it is not a valid rule file; or the service does not
        answer, or does not take the token.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "mesh_rules.toml"
      >>> _ = path.write_text('''
      ... schema = 1
      ... axes = ["dp", "tp"]
      ... batch_axes = ["dp"]
      ... [[rule]]
      ... match = "cpu-8"
      ... ici = { dp = 2, tp = 4 }
      ... ''')
      >>> dict(load(path).select("cpu-8").create_device_mesh().shape)
      {'dp': 2, 'tp': 4}
    """
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        from automesh.plugins.service import find_service

        return find_service("`automesh.load` of a URL").load_rules(path)
    return read_rules(rules_path(path))


def presets(pattern: str = "") -> PresetList:
    """Lists the rules for public models that come with automesh; `load` reads them.

    Args:
      pattern: the name of a preset, a part of names, or all of one with `*` and `?`; empty: all.

    Raises:
      UsageError: nothing is called so.

    Example:
      >>> [one.name for one in presets("qwen3-1.7b").found]
      ['maxtext/qwen3-1.7b']
      >>> load("preset:maxtext/qwen3-1.7b").axes
      ('data', 'fsdp', 'tensor')
    """
    from automesh.mesh.rules.shipped import find_presets

    return PresetList(found=find_presets(check_text(pattern)))


def export(
    rules: str | Path = "mesh_rules.toml",
    *,
    to: str,
    select: str = "",
    batch: int = 0,
    axes: Mapping[str, str] | None = None,
    remat: Mapping[str, str] | None = None,
    knobs: Mapping[str, str] | None = None,
    leave_out: Sequence[str] = (),
) -> str:
    """Writes a rule as the configuration of another framework; returns its text.

    Args:
      rules: a rules file, or a preset as in `load`.
      to: maxtext, axlearn, levanter, easydel, tunix, loadax or json.
      select: name of the target whose rule is written, and which sizes that are left open are
        inferred from; may be left out if the file has one rule, or the framework takes several.
      batch: rows of one update of the optimizer over all devices, where no knob of the rule says it
        and the framework wants it.
      axes: axes of the rule -> those of the framework, where they are called otherwise.
      remat: values of the knob `remat` -> the framework's.
      knobs: other knobs -> keys of the framework that take their values.
      leave_out: knobs, `mapping`, `axis_types` or `compiler_options` that shall not be written.

    Raises:
      UsageError: no such file, rule or framework, or the framework cannot say the rule.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "mesh_rules.toml"
      >>> _ = path.write_text('''
      ... schema = 1
      ... axes = ["dp", "tp"]
      ... [[rule]]
      ... match = "tpu-v5p-32"
      ... ici = { dp = 2, tp = 8 }
      ... ''')
      >>> "ici_tensor_parallelism: 8" in export(path, to="maxtext")
      True
    """
    from automesh.report.export.frameworks import export_rules, granules_of
    from automesh.report.export.nouns import ExportWords

    words = ExportWords(
        axes=axes or {},
        remat=remat or {},
        knobs=knobs or {},
        leave_out=tuple(leave_out),
        global_batch=batch,
    )
    granules = granules_of(select) if select else None
    return export_rules(
        read_rules(rules_path(rules)), to, select=select, words=words, granules=granules
    )


def import_rules(
    path: str | Path,
    *,
    framework: str,
    target: str = "",
    match: str = "",
    axes: Mapping[str, str] | None = None,
    remat: Mapping[str, str] | None = None,
    notes: list[str] | None = None,
) -> Rules:
    """Reads another framework's configuration as rules; Python in it is read, not run.

    Args:
      path: its file: YAML or a command with `key=value` for MaxText, YAML for Levanter and Tunix,
        Python for AXLearn, EasyDeL and Loadax, JSON for json.
      framework: maxtext, axlearn, levanter, easydel, tunix, loadax or json.
      target: devices that sizes left open are inferred for; of a list of rules, the one for these
        devices alone is read.
      match: pattern of the rule, where the file names no target; by default that of `target`, else
        any.
      axes: axes of the rule -> those of the framework, where they are called otherwise.
      remat: values of the knob `remat` -> the framework's.
      notes: gets a phrase for all that was not taken over.

    Raises:
      UsageError: no such file or framework, or the file does not spell out a mesh.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "run.sh"
      >>> _ = path.write_text("python -m train ici_fsdp_parallelism=8 dcn_data_parallelism=1")
      >>> rules = import_rules(path, framework="maxtext", target="cpu:8")
      >>> rules.select("cpu-8").mesh_shape.ici_mesh_shape[rules.axes.index("fsdp")]
      8
    """
    from automesh.report.export import frameworks
    from automesh.report.export.nouns import ExportWords

    granules = None
    if target:
        granules = frameworks.granules_of(check_text(target))
        if granules is None:
            raise UsageError(
                f"`{target}` names no devices whose number is known",
                hint="name them as in `automesh targets`, or as `cpu:8`",
            )
    found = frameworks.import_rules(
        read_text(user_path(path)),
        framework,
        match=match,
        words=ExportWords(axes=axes or {}, remat=remat or {}),
        granules=granules,
        source=user_path(path),
    )
    if notes is not None:
        notes += found.notes
    return found.rules


def progress_on_stderr() -> Progress:
    """Opens a display on stderr: bars on a terminal, plain lines in a pipe or a log."""
    from automesh.report.progress import open_progress

    return open_progress(sys.stderr)


def lint(
    build: str | Path | Callable[..., Any],
    mesh: str = "",
    *,
    every: bool = False,
    target: str = "local",
    hardware: str | Path = "",
    space: str | Path = "",
    step: str = "",
    split: Sequence[str] = (),
    baseline: str = "",
    args: Sequence[str] = (),
    timeout: str = "10m",
    progress: Progress | None = None,
) -> Lint:
    """Says what the compiler does to a step that nobody asked for, and what would mend it.

    Nothing is compiled or run: shardings are propagated through the step, and cures are tried in
    copies of it.

    Args:
      build: as in `search`.
      mesh: `dp:2,tp:4`, or with knobs `dp:8 remat=full`; by default the script's own, and of a
        script that has none all meshes.
      every: look at all meshes of the target.
      target, hardware, space, step, split, baseline, args: as in `check_script`.
      timeout: limit for calling `build` and propagating once.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: bad arguments, a script that cannot be loaded, or no such mesh.
      NoFeasibleMesh: no mesh is legal.

    Example:
      >>> import jax
      >>> def build(mesh):
      ...     rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
      ...     state = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=rows)
      ...     return jax.jit(lambda state: (state * 2, 0.0)), (state,)
      >>> [one.rule for one in lint(build, "dp:2", target="cpu:2").found.findings]
      ['undonated-state']
    """
    from automesh.report.progress import Silent
    from automesh.tuner.interrupts import interrupts_at_rest
    from automesh.tuner.lint.script import lint_script

    for word in (mesh, *args):
        check_text(word)
    if every and mesh.strip():
        raise UsageError(
            "a mesh was named, and all of them as well",
            hint="name MESH to look at it alone, or give --all",
        )
    given = SearchOptions(
        hardware=hardware,
        space=space,
        step=step,
        split=split,
        baseline=baseline,
        args=args,
        timeout=timeout,
        budget=timeout,
        top=1,
        dry_run=True,
    )
    request = read_request(build, given, targets=[target])
    is_script = isinstance(build, str | Path)
    name = str(build) if is_script else getattr(build, "__name__", "build")
    with interrupts_at_rest(), progress or Silent() as shown:
        found = lint_script(request, script=name, mesh=mesh, every=every, progress=shown)
    return Lint(found=found)


def explain(
    subject: str | Path,
    mesh: str,
    *,
    against: str = "",
    target: str = "",
    hardware: str | Path = "",
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
      hardware: for a script: TOML file with clusters of your own.
      space: for a script: the search space; by default `auto`.
      args: for a script: its own arguments.
      storage: the --storage of the search that made the study, if it had one.
      progress: where to report to; by default nowhere.

    Raises:
      UsageError: bad arguments, no such study, or a mesh that it does not hold.

    Example:
      >>> import tempfile
      >>> script = Path(tempfile.mkdtemp()) / "train.py"
      >>> _ = script.write_text('''
      ... import jax
      ... def build(mesh):
      ...     rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
      ...     batch = jax.ShapeDtypeStruct((16, 64), "float32", sharding=rows)
      ...     return lambda batch: (batch @ batch.T).sum(), (batch,)
      ... ''')
      >>> "dp:4" in explain(script, "dp:4", target="cpu:4").text()
      True
    """
    from automesh.report.progress import Silent
    from automesh.tuner.explain.study import explain_script, explain_study

    for word in (mesh, against, storage, *args):
        check_text(word)
    if is_study(subject):
        if target or hardware or space or args:
            raise UsageError(
                f"`{subject}` is a study, which has its target and its search space already",
                hint="give the script instead to explain it for other devices",
            )
        folder = Path(subject)
        found = explain_study(folder, mesh, against, results=folder.parent, storage=storage)
        return Account(found=found)
    request = read_request(
        subject,
        # Longer than a search gives one plan: here it is the only one.
        SearchOptions(
            hardware=hardware, space=space, args=args, top=1, dry_run=True, timeout="10m"
        ),
        targets=[target or "local"],
    )
    return Account(found=explain_script(request, mesh, against, progress or Silent()))


def write_trace(study: str | Path, mesh: str, path: str | Path, *, storage: str = "") -> None:
    """Writes the replay of a compiled plan as a Chrome trace, for https://ui.perfetto.dev.

    Args:
      study: folder of a study of devices that are not here.
      mesh: `dp:2,tp:4`, or with knobs `dp:8 remat=full`.
      path: the file.
      storage: the --storage of the search that made the study, if it had one.

    Raises:
      UsageError: no such study or plan, nothing to replay, or the file cannot be written.
    """
    from automesh.tuner.explain.study import write_trace as write

    if not is_study(study):
        raise UsageError(
            f"`{study}` is a script: what has not been compiled cannot be replayed",
            hint="search with it first, and give the folder of the study",
        )
    folder = Path(study)
    write(folder, check_text(mesh), user_path(path), results=folder.parent, storage=storage)


def is_study(subject: str | Path) -> bool:
    """Whether a subject is a study: an existing folder, or a text that can be no script."""
    text = str(subject)
    if not text.strip():
        raise UsageError(
            "it was not said what to explain", hint="name a script, or a study's folder"
        )
    if ":" not in text:
        user_path(text)
    return Path(text).is_dir() or not (text.endswith(".py") or ":" in text or Path(text).is_file())
