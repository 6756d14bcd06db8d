"""The command line: arguments in, one call each, words out."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from automesh.cli_guard import guarded, interrupted, prepare_streams, typed
from automesh.cli_help import (
    CALIBRATE_HELP,
    CHECK_SCRIPT_HELP,
    COMMAND_OPTION,
    DOCTOR_HELP,
    EXPLAIN_HELP,
    HELP,
    RESERVE_OPTION,
    SEARCH_HELP,
    SHOW_HELP,
    SKIP_STEPS_OPTION,
    SPLIT_OPTION,
    STEP_TIME_OPTION,
    TARGET_OPTION,
    TARGETS_HELP,
    TIMED_STEPS_OPTION,
    TOP_OPTION,
    TRACE_OPTION,
    XLA_OPTION,
)
from automesh.errors import Interrupted, UsageError

_T = TypeVar("_T")
_COMMANDS = ("search", "check-script", "show", "explain", "targets", "calibrate", "doctor")

app = typer.Typer(
    name="automesh",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(
    help=SEARCH_HELP,
    short_help="Search for the fastest mesh and write mesh_rules.toml.",
    context_settings={"allow_interspersed_args": True},
)
def search(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="What builds the step.", show_default=False),
    ] = None,
    script_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="The script's own sys.argv, after --."),
    ] = None,
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
            help="The mesh that the script uses today, to compare with: dp:8, or "
            "'fsdp:-1 remat=full'.",
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
            help="To share one search between hosts: postgresql://user@host/db, or a "
            "journal file (*.journal).",
        ),
    ] = "",
    workers: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Compiles side by side; 0: as many as fit."),
    ] = 0,
    timeout: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Limit for one compile, one visit of a mesh, or one command."
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
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say how the estimates were made, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start another study instead of resuming.")
    ] = False,
) -> None:
    from automesh import api
    from automesh.space.curated import CURATED
    from automesh.space.options import parse_options
    from automesh.units import parse_bytes, parse_duration

    targets, options = target or ["local"], xla or []
    command_typed = shlex.join(typed())
    api.check_subject(
        script,
        command,
        targets,
        of_commands={
            "--step-time": step_time,
            "--skip-steps": skip_steps is not None,
            "--timed-steps": timed_steps is not None,
        },
        of_builds={
            "--hardware": hardware,
            "--workers": workers,
            "--reserve-hbm": reserve_hbm,
            "--xla": options,
            "--step": step,
            "--split": split or [],
        },
    )
    if command:
        asked = api.make_command_request(
            command,
            step_time=step_time,
            skip_steps=skip_steps,
            timed_steps=timed_steps,
            rules=rules,
            results=results,
            command=command_typed,
            target=targets[0],
            space=space,
            budget_s=_read("--budget", parse_duration, budget),
            top=top,
            baseline=baseline,
            storage=storage,
            timeout_s=_read("--timeout", parse_duration, timeout),
            memory_limit_bytes=_read("--worker-memory", parse_bytes, worker_memory)
            if worker_memory
            else 0,
            dry_run=dry_run,
            new=new,
        )
        with api.progress_on_stderr() as progress:
            result = api.run_command(asked, progress)
        _conclude(result, as_json=as_json, top=top or 0, dry_run=dry_run, verbose=verbose)
        return
    request = api.make_request(
        script or "",
        args=script_args or [],
        target=targets[0],
        hardware=hardware,
        space=space or "auto",
        budget_s=_read("--budget", parse_duration, budget),
        top=top,
        baseline=baseline,
        rules=rules,
        results=results,
        storage=storage,
        workers=workers,
        timeout_s=_read("--timeout", parse_duration, timeout),
        memory_limit_bytes=_read("--worker-memory", parse_bytes, worker_memory)
        if worker_memory
        else 0,
        reserve=reserve_hbm,
        xla=parse_options(one for one in options if one != CURATED),
        curated=CURATED in options,
        dry_run=dry_run,
        new=new,
        command=command_typed,
        step=step,
        split=split or [],
    )
    if len(targets) > 1:
        found = api.run_all(request, targets, api.progress_on_stderr)
        _print(found, as_json=as_json, top=top or 0, verbose=verbose)
        if found.interrupted:
            raise interrupted()
        found.require_all()
        return
    with api.progress_on_stderr() as progress:
        result = api.run(request, progress)
    _conclude(result, as_json=as_json, top=top or 0, dry_run=dry_run, verbose=verbose)


@app.command(
    "check-script",
    help=CHECK_SCRIPT_HELP,
    short_help="Look at a script in seconds: is it ready to be searched?",
    context_settings={"allow_interspersed_args": True},
)
def check_script(
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", help="What builds the step.", show_default=False),
    ],
    script_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="The script's own sys.argv, after --."),
    ] = None,
    target: Annotated[str, typer.Option(metavar="NAME", help="Devices, as in search.")] = "local",
    hardware: Annotated[
        str, typer.Option(metavar="FILE", help="TOML file with clusters of your own.")
    ] = "",
    space: Annotated[
        str, typer.Option(metavar="NAME", help="Search space, as in search.")
    ] = "auto",
    step: Annotated[
        str, typer.Option(metavar="NAME", help="Of a script without `build`, as in search.")
    ] = "",
    split: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=A,B", help="Of a script without `build`, as in search."),
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="MESH", help="The mesh that the script uses today.")
    ] = "",
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Limit for calling build and tracing once.")
    ] = "2m",
    show_all: Annotated[
        bool, typer.Option("--all", help="A line for each array, however many there are.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    from automesh import api
    from automesh.units import parse_duration

    _read("--timeout", parse_duration, timeout)
    check = api.check_script(
        script,
        target=target,
        hardware=hardware,
        space=space,
        baseline=baseline,
        step=step,
        split=split or [],
        args=script_args or [],
        timeout=timeout,
        progress=api.progress_on_stderr(),
    )
    sys.stdout.write(
        json.dumps(check.to_json(), indent=1) + "\n" if as_json else check.table(show_all=show_all)
    )
    if not check.is_ready:
        raise typer.Exit(1)


@app.command(help=SHOW_HELP, short_help="Show what a study has found so far.")
def show(
    study: Annotated[
        Path | None,
        typer.Argument(
            metavar="STUDY",
            help="Folder of a study; by default the newest under --results.",
            show_default=False,
        ),
    ] = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder with the studies.")] = Path(
        "results"
    ),
    storage: Annotated[
        str,
        typer.Option(metavar="URL", help="The --storage of the search, if it had one."),
    ] = "",
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Rows to print.")] = 8,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say how the estimates were made, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from automesh import api

    found = api.show(study, results=results, storage=storage)
    _print(found, as_json=as_json, top=top, verbose=verbose)


@app.command(help=TARGETS_HELP, short_help="List what can be searched for, with facts.")
def targets(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN",
            help="A target, or a part of names: v5p, h100, 'tpu-v5*'.",
            show_default=False,
        ),
    ] = "",
    hardware: Annotated[
        str,
        typer.Option(metavar="FILE", help="TOML file with clusters of your own."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all facts as JSON.")] = False,
) -> None:
    from automesh import api

    found = api.targets(pattern, hardware=hardware)
    sys.stdout.write(json.dumps(found.to_json(), indent=1) + "\n" if as_json else found.table())


@app.command(help=CALIBRATE_HELP, short_help="Measure the devices, for better estimates.")
def calibrate(
    target: Annotated[
        str, typer.Option(metavar="NAME", help="Devices to measure: local or cpu:N.")
    ] = "local",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the profile goes; by default where searches look for it.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="For measuring: 30s, 5m; the rest is left out.")
    ] = "60s",
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    from automesh import api
    from automesh.units import parse_duration

    _read("--budget", parse_duration, budget)
    result = api.calibrate(target, out=out, budget=budget, progress=api.progress_on_stderr())
    if as_json:
        sys.stdout.write(json.dumps(result.to_json(), indent=1) + "\n")
    else:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(result.table(width=width, colour=api.is_colourful()))
    if result.interrupted:
        raise Interrupted(
            "interrupted; what is measured is kept",
            hint="the same command measures everything again, newer points replace older ones",
        )


@app.command(help=EXPLAIN_HELP, short_help="Explain where the time of a mesh goes.")
def explain(
    study: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="Folder of a study, or a script.", show_default=False),
    ],
    mesh: Annotated[
        str,
        typer.Argument(metavar="MESH", help="dp:2,tp:4, or 'dp:8 remat=full'.", show_default=False),
    ],
    script_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="For a script: its own sys.argv, after --."),
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="MESH", help="Another mesh, to say why one of the two wins.")
    ] = "",
    target: Annotated[
        str, typer.Option(metavar="NAME", help="For a script: devices, as in search; else local.")
    ] = "",
    hardware: Annotated[
        str, typer.Option(metavar="FILE", help="For a script: clusters of your own, in TOML.")
    ] = "",
    space: Annotated[
        str, typer.Option(metavar="NAME", help="For a script: search space; else auto.")
    ] = "",
    storage: Annotated[
        str,
        typer.Option(metavar="URL", help="The --storage of the search, if it had one."),
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=TRACE_OPTION, show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    from automesh import api

    if trace is not None:
        api.write_trace(study, mesh, trace, storage=storage)
    with api.progress_on_stderr() as progress:
        account = api.explain(
            study,
            mesh,
            against=against,
            target=target,
            hardware=hardware,
            space=space,
            args=script_args or [],
            storage=storage,
            progress=progress,
        )
    sys.stdout.write(
        json.dumps(account.to_json(), indent=1, allow_nan=False) + "\n"
        if as_json
        else account.text()
    )


@app.command(help=DOCTOR_HELP, short_help="Check versions, devices and known problems.")
def doctor(
    target: Annotated[
        str, typer.Option(metavar="NAME", help="Devices to look at: local or cpu:N.")
    ] = "local",
    cache: Annotated[
        bool, typer.Option("--cache", help="Show the compiled programs that are kept instead.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="With --cache: remove them all.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    from automesh import diagnosis

    if clear and not cache:
        raise UsageError(
            "--clear removes the compiled programs that --cache shows",
            hint="write `automesh doctor --cache --clear`",
        )
    if cache:
        sys.stdout.write(diagnosis.examine_store(clear=clear, as_json=as_json))
        return
    findings = diagnosis.examine(target)
    sys.stdout.write(diagnosis.to_json(findings) if as_json else diagnosis.render(findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def _read(option: str, read: Callable[[str], _T], text: str) -> _T:
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hint) from None


def _conclude(result: Any, *, as_json: bool, top: int, dry_run: bool, verbose: bool) -> None:
    """Prints the result of a search for one target, and ends with its exit code."""
    _print(result, as_json=as_json, top=top, verbose=verbose)
    if result.interrupted:
        raise interrupted()
    if not dry_run:
        result.require_best()


def _print(result: Any, *, as_json: bool, top: int, verbose: bool) -> None:
    text = (
        json.dumps(result.to_json(), indent=1)
        if as_json
        else result.table(top=top, verbose=verbose)
    )
    sys.stdout.write(text + "\n")


def _version(show_it: bool) -> None:
    if show_it:
        from importlib.metadata import version

        sys.stdout.write(f"automesh {version('jax-automesh')}\n")
        raise typer.Exit


@app.callback(help=HELP, invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    # `version` has ended the program already, if it was given.
    if not version and context.invoked_subcommand is None:
        sys.stderr.write(context.get_help() + "\n")
        raise typer.Exit(2)


def main() -> None:
    """Runs the command line: 0 found, 1 nothing feasible, 2 bad input, 130 or 143 stopped."""
    prepare_streams()
    sys.exit(guarded(lambda: app(standalone_mode=False, prog_name="automesh"), _COMMANDS))
