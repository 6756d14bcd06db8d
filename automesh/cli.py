"""The command line: arguments in, one call each, words out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from automesh.errors import AutomeshError, Interrupted, NoFeasibleMesh, UsageError

# The root of Typer's argument errors; its module is private, its subclass is not.
_ArgumentError: type[Exception] = typer.BadParameter.__mro__[2]  # pyright: ignore

app = typer.Typer(
    name="automesh",
    help="Finds the fastest device mesh for a JAX training step, and proves it.",
    epilog="Start with: automesh search train.py",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SEARCH_HELP = """Search the fastest mesh for the step that SCRIPT builds, and write it to mesh_rules.toml.

SCRIPT is train.py, train.py:make_step or package.module:function. The function (`build` unless named) takes a
jax.sharding.Mesh and keyword knobs with defaults, and returns (step, args); args may be jax.ShapeDtypeStruct with
shardings. What follows -- is the script's own sys.argv.

The same command resumes: finished trials are never repeated. Ctrl-C or kill it at any time.

\b
Examples:
  automesh search train.py
  automesh search train.py --target cpu:8 --budget 3m
  automesh search train.py --baseline dp:8 --space my_space.toml
  automesh search pkg.steps:make_step -- --size small
"""


@app.command(help=SEARCH_HELP, context_settings={"allow_interspersed_args": True})
def search(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT[:FN]", help="What builds the step.", show_default=False)
    ],
    script_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]", help="The script's own arguments, after --."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="Devices to search for: local (the attached ones) or cpu:N (virtual)."),
    ] = "local",
    space: Annotated[
        str,
        typer.Option(help="Search space: auto, dense_lm, moe_lm, long_context, or a TOML file."),
    ] = "auto",
    budget: Annotated[str, typer.Option(help="Time for the search: 90s, 10m, 1.5h.")] = "10m",
    top: Annotated[int, typer.Option(min=1, help="Finalists to measure, and rows to print.")] = 8,
    baseline: Annotated[
        str,
        typer.Option(
            help="The mesh that the script uses today, for example dp:8 or 'fsdp:8 remat=full'."
        ),
    ] = "",
    rules: Annotated[
        Path | None,
        typer.Option(help="Rule file to merge the winner into; by default beside the script."),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Folder for the study: trials, logs, caches.")
    ] = Path("results"),
    storage: Annotated[
        str,
        typer.Option(
            help="Optuna storage URL (postgresql+psycopg://...) or journal file, to share a search."
        ),
    ] = "",
    workers: Annotated[
        int, typer.Option(min=0, help="Compile workers side by side; 0: as many as fit.")
    ] = 0,
    timeout: Annotated[
        str, typer.Option(help="Limit for one compile or one visit of a finalist.")
    ] = "5m",
    worker_memory: Annotated[
        str,
        typer.Option(
            help="Memory limit of one worker, for example 8GiB; by default its share of what is free."
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Stop after counting the legal meshes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start another study instead of resuming.")
    ] = False,
) -> None:
    from automesh import api
    from automesh.units import parse_bytes, parse_duration

    request = api.make_request(
        script,
        args=script_args or [],
        target=target,
        space=space,
        budget_s=parse_duration(budget),
        top=top,
        baseline=baseline,
        rules=rules,
        results=results,
        storage=storage,
        workers=workers,
        timeout_s=parse_duration(timeout),
        memory_limit_bytes=parse_bytes(worker_memory) if worker_memory else 0,
        dry_run=dry_run,
        new=new,
    )
    with api.progress_on_stderr() as progress:
        result = api.run(request, progress)
    _print(result, as_json=as_json, top=top)
    if result.interrupted:
        raise Interrupted(
            "interrupted; nothing is lost", hint="run the same command again to go on"
        )
    if not dry_run:
        result.require_best()


@app.command()
def show(
    study: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a study; by default the newest under results/.", show_default=False
        ),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder with the studies.")] = Path("results"),
    storage: Annotated[
        str, typer.Option(help="The storage of the study, if it was not SQLite.")
    ] = "",
    top: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show what a study has found so far, without running anything."""
    from automesh import api

    _print(api.show(study, results=results, storage=storage), as_json=as_json, top=top)


@app.command()
def doctor(
    target: Annotated[str, typer.Option(help="Devices to look at.")] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check versions, devices, known-bad combinations, and say what to install for which target."""
    from automesh import diagnosis

    findings = diagnosis.examine(target)
    sys.stdout.write(diagnosis.to_json(findings) if as_json else diagnosis.render(findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def _print(result: Any, *, as_json: bool, top: int) -> None:
    sys.stdout.write(
        json.dumps(result.to_json(), indent=1) + "\n" if as_json else result.table(top=top) + "\n"
    )
    sys.stdout.flush()


def _version(show_it: bool) -> None:
    if show_it:
        from importlib.metadata import version

        sys.stdout.write(f"automesh {version('jax-automesh')}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Finds the fastest device mesh for a JAX training step, and proves it."""


def main() -> None:
    """Runs the command line; exit codes: 0 found, 1 nothing feasible, 2 bad input, 130 interrupted."""
    sys.exit(_guarded(lambda: app(standalone_mode=False)))


def _guarded(call: Callable[[], Any]) -> int:
    try:
        outcome = call()
        return outcome if isinstance(outcome, int) else 0
    except NoFeasibleMesh as error:
        return _complain(error, 1)
    except Interrupted as error:
        return _complain(error, 130)
    except AutomeshError as error:
        return _complain(error, 2)
    except KeyboardInterrupt:
        return _complain(
            Interrupted("interrupted", hint="run the same command again to go on"), 130
        )
    except BrokenPipeError:
        # The reader of our table went away (`automesh show | head`): not an error of anyone's.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _ArgumentError as error:
        return _complain(
            UsageError(
                _sentence(error), hint="`automesh --help` and `automesh COMMAND --help` list all"
            ),
            2,
        )


def _sentence(error: Any) -> str:
    message: str = error.format_message()
    return message[:1].lower() + message[1:].rstrip(".")


def _complain(error: AutomeshError, code: int) -> int:
    hint = f"\nhint: {error.hint}\n" if error.hint else ""
    sys.stderr.write(f"error: {error.message}\n{hint}")
    return code
