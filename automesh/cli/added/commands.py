"""Adds commands of plug-ins to the command line: listed by name, loaded when one is called."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from automesh.plugins.command import PluginCommand
from automesh.plugins.entry_points import installed, load
from automesh.plugins.offered import COMMANDS, SHORT_HELPS

_PLACEHOLDER = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def offer_commands(app: typer.Typer) -> None:
    """Lists the commands of this repository's plug-ins in the help, installed or not."""
    for name, short_help in SHORT_HELPS.items():
        app.command(name, short_help=short_help, context_settings=dict(_PLACEHOLDER))(_not_loaded)


def _not_loaded() -> None:
    """Represents a command until it is called, when `Commands` loads it."""
    raise NotImplementedError


class Commands(TyperGroup):
    """The commands of the core, and those that plug-ins add."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Lists all names in the order of the help; those of others' plug-ins are the last."""
        known = super().list_commands(ctx)
        return [*known, *sorted(installed(COMMANDS).keys() - set(known))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command for the help; those of this repository's plug-ins are not loaded."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in installed(COMMANDS):
            return load_command(cmd_name)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that is called.

        Raises:
          UsageError: it is in a plug-in that is not installed, or that cannot be loaded.
        """
        name, command, rest = super().resolve_command(ctx, args)
        if name in SHORT_HELPS:
            command = load_command(str(name))
        return name, command, rest


def load_command(name: str) -> Any:
    """Loads a command of a plug-in.

    Raises:
      UsageError: the plug-in is not installed, or cannot be loaded.
    """
    found: PluginCommand = load(COMMANDS, name, PluginCommand, what=f"`automesh {name}`")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"allow_interspersed_args": True} if found.takes_script_args else {}
    alone.command(name, help=found.help, short_help=found.short_help, context_settings=settings)(
        found.run
    )
    return get_command(alone)
