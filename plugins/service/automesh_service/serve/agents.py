"""The routes of agents, which take, keep and give back submissions. They store data and run
nothing."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as UrlPath
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from automesh import limits
from automesh_service.serve.access import AgentHolder
from automesh_service.serve.problems import RESPONSES, Problem
from automesh_service.serve.service import ServiceHere
from automesh_service.submissions.leases import Beat, Lease, Offer

_LEASE = re.compile(r"[0-9a-f]{32}")
_LABEL = r"^[A-Za-z0-9*?][A-Za-z0-9._:@*?-]*$"  # the same characters as `automesh agent` allows


def _is_routine(request: Request) -> None:
    """Marks a request that agents send every few seconds: it is only audited if it is refused."""
    request.state.is_routine = True


router = APIRouter(
    prefix="/v1/agent/leases",
    tags=["agents"],
    dependencies=[Depends(_is_routine)],
    responses={
        **RESPONSES,
        409: {"description": "The lease has ended.", "content": {"application/problem+json": {}}},
    },
)

Label = Annotated[str, Field(pattern=_LABEL, max_length=64)]


class OfferBody(BaseModel):
    """The description that an agent gives of itself."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=64)
    takes: list[Label] = Field(["*"], max_length=20, description="Patterns of targets: `cpu:*`.")
    has: list[Label] = Field(
        [], max_length=50, description="Labels of the host that submissions may need."
    )
    place: str = Field("", max_length=1_000, description="Its folder, for people.")
    lease: str = Field(
        "",
        pattern=r"^([0-9a-f]{32})?$",
        max_length=32,
        description="Identifies the lease; chosen at random. An agent that got no answer asks "
        "again with the same value, and gets the same submission.",
    )
    cores: int = Field(1, ge=1, le=2**20)
    memory_bytes: int = Field(0, ge=0, le=2**60)


class EndBody(BaseModel):
    """The end of a search."""

    model_config = ConfigDict(extra="forbid", strict=True)

    code: int | None = Field(None, ge=-64, le=255, description="Exit code; null: cut short.")
    said: str = Field("", max_length=2_000, description="Why the search could not be started.")
    is_meant: bool = Field(False, description="The agent was asked to end.")


def _checked(lease: Annotated[str, UrlPath(max_length=limits.NAME_CHARS)]) -> str:
    if not _LEASE.fullmatch(lease):
        raise Problem(404, "there is no such lease")
    return lease


LeaseId = Annotated[str, Depends(_checked)]


@router.post(
    "",
    summary="Take the suitable submission that has waited longest",
    responses={200: {"model": Lease}, 204: {"description": "There is no such submission now."}},
)
def take(body: OfferBody, service: ServiceHere, holder: AgentHolder) -> Any:
    """Gives the agent a lease. Any request with the lease keeps it; the agent sends one at least
    every `LEASE_S` seconds."""
    if not service.settings.takes_submissions:
        raise Problem(403, "this service shows studies, and takes no submissions")
    offer = Offer(
        name=body.name,
        takes=tuple(body.takes),
        has=tuple(body.has),
        place=body.place,
        cores=body.cores,
        memory_bytes=body.memory_bytes,
    )
    found = service.leases.take(holder.name, offer, body.lease)
    return Response(status_code=204) if found is None else found


@router.post("/{lease}/beat", summary="Keep a lease")
def beat(lease: LeaseId, service: ServiceHere, holder: AgentHolder) -> Beat:
    return service.leases.beat(lease, holder.name)


@router.get("/{lease}/bundle", summary="The bundle of the submission")
def get_bundle(lease: LeaseId, service: ServiceHere, holder: AgentHolder) -> FileResponse:
    path = service.leases.bundle(lease, holder.name)
    return FileResponse(path, media_type="application/x-tar")


@router.post("/{lease}/log", summary="Add to the log of the search")
async def add_log(
    lease: LeaseId,
    request: Request,
    service: ServiceHere,
    holder: AgentHolder,
    offset: Annotated[int, Query(ge=0, le=2**60)],
) -> dict[str, int]:
    """Takes bytes of the log that begin at `offset`. The answer has the number of bytes that the
    log has now; the agent continues from there."""
    data = await request.body()
    size = await to_thread.run_sync(service.leases.add_log, lease, holder.name, offset, data)
    return {"bytes": size}


@router.put("/{lease}/state", summary="Send the results of the search so far", status_code=204)
async def put_state(
    lease: LeaseId,
    request: Request,
    service: ServiceHere,
    holder: AgentHolder,
    sequence: Annotated[int, Query(ge=1, le=2**60)],
) -> Response:
    """Takes a tar with `results/STUDY/...` and `mesh_rules.toml`, plain or gzipped, with the bounds
    of a bundle. `sequence` grows with each state of a lease: a state with a smaller one changes
    nothing."""
    leases = service.leases
    # The lease is checked before anything of the body is read.
    await to_thread.run_sync(leases.beat, lease, holder.name)
    descriptor, name = tempfile.mkstemp(suffix=".draft", dir=service.home.folder / "bundles")
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
        await to_thread.run_sync(leases.keep_state, lease, holder.name, sequence, draft)
    finally:
        draft.unlink(missing_ok=True)
    return Response(status_code=204)


@router.get("/{lease}/state", summary="The results of a former run of the search")
def get_state(lease: LeaseId, service: ServiceHere, holder: AgentHolder) -> FileResponse:
    path = service.leases.state(lease, holder.name)
    if not path.is_file():
        raise Problem(404, "there is none")
    return FileResponse(path, media_type="application/x-tar")


@router.post("/{lease}/end", summary="Report how the search ended")
def end(lease: LeaseId, body: EndBody, service: ServiceHere, holder: AgentHolder) -> dict[str, str]:
    ended = service.leases.end(
        lease, holder.name, body.code, said=body.said, is_meant=body.is_meant
    )
    return {"state": ended.state}
