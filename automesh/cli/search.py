"""`automesh search`: the main job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from automesh.cli.guard import interrupted, typed
from automesh.cli.options import Script, named, print_report, print_result, spelled, takes
from automesh.errors import UsageError
from automesh.options.table import JOBSET, SEARCH
from automesh.plugins.service import Asked, find_service
from automesh.report.search_command import read_words

if TYPE_CHECKING:
    from automesh.answers import Result
    from automesh.tuner.request import SearchOptions, SearchRequest

    class SearchGiven(SearchOptions):
        """The arguments and options of the command, also those that only the command line has."""

        module: str
        entry: str
        target: list[str]
        verbose: bool
        json: bool
        report: bool
        image: str
        volume: str
        write: Path | None
        apply: bool
        server: str


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
arrays must be split alike is read from the step, and meshes are searched together with what
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


@takes(SEARCH)
def search(script: Script = None, **given: Unpack[SearchGiven]) -> None:
    from automesh import api

    script, args = named(script, given["module"], given["entry"], list(given.get("args", ())))
    if given["server"]:
        _check_remote(script)
        carried = {one.name: given[one.name] for one in SEARCH if one.has_server}
        service = find_service("`automesh search --server`")
        service.submit_and_follow(
            Asked(script=script or "", args=tuple(args or ()), options=carried)
        )
        return
    options = api.SearchOptions(**{one.name: given[one.name] for one in SEARCH if one.doc})
    options["args"] = args or []
    targets = given["target"] or ["local"]
    request = api.read_request(
        script, options, targets=targets, again=read_words(typed()[2:]), spelled=spelled
    )
    _check_jobset_options(given)
    write = given["write"]
    if write is not None:
        if len(targets) > 1:
            raise UsageError("a JobSet is for one target", hint="write a file for each --target")
        done = api.write_jobset(
            request,
            write,
            image=given["image"],
            volume=given["volume"],
            is_applied=given["apply"],
        )
        sys.stderr.write(f"{done}\n")
        return
    joined = api.join_processes(request) if len(targets) == 1 else request
    if joined is None:
        return
    if len(targets) > 1:
        _search_all(joined, targets, given)
    else:
        _search_one(joined, given)


def _search_all(request: SearchRequest, targets: list[str], given: SearchGiven) -> None:
    from automesh import api

    top, verbose, as_json = request.top, given["verbose"], given["json"]

    def show(result: Result) -> None:
        # Its table is not held back until the other targets are searched, which takes minutes.
        if not as_json:
            print_result(result, as_json=False, top=top, verbose=verbose)
            sys.stdout.flush()

    found = api.run_all(request, targets, api.progress_on_stderr, on_each=show)
    print_report(found.to_report(), as_json=as_json)
    for each in found.found.searches if given["report"] else ():
        if each.result is not None:
            _write_report(found[each.target])
    if found.interrupted:
        raise interrupted()
    found.require_all()


def _search_one(request: SearchRequest, given: SearchGiven) -> None:
    from automesh import api

    with api.progress_on_stderr() as progress:
        result = api.run(request, progress)
    as_json, top, verbose = given["json"], request.top, given["verbose"]
    try:
        print_result(result, as_json=as_json, top=top, verbose=verbose)
    except KeyboardInterrupt:
        # The table is there, and is drawn before any of it is written: somebody waits for it.
        print_result(result, as_json=as_json, top=top, verbose=verbose)
        raise interrupted() from None
    if given["report"]:
        _write_report(result)
    if result.interrupted:
        raise interrupted()
    if not request.dry_run:
        result.require_best()


def _check_jobset_options(given: SearchGiven) -> None:
    """Checks that options of a JobSet come with `--launch kubernetes`, and that `--write` is given.

    Raises:
      UsageError: names the option.
    """
    wrong = next((one.word for one in JOBSET if given[one.name]), "")
    launch = given.get("launch")
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
    """Refuses options that only a search here has, and searches that a service cannot run.

    Raises:
      UsageError: names the option.
    """
    given = read_words(typed()[2:])
    words = [one.word for one in SEARCH if one.has_server]
    wrong = [name for name, _ in given.options if name not in words] if given else []
    if wrong:
        carried = [f"--{word}" for word in words if word != "server"]
        raise UsageError(
            f"`--{wrong[0]}` is not for a search by a service",
            hint=f"--server takes a script with {', '.join(carried[:-1])} and {carried[-1]}",
        )
    if not script:
        raise UsageError("--server: it was not said what to search", hint="name a script")


def _write_report(result: Result) -> None:
    """Writes the HTML page, and its path to stderr, because stdout has the table or JSON."""
    sys.stderr.write(f"report: {result.report()}\n")
