"""Tokens: who sends a request, and what this holder may do.

A token is `amt_NUMBER_SECRET`. The secret has 256 random bits. The database has only its SHA-256,
from which nobody can compute the secret, so the database contains no usable token. A slow hash, as
for passwords that people choose, is not needed for so many random bits.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import sqlalchemy as sa

from automesh.errors import UsageError
from automesh_service.submissions.database import TOKENS, Database

Scope = Literal["read", "submit", "agent", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_MAY: Mapping[Scope, tuple[Scope, ...]] = {
    "read": ("read",),  # look at studies
    "submit": ("read", "submit"),  # submit searches, and see one's own submissions
    "agent": ("agent",),  # take submissions and send their results; see nothing else
    "admin": SCOPES,  # see and change everything
}
_TOKEN = re.compile(r"amt_(?P<number>[0-9a-f]{12})_(?P<secret>[0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The holder of a token.

    Attributes:
      number: number of the token.
      name: name of the person or program, who owns the submissions that are made with any of their
        tokens.
      expires_s: seconds since 1970; None for never.
    """

    number: str
    name: str
    scope: Scope
    expires_s: float | None = None

    def may(self, scope: Scope) -> bool:
        return scope in _MAY[self.scope]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The reason why a token is refused: `unknown`, `expired` or `revoked`."""

    reason: Literal["unknown", "expired", "revoked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedToken:
    """A token in a list; `state` is `valid`, `expired` or `revoked`."""

    number: str
    name: str
    scope: Scope
    made_s: float
    expires_s: float | None
    state: Literal["valid", "expired", "revoked"]


class Tokens:
    """The tokens of a service."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def make(self, name: str, scope: str, lasts_s: float | None) -> str:
        """Makes a token. It is shown once and never again.

        Raises:
          UsageError: the name or the scope is not allowed.
        """
        check_name(name)
        if scope not in SCOPES:
            raise UsageError(f"`{scope}` is no scope", hint=f"there are {', '.join(SCOPES)}")
        number, secret, now_s = secrets.token_hex(6), secrets.token_hex(32), self._clock()
        row = {
            "number": number,
            "name": name,
            "hash": _hash(secret),
            "scope": scope,
            "made_s": now_s,
            "expires_s": None if lasts_s is None else now_s + lasts_s,
        }
        with self._database.change() as connection:
            connection.execute(sa.insert(TOKENS).values(row))
        return f"amt_{number}_{secret}"

    def check(self, token: str) -> Holder | Refused:
        """Returns the holder of a token, or why the token is refused."""
        match = _TOKEN.fullmatch(token)
        with self._database.read() as connection:
            row = (
                match
                and connection.execute(
                    sa.select(TOKENS).where(TOKENS.c.number == match["number"])
                ).one_or_none()
            )
        # The comparison takes the same time whether or not the token exists.
        known = row.hash if row else _hash("")
        is_right = hmac.compare_digest(_hash(match["secret"] if match else "-"), known)
        if not row or not is_right:
            return Refused(reason="unknown")
        state = self._state(row)
        if state != "valid":
            return Refused(reason=state)
        return Holder(number=row.number, name=row.name, scope=row.scope, expires_s=row.expires_s)

    def holder(self, number: str) -> Holder | None:
        """Returns the holder of the token of this number; None if the token is not valid any
        more."""
        with self._database.read() as connection:
            row = connection.execute(
                sa.select(TOKENS).where(TOKENS.c.number == number)
            ).one_or_none()
        if row is None or self._state(row) != "valid":
            return None
        return Holder(number=row.number, name=row.name, scope=row.scope, expires_s=row.expires_s)

    def listed(self) -> list[ListedToken]:
        """Returns all tokens, in the order in which they were made."""
        with self._database.read() as connection:
            rows = connection.execute(sa.select(TOKENS).order_by(TOKENS.c.made_s)).all()
        return [
            ListedToken(
                number=row.number,
                name=row.name,
                scope=row.scope,
                made_s=row.made_s,
                expires_s=row.expires_s,
                state=self._state(row),
            )
            for row in rows
        ]

    def revoke(self, number: str) -> None:
        """Ends a token at once.

        Raises:
          UsageError: there is no token of this number.
        """
        ended = (
            sa.update(TOKENS)
            .where(TOKENS.c.number == number, TOKENS.c.revoked_s.is_(None))
            .values(revoked_s=self._clock())
        )
        with self._database.change() as connection:
            if connection.execute(ended).rowcount:
                return
        raise UsageError(
            f"there is no token `{number}` that is not revoked",
            hint="`automesh token --list` lists them",
        )

    def _state(self, row: sa.Row[Any]) -> Literal["valid", "expired", "revoked"]:
        if row.revoked_s is not None:
            return "revoked"
        is_over = row.expires_s is not None and row.expires_s <= self._clock()
        return "expired" if is_over else "valid"


def check_name(name: str) -> None:
    """Raises UsageError for a text that cannot be the name of a person or a program."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"`{name}` is no name for the holder of a token",
            hint="write letters, digits, dots, dashes and @, at most 64 of them",
        )


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
