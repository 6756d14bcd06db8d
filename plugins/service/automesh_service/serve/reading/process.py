"""The process that has studies read for a server: `process PARENT LEASH LOOKS QUESTIONS...`.

Reading takes the interpreter for a tenth of a second at a time, which the server has better use
for; and what others have written may take for ever. So this process looks which studies there are,
and lets others, its copies, read them, each for as long as it may. It is started and killed by the
server, keeps nothing that would be missed, and ends with it: the kernel kills it when the server's
thread that started it ends (Linux), and the leash, a socket on which nothing is said, is at its end
when the server is gone, however that came about. Its copies end with it in the same way.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from automesh_service.serve.reading.forks import start_forks, tie_to
from automesh_service.serve.reading.lanes import (
    AnsweringProcess,
    Lanes,
    answer,
    refusal,
    warm_up,
    work,
)
from automesh_service.serve.reading.messages import Lane, LaneEnded, Message
from automesh_service.serve.reading.scan import RememberedStudy, Scan

_NICE = 5
"""The server answers first; and so does what is measured on this machine."""


def main(words: Sequence[str]) -> None:
    """The process itself: pid of the server, and the descriptors of its sockets."""
    parent, leash, looks, *questions = (int(word) for word in words)
    tie_to(parent)
    with suppress(OSError):
        os.nice(_NICE)
    looking = Lane(socket.socket(fileno=looks))
    with suppress(LaneEnded):
        first = looking.receive()
        warm_up()
        # Before there is another thread: only of a process with one thread a copy is whole.
        forks = start_forks(partial(work, first["storage"]), (leash, looks, *questions))
        threading.Thread(target=_hold, args=(socket.socket(fileno=leash),), daemon=True).start()
        for one in questions:
            lane = Lane(socket.socket(fileno=one))
            arguments = (lane, AnsweringProcess(forks))
            threading.Thread(target=_answer_all, args=arguments, daemon=True).start()
        _look_all(looking, first, Lanes(forks))
    # Not the usual way: threads may wait for a process for as long as it likes.
    os._exit(0)


def _hold(leash: socket.socket) -> None:
    """Ends this process when the server has."""
    with suppress(OSError):
        leash.recv(1)
    os._exit(0)


def _look_all(lane: Lane, first: Message, lanes: Lanes) -> None:
    """Looks at the studies as often as the server asks for it."""
    seen: dict[str, RememberedStudy] = {}
    while part := lane.receive()["known"]:
        seen |= {name: _seen(said) for name, said in part.items()}
    lane.send({"begun": os.getpid()})
    scan = Scan(first["storage"], pause_s=first["pause_s"], seen=seen, readings=lanes)
    while True:
        asked = lane.receive()
        roots = [Path(one) for one in asked["roots"]]
        try:
            for message in scan.look(roots, most=asked["most"]):
                lane.send(message)
        except LaneEnded:
            raise
        except Exception as error:  # noqa: BLE001  A storage that is down now may be up again soon.
            lane.send(refusal(error))


def _seen(said: dict[str, Any]) -> RememberedStudy:
    return RememberedStudy(
        stamp=said["stamp"],
        is_running=said["is_running"],
        # When it was tried is not known here: it is tried at once, where it keeps nobody waiting.
        is_unreadable=said["is_unreadable"],
        is_slow=said["is_unreadable"],
    )


def _answer_all(lane: Lane, asked: AnsweringProcess) -> None:
    """Answers questions until the server has no more."""
    with suppress(LaneEnded):
        while True:
            lane.send(answer(asked, lane.receive()))


if __name__ == "__main__":
    main(sys.argv[1:])
