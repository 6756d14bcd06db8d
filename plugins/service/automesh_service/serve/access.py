"""Authentication and rights: tokens in the `Authorization` header, and tickets for pages.

There are no cookies: so a browser sends nothing by itself that another site could misuse, and no
secret of one port of a machine goes to another port.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from automesh_service.serve.problems import Problem
from automesh_service.serve.service import OpenService, ServiceHere
from automesh_service.submissions.tokens import Holder, Refused, Scope

TICKET_S = 60.0
"""Seconds for which a ticket is valid: a browser requests the page as soon as it has the ticket."""
_bearer = HTTPBearer(auto_error=False, description="A token of `automesh token`.")
_SAID = {
    "unknown": "the token is not known here",
    "expired": "the token has expired",
    "revoked": "the token was revoked",
}
_HINT = "send `Authorization: Bearer TOKEN`; `automesh token NAME` on the server's host makes one"


def _holder_for(scope: Scope) -> Callable[..., Holder]:
    def holder(
        request: Request,
        service: ServiceHere,
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None,
    ) -> Holder:
        return admitted(request, service, _found(request, service, given), scope)

    return holder


def _found(
    request: Request, service: OpenService, given: HTTPAuthorizationCredentials | None
) -> Holder:
    """Returns the holder of the token in a request.

    Raises:
      Problem: 401 without a valid token, 429 after too many wrong ones.
    """
    found = service.tokens.check(given.credentials) if given is not None else None
    if isinstance(found, Holder):
        return found
    wait_s = service.limiter.take_refusal(address_of(request))
    if wait_s:
        raise _too_fast(wait_s)
    said = _SAID[found.reason] if isinstance(found, Refused) else "there is no token"
    raise Problem(401, said, hint=_HINT, headers={"WWW-Authenticate": "Bearer"})


def check_known(request: Request, service: OpenService) -> None:
    """Checks that a request has a valid token, before anything of its body is read.

    Raises:
      Problem: 401, 429: it has none.
    """
    try:
        _found(request, service, _given(request.headers.get("authorization", "")))
    except Problem as error:  # The server does not wait for the rest of the request.
        error.headers = {**(error.headers or {}), "Connection": "close"}
        raise
    service.connections.know(request.scope.get("client"))


def admitted(request: Request, service: OpenService, holder: Holder, scope: Scope) -> Holder:
    """Returns the holder of a valid token, if this holder has the right `scope` now.

    Raises:
      Problem: 403 without the right, 429 after too many requests.
    """
    # Stored for the audit, also if the request is refused.
    request.scope.setdefault("state", {})["who"] = holder.name
    service.connections.know(request.scope.get("client"))
    wait_s = service.limiter.take(holder.number)
    if wait_s:
        raise _too_fast(wait_s)
    if not holder.may(scope):
        raise Problem(
            403,
            f"the token may {holder.scope}, and this takes one that may {scope}",
            hint=f"`automesh token NAME --scope {scope}` on the server's host makes one",
        )
    return holder


def _too_fast(wait_s: float) -> Problem:
    headers = {"Retry-After": str(math.ceil(wait_s))}
    return Problem(429, "requests come too fast", headers=headers)


def address_of(request: Request) -> str:
    """Returns the address that sent a request; behind a proxy on this machine this is the
    proxy's."""
    return request.client.host if request.client else ""


def reader_of(request: Request, service: OpenService, authorization: str) -> Holder:
    """Returns the holder of the token in a header, for a route that also accepts a ticket.

    Raises:
      Problem: as for every other route.
    """
    return _holder_for("read")(request, service, _given(authorization))


def _given(authorization: str) -> HTTPAuthorizationCredentials | None:
    """Returns the token of a header; None if it has none."""
    scheme, _, token = authorization.partition(" ")
    given = HTTPAuthorizationCredentials(scheme=scheme, credentials=token.strip())
    return given if scheme.lower() == "bearer" else None


Reader = Annotated[Holder, Depends(_holder_for("read"))]
Submitter = Annotated[Holder, Depends(_holder_for("submit"))]
AgentHolder = Annotated[Holder, Depends(_holder_for("agent"))]
Admin = Annotated[Holder, Depends(_holder_for("admin"))]


def owner_of(holder: Holder) -> str | None:
    """Returns the owner whose submissions a holder may see; None for all owners."""
    return None if holder.may("admin") else holder.name


# Tickets: a browser that shows a page in a frame cannot send a header with its request.


def ticket_for(service: OpenService, holder: Holder, name: str) -> str:
    """Makes a ticket, with which a browser may load the page of one study for a minute."""
    until = str(int(time.time() + TICKET_S))
    return f"{holder.number}.{until}.{_seal(service, holder.number, until, name)}"


def holder_of_ticket(request: Request, service: OpenService, ticket: str, name: str) -> Holder:
    """Returns the holder of the token with which a ticket was made.

    Raises:
      Problem: 401: the ticket is for another page, too old, or its token is not valid any more.
    """
    number, _, rest = ticket.partition(".")
    until, _, seal = rest.partition(".")
    is_right = hmac.compare_digest(seal.encode(), _seal(service, number, until, name).encode())
    holder = service.tokens.holder(number) if is_right else None
    if holder is None or int(until) < time.time():
        wait_s = service.limiter.take_refusal(address_of(request))
        raise _too_fast(wait_s) if wait_s else Problem(401, "the ticket of this page is over")
    return admitted(request, service, holder, "read")


def _seal(service: OpenService, number: str, until: str, name: str) -> str:
    said = f"{number}\0{until}\0{name}".encode(errors="surrogateescape")
    digest = hmac.new(service.key, said, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
