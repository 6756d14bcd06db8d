"""Submits a search to a service, follows it, and downloads its rules."""

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

_PAUSE_S = 1.0  # seconds before a stream that has ended is opened again
_FINAL = ("found", "nothing", "failed", "cancelled")
_GO_ON = ("nothing", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The submission that a service has taken.

    Attributes:
      number: its number.
      state: its state now.
      is_known: whether the same command had submitted it before.
    """

    number: str
    state: str
    is_known: bool


def order_for(
    script: str, order: Order, *, folder: str | Path = "", space: str = "", hardware: str = ""
) -> tuple[Order, Path]:
    """Returns the order for a script on this machine, and the folder that is its bundle.

    Args:
      script: `train.py` or `train.py:make_step`.
      order: all other options.
      folder: the folder that is sent; by default the script's own.
      space, hardware: as for `automesh search`; files must lie in the folder.

    Raises:
      UsageError: a file does not exist, or is not in the folder.
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
    """Sends a bundle, unless the service already has it, and the order for it.

    The same folder with the same order is the same submission. If it has ended without a rule, it
    is resumed.

    Args:
      rules: the file that the rule will be written to; it is not sent.
      is_new: whether to make another submission in any case.

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
      state: the state in which it ended.
      said: one sentence about how it ended.
      studies: names of its studies.
    """

    state: str
    said: str
    studies: tuple[str, ...]


def follow(server: Server, number: str, say: Callable[[str], None]) -> EndedSubmission:
    """Waits for the end of a submission, and shows the log of its search meanwhile.

    Args:
      say: shows a line.

    Raises:
      UsageError: nothing has answered for minutes, the service refuses, or the answer is not one of
        a service.
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
            # The requests below show the state of the submission, or report that nothing answers.
            pass
        now = server.patience.until_answered(lambda: server.ask("GET", path)).read(SubmissionNow)
        if now.submission.state in _FINAL:
            return EndedSubmission(
                state=now.submission.state, said=now.submission.said, studies=now.studies
            )
        time.sleep(_PAUSE_S)


def tables(server: Server, studies: Sequence[str], *, width: int, top: int) -> str:
    """Returns the tables of studies, as `automesh show` prints them."""
    parts: list[str] = []
    for name in studies:
        path = f"{_path_of(name)}/table.txt?width={width}&top={top}"
        ask = partial(server.ask, "GET", path, most_bytes=limits.REMOTE_TABLE_BYTES)
        parts.append(clean_lines(server.patience.until_answered(ask).text("text/plain")))
    return "\n".join(parts)


def result_json(server: Server, studies: Sequence[str]) -> list[Any]:
    """Returns the results of studies, as `automesh show --json` prints them."""
    found: list[Any] = []
    for name in studies:
        path = f"{_path_of(name)}/result.json"
        ask = partial(server.ask, "GET", path, most_bytes=limits.REMOTE_ANSWER_BYTES)
        found.append(server.patience.until_answered(ask).json_object("best"))
    return found


def _path_of(study: str) -> str:
    return f"/v1/studies/{quote(study, safe='')}"


def _read_study(server: Server, name: str) -> StudyNow:
    """Reads a study from a service.

    Raises:
      Unreachable: the service has not read the study yet, as after a restart, so it is not known
        whether there is a rule.
      RefusedRequest: as for `Server.ask`.
      WrongAnswer: the answer is not one of a service.
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
    """Merges the rules of studies into a file, as a search on this machine would do.

    Args:
      targets: the targets that the user asked for; rules in the file for other targets stay as they
        are.

    Returns:
      The targets whose rules were merged.

    Raises:
      NoFeasibleMesh: none of the studies has a rule.
      UsageError: the file is broken or cannot be written; or the service has sent something that is
        no rule for one of the targets.
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
    """Returns the rule for a target from a rule file that has no other rule.

    Raises:
      WrongAnswer: it is no such file.
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
    """Checks that a rule is for a target that the user asked for: a rule for another target would
    replace one in the file.

    Raises:
      WrongAnswer: it is for another target.
    """
    if "local" in asked:  # The user named "local", and only the host knows which target that is.
        return
    selectors = [parse_target(name, {}).selector for name in asked]
    if target not in selectors:
        raise WrongAnswer(
            f"the service has sent a rule for {target}; asked for was {', '.join(selectors)}"
        )
