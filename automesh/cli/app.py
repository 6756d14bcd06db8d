"""The command `automesh`: its subcommands, `--version`, and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from automesh.cli import (
    agent,
    calibrate,
    check,
    check_script,
    doctor,
    explain,
    export,
    hosts,
    report,
    search,
    show,
    targets,
)
from automesh.cli.added.commands import Commands, offer_commands
from automesh.cli.guard import guarded, prepare_streams
from automesh.cli.lint import command as lint
from automesh.cli.rules import presets

HELP = """Finds the fastest device mesh for a JAX training step, and proves it.

Write one function in your training script. It takes a mesh, and returns the step with
its arguments:

\b
  def build(mesh, remat="full"):    # knobs are keywords with defaults
      ...                           # NamedSharding(mesh, P("dp", "tp"))
      return step, (state, batch)   # jax.ShapeDtypeStruct is enough

Then search. Every legal mesh of your devices is estimated, the most promising are compiled,
the best are run, and the winner is written to mesh_rules.toml with its evidence:

\b
  automesh search train.py                    on the attached devices
  automesh search train.py --target cpu:8     on 8 virtual CPU devices

In the training script, read it back:

\b
  config = automesh.load("mesh_rules.toml").select()  # these devices' rule
  mesh = config.create_device_mesh()          config.knobs, config.mapping
"""

_WITH_ARGS = {"allow_interspersed_args": True}

app = typer.Typer(
    name="automesh",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    "search",
    help=search.HELP,
    short_help="Search for the fastest mesh and write mesh_rules.toml.",
    context_settings=_WITH_ARGS,
)(search.search)
app.command(
    "check",
    help=check.HELP,
    short_help="Compare the rules of a file with what the script is today.",
    context_settings=_WITH_ARGS,
)(check.check)
app.command(
    "check-script",
    help=check_script.HELP,
    short_help="Look at a script in seconds: is it ready to be searched?",
    context_settings=_WITH_ARGS,
)(check_script.check_script)
app.command(
    "lint",
    help=lint.HELP,
    short_help="Say what the compiler does to a step that nobody asked for.",
    context_settings=_WITH_ARGS,
)(lint.lint)
app.command("show", help=show.HELP, short_help="Show what a study has found so far.")(show.show)
app.command("report", help=report.HELP, short_help="Write a study as one HTML page.")(report.report)
app.command("targets", help=targets.HELP, short_help="List what can be searched for, with facts.")(
    targets.targets
)
app.command(
    "presets", help=presets.HELP, short_help="List the rules that are shipped for public models."
)(presets.presets)
app.command(
    "calibrate", help=calibrate.HELP, short_help="Measure the devices, for better estimates."
)(calibrate.calibrate)
app.command("explain", help=explain.HELP, short_help="Explain where the time of a mesh goes.")(
    explain.explain
)
app.command(
    "export", help=export.EXPORT_HELP, short_help="Write a rule as a configuration of MaxText, ..."
)(export.export)
app.command(
    "import", help=export.IMPORT_HELP, short_help="Read the mesh of another framework as a rule."
)(export.import_)
app.command(
    "agent", help=agent.HELP, short_help="Serve a search on another host with this one's devices."
)(agent.agent)
app.command("hosts", help=hosts.HELP, short_help="Show what the hosts of a running search do.")(
    hosts.hosts
)
offer_commands(app)
app.command("doctor", help=doctor.HELP, short_help="Check versions, devices and known problems.")(
    doctor.doctor
)


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
    commands = [command.name for command in app.registered_commands if command.name]
    sys.exit(guarded(lambda: app(standalone_mode=False, prog_name="automesh"), commands))
