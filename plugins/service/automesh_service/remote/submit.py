"""Submitting a search to a service, following it, and taking its rules home."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from automesh import limits
from automesh.errors import NoFeasibleMesh, UsageError
from automesh.hardware.targets import parse_target
from automesh.jsonio import dumps
from automesh.mesh.rules.file import merge_rule, parse_rules
from automesh.mesh.rules.rule import MeshRule, matches
from automesh.texts.terminal import clean, clean_lines, shortened
from automesh.texts.user_text import user_path
from automesh.tuner.request import parse_entry
from automesh_service.remote.answers import (
    LogLines,
    StudyNow,
    SubmissionNow,
    SubmissionTaken,
    WrongAnswer,
    read,
)
from automesh_service.remote.client import Server
from automesh_service.remote.patience import BUSY, RefusedRequest, Unreachable
from automesh_service.submissions.bundle import pack
from automesh_service.submissions.order import Order, checked

_PAUSE_S = 1.0  # before a stream that has ended is opened again
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
    patiently = server.patience.until_answered
    patiently(lambda: server.ask("PUT", path, data, headers={"Content-Type": "application/x-tar"}))
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    answer = patiently(lambda: server.ask("POST", "/v1/studies", body, headers=headers))
    found = answer.read(SubmissionTaken)
    known = answer.status == 200
    if known and found.state in _GO_ON:
        again = f"/v1/submissions/{found.number}/resume"
        found = patiently(lambda: server.ask("POST", again, b"")).read(SubmissionTaken)
    return Submitted(number=found.number, state=found.state, is_known=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSubmission:
    """A submission as it ended.

    Attributes:
      state: how.
      said: one sentence on that.
      studies: names of those that it has left.
    """

    state: str
    said: str
    studies: tuple[str, ...]


def follow(server: Server, number: str, say: Callable[[str], None]) -> EndedSubmission:
    """Waits for the end of a submission, and shows what its search says meanwhile.

    Args:
      say: shows a line.

    Raises:
      UsageError: nobody has answered for minutes, or the service refuses, or it does not answer as
        one does.
    """
    path, last = f"/v1/submissions/{number}", ""
    while True:
        try:
            for event in server.events(f"{path}/events", last):
                last = event.number or last
                if event.kind == "log":
                    for line in read(event.data, LogLines).text.splitlines():
                        say(shortened(clean(line), limits.REMOTE_LINE_CHARS))
        except RefusedRequest as error:
            if error.status not in BUSY:
                raise
        except Unreachable:
            # Whoever answers below says how it is; if nobody does, that is said there.
            pass
        now = server.patience.until_answered(lambda: server.ask("GET", path)).read(SubmissionNow)
        if now.submission.state in _FINAL:
            return EndedSubmission(
                state=now.submission.state, said=now.submission.said, studies=now.studies
            )
        time.sleep(_PAUSE_S)


def tables(server: Server, studies: Sequence[str], *, width: int, top: int) -> str:
    """The tables of studies, as `automesh show` prints them."""
    parts: list[str] = []
    for name in studies:
        path = f"{_path_of(name)}/table.txt?width={width}&top={top}"
        ask = partial(server.ask, "GET", path, most_bytes=limits.REMOTE_TABLE_BYTES)
        parts.append(clean_lines(server.patience.until_answered(ask).text("text/plain")))
    return "\n".join(parts)


def result_json(server: Server, studies: Sequence[str]) -> list[Any]:
    """The results of studies, as `automesh show --json` prints them."""
    found: list[Any] = []
    for name in studies:
        path = f"{_path_of(name)}/result.json"
        ask = partial(server.ask, "GET", path, most_bytes=limits.REMOTE_ANSWER_BYTES)
        found.append(server.patience.until_answered(ask).json_object("best"))
    return found


def _path_of(study: str) -> str:
    return f"/v1/studies/{quote(study, safe='')}"


def _read_study(server: Server, name: str) -> StudyNow:
    """What a service says of a study.

    Raises:
      Unreachable: it was not read yet, as after a restart: whether it has a rule is not known.
      RefusedRequest: as `Server.ask`.
      WrongAnswer: it says what none does.
    """
    answer = server.ask("GET", _path_of(name), most_bytes=2 * limits.PEOPLE_FILE_BYTES)
    found = answer.read(StudyNow)
    if not found.rule and found.study.state == "unread":
        raise Unreachable(
            f"{server.url} has not read the study yet", hint="ask again in a few minutes"
        )
    return found


def take_rules(
    server: Server, studies: Sequence[str], path: Path, *, targets: Sequence[str] = ("local",)
) -> list[str]:
    """Merges the rules of studies into a file, as a search here would have done.

    Args:
      targets: that were asked for: rules of others in the file are left alone.

    Returns:
      The targets whose rules were merged.

    Raises:
      NoFeasibleMesh: none of the studies has a rule.
      UsageError: the file is broken or cannot be written; or the service has sent what is no rule
        for a target that was asked for.
    """
    merged: list[str] = []
    missing: list[str] = []
    for name in studies:
        found = server.patience.until_answered(partial(_read_study, server, name))
        if not found.rule:
            missing.append(f"{name}: {found.missing}")
            continue
        target = found.study.target
        rule = _only_rule(found.rule, target)
        _check_asked(target, targets)
        merge_rule(path, rule, selector=target)
        merged.append(target)
    if not merged:
        raise NoFeasibleMesh("; ".join(missing) or "the search has left no study")
    return merged


def _only_rule(text: str, target: str) -> MeshRule:
    """The rule for a target in a rule file that has nothing else.

    Raises:
      WrongAnswer: it is none.
    """
    try:
        rules = parse_rules(text, name="mesh_rules.toml")
    except UsageError as error:
        raise WrongAnswer(f"the service has sent what is no rule: {clean(error.message)}") from None
    if len(rules.rules) != 1 or not matches(rules.rules[0].match, target):
        raise WrongAnswer(f"the service has sent what is no rule for {target}")
    (rule,) = rules.rules
    return replace(rule, axes=rules.axes_of(rule), batch_axes=rules.batch_axes_of(rule))


def _check_asked(target: str, asked: Sequence[str]) -> None:
    """Refuses a rule for what nobody has asked for: it would take the place of another one.

    Raises:
      WrongAnswer: it is one.
    """
    if "local" in asked:  # Which target that is, the host knows.
        return
    selectors = [parse_target(name, {}).selector for name in asked]
    if target not in selectors:
        raise WrongAnswer(
            f"the service has sent a rule for {target}; asked for was {', '.join(selectors)}"
        )
