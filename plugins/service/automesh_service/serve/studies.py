"""The routes of studies: lists, figures, pages, rules, logs, live progress."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Body, Header, Query, Request
from fastapi import Path as UrlPath
from fastapi.responses import PlainTextResponse, Response

from automesh import limits
from automesh.reading import Unreadable, open_regular
from automesh.texts.terminal import clean_lines
from automesh_service.serve import access
from automesh_service.serve.access import Reader
from automesh_service.serve.events import EVENTS, Watched, Watching, stream, view_of, watching
from automesh_service.serve.problems import RESPONSES, Problem
from automesh_service.serve.reading.summary import KnownStudy, State, StudySummary
from automesh_service.serve.service import OpenService, ServiceHere
from automesh_service.submissions.store import Missing, Submission
from automesh_service.submissions.tokens import Holder

router = APIRouter(prefix="/v1/studies", tags=["studies"], responses={**RESPONSES})
Name = Annotated[str, UrlPath(max_length=limits.NAME_CHARS)]
_TOML = "application/toml; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPage:
    """One page of a list of studies.

    Attributes:
      total: the number of studies on all pages.
      next: number of the next page; None on the last one.
    """

    studies: list[StudySummary]
    total: int
    page: int
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyAnswer:
    """One study.

    Attributes:
      rule: the text of its rule file; empty without a rule.
      missing: why there is no rule.
      submission: number of the submission that it belongs to, if the holder may see that; else
        empty.
    """

    study: StudySummary
    rule: str
    missing: str
    submission: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """A log of a study's workers."""

    name: str
    bytes: int


def known_study(service: OpenService, name: str) -> KnownStudy:
    """Returns the study of exactly this name.

    Raises:
      Problem: 404: there is no such study.
      Away: the study is not known, and the studies could not be listed lately.
    """
    found = service.catalogue.get(name)
    if found is None:
        # For a second or two after a restart no study is known. An answer 404 would be wrong then,
        # and clients do not repeat such a request.
        service.catalogue.wait_until_fresh()
        found = service.catalogue.get(name)
    if found is None:
        raise Problem(404, f"there is no study `{name}`", hint="GET /v1/studies lists them")
    return found


def submission_of(service: OpenService, known: KnownStudy, holder: Holder) -> Submission | None:
    """Returns the submission that a study belongs to, if there is one and this holder may see
    it."""
    number = number_in(service, known)
    if not number:
        return None
    try:
        return service.store.get(number, access.owner_of(holder))
    except Missing:
        return None


def number_in(service: OpenService, known: KnownStudy) -> str:
    """Returns the number of the submission whose folder contains a study; empty for none."""
    folder = known.folder
    is_job = folder.is_relative_to(service.home.jobs)
    return folder.relative_to(service.home.jobs).parts[0] if is_job else ""


def may_see_logs(service: OpenService, known: KnownStudy, holder: Holder) -> bool:
    """Whether a holder may see the logs of a study: they have the output of a script, so only the
    owner of a submission may see them."""
    if holder.may("admin") or submission_of(service, known, holder) is not None:
        return True
    return not number_in(service, known)


@router.get("", summary="List and search studies", response_model=StudyPage)
def list_studies(
    service: ServiceHere,
    holder: Reader,
    query: Annotated[str, Query(max_length=200, description="Words of name, target, plan.")] = "",
    state: State | None = None,
    target: Annotated[str, Query(max_length=limits.TARGET_CHARS)] = "",
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    size: Annotated[int, Query(ge=1, le=limits.PAGE_SIZE)] = 50,
) -> Response:
    """Lists studies, the one that changed last first; 503 while the list is too old."""
    del holder
    service.catalogue.wait_until_fresh()
    words = query.lower().split()
    found = [
        one.text
        for one in service.catalogue.listed()
        if (state is None or one.summary.state == state)
        and (not target or one.summary.target == target)
        and (not words or all(word in one.words for word in words))
    ]
    begin = (page - 1) * size
    following = "null" if begin + size >= len(found) else page + 1
    # The answer has the form of `StudyPage`. It is joined from texts that were made when the
    # studies were read, because clients request it often.
    texts = ", ".join(found[begin : begin + size])
    return Response(
        f'{{"studies": [{texts}], "total": {len(found)}, "page": {page}, "next": {following}}}',
        media_type="application/json",
    )


@router.get("/{name}", summary="One study")
def get_study(name: Name, service: ServiceHere, holder: Reader) -> StudyAnswer:
    service.catalogue.wait_until_fresh()
    known = known_study(service, name)
    mine = submission_of(service, known, holder)
    return StudyAnswer(
        study=known.summary,
        rule=known.rule,
        missing=known.missing,
        submission=mine.number if mine is not None else "",
    )


@router.get("/{name}/result.json", summary="All figures, as `automesh show --json` prints them")
def get_result(name: Name, service: ServiceHere, holder: Reader) -> Response:
    del holder
    text = service.catalogue.result(known_study(service, name))
    return Response(text, media_type="application/json")


@router.get("/{name}/table.txt", summary="The table, as `automesh show` prints it")
def get_table(
    name: Name,
    service: ServiceHere,
    holder: Reader,
    width: Annotated[int, Query(ge=40, le=400)] = 100,
    top: Annotated[int, Query(ge=1, le=1000)] = 8,
) -> PlainTextResponse:
    del holder
    known = known_study(service, name)
    return PlainTextResponse(service.catalogue.table(known, width=width, top=top))


# Rules


@router.get("/{name}/rules.toml", summary="The rule file", response_class=Response)
def get_rules(
    name: Name,
    service: ServiceHere,
    holder: Reader,
    if_none_match: Annotated[str, Header(max_length=limits.HEADER_CHARS)] = "",
) -> Response:
    """Returns the rule as a file for `automesh.load(URL)`; 404 while there is none."""
    del holder
    known = known_study(service, name)
    if not known.rule and known.summary.state == "unread":
        known = service.catalogue.when_read(known)
    if not known.rule:
        raise Problem(404, f"the study has no rule: {known.missing}")
    return tagged(known.rule, if_none_match)


def tagged(text: str, if_none_match: str) -> Response:
    """Returns a rule file with its ETag; 304 without a body for a client that already has it."""
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    has = {one.strip().removeprefix("W/") for one in if_none_match.split(",")}
    if tag in has or "*" in has:
        return Response(status_code=304, headers=headers)
    return Response(text, media_type=_TOML, headers=headers)


@router.post(
    "/{name}/rules.toml/diff",
    summary="What the rule would change in a given file",
    response_class=PlainTextResponse,
)
def diff_rules(
    name: Name,
    service: ServiceHere,
    holder: Reader,
    mine: Annotated[str, Body(media_type="application/toml", max_length=limits.PEOPLE_FILE_BYTES)],
) -> PlainTextResponse:
    """Takes a rule file and answers with a unified diff: how the file changes if the rule is merged
    into it. The diff is empty if the file already has the rule. Nothing is stored."""
    del holder
    text = service.catalogue.diff(known_study(service, name), mine)
    return PlainTextResponse(text, media_type="text/x-diff")


# Logs


@router.get("/{name}/logs", summary="Logs of its workers")
def list_logs(name: Name, service: ServiceHere, holder: Reader) -> list[LogFile]:
    known = _with_logs(service, name, holder)
    return [LogFile(name=one.name, bytes=one.lstat().st_size) for one in _logs(known)]


@router.get("/{name}/logs/{file}", summary="A part of a log", response_class=PlainTextResponse)
def get_log(
    name: Name,
    file: Name,
    service: ServiceHere,
    holder: Reader,
    offset: Annotated[int, Query(ge=0, le=2**60)] = 0,
) -> PlainTextResponse:
    """Returns a part of a log from byte `offset` on, without control characters of terminals;
    `X-Next-Offset` is the offset of the next part."""
    known = _with_logs(service, name, holder)
    path = next((one for one in _logs(known) if one.name == file), None)
    if path is None:
        raise Problem(404, f"the study has no log `{file}`")
    return log_part(path, offset)


def log_part(path: Path, offset: int) -> PlainTextResponse:
    """Returns a part of a log as text.

    Raises:
      Problem: 404: the log cannot be read.
    """
    try:
        with open_regular(path, follow=False) as log:
            log.seek(offset)
            data = log.read(limits.LOG_SLICE_BYTES)
    except (OSError, Unreadable):
        raise Problem(404, "the log cannot be read") from None
    text = clean_lines(data.decode(errors="replace"))
    return PlainTextResponse(text, headers={"X-Next-Offset": str(offset + len(data))})


def _with_logs(service: OpenService, name: str, holder: Holder) -> KnownStudy:
    known = known_study(service, name)
    if not may_see_logs(service, known, holder):
        raise Problem(403, "the logs of a submission are its owner's")
    return known


def _logs(known: KnownStudy) -> list[Path]:
    """Returns the regular files in the study's folder of logs; links are not followed."""
    folder = known.folder / "logs"
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(one for one in folder.iterdir() if one.is_file() and not one.is_symlink())


# Pages


@router.get("/{name}/ticket", summary="Lets a browser have the page, for a minute")
def get_ticket(name: Name, service: ServiceHere, holder: Reader) -> dict[str, str]:
    known_study(service, name)
    return {"ticket": access.ticket_for(service, holder, name)}


@router.get("/{name}/page", summary="The report, as `automesh report` makes it")
def get_page(
    name: Name,
    request: Request,
    service: ServiceHere,
    ticket: Annotated[str, Query(max_length=200)] = "",
    authorization: Annotated[str, Header(max_length=limits.HEADER_CHARS)] = "",
) -> Response:
    """Returns HTML with a policy of its own: it has no origin, and cannot call the API."""
    if ticket:
        access.holder_of_ticket(request, service, ticket, name)
    else:
        access.reader_of(request, service, authorization)
    service.catalogue.wait_until_fresh()
    made = service.pages.page_of(known_study(service, name))
    headers = {"Content-Security-Policy": made.policy, "Cross-Origin-Opener-Policy": "unsafe-none"}
    return Response(made.html, media_type="text/html; charset=utf-8", headers=headers)


@router.get(
    "/{name}/events", summary="Live progress", response_class=Response, responses={**EVENTS}
)
async def watch_study(
    name: Name,
    service: ServiceHere,
    holder: Reader,
    last_event_id: Annotated[str, Header(max_length=64)] = "",
) -> Watching:
    """Sends server-sent events: `state` (the summary), `log` (lines of the search, if the holder
    may see them), `end`. `Last-Event-ID` continues a stream where it was."""
    # This may wait for a new list of studies.
    known = await to_thread.run_sync(known_study, service, name)
    number = number_in(service, known)
    log = None
    if number and may_see_logs(service, known, holder):
        log = service.home.job(number) / "search.log"
    look = partial(_watched, service, name, holder)
    view = view_of(service, holder, f"study {name}", look)
    return watching(service, holder, stream(service, view, log, last_event_id))


def _watched(service: OpenService, name: str, holder: Holder) -> Watched:
    known = service.catalogue.get(name)
    if known is None:
        return Watched(submission=None, studies=())
    return Watched(submission=submission_of(service, known, holder), studies=(known,))
