"""The table of options: one record an option of `automesh search`, in the order of its `--help`.

How to add one: docs/contributing.md.
"""

from __future__ import annotations

from pathlib import Path

from automesh.options.option import (
    ABSOLUTE_FILE,
    COMPILER_OPTIONS,
    DURATION,
    DURATION_OR_NONE,
    FILE,
    FLAG,
    FOLDER,
    MESH,
    NEW_FILE,
    NUMBER,
    NUMBER_OR_NONE,
    SIZE,
    SPACE,
    SPLITS,
    TEXT,
    TEXTS,
    TIMES,
    Option,
)

_OF_ALL = (
    Option(
        name="args",
        value=TEXTS,
        is_argument=True,
        metavar="-- ARGS",
        help="The script's own sys.argv, after --.",
        doc="the script's own arguments.",
        searches="build",
    ),
    Option(
        name="module",
        value=TEXT,
        short="m",
        metavar="NAME",
        help="Instead of SCRIPT: a module that is run as by `python -m`.",
    ),
    Option(
        name="entry",
        value=TEXT,
        metavar="NAME",
        help="Instead of SCRIPT: a console script of an installed package.",
    ),
    Option(
        name="command",
        value=TEXT,
        metavar="TEMPLATE",
        help="Instead of SCRIPT: a command whose mesh is a flag, with {axis} where sizes stand.",
        doc="instead of `build`: what to run for each mesh, `python train.py --fsdp {fsdp}`; see "
        "`automesh search --help`.",
    ),
    Option(
        name="step_time",
        value=TIMES,
        metavar="SOURCE",
        help="For a --command: `capture` (by default) times its jitted step inside of its Python; "
        "`jsonl:FILE` or `jsonl:FILE:KEY` reads a file of JSON lines that it writes; "
        "`regex:PATTERN` reads its output, with a group for seconds, or (?P<ms>...), (?P<s>...), "
        "(?P<steps_per_s>...).",
        doc="for a command: `capture` (by default), `jsonl:FILE`, `jsonl:FILE:KEY` or "
        "`regex:PATTERN`.",
        searches="command",
        group="command",
        field="source",
    ),
    Option(
        name="skip_steps",
        value=NUMBER_OR_NONE,
        metavar="N",
        otherwise=2,
        least=0,
        help="For a --command: first steps that do not count, as they compile and warm up; by "
        "default 2.",
        doc="for a command: first steps that do not count; by default 2.",
        searches="command",
        group="command",
        field="skip",
    ),
    Option(
        name="timed_steps",
        value=NUMBER_OR_NONE,
        metavar="N",
        otherwise=10,
        least=1,
        help="For a --command: steps that are timed in each run, which is then ended; by default "
        "10.",
        doc="for a command: steps that are timed in each run; by default 10.",
        searches="command",
        group="command",
        field="steps",
    ),
    Option(
        name="target",
        value=TEXTS,
        metavar="NAME",
        help="Devices: local (the attached ones, by default), cpu:N (N virtual ones), or some "
        "that are not here: tpu-v5p-128, v5e:4x8, gpu-h100-64; cpu:N*P are P processes of N "
        "virtual ones, with DCN between them. A part of the devices is a target of its own: "
        "cpu:4, gpu-h100-4; of attached GPUs, CUDA_VISIBLE_DEVICES names them. Give it again for "
        "several: one rule each.",
        has_server=True,
        has_order=True,
    ),
    Option(
        name="hardware",
        value=FILE,
        metavar="FILE",
        help="TOML file with clusters of your own, as targets.",
        doc="TOML file with clusters of your own, each a target by its name.",
        searches="build",
        field="hardware",
        is_path=True,
        has_order=True,
        has_jobset=False,
    ),
    Option(
        name="space",
        value=SPACE,
        metavar="NAME",
        help="Search space: auto (by default), dense_lm, moe_lm, long_context, "
        "dense_lm_pipeline, moe_lm_pipeline, or a TOML file; of a --command by default the "
        "axes that it names.",
        doc="a shipped search space (`auto`, `dense_lm`, `moe_lm`, `long_context`) or a TOML "
        "file; by default `auto`, of a command the axes that it names.",
        field="space",
        has_server=True,
        has_order=True,
    ),
    Option(
        name="step",
        value=TEXT,
        metavar="NAME",
        help="For a script without `build`: the jitted function that is its training step.",
        doc="of a script without `build`, the jitted function that is its training step.",
        searches="build",
        field="step",
        has_order=True,
    ),
    Option(
        name="split",
        value=SPLITS,
        metavar="AXIS=A,B",
        help="For a script without `build`: search an axis of its mesh as several. data=dp,fsdp "
        "splits over dp and fsdp what the script splits over data, and over fsdp also the "
        "parameters and optimizer state that it leaves whole.",
        doc="of a script without `build`, axes of its mesh to search as several, `data=dp,fsdp`: "
        "fsdp splits the parameters, too, that the script leaves whole over `data`.",
        searches="build",
        field="splits",
        has_order=True,
    ),
    Option(
        name="infer",
        value=FLAG,
        help="Search how to split the arrays, too. For a script that makes no mesh that is done "
        "anyway; of one that makes a mesh, other ways to split its parameters and optimizer state "
        "are compared with its own.",
        doc="search how arrays are split, too, as it is done for a script that makes no mesh; of "
        "one that makes a mesh, other ways to split its parameters and optimizer state are "
        "compared with its own.",
        searches="build",
        field="infer",
    ),
    Option(
        name="budget",
        value=DURATION,
        default="10m",
        shows_default=True,
        metavar="TIME",
        help="For all of the search: 90s, 10m, 1.5h. To confirm the winner may take a little "
        "longer.",
        doc="time for the search, as `90s`, `10m`, `1.5h`.",
        field="budget_s",
        has_server=True,
        has_order=True,
    ),
    Option(
        name="top",
        value=NUMBER_OR_NONE,
        metavar="N",
        least=1,
        help="Meshes in one race (by default 8, of a --command 4), or to compile for devices that "
        "are not here (10); and rows to print.",
        doc="finalists of one race (by default 8, of a command 4), or plans to compile for "
        "devices that are not here (by default 10).",
        field="top",
        has_server=True,
        has_order=True,
    ),
    Option(
        name="baseline",
        value=MESH,
        metavar="MESH",
        help="The mesh that the script uses today, to compare with: dp:8, 'fsdp:-1 remat=full', "
        "or maxtext:FILE (see `import --help`).",
        doc="the mesh in use today, such as `dp:8`; by default the workload's own.",
        field="baseline",
        has_server=True,
        has_order=True,
    ),
    Option(
        name="rules",
        value=NEW_FILE,
        metavar="FILE",
        help="Where the winner goes; by default mesh_rules.toml beside the script, of a "
        "--command in this folder.",
        doc="rule file to merge the winner into; by default beside the script, for a function "
        "none, for a command `mesh_rules.toml` in the working directory.",
        field="rules",
        is_path=True,
        has_server=True,
    ),
    Option(
        name="results",
        value=FOLDER,
        default=Path("results"),
        shows_default=True,
        metavar="DIR",
        help="For studies: trials, logs, caches.",
        doc="folder for the study.",
        field="results",
        is_path=True,
    ),
    Option(
        name="storage",
        value=TEXT,
        metavar="URL",
        help="To share one search between hosts: postgresql://user@host/db, or a journal file "
        "(*.journal). The password: see above.",
        doc="Optuna storage URL or journal file; by default SQLite in the study's folder.",
        field="storage",
        has_secret=True,
    ),
    Option(
        name="workers",
        value=NUMBER,
        shows_default=True,
        metavar="N",
        least=0,
        help="Compiles side by side; 0: as many as fit.",
        doc="compiles side by side; 0 for as many as fit.",
        searches="build",
        field="workers",
    ),
    Option(
        name="timeout",
        value=DURATION,
        default="5m",
        shows_default=True,
        metavar="TIME",
        help="Limit for one compile, one visit of a mesh, or one command. A compile gets the time "
        "on top in which others had the cores.",
        doc="limit for one compile, one visit of a mesh, or one run of a command.",
        field="timeout_s",
        has_order=True,
    ),
    Option(
        name="worker_memory",
        value=SIZE,
        metavar="SIZE",
        help="Limit for one worker, as 8GiB; by default its share of what is free.",
        doc="limit for one worker, as `8GiB`; by default its share of what is free.",
        field="memory_limit_bytes",
    ),
    Option(
        name="reserve_hbm",
        value=TEXT,
        metavar="SIZE",
        help="Memory of a device that plans leave free, as 1GiB or 5%; by default, of devices "
        "that are not here, 256 MiB of a TPU and what jax does not take of a GPU (25 %).",
        doc="memory of a device that plans leave free, as `1GiB` or `5%`.",
        searches="build",
        field="reserve",
        has_order=True,
    ),
    Option(
        name="xla",
        value=COMPILER_OPTIONS,
        metavar="NAME=VALUE",
        help="Compiler option; NAME=default,VALUE tries both. May be given again. `curated` tries "
        "those that are worth it on the target.",
        doc="compiler options by name, with the value or the values to try; `default` leaves an "
        "option to the compiler.",
        searches="build",
        field="xla",
        has_order=True,
    ),
    Option(
        name="dry_run",
        value=FLAG,
        help="Rank the meshes by estimate, or show the commands, and stop.",
        doc="rank the meshes by estimate, or say what a command would be, and stop.",
        field="dry_run",
    ),
    Option(
        name="verbose",
        value=FLAG,
        short="v",
        help="Say how the estimates were made, and how often a script without `build` was "
        "started, too.",
    ),
    Option(name="json", value=FLAG, help="Print the result as JSON.", has_server=True),
    Option(
        name="report",
        value=FLAG,
        help="Write the study as an HTML page, too: see `report`.",
    ),
)
HOSTS = (
    Option(
        name="launch",
        value=TEXT,
        group="hosts",
        metavar="NAME",
        help="What starts the agents of a search on several hosts: slurm; ray; local, all of them "
        "on this host, to try it; kubernetes, which writes a JobSet. Without it, and with "
        "--listen, start `automesh agent` on each host.",
        doc="what starts the agents of a search on several hosts: `slurm`, `ray`, or `local`, all "
        "of them on this one; see docs/clusters.md.",
        searches="build",
        field="launch",
        has_jobset=False,
    ),
    Option(
        name="hosts",
        value=NUMBER,
        group="hosts",
        metavar="N",
        least=0,
        help="Hosts, each with an agent; by default one for each process of the target.",
        doc="each with an agent; by default one for each process of the target.",
        searches="build",
        field="hosts",
        has_jobset=False,
    ),
    Option(
        name="processes_per_host",
        value=NUMBER,
        group="hosts",
        metavar="N",
        least=0,
        help="Processes that each host has, which share its GPUs evenly; by default 1, and of "
        "cpu:N*P what --hosts leaves.",
        doc="that each host has, with a share of its GPUs each; by default 1.",
        searches="build",
        field="processes_per_host",
    ),
    Option(
        name="listen",
        value=TEXT,
        group="hosts",
        metavar="ADDRESS",
        help="Address of this host that agents dial, with or without a port: 10.0.0.1:8600; for "
        "slurm and ray by default what its name means.",
        doc="address of this host that agents dial, such as `10.0.0.1:8600`.",
        searches="build",
        field="listen",
        has_jobset=False,
    ),
    Option(
        name="wait",
        value=DURATION_OR_NONE,
        group="hosts",
        metavar="TIME",
        help="How long to wait for the agents; by default 5m, for slurm and ray 1d of queue.",
        doc="how long to wait for the agents, such as `5m`.",
        searches="build",
        field="wait_s",
        has_jobset=False,
    ),
    Option(
        name="certificate",
        value=ABSOLUTE_FILE,
        group="hosts",
        metavar="FILE",
        help="PEM file: encrypts the messages of search and agents; the agents then need --ca; "
        "docs/clusters.md shows how it is made.",
        doc="PEM file, for an encrypted channel to the agents.",
        searches="build",
        field="certificate",
        is_path=True,
    ),
    Option(
        name="key",
        value=ABSOLUTE_FILE,
        group="hosts",
        metavar="FILE",
        help="PEM file with the key to --certificate.",
        doc="PEM file with the key to the certificate.",
        searches="build",
        field="key",
        is_path=True,
    ),
    Option(
        name="ca",
        value=ABSOLUTE_FILE,
        group="hosts",
        metavar="FILE",
        help="PEM file, on all hosts, by which agents that are started for you (--launch, srun) "
        "check --certificate: the certificate of its authority, or --certificate itself.",
        doc="PEM file with the certificates that agents trust if they are started for you.",
        searches="build",
        field="ca",
        is_path=True,
    ),
)
"""The options that say on which hosts a search, or a calibration, runs."""
JOBSET = (
    Option(
        name="image",
        value=TEXT,
        group="jobset",
        metavar="IMAGE",
        help="For --launch kubernetes: image of the pods, with automesh and what the script "
        "imports.",
        has_jobset=False,
    ),
    Option(
        name="volume",
        value=TEXT,
        group="jobset",
        metavar="CLAIM:PATH",
        help="For --launch kubernetes: a claim that all pods mount, with the folder of the "
        "script, as NAME:/path.",
        has_jobset=False,
    ),
    Option(
        name="write",
        value=NEW_FILE,
        group="jobset",
        metavar="FILE",
        help="For --launch kubernetes: where the JobSet goes.",
        has_jobset=False,
    ),
    Option(
        name="apply",
        value=FLAG,
        group="jobset",
        help="For --launch kubernetes: start it with kubectl.",
        has_jobset=False,
    ),
)
"""The options that say how a JobSet is written, instead of a search here."""
SEARCH = (
    *_OF_ALL,
    *HOSTS,
    *JOBSET,
    Option(
        name="server",
        value=TEXT,
        metavar="URL",
        help="Let the service at this address search, as `automesh submit` does.",
        has_server=True,
    ),
    Option(
        name="new",
        value=FLAG,
        help="Start another study instead of resuming.",
        doc="start another study instead of resuming.",
        field="new",
        has_server=True,
        has_resume=False,
    ),
)
"""All options of `automesh search`."""
BY_NAME = {option.name: option for option in SEARCH}
"""All options, by their names in Python."""
