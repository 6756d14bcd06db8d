"""What all routes share: the open service, and how its answers are made."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

from fastapi import Depends, Request

from automesh import limits
from automesh.skipped import reason_of
from automesh_service.serve.catalogue import STALE_S, Catalogue
from automesh_service.serve.limiter import Limiter, Watchers
from automesh_service.serve.looks import Looks
from automesh_service.serve.metrics import Metrics
from automesh_service.serve.net.connections import Connections
from automesh_service.serve.pages import Pages
from automesh_service.submissions.audit import Audit
from automesh_service.submissions.database import Database, Unwritable
from automesh_service.submissions.elapsed import Elapsed
from automesh_service.submissions.home import Home
from automesh_service.submissions.leases import Leases
from automesh_service.submissions.retention import Retention
from automesh_service.submissions.store import Store
from automesh_service.submissions.tokens import Tokens

REFRESH_S = 1.0
"""Between two looks at which studies have changed."""
TROUBLE_S = 10.0
"""Between two looks at the most, while none succeeds."""
LEASES_S = 2.0
"""Between two looks at which agents are lost."""
PAUSE_S = 3.0
"""Before a study that changes all the time is read again: that takes a tenth of a second."""
_LOG = logging.getLogger("automesh.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What a service was started with.

    Attributes:
      results: folder with the studies of searches on this machine.
      storage: as `--storage`; without a password.
      names: under which it is reached, each with its port unless that is the usual one of the
        scheme, as in a `Host` header.
      searches: how many run at once.
      takes_submissions: False: it only shows.
      has_runner: searches are run on this host, too; False: by agents alone.
      keep_s: age from which on submissions that have ended are removed; None to keep all.
      connections: how many may be open at once.
      proxies: addresses whose connections are those of many people.
    """

    results: Path
    storage: str = ""
    names: tuple[str, ...] = ()
    searches: int = 1
    takes_submissions: bool = True
    has_runner: bool = True
    keep_s: float | None = None
    connections: int = limits.CONNECTIONS
    proxies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OpenService:
    """The open service. Everything in it may be used by several threads at once."""

    home: Home
    settings: ServiceSettings
    database: Database
    tokens: Tokens
    store: Store
    audit: Audit
    retention: Retention
    leases: Leases
    catalogue: Catalogue
    pages: Pages
    metrics: Metrics
    limiter: Limiter
    watchers: Watchers
    connections: Connections
    looks: Looks = field(default_factory=Looks)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    closing: threading.Event = field(default_factory=threading.Event)

    def keep_up(self) -> None:
        """Has read what has changed until the service closes; a thread of its own does it."""
        self.catalogue.keep_fresh()
        trouble_s, trouble = REFRESH_S, ""
        while not self.closing.is_set():
            began_s = time.monotonic()
            try:
                is_behind = self.catalogue.refresh()
                trouble_s, trouble = REFRESH_S, ""
            except Exception as error:  # noqa: BLE001  A storage that is down now may be up again soon.
                self.metrics.note_storage(is_up=False)
                before, trouble = trouble, reason_of(error)
                if trouble != before:  # Not each few seconds for hours.
                    _LOG.warning("the studies cannot be looked at: %s", trouble)
                # The process that reads may be one that cannot live: to start it takes a second.
                self.closing.wait(trouble_s)
                trouble_s = min(2 * trouble_s, TROUBLE_S)
                continue
            self.closing.wait(_rest_s(time.monotonic() - began_s, is_behind=is_behind))

    def keep_house(self) -> None:
        """Removes what is old until the service closes; a thread of its own does it."""
        while not self.closing.is_set():
            try:
                self.retention.remove_old()
            except (Unwritable, OSError) as error:
                _LOG.warning("what is old could not be removed: %s", reason_of(error))
            except Exception:  # noqa: BLE001  The disk may have room again soon.
                _LOG.exception("what is old could not be removed")
            self.closing.wait(limits.HOUSEKEEPING_S)

    def keep_leases(self) -> None:
        """Ends the leases of agents that are lost; a thread of its own does it."""
        while not self.closing.wait(LEASES_S):
            try:
                self.leases.end_lost()
            except Unwritable as error:
                _LOG.warning("leases could not be ended: %s", error.message)
            except Exception:  # noqa: BLE001  The database may be free again soon.
                _LOG.exception("leases could not be looked at")

    def close(self) -> None:
        self.closing.set()


def _rest_s(took_s: float, *, is_behind: bool) -> float:
    """How long to rest after a look: half of a core at most, also while a thousand studies are read
    for the first time. But after one that has waited for the lock of a study, it is looked again at
    once: which studies there are was not seen since it began."""
    rest_s = min(took_s, STALE_S / 2 - took_s) if is_behind else REFRESH_S
    return max(rest_s if took_s < STALE_S / 2 else 0.0, 0.05)


def open_service(home: Home, settings: ServiceSettings) -> OpenService:
    """Opens everything that a service needs.

    Raises:
      UsageError: its database or the storage of the studies cannot be used.
    """
    database = Database(home.database)
    audit = Audit(database)

    def roots() -> Sequence[Path]:
        with os.scandir(home.jobs) as entries:
            jobs = sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
        found = [home.jobs / one / "results" for one in jobs]
        return [settings.results, *(one for one in found if not one.is_symlink())]

    store = Store(home, database)
    metrics = Metrics()

    def on_listed() -> None:  # What is read after that may take as long as it likes.
        metrics.note_storage(is_up=True)

    catalogue = Catalogue(roots, settings.storage, pause_s=PAUSE_S, on_listed=on_listed)

    def is_foreign(study: str, job: Path) -> bool:
        known = catalogue.get(study)
        if known is None or known.folder.parent.parent != job:
            # It may be somebody else's all the same, whom nobody has looked for yet.
            catalogue.wait_until_fresh()
            known = catalogue.get(study)
        return known is not None and known.folder.parent.parent != job

    return OpenService(
        home=home,
        settings=settings,
        database=database,
        tokens=Tokens(database),
        store=store,
        audit=audit,
        retention=Retention(
            home=home,
            database=database,
            audit=audit,
            elapsed=Elapsed(database=database),
            keep_s=settings.keep_s,
        ),
        leases=Leases(
            home=home, database=database, store=store, audit=audit, is_foreign=is_foreign
        ),
        catalogue=catalogue,
        pages=Pages(folder=home.pages),
        metrics=metrics,
        limiter=Limiter(),
        # Others must be answered as well while all streams are open.
        watchers=Watchers(settings.connections // 2),
        connections=Connections(most=settings.connections, proxies=settings.proxies),
    )


def service_of(request: Request) -> OpenService:
    """The service that a request is for."""
    return cast(OpenService, request.app.state.service)


ServiceHere = Annotated[OpenService, Depends(service_of)]
