"""The open service that all routes share, and how its answers are made."""

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
"""Seconds between two looks for changed studies."""
TROUBLE_S = 10.0
"""The most seconds between two looks while they fail."""
LEASES_S = 2.0
"""Seconds between two checks for lost agents."""
PAUSE_S = 3.0
"""Seconds before a study that changes all the time is read again; reading takes a tenth of a
second."""
_LOG = logging.getLogger("automesh.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """The settings with which a service was started.

    Attributes:
      results: folder with the studies of searches on this machine.
      storage: as for `--storage`, without a password.
      names: the names in the `Host` header under which it is reached, each with its port unless
        that is the default of the scheme.
      searches: how many run at once.
      takes_submissions: whether it takes submissions; False: it only shows studies.
      has_runner: whether searches run on this host, too; False: only agents run them.
      keep_s: age from which on ended submissions are removed; None to keep all.
      connections: how many connections may be open at once.
      proxies: addresses of proxies; many users share their connections.
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
    """The open service. Several threads may use all of it at once."""

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
        """Reads the studies that have changed, again and again, until the service closes; runs in a
        thread of its own."""
        self.catalogue.keep_fresh()
        trouble_s, trouble = REFRESH_S, ""
        while not self.closing.is_set():
            began_s = time.monotonic()
            try:
                is_behind = self.catalogue.refresh()
                trouble_s, trouble = REFRESH_S, ""
            except Exception as error:  # noqa: BLE001  A storage that is down may be up again soon.
                self.metrics.note_storage(is_up=False)
                before, trouble = trouble, reason_of(error)
                if trouble != before:  # The same error is not logged every few seconds for hours.
                    _LOG.warning("the studies cannot be looked at: %s", trouble)
                # If the process that reads cannot live, each attempt to start it costs a second.
                self.closing.wait(trouble_s)
                trouble_s = min(2 * trouble_s, TROUBLE_S)
                continue
            self.closing.wait(_rest_s(time.monotonic() - began_s, is_behind=is_behind))

    def keep_house(self) -> None:
        """Removes old files until the service closes; runs in a thread of its own."""
        while not self.closing.is_set():
            try:
                self.retention.remove_old()
            except (Unwritable, OSError) as error:
                _LOG.warning("what is old could not be removed: %s", reason_of(error))
            except Exception:  # noqa: BLE001  The disk may have room again soon.
                _LOG.exception("what is old could not be removed")
            self.closing.wait(limits.HOUSEKEEPING_S)

    def keep_leases(self) -> None:
        """Ends the leases of lost agents until the service closes; runs in a thread of its own."""
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
    """Returns how long to rest after a look. Reading then uses half of a core at most, even while a
    thousand studies are read for the first time. There is no rest after a look that has waited for
    the lock of a study: the list of studies is old by then."""
    rest_s = min(took_s, STALE_S / 2 - took_s) if is_behind else REFRESH_S
    return max(rest_s if took_s < STALE_S / 2 else 0.0, 0.05)


def open_service(home: Home, settings: ServiceSettings) -> OpenService:
    """Opens everything that a service needs.

    Raises:
      UsageError: the database of the service or the storage of the studies cannot be used.
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

    # The list exists by now; reading the studies may take as long as it likes.
    def on_listed() -> None:
        metrics.note_storage(is_up=True)

    catalogue = Catalogue(roots, settings.storage, pause_s=PAUSE_S, on_listed=on_listed)

    def is_foreign(study: str, job: Path) -> bool:
        known = catalogue.get(study)
        if known is None or known.folder.parent.parent != job:
            # Another folder may have a study of this name that was not listed yet.
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
        # Half of the connections: other requests must be answered while all streams are open.
        watchers=Watchers(settings.connections // 2),
        connections=Connections(most=settings.connections, proxies=settings.proxies),
    )


def service_of(request: Request) -> OpenService:
    """Returns the service that a request is for."""
    return cast(OpenService, request.app.state.service)


ServiceHere = Annotated[OpenService, Depends(service_of)]
