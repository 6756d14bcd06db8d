"""The folder of a service: the paths in it. Only its owner may enter it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from automesh.errors import UsageError
from automesh.tuner.paths import make_folder

_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The folder of a service.

    service.db     tokens, submissions, the audit
    bundles/       the bundles, named by their hashes
    jobs/ID/       one submission: bundle/ (unpacked), results/ (its studies),
                   mesh_rules.toml, search.log, result.json
    pages/         reports that were rendered
    server.lock, runner.lock, runner.log
    """

    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / "service.db"

    @property
    def pages(self) -> Path:
        return self.folder / "pages"

    @property
    def runner_log(self) -> Path:
        return self.folder / "runner.log"

    def bundle(self, digest: str) -> Path:
        return self.folder / "bundles" / f"{digest}.tar"

    def job(self, number: str) -> Path:
        """Returns the folder of a submission; raises ValueError if `number` is not one."""
        if not _ID.fullmatch(number):
            raise ValueError(number)
        return self.folder / "jobs" / number

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    def lock(self, name: str, *, timeout_s: float = 0.0) -> FileLock:
        """Returns the lock that a server, or a runner, holds while it lives. The kernel releases
        the lock when the process dies.

        Args:
          timeout_s: seconds to wait for another holder, which may only be checking whether the lock
            is held.
        """
        return FileLock(str(self.folder / f"{name}.lock"), timeout=timeout_s)


def is_held(lock: FileLock) -> bool:
    """Whether another process holds a lock."""
    try:
        with lock:
            return False
    except Timeout:
        return True


def open_home(folder: Path) -> Home:
    """Opens the folder of a service; makes it if it does not exist.

    Raises:
      UsageError: it cannot be made, belongs to another user, or other users may enter it.
    """
    is_new = not folder.exists()
    make_folder(folder)
    if is_new:
        folder.chmod(0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UsageError(
            f"others than you may enter `{folder}`, which holds people's code",
            hint=f"run `chmod 700 {folder}`, or choose another folder with --home",
        )
    home = Home(folder=folder.absolute())
    for place in (home.pages, home.jobs, home.folder / "bundles"):
        place.mkdir(mode=0o700, exist_ok=True)
    return home
