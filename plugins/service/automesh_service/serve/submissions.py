"""The routes of submissions: bundles, orders, cancel, resume, extend, hosts and the audit."""

from __future__ import annotations

import os
import re
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Literal

import sqlalchemy as sa
from anyio import to_thread
from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from automesh import limits
from automesh.errors import AutomeshError
from automesh.jsonio import from_json, read_json
from automesh.reading import read_text
from automesh_service.serve import access
from automesh_service.serve.access import Admin, Reader, Submitter
from automesh_service.serve.events import EVENTS, Watched, Watching, stream, view_of, watching
from automesh_service.serve.problems import RESPONSES, Problem
from automesh_service.serve.service import OpenService, ServiceHere
from automesh_service.serve.studies import log_part, tagged
from automesh_service.submissions.audit import AuditEntry
from automesh_service.submissions.bundle import BadBundle, Bundle, check
from automesh_service.submissions.database import RUNNERS
from automesh_service.submissions.order import Order, checked
from automesh_service.submissions.store import ENDED, State, Submission
from automesh_service.submissions.tokens import Scope

router = APIRouter(prefix="/v1", responses={**RESPONSES})
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[\x21-\x7e]{8,200}")
_SEEN_S = 15.0  # a runner reports every two seconds that it lives

Key = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=limits.IDEMPOTENCY_CHARS,
        description="8 to 200 characters; the same one for each repetition of one request.",
    ),
]


Word = Annotated[str, Field(max_length=limits.ORDER_CHARS)]
Words = Annotated[list[Word], Field(max_length=limits.ORDER_WORDS)]
Number = Annotated[str, Path(max_length=limits.NAME_CHARS)]


class OrderBody(BaseModel):
    """A search to run; the fields are options of `automesh search`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    entry: Word = Field(description="`train.py` or `train.py:make_step`, relative to the bundle.")
    args: Words = []
    targets: Words = ["local"]
    space: Word = Field("", description="A shipped space, or a TOML file of the bundle.")
    budget: Word = "10m"
    baseline: Word = ""
    top: int = Field(0, ge=0, le=limits.ORDER_TOP)
    timeout: Word = ""
    step: Word = ""
    split: Words = []
    xla: Words = []
    reserve_hbm: Word = ""
    hardware: Word = Field("", description="A TOML file of the bundle.")
    needs: Words = Field([], description="Labels that the host of its agent must have.")

    def order(self) -> Order:
        """Returns the order, checked.

        Raises:
          UsageError: the order cannot be run.
        """
        order: Order = from_json(self.model_dump(), Order)
        return checked(order)


class SubmitBody(BaseModel):
    """The hash of a bundle that was sent before, and the search to run in it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bundle: str = Field(
        pattern=f"^{_DIGEST.pattern}$", max_length=64, description="SHA-256 of the bundle."
    )
    order: OrderBody


class ExtendBody(BaseModel):
    """Another budget."""

    model_config = ConfigDict(extra="forbid", strict=True)

    budget: str = Field(max_length=20, description="Time for the next run, as `10m`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionAnswer:
    """A submission with the names of its studies."""

    submission: Submission
    studies: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionPage:
    """One page of a list of submissions; has the form of `StudyPage`."""

    submissions: list[Submission]
    total: int
    page: int
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host that runs searches.

    Attributes:
      kind: whether it is the runner of the service or an agent.
      state: `lost` if it has sent nothing for a while.
      running: numbers of submissions.
      takes, has: patterns of the targets, and the labels, of an agent.
    """

    name: str
    kind: Literal["runner", "agent"]
    state: Literal["there", "lost"]
    cores: int
    memory_bytes: int
    started_s: float
    seen_s: float
    running: list[str]
    takes: list[str]
    has: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Me:
    """The holder of the token."""

    name: str
    scope: Scope
    expires_s: float | None


@router.get("/me", tags=["service"], summary="Whose token this is")
def get_me(holder: Reader) -> Me:
    return Me(name=holder.name, scope=holder.scope, expires_s=holder.expires_s)


# Bundles


@router.put("/bundles/{digest}", tags=["submissions"], summary="Send a bundle", status_code=201)
async def put_bundle(
    digest: Number, request: Request, service: ServiceHere, holder: Submitter
) -> Bundle:
    """Takes a tar, plain or gzipped, whose SHA-256 is `digest`. The tar is checked, and refused
    with status 422 if it has links, paths that lead out of it, or more than a bundle may have."""
    _check_taking(service)
    request.state.subject = digest
    if not _DIGEST.fullmatch(digest):
        raise Problem(422, "a bundle is named by its SHA-256 in small hexadecimal digits")
    descriptor, name = tempfile.mkstemp(suffix=".draft", dir=service.home.bundle(digest).parent)
    draft = FilePath(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
        return await to_thread.run_sync(_kept, service, draft, digest, holder.name)
    finally:
        draft.unlink(missing_ok=True)


def _kept(service: OpenService, draft: FilePath, digest: str, owner: str) -> Bundle:
    found = check(draft)
    if found.digest != digest:
        raise BadBundle("the bytes that were sent do not have this SHA-256")
    service.store.keep_bundle(draft, found, owner)
    return found


@router.get("/bundles/{digest}", tags=["submissions"], summary="A bundle of one's own")
def get_bundle(digest: Number, service: ServiceHere, holder: Submitter) -> FileResponse:
    if not _DIGEST.fullmatch(digest):
        raise Problem(404, "there is no such bundle")
    service.store.bundle(digest, access.owner_of(holder))
    return FileResponse(service.home.bundle(digest), media_type="application/x-tar")


# Submissions


@router.post(
    "/studies",
    tags=["submissions"],
    summary="Submit a search",
    status_code=201,
    responses={
        200: {"description": "It was submitted before, with the same key.", "model": Submission}
    },
)
def submit(
    body: SubmitBody,
    request: Request,
    response: Response,
    service: ServiceHere,
    holder: Submitter,
    key: Key,
) -> Submission:
    """Takes an order for a bundle that was sent before. The order runs once for each
    `Idempotency-Key`, however often it is sent, and whether or not an answer arrived."""
    _check_taking(service)
    found, is_new = service.store.submit(
        body.order.order(), body.bundle, owner=holder.name, key=_checked_key(key)
    )
    request.state.subject = found.number
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"/v1/submissions/{found.number}"
    return found


def _checked_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise Problem(422, "an `Idempotency-Key` has 8 to 200 printable characters of ASCII")
    return key


def _check_taking(service: OpenService) -> None:
    if not service.settings.takes_submissions:
        raise Problem(403, "this service shows studies, and takes no submissions")


@router.get("/submissions", tags=["submissions"], summary="List one's submissions")
def list_submissions(
    service: ServiceHere,
    holder: Submitter,
    state: State | None = None,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    size: Annotated[int, Query(ge=1, le=limits.PAGE_SIZE)] = 50,
) -> SubmissionPage:
    """Lists submissions, the latest first; an admin sees those of all users."""
    begin = (page - 1) * size
    states = () if state is None else (state,)
    found, total = service.store.listed(
        access.owner_of(holder), states=states, skip=begin, count=size
    )
    next_page = page + 1 if begin + size < total else None
    return SubmissionPage(submissions=found, total=total, page=page, next=next_page)


@router.get("/submissions/{number}", tags=["submissions"], summary="One submission")
def get_submission(number: Number, service: ServiceHere, holder: Submitter) -> SubmissionAnswer:
    found = service.store.get(number, access.owner_of(holder))
    if found.state in ENDED or not service.catalogue.has_looked:
        # A client that reads the end of a search here does not ask again, so the list of its
        # studies must be fresh.
        service.catalogue.wait_until_fresh()
    return SubmissionAnswer(submission=found, studies=_studies_of(service, found))


def _studies_of(service: OpenService, submission: Submission) -> list[str]:
    """Returns the names of the known studies of a submission."""
    return list(service.catalogue.below(service.home.job(submission.number) / "results"))


@router.post("/submissions/{number}/cancel", tags=["submissions"], summary="End a submission")
def cancel(number: Number, request: Request, service: ServiceHere, holder: Submitter) -> Submission:
    """Ends the search as Ctrl-C does: finished trials are kept, and `resume` continues."""
    request.state.subject = number
    return service.store.cancel(number, access.owner_of(holder))


@router.post("/submissions/{number}/resume", tags=["submissions"], summary="Resume a submission")
def resume(number: Number, request: Request, service: ServiceHere, holder: Submitter) -> Submission:
    request.state.subject = number
    _check_taking(service)
    return service.store.resume(number, access.owner_of(holder))


@router.post("/submissions/{number}/extend", tags=["submissions"], summary="Extend a submission")
def extend(
    number: Number,
    body: ExtendBody,
    request: Request,
    service: ServiceHere,
    holder: Submitter,
    key: Key,
) -> Submission:
    """Continues the same search with this budget; once for each key."""
    request.state.subject = number
    _check_taking(service)
    return service.store.extend(
        number,
        body.budget,
        owner=access.owner_of(holder),
        who=holder.name,
        key=_checked_key(key),
    )


@router.get(
    "/submissions/{number}/rules.toml",
    tags=["submissions"],
    summary="The rules of all its targets",
    response_class=Response,
)
def get_rules(
    number: Number,
    service: ServiceHere,
    holder: Submitter,
    if_none_match: Annotated[str, Header(max_length=limits.HEADER_CHARS)] = "",
) -> Response:
    found = service.store.get(number, access.owner_of(holder))
    path = service.home.job(found.number) / "mesh_rules.toml"
    if path.is_symlink() or not path.is_file():
        raise Problem(404, f"the submission has no rule: {found.said or found.state}")
    return tagged(read_text(path), if_none_match)


@router.get(
    "/submissions/{number}/log",
    tags=["submissions"],
    summary="The log of its search",
    response_class=PlainTextResponse,
)
def get_log(
    number: Number,
    service: ServiceHere,
    holder: Submitter,
    offset: Annotated[int, Query(ge=0, le=2**60)] = 0,
) -> PlainTextResponse:
    found = service.store.get(number, access.owner_of(holder))
    return log_part(service.home.job(found.number) / "search.log", offset)


@router.get(
    "/submissions/{number}/events",
    tags=["submissions"],
    summary="Live progress",
    response_class=Response,
    responses={**EVENTS},
)
async def watch_submission(
    number: Number,
    service: ServiceHere,
    holder: Submitter,
    last_event_id: Annotated[str, Header(max_length=64)] = "",
) -> Watching:
    """Sends the same events as those of a study, from before the study exists."""
    look = partial(_watched, service, number, access.owner_of(holder))
    await to_thread.run_sync(look)
    if not service.catalogue.has_looked:
        await to_thread.run_sync(service.catalogue.wait_until_fresh)
    log = service.home.job(number) / "search.log"
    view = view_of(service, holder, f"submission {number}", look)
    return watching(service, holder, stream(service, view, log, last_event_id))


def _watched(service: OpenService, number: Number, owner: str | None) -> Watched:
    found = service.store.get(number, owner)
    known = service.catalogue.known()
    studies = tuple(known[name] for name in _studies_of(service, found) if name in known)
    return Watched(submission=found, studies=studies)


# The service itself


@router.get("/hosts", tags=["service"], summary="Hosts that run searches")
def list_hosts(service: ServiceHere, holder: Reader) -> list[Host]:
    """Lists hosts. Only an admin sees which submissions run."""
    with service.database.read() as connection:
        rows = connection.execute(sa.select(RUNNERS).order_by(RUNNERS.c.host)).all()
    is_admin = holder.may("admin")
    runners = [
        Host(
            name=row.host,
            kind="runner",
            state=_state(row.seen_s),
            cores=row.cores,
            memory_bytes=row.memory_bytes,
            started_s=row.started_s,
            seen_s=row.seen_s,
            running=_numbers(row.running) if is_admin else [],
            takes=["*"],
            has=[],
        )
        for row in rows
    ]
    agents = [
        Host(
            name=name,
            kind="agent",
            state=_state(one.seen_s),
            cores=one.offer.cores,
            memory_bytes=one.offer.memory_bytes,
            started_s=one.started_s,
            seen_s=one.seen_s,
            running=[one.running] if is_admin and one.running else [],
            takes=list(one.offer.takes),
            has=list(one.offer.has),
        )
        for name, one in sorted(service.leases.agents.copy().items())
    ]
    return runners + agents


def _state(seen_s: float) -> Literal["there", "lost"]:
    return "there" if time.time() - seen_s < _SEEN_S else "lost"


def _numbers(text: str) -> list[str]:
    try:
        found: list[str] = read_json(text, list[str])
    except AutomeshError:
        return []
    return found


@router.get("/audit", tags=["service"], summary="Who did what")
def list_audit(
    service: ServiceHere,
    holder: Admin,
    before: Annotated[int | None, Query(ge=1, le=limits.LARGEST_INTEGER)] = None,
    size: Annotated[int, Query(ge=1, le=limits.PAGE_SIZE)] = 100,
) -> list[AuditEntry]:
    """Lists the latest entries first; `before` is the number of the last entry that the client
    has."""
    del holder
    return service.audit.entries(before=before, count=size)
