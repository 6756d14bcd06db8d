"""The number of descriptors of the process, and how many connections they suffice for."""

from __future__ import annotations

import resource

from automesh import limits
from automesh.errors import UsageError

RESERVED = 192
"""Descriptors for other uses: threads that answer open the database, logs and bundles, and the
other processes of the service have sockets."""
_OF_A_CONNECTION = 2
"""Descriptors of one connection, which may have a file open as well: a bundle that arrives or
leaves."""
_LEAST = 16
_MOST = RESERVED + _OF_A_CONNECTION * limits.CONNECTIONS


def raise_limit() -> int:
    """Raises the limit of open files as far as it is useful and the system allows it.

    Returns:
      The new limit.
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
    """Returns how many connections a process may have that may open `descriptors` files.

    Raises:
      UsageError: the number is too small for any connection.
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
