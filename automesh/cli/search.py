"""`automesh search`: the main job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from automesh.cli.guard import interrupted, typed
from automesh.cli.options import (
    Ca,
    Certificate,
    Entry,
    Hosts,
    Key,
    Listen,
    Module,
    ProcessesPerHost,
    ScriptArgs,
    Verbose,
    Wait,
    named,
    print_result,
    spelled,
    with_notice,
)
from automesh.errors import UsageError
from automesh.plugins.service import Asked, find_service
from automesh.report.search_command import read_words

if TYPE_CHECKING:
    from automesh.answers import Result

HELP = """Search for the fastest mesh for the step that SCRIPT builds, and write it to
mesh_rules.toml.

SCRIPT is train.py, train.py:make_step or package.module:function. The function is `build`
unless you name another; it takes the mesh and returns (step, args).

What has no file of its own to name: -m package.train as for python, --entry NAME for a console
script, train.ipynb for a notebook, whose code cells are run in their order.

A script without `build` is run as it is, up to the call of its training step, with the mesh
of each plan in the place of its own: the axes of its mesh are searched, and that mesh is what
others are compared with. --step NAME chooses among several jitted functions. --split
data=dp,fsdp searches two axes in the place of its axis `data`, the second of which splits
the parameters, too.

A script that makes no mesh (--infer) is run up to its step as well. Which dimensions of its
arrays must be split alike is told from the step, and meshes are searched together with what
is split over them: the batch, parameters and optimizer state, layers' widths. The rule has
the shardings, and config.apply(step) in the script uses them (docs/infer.md).

A search lists all meshes, estimates the legal ones, compiles the most promising, races the
best of them against the script's own mesh (--baseline), and runs the winner again in fresh
processes. While others may still win and there is time, it races on. The table goes to
stdout, progress to stderr.

Devices that are not here (--target tpu-v5p-128) are compiled for: what does not fit is found
out by their own compiler, the schedules of the best are replayed on the links of the target,
and the rule says that its times are predicted. That needs `pip install 'jax-automesh[tpu]'`
or `[gpu]`; a search on the devices later starts from the rule and replaces it by what it
measures.

Stop it whenever you like: the same command goes on where it was. What is finished is never
repeated.

\b
Examples:
  automesh search train.py
  automesh search train.py --dry-run          the estimates alone
  automesh search train.py --dry-run --target tpu-v5p-128
  automesh search train.py --target tpu-v5p-128 --target gpu-h100-64
  automesh search train.py --target cpu:8 --budget 3m
  automesh search train.py --baseline "fsdp:8 remat=full"
  automesh search train.py --space my_space.toml --top 4
  automesh search pkg.steps:make_step -- --size small
  automesh search -m pkg.train -- --steps 100
  automesh search maxtext --target tpu-v5p-64 -- model_name=llama3.1-8b
  automesh search levanter -- --config_path config.yaml
  automesh search train.py --split data=dp,fsdp -- --steps 100
  automesh search one_device.py --infer --target tpu-v5p-16

maxtext, levanter, easydel, tunix, kauldron and axlearn stand for the framework's own step; behind
-- are the arguments of its own training command (docs/frameworks.md).

\b
Where the mesh is a flag of a program, give its command instead of SCRIPT:
  automesh search --command 'python train.py --fsdp {fsdp} --tp {tp}'
  automesh search --command 'python -m trainer ici={ici.dp} dcn={dcn.dp}'

It is run as it is, at least once for each plan, and ended when its steps are timed
(--step-time). {axis} is the size of an axis, {ici.axis} and {dcn.axis} are its parts inside
and between slices or nodes, {knob} is a knob of --space, {run_dir} is an empty folder for
what a run writes, {{ and }} are braces. No shell is used.

\b
A search space (my_space.toml) says what may vary:
  batch_axes = ["dp"]               # split the rows of a batch
  [axes]                            # of the mesh, under any names
  dp = {}
  tp = { max = 4 }
  [constraints]
  tp = { divides = "num_heads" }    # a fact of automesh.Workload, or a number
  [mapping]                         # build(mesh, mapping={"mlp": "tp", ...})
  mlp = ["tp", ["dp", "tp"]]        # axes of a logical axis, or "none"
  [knobs]
  remat = ["none", "full"]          # keywords of build

Several hosts (docs/clusters.md): --target 'cpu:4*2' tries it here, with two agents. In a
cluster, give all hosts the same token (automesh agent --help), and run

\b
  automesh search train.py --hosts 2 --listen 10.0.0.1:8600   on one of them
  automesh agent 10.0.0.1:8600                                on each of them

An engine starts the agents, or the same command on all hosts, as it starts a training:

\b
  automesh search train.py --launch slurm --hosts 4   in an allocation or not
  automesh search train.py --launch ray --hosts 4
  srun automesh search train.py        with a token, as above; or mpirun, ...

In Kubernetes a JobSet does all of it: --target tpu-v5litepod-16 --launch kubernetes
--image IMAGE --volume CLAIM:PATH --write jobset.yaml --apply.

Others can read a command: the password of --storage does not belong into it. The first of
these counts:

\b
  AUTOMESH_STORAGE_PASSWORD=PASSWORD     a variable of the environment
  AUTOMESH_STORAGE_PASSWORD_FILE=FILE    a file that you alone may read
  PGPASSWORD, PGPASSFILE, ~/.pgpass      as for every client of PostgreSQL

\b
Exit codes:
  0 found   1 nothing may become a rule   2 bad input
  130 Ctrl-C   143 SIGTERM: the same command goes on
"""

COMMAND_OPTION = (
    """Instead of SCRIPT: a command whose mesh is a flag, with {axis} where sizes stand."""
)

SPLIT_OPTION = """For a script without `build`: search an axis of its mesh as several. data=dp,fsdp
splits over dp and fsdp what the script splits over data, and over fsdp also the parameters and
optimizer state that it leaves whole."""

STEP_TIME_OPTION = """Of a --command: `capture` (by default) times its jitted step inside of its
Python; `jsonl:FILE` or `jsonl:FILE:KEY` reads a file of JSON lines that it writes; `regex:PATTERN`
reads its output, with a group for seconds, or (?P<ms>...), (?P<s>...), (?P<steps_per_s>...)."""

SKIP_STEPS_OPTION = """Of a --command: first steps that do not count, as they compile and warm up;
by default 2."""

TIMED_STEPS_OPTION = """Of a --command: steps that are timed in each run, which is then ended; by
default 10."""

TARGET_OPTION = """Devices: local (the attached ones, by default), cpu:N (N virtual ones), or some
that are not here: tpu-v5p-128, v5e:4x8, gpu-h100-64; cpu:N*P are P processes of N virtual ones,
with DCN between them. Give it again for several: one rule each."""

LAUNCH_OPTION = """What starts the agents of a search on several hosts: slurm; ray; local, all of
them on this host, to try it; kubernetes, which writes a JobSet. Without it, and with --listen,
start `automesh agent` on each host."""

IMAGE_OPTION = """For --launch kubernetes: image of the pods, with automesh and what the script
imports."""

VOLUME_OPTION = """For --launch kubernetes: a claim that all pods mount, with the folder of the
script, as NAME:/path."""

TOP_OPTION = """Meshes in one race (by default 8, of a --command 4), or to compile for devices that
are not here (10); and rows to print."""

RESERVE_OPTION = """Memory of a device that plans leave free, as 1GiB or 5%; by default, of devices
that are not here, 256 MiB of a TPU and what jax does not take of a GPU (25 %)."""

SERVER_OPTION = """Let the service at this address search, as `automesh submit` does."""

_REMOTE = ("server", "target", "space", "budget", "top", "baseline", "rules", "json", "new")

XLA_OPTION = """Compiler option; NAME=default,VALUE tries both. May be given again. `curated` tries
those that are worth it on the target."""


def search(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="What builds the step.", show_default=False),
    ] = None,
    script_args: ScriptArgs = None,
    module: Module = "",
    entry: Entry = "",
    command: Annotated[
        str,
        typer.Option(metavar="TEMPLATE", help=COMMAND_OPTION, show_default=False),
    ] = "",
    step_time: Annotated[
        str,
        typer.Option(metavar="SOURCE", help=STEP_TIME_OPTION, show_default=False),
    ] = "",
    skip_steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help=SKIP_STEPS_OPTION, show_default=False),
    ] = None,
    timed_steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=TIMED_STEPS_OPTION, show_default=False),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=TARGET_OPTION, show_default=False),
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(metavar="FILE", help="TOML file with clusters of your own, as targets."),
    ] = "",
    space: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Search space: auto (by default), dense_lm, moe_lm, long_context, "
            "dense_lm_pipeline, moe_lm_pipeline, or a TOML file; of a --command by default the "
            "axes that it names.",
            show_default=False,
        ),
    ] = "",
    step: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="For a script without `build`: the jitted function that is its training step.",
        ),
    ] = "",
    split: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=A,B", help=SPLIT_OPTION, show_default=False),
    ] = None,
    infer: Annotated[
        bool,
        typer.Option(
            "--infer",
            help="The script makes no mesh: search how to split its arrays, too. Without this "
            "option that is done for every such script; with it, one that makes a mesh is refused.",
        ),
    ] = False,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="For all of the search: 90s, 10m, 1.5h. To confirm the winner may "
            "take a little longer.",
        ),
    ] = "10m",
    top: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=TOP_OPTION, show_default=False),
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="MESH",
            help="The mesh that the script uses today, to compare with: dp:8, "
            "'fsdp:-1 remat=full', or maxtext:FILE (see `import --help`).",
        ),
    ] = "",
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the winner goes; by default mesh_rules.toml beside the script, of a "
            "--command in this folder.",
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="For studies: trials, logs, caches.")
    ] = Path("results"),
    storage: Annotated[
        str,
        typer.Option(
            metavar="URL",
            callback=with_notice,
            help="To share one search between hosts: postgresql://user@host/db, or a "
            "journal file (*.journal). The password: see above.",
        ),
    ] = "",
    workers: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Compiles side by side; 0: as many as fit."),
    ] = 0,
    timeout: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Limit for one compile, one visit of a mesh, or one command. A compile gets the "
            "time on top in which others had the cores.",
        ),
    ] = "5m",
    worker_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Limit for one worker, as 8GiB; by default its share of what is free.",
        ),
    ] = "",
    reserve_hbm: Annotated[
        str,
        typer.Option(metavar="SIZE", help=RESERVE_OPTION, show_default=False),
    ] = "",
    xla: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help=XLA_OPTION, show_default=False),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Rank the meshes by estimate, or show the commands, and stop."
        ),
    ] = False,
    verbose: Verbose = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Write the study as an HTML page, too: see `report`."),
    ] = False,
    launch: Annotated[
        str, typer.Option(metavar="NAME", help=LAUNCH_OPTION, show_default=False)
    ] = "",
    hosts: Hosts = 0,
    processes_per_host: ProcessesPerHost = 0,
    listen: Listen = "",
    wait: Wait = "",
    certificate: Certificate = "",
    key: Key = "",
    ca: Ca = "",
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help=IMAGE_OPTION, show_default=False)
    ] = "",
    volume: Annotated[
        str, typer.Option(metavar="CLAIM:PATH", help=VOLUME_OPTION, show_default=False)
    ] = "",
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For --launch kubernetes: where the JobSet goes."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="For --launch kubernetes: start it with kubectl.")
    ] = False,
    server: Annotated[
        str, typer.Option(metavar="URL", help=SERVER_OPTION, show_default=False)
    ] = "",
    new: Annotated[
        bool, typer.Option("--new", help="Start another study instead of resuming.")
    ] = False,
) -> None:
    from automesh import api

    targets = target or ["local"]
    script, script_args = named(script, module, entry, script_args)
    if server:
        asked = Asked(
            script=script or "",
            args=tuple(script_args or ()),
            server=server,
            folder="",
            targets=tuple(targets),
            space=space,
            budget=budget,
            top=top or 0,
            baseline=baseline,
            rules=rules,
        )
        _check_remote(script)
        service = find_service("`automesh search --server`")
        service.submit_and_follow(asked, is_detached=False, is_new=new, as_json=as_json)
        return
    options = api.SearchOptions(
        command=command,
        step_time=step_time,
        skip_steps=skip_steps,
        timed_steps=timed_steps,
        hardware=hardware,
        space=space,
        step=step,
        split=split or [],
        infer=infer,
        budget=budget,
        top=top,
        baseline=baseline,
        args=script_args or [],
        rules=rules,
        results=results,
        storage=storage,
        workers=workers,
        timeout=timeout,
        worker_memory=worker_memory,
        reserve_hbm=reserve_hbm,
        xla=xla or [],
        dry_run=dry_run,
        new=new,
        launch=launch,
        hosts=hosts,
        processes_per_host=processes_per_host,
        listen=listen,
        wait=wait,
        certificate=certificate,
        key=key,
        ca=ca,
    )
    request = api.read_request(
        script, options, targets=targets, again=read_words(typed()[2:]), spelled=spelled
    )
    check_jobset_options(launch, {"image": image, "volume": volume, "write": write, "apply": apply})
    if write is not None:
        if len(targets) > 1:
            raise UsageError("a JobSet is for one target", hint="write a file for each --target")
        done = api.write_jobset(request, write, image=image, volume=volume, is_applied=apply)
        sys.stderr.write(f"{done}\n")
        return
    joined = api.join_processes(request) if len(targets) == 1 else request
    if joined is None:
        return
    request = joined
    if len(targets) > 1:
        found = api.run_all(request, targets, api.progress_on_stderr)
        print_result(found, as_json=as_json, top=top or 0, verbose=verbose)
        for each in found.found.searches if report else ():
            if each.result is not None:
                _write_report(found[each.target])
        if found.interrupted:
            raise interrupted()
        found.require_all()
        return
    with api.progress_on_stderr() as progress:
        result = api.run(request, progress)
    try:
        print_result(result, as_json=as_json, top=top or 0, verbose=verbose)
    except KeyboardInterrupt:
        # The table is there, and is drawn before any of it is written: somebody waits for it.
        print_result(result, as_json=as_json, top=top or 0, verbose=verbose)
        raise interrupted() from None
    if report:
        _write_report(result)
    if result.interrupted:
        raise interrupted()
    if not dry_run:
        result.require_best()


def check_jobset_options(launch: str, given: Mapping[str, object]) -> None:
    """Checks that options of a JobSet come with `--launch kubernetes`, and that `--write` is given.

    Raises:
      UsageError: names the option.
    """
    wrong = next((name for name, value in given.items() if value), "")
    if launch == "kubernetes" and given["write"] is None:
        raise UsageError(
            "--launch kubernetes writes a JobSet, and it was not said where",
            hint="name a file: --write jobset.yaml",
        )
    if launch != "kubernetes" and wrong:
        raise UsageError(
            f"--{wrong} is for a search in a Kubernetes cluster", hint="add --launch kubernetes"
        )


def _check_remote(script: str | None) -> None:
    """Refuses what a search here can do, and one that a service runs cannot.

    Raises:
      UsageError: names the option.
    """
    given = read_words(typed()[2:])
    wrong = [name for name, _ in given.options if name not in _REMOTE] if given else []
    if wrong:
        raise UsageError(
            f"`--{wrong[0]}` is not for a search by a service",
            hint="--server takes a script with --target, --space, --budget, --top, --baseline, "
            "--rules, --json and --new",
        )
    if not script:
        raise UsageError("--server: it was not said what to search", hint="name a script")


def _write_report(result: Result) -> None:
    """Stdout has the table, or JSON: where the page is goes to stderr."""
    sys.stderr.write(f"report: {result.report()}\n")
