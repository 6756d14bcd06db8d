"""A search's memory: the studies `screen`, `compile` and `measure`, shared by all who open the
storage."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from automesh.errors import AutomeshError, UsageError
from automesh.jsonio import from_json
from automesh.skipped import name_of_note
from automesh.tuner.study.lease import Owner, StudyLease, this_owner
from automesh.tuner.study.scope import EVERYTHING, Scope
from automesh.tuner.study.storage import Storage, parse_storage
from automesh.tuner.study.trials import Round, RungName, Trial

if TYPE_CHECKING:
    from automesh.tuner.study.backend import Backend
    from automesh.tuner.study.rung import Rung


__all__ = [
    "Owner",
    "Round",
    "Storage",
    "Study",
    "Trial",
    "load_tools",
    "open_study",
    "parse_storage",
]


PUBLISH_S = 5.0
"""Seconds between two writes of a database's log into its file, each of which takes
milliseconds."""


def load_tools() -> None:
    """Imports Optuna and SQLAlchemy early, so that `open_study` need not wait for them."""
    importlib.import_module("automesh.tuner.study.backend")


def open_study(
    storage: Storage,
    name: str,
    *,
    source_hash: str = "",
    versions: tuple[tuple[str, str], ...] = (),
    scope: Scope = EVERYTHING,
    create: bool = True,
    in_place: bool = True,
    backend: Backend | None = None,
) -> Study:
    """Opens the study `name` in `storage`.

    Args:
      source_hash: of the script as it is now; only trials with the same one are claimed.
      versions: of everything whose change makes figures stale; likewise.
      scope: what the search may try; only its plans are claimed.
      create: make the study if there is none; False for callers that only read it.
      in_place: as for `open_backend`, for a caller that only reads.
      backend: the storage, if the caller has opened it already; the study closes it.

    Raises:
      UsageError: the storage cannot be used, a newer automesh made the study, or there is none.
    """
    # Here and not above: `automesh --help` must not wait for Optuna and SQLAlchemy.
    from automesh.tuner.study.backend import open_backend
    from automesh.tuner.study.rung import Rung

    backend = backend or open_backend(storage, is_read_only=not create, in_place=in_place)
    owner = this_owner()
    lease = StudyLease(backend.leases, f"{name}/lease", owner)

    def open_rung(rung: RungName) -> Rung:
        return Rung(
            backend,
            name,
            rung,
            owner=owner,
            lease=lease,
            source_hash=source_hash,
            versions=versions,
            scope=scope,
            is_new=create,
        )

    try:
        with backend.explained():
            if not create and not backend.has_search(name):
                raise _missing(backend, name)
            compiles, measures = open_rung("compile"), open_rung("measure")
    except BaseException:
        backend.close()
        raise
    return Study(
        backend,
        name,
        owner=owner,
        lease=lease,
        scope=scope,
        compiles=compiles,
        measures=measures,
        open_screen=lambda: open_rung("screen"),
    )


def _missing(backend: Backend, name: str) -> UsageError:
    names = {one.rpartition("/")[0] for one in backend.study_names()}
    there = ", ".join(f"`{one}`" for one in sorted(names - {""})) or "none"
    return UsageError(
        f"there is no study `{name}` in {backend.storage.text}",
        hint=f"run its search first; the studies there are: {there}",
    )


class Study:
    """The open study of one search in one process; a context manager, to be used from one thread.

    Attributes:
      name: of the search; Optuna's studies are `<name>/compile`, `<name>/measure` and, for devices
        that are not here, `<name>/screen`.
      storage: where it is kept.
      owner: the identity of this process for the others.
      scope: what the search may try.
      compile: the rung of compiled plans.
      measure: the rung of measured plans.
      skipped: trials, notes and holds that were found damaged, and left out.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        owner: Owner,
        lease: StudyLease,
        scope: Scope,
        compiles: Rung,
        measures: Rung,
        open_screen: Callable[[], Rung],
    ) -> None:
        self.name = name
        self.storage = backend.storage
        self.owner = owner
        self.scope = scope
        self.compile = compiles
        self.measure = measures
        self.skipped = backend.skipped
        self._backend = backend
        self._lease = lease
        self._open_screen = open_screen
        self._screen: Rung | None = None
        self._notes: Mapping[str, Any] | None = None
        self._is_frozen = False
        self._published_s = -math.inf

    @property
    def screen(self) -> Rung:
        """The rung of plans compiled at low effort; it is made at its first use."""
        if self._screen is None:
            with self._backend.explained():
                self._screen = self._open_screen()
                self._screen.source_hash = self.compile.source_hash
            if self._is_frozen:
                self._screen.freeze()
        return self._screen

    def freeze(self) -> None:
        """Reads notes and trials once from now on, until this is called again: for readers."""
        self._is_frozen, self._notes = True, None
        for rung in (self.compile, self.measure, self._screen):
            if rung is not None:
                rung.freeze()

    def count_for(self, source_hash: str) -> None:
        """Counts trials of the script with this hash from now on, and makes new ones for it."""
        self.compile.source_hash = self.measure.source_hash = source_hash
        if self._screen is not None:
            self._screen.source_hash = source_hash

    def lead(self) -> bool:
        """Takes the lease if it is free; returns whether this process enqueues and measures."""
        with self._backend.explained():
            return self._lease.acquire()

    def leader(self) -> Owner | None:
        """Returns who has the lease; None if nobody."""
        with self._backend.explained():
            return self._lease.holder()

    def heartbeat(self) -> bool:
        """Keeps the lease and the claims of this process; call it every few seconds.

        Returns:
          Whether this process has the lease.
        """
        with self._backend.explained():
            is_held = self._lease.renew()
        self._publish()
        return is_held

    def note(self, key: str, value: Any) -> None:
        """Stores a JSON value in the study; the last note of a key counts."""
        with self._backend.explained():
            self.compile.optuna_study.set_user_attr(f"automesh.{key}", json.dumps(value))
        self._publish()

    def _publish(self, *, at_once: bool = False) -> None:
        """Lets other accounts, who read only the file of the study, see what it has by now.

        It does so at the first note, which is the header, and every few seconds.
        """
        if at_once or time.monotonic() - self._published_s > PUBLISH_S:
            with self._backend.explained():
                self._backend.publish(lasting=at_once)
            self._published_s = time.monotonic()

    def noted(self, key: str) -> Any:
        """Returns what was last noted under `key`; None if nothing was, or it is damaged."""
        notes = self._notes
        if notes is None:
            with self._backend.explained():
                notes = self.compile.optuna_study.user_attrs
            if self._is_frozen:
                self._notes = notes
        text = notes.get(f"automesh.{key}")
        if text is None:
            return None
        try:
            return json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            self.skipped.note(name_of_note(key), error)
            return None

    def read_note(self, key: str, found: Any, kind: Any) -> Any:
        """Reads a note as a value of `kind`; None if it is damaged, or None."""
        if found is None:
            return None
        try:
            return from_json(found, kind)
        except AutomeshError as error:
            self.skipped.note(name_of_note(key), error)
            return None

    def close(self) -> None:
        """Gives everything back that is not finished, for the next search to go on with."""
        try:
            self.compile.give_all_back()
            self.measure.give_all_back()
            if self._screen is not None:
                self._screen.give_all_back()
            with self._backend.explained():
                self._lease.release()
            # What a former search has left in its working copy counts, too.
            if self._published_s > -math.inf or self._backend.working is not None:
                self._publish(at_once=True)
        finally:
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except UsageError:
            # If the storage is gone, what failed first says so; otherwise this is news.
            if error is None:
                raise
