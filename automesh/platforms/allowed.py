"""Checks limits of the shell, the account or the service manager that may be too low.

Workers inherit these limits. With one that is too low, a worker ends in the middle of an import,
which looks like an error of the script.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from automesh.errors import UsageError
from automesh.units import format_bytes

LEAST_FILES = 256
"""Descriptors: the channel of a worker has a number above those that scripts usually use."""
_LEAST_PROCESSES = 512  # threads count as well, and XLA starts some for each core
_LEAST_ADDRESSES = 16 * 2**30  # what XLA maps; it is not memory that is used


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit that is too low.

    Attributes:
      said: the limit in words.
      command: shell command that raises it.
    """

    said: str
    command: str


def low_limits() -> tuple[Limit, ...]:
    """Returns the limits of this process that may be too low for a search."""
    found: list[Limit] = []
    files = _soft(resource.RLIMIT_NOFILE)
    if files is not None and files < LEAST_FILES:
        found.append(Limit(said=f"{files} open files", command="ulimit -n 1024"))
    # The system does not count processes of root.
    processes = _soft(resource.RLIMIT_NPROC) if os.geteuid() else None
    if processes is not None and processes < _LEAST_PROCESSES:
        found.append(Limit(said=f"{processes} processes and threads", command="ulimit -u 4096"))
    addresses = _soft(resource.RLIMIT_AS)
    if addresses is not None and addresses < _LEAST_ADDRESSES:
        said = f"{format_bytes(addresses)} of addresses"
        found.append(Limit(said=said, command="ulimit -v unlimited"))
    return tuple(found)


def spare_threads() -> None:
    """Keeps numpy from starting a thread for each core if only a few are allowed.

    Without enough threads, its OpenBLAS ends the process in the middle of an import, as Ctrl-C
    does. Call this before numpy is imported; workers inherit it.
    """
    if any("processes" in one.said for one in low_limits()):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def check_files() -> None:
    """Checks that a worker can be started at all.

    Raises:
      UsageError: too few files may be open at once.
    """
    files = _soft(resource.RLIMIT_NOFILE)
    if files is not None and files < LEAST_FILES:
        raise UsageError(
            f"a process may have no more than {files} files open here, and a search needs "
            f"{LEAST_FILES}",
            hint="raise the limit: `ulimit -n 1024`",
        )


def limits_hint() -> str:
    """Returns a hint about low limits, for a worker that ended without a reason; empty if none."""
    low = low_limits()
    if not low:
        return ""
    said = " and ".join(one.said for one in low)
    commands = ", ".join(f"`{one.command}`" for one in low)
    return f"a process may have no more than {said} here, which may be too little: try {commands}"


def _soft(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
