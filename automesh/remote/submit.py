"""Submitting a search to a service, following it, and taking its rules home."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from automesh.errors import NoFeasibleMesh, UsageError
from automesh.jsonio import dumps
from automesh.mesh.rules.file import merge_rule, parse_rules
from automesh.remote.client import BUSY, RefusedRequest, Server, Unreachable
from automesh.submissions.bundle import pack
from automesh.submissions.order import Order, checked
from automesh.texts.terminal import clean, clean_lines
from automesh.texts.user_text import user_path
from automesh.tuner.request import parse_entry

_BACK_S = 300.0
"""How long a service that does not answer is waited for: it may be started again."""
_PAUSE_S = 1.0
_FINAL = ("found", "nothing", "failed", "cancelled")
_GO_ON = ("nothing", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What a service has taken.

    Attributes:
      number: of the submission.
      state: of it now.
      is_known: it was submitted before, by the same command.
    """

    number: str
    state: str
    is_known: bool


def order_for(
    script: str, order: Order, *, folder: str | Path = "", space: str = "", hardware: str = ""
) -> tuple[Order, Path]:
    """An order for a script on this machine, and the folder that is its bundle.

    Args:
      script: `train.py` or `train.py:make_step`.
      order: all else.
      folder: what is sent; by default the script's own folder.
      space, hardware: as for `automesh search`; files must lie in the folder.

    Raises:
      UsageError: there is no such file, or it is not in the folder.
    """
    found = parse_entry(script)
    if found.start:
        raise UsageError(
            f"`{script}` is not started by its file, and a service starts nothing else",
            hint="name a Python file, such as train.py, and what is sent with --folder",
        )
    if found.kind != "script" or Path(found.location).suffix != ".py":
        raise UsageError(
            f"`{script}` is no script that can be sent", hint="name a Python file, such as train.py"
        )
    path = user_path(script.rpartition(":")[0] if ":" in script else script)
    function = script.rpartition(":")[2] if ":" in script else ""
    root = (user_path(folder) if str(folder) else path.parent).resolve()
    if not root.is_dir():
        raise UsageError(f"`{folder}` is no folder")

    def inside(name: str | Path) -> str:
        found = user_path(name)
        if not found.is_file():
            raise UsageError(f"there is no file `{name}`")
        if not found.resolve().is_relative_to(root):
            raise UsageError(
                f"`{name}` is not in the folder `{root}`, which is what is sent",
                hint="move it there, or name a folder that has both with --folder",
            )
        return found.resolve().relative_to(root).as_posix()

    is_file = space.endswith(".toml")
    order = replace(
        order,
        entry=inside(path) + (f":{function}" if function else ""),
        space=inside(space) if is_file else space,
        hardware=inside(hardware) if hardware else "",
    )
    return checked(order), root


def submit(
    server: Server, order: Order, folder: Path, *, rules: Path | None = None, is_new: bool = False
) -> Submitted:
    """Sends a bundle, unless the service has it, and the order for it.

    The same folder with the same order is the same submission, which goes on where it was if it has
    ended without a rule.

    Args:
      rules: a file that the rule will go to, which is not sent.
      is_new: make another submission all the same.

    Raises:
      UsageError: the folder is too large, nobody answers, or the service refuses.
    """
    data, bundle = pack(folder, without=rules)
    body = dumps({"bundle": bundle.digest, "order": order.to_json()}).encode()
    key = secrets.token_hex(16) if is_new else hashlib.sha256(body).hexdigest()[:40]
    path = f"/v1/bundles/{bundle.digest}"
    _patiently(lambda: server.ask("PUT", path, data, headers={"Content-Type": "application/x-tar"}))
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    answer = _patiently(lambda: server.ask("POST", "/v1/studies", body, headers=headers))
    found = answer.json()
    known = answer.status == 200
    if known and found["state"] in _GO_ON:
        again = f"/v1/submissions/{found['number']}/resume"
        found = _patiently(lambda: server.ask("POST", again, b"")).json()
    return Submitted(number=str(found["number"]), state=str(found["state"]), is_known=known)


def _patiently(ask: Callable[[], Any]) -> Any:
    """Asks again while nobody answers: all that is asked here may be asked twice."""
    end_s = time.monotonic() + _BACK_S
    while True:
        try:
            return ask()
        except Unreachable:
            if time.monotonic() > end_s:
                raise
            time.sleep(_PAUSE_S)
        except RefusedRequest as error:
            if error.status not in BUSY or time.monotonic() > end_s:
                raise
            time.sleep(_PAUSE_S)


def follow(server: Server, number: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Waits for the end of a submission, and shows what its search says meanwhile.

    Args:
      say: shows a line.

    Returns:
      The submission as it ended.

    Raises:
      UsageError: nobody has answered for minutes, or the service refuses.
    """
    path, last = f"/v1/submissions/{number}", ""
    while True:
        try:
            for event in server.events(f"{path}/events", last):
                last = event.number or last
                if event.kind == "log":
                    for line in str(json.loads(event.data)["text"]).splitlines():
                        say(clean(line))
        except Unreachable:
            time.sleep(_PAUSE_S)
        except RefusedRequest as error:
            if error.status not in BUSY:
                raise
            time.sleep(_PAUSE_S)
        found = _patiently(lambda: server.ask("GET", path)).json()
        if found["submission"]["state"] in _FINAL:
            return {**found["submission"], "studies": found["studies"]}


def tables(server: Server, studies: Sequence[str], *, width: int, top: int) -> str:
    """The tables of studies, as `automesh show` prints them."""
    parts: list[str] = []
    for name in studies:
        path = f"/v1/studies/{quote(name, safe='')}/table.txt?width={width}&top={top}"
        answer = _patiently(partial(server.ask, "GET", path))
        parts.append(clean_lines(answer.body.decode(errors="replace")))
    return "\n".join(parts)


def result_json(server: Server, studies: Sequence[str]) -> list[Any]:
    """The results of studies, as `automesh show --json` prints them."""
    paths = [f"/v1/studies/{quote(name, safe='')}/result.json" for name in studies]
    return [_patiently(partial(server.ask, "GET", path)).json() for path in paths]


def _read_study(server: Server, path: str) -> Any:
    """What a service says of a study.

    Raises:
      Unreachable: it was not read yet, as after a restart: whether it has a rule is not known.
      RefusedRequest: as `Server.ask`.
    """
    found = server.ask("GET", path).json()
    if not found["rule"] and found["study"]["state"] == "unread":
        raise Unreachable(
            f"{server.url} has not read the study yet", hint="ask again in a few minutes"
        )
    return found


def take_rules(server: Server, studies: Sequence[str], path: Path) -> list[str]:
    """Merges the rules of studies into a file, as a search here would have done.

    Returns:
      The targets whose rules were merged.

    Raises:
      NoFeasibleMesh: none of the studies has a rule.
      UsageError: the file is broken or cannot be written.
    """
    merged: list[str] = []
    missing: list[str] = []
    for name in studies:
        path_of = f"/v1/studies/{quote(name, safe='')}"
        found = _patiently(partial(_read_study, server, path_of))
        if not found["rule"]:
            missing.append(f"{name}: {found['missing']}")
            continue
        rules = parse_rules(str(found["rule"]), name="mesh_rules.toml")
        (rule,) = rules.rules
        whole = replace(rule, axes=rules.axes_of(rule), batch_axes=rules.batch_axes_of(rule))
        target = str(found["study"]["target"])
        merge_rule(path, whole, selector=target)
        merged.append(target)
    if not merged:
        raise NoFeasibleMesh("; ".join(missing) or "the search has left no study")
    return merged
