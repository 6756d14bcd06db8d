"""How many descriptors the process may have, and how many connections that is enough for."""

from __future__ import annotations

import resource

from automesh import limits
from automesh.errors import UsageError

RESERVED = 192
"""For what is no connection: threads that answer open the database, logs and bundles, and the
processes beside the server have sockets."""
_OF_A_CONNECTION = 2
"""A connection may have a file open as well: the draft of a bundle, or one that is handed out."""
_LEAST = 16
_MOST = RESERVED + _OF_A_CONNECTION * limits.CONNECTIONS


def raise_limit() -> int:
    """Raises the limit of open files as far as it is of use and the system lets us.

    Returns:
      The limit now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def connections_for(descriptors: int) -> int:
    """How many connections a process may have that may open so many files.

    Raises:
      UsageError: too few to serve anybody.
    """
    most = (descriptors - RESERVED) // _OF_A_CONNECTION
    if most < _LEAST:
        raise UsageError(
            f"the service may open no more than {descriptors} files, and needs "
            f"{RESERVED + _OF_A_CONNECTION * _LEAST}",
            hint="raise the limit before the start, as `ulimit -n 1024` does, or LimitNOFILE= of "
            "systemd",
        )
    return min(most, limits.CONNECTIONS)
