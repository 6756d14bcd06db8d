"""Starts a command that ends when the process that started it does: `tied PARENT COMMAND...`.

If an agent is killed, its search would otherwise keep the devices until its budget is spent, while
another agent runs the same submission. With this command the kernel sends SIGTERM to the search,
which saves its results and ends as at Ctrl-C.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tied(words: Sequence[str]) -> list[str]:
    """Returns the command line that starts a command which ends with this process."""
    return [sys.executable, "-P", "-m", "automesh_service.remote.tied", str(os.getpid()), *words]


def main(words: Sequence[str]) -> None:
    """Replaces this process by the command."""
    parent, *command = words
    if sys.platform == "linux":
        # The kernel keeps this over `exec`.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # The parent died before the line above took effect.
        sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
