"""The objects that automesh finds by the entry points of this distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automesh.plugins.command import PluginCommand
from automesh.plugins.offered import SHORT_HELPS
from automesh.plugins.service import Asked, AskedAgent
from automesh_service.commands import serve, submit, token

if TYPE_CHECKING:
    from automesh.mesh.config import Rules

SERVE = PluginCommand(
    name="serve",
    help=serve.HELP,
    short_help=SHORT_HELPS["serve"],
    run=serve.serve,
)
SUBMIT = PluginCommand(
    name="submit",
    help=submit.HELP,
    short_help=SHORT_HELPS["submit"],
    run=submit.submit,
    takes_script_args=True,
)
TOKEN = PluginCommand(
    name="token",
    help=token.HELP,
    short_help=SHORT_HELPS["token"],
    run=token.token,
)


class _OfferedService:
    """`automesh.plugins.service.Service`."""

    def submit_and_follow(self, asked: Asked) -> None:
        submit.submit_and_follow(
            submit.SubmitGiven(script=asked.script, script_args=list(asked.args), **asked.options)
        )

    def serve_agent(self, asked: AskedAgent) -> None:
        from automesh_service.commands.agent import serve_asked

        serve_asked(asked)

    def load_rules(self, url: str) -> Rules:
        from automesh_service.remote.rules import load_rules

        return load_rules(url)


SERVICE = _OfferedService()
