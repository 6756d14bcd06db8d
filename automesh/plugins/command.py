"""A command of a plug-in: `automesh NAME`, in the group of entry points `automesh.commands`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginCommand:
    """A command of a plug-in, as the command line needs it.

    Attributes:
      name: as it is typed, and as its entry point is called.
      help: from which it can be learned.
      short_help: its line in `automesh --help`.
      run: a function with Typer's annotations.
      takes_script_args: its options may follow its arguments, and arguments of a script `--`.
    """

    name: str
    help: str
    short_help: str
    run: Callable[..., Any]
    takes_script_args: bool = False
