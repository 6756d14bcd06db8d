"""The process that reads studies for a server: `process PARENT LEASH LOOKS QUESTIONS...`.

Reading takes the interpreter for a tenth of a second at a time, which the server has better use
for. It is started and killed by the server, keeps nothing that would be missed, and ends with it:
the kernel kills it when the server's thread that started it ends (Linux), and the leash, a socket
on which nothing is said, is at its end when the server is gone, however that came about.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from automesh.errors import AutomeshError
from automesh.serve.reading.messages import Lane, LaneEnded, Message, TooLong
from automesh.serve.reading.questions import answer_of
from automesh.serve.reading.scan import Scan, Seen

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NICE = 5
"""The server answers first; and so does what is measured on this machine."""
_LIKELY_VICTIM = "500"  # Of 1000: out of memory, the kernel should kill it and not the server.


def main(words: Sequence[str]) -> None:
    """The process itself: pid of the server, and the descriptors of its sockets."""
    parent, leash, looks, *questions = (int(word) for word in words)
    _tie_to(parent)
    threading.Thread(target=_hold, args=(socket.socket(fileno=leash),), daemon=True).start()
    with suppress(OSError):
        os.nice(_NICE)
    if sys.platform == "linux":
        with suppress(OSError):  # Some sandboxes forbid it.
            Path("/proc/self/oom_score_adj").write_text(_LIKELY_VICTIM)
    for one in questions:
        lane = Lane(socket.socket(fileno=one))
        threading.Thread(target=_answer_all, args=(lane,), daemon=True).start()
    with suppress(LaneEnded):
        _look_all(Lane(socket.socket(fileno=looks)))
    # Not the usual way: threads may wait for a database for as long as it likes.
    os._exit(0)


def _tie_to(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the line above took effect.
        os._exit(1)


def _hold(leash: socket.socket) -> None:
    """Ends this process when the server has."""
    with suppress(OSError):
        leash.recv(1)
    os._exit(0)


def _look_all(lane: Lane) -> None:
    """Looks at the studies as often as the server asks for it."""
    first = lane.receive()
    seen: dict[str, Seen] = {}
    while part := lane.receive()["known"]:
        seen |= {name: _seen(said) for name, said in part.items()}
    lane.send({"begun": os.getpid()})
    scan = Scan(first["storage"], pause_s=first["pause_s"], seen=seen)
    while True:
        asked = lane.receive()
        roots = [Path(one) for one in asked["roots"]]
        try:
            for message in scan.look(roots, most=asked["most"], without=asked["without"]):
                lane.send(message)
        except LaneEnded:
            raise
        except Exception as error:  # noqa: BLE001  A storage that is down now may be up again soon.
            lane.send(_refusal(error))


def _seen(said: dict[str, Any]) -> Seen:
    return Seen(
        stamp=said["stamp"],
        is_running=said["is_running"],
        # When it was tried is not known here: it is tried at once.
        is_unreadable=said["is_unreadable"],
    )


def _answer_all(lane: Lane) -> None:
    """Answers questions until the server has no more."""
    with suppress(LaneEnded):
        while True:
            asked = lane.receive()
            try:
                said: Message = {"text": answer_of(asked)}
            except Exception as error:  # noqa: BLE001  The server says so to who has asked.
                said = _refusal(error)
            try:
                lane.send(said)
            except TooLong as error:
                lane.send(_refusal(error))


def _refusal(error: Exception) -> Message:
    """What the server is told of an error; the log is told of one that nobody has thought of."""
    if isinstance(error, AutomeshError):
        return {"refused": error.message, "hint": error.hint}
    traceback.print_exception(error)
    return {"failed": type(error).__name__}


if __name__ == "__main__":
    main(sys.argv[1:])
