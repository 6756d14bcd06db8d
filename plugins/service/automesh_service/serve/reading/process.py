"""The process that has studies read for a server: `process PARENT LEASH LOOKS QUESTIONS...`.

To read a study takes the interpreter for a tenth of a second, which would delay the server's
answers; and a study that a user has damaged may take for ever. So this process lists the studies,
and its forks read them, each within a bound of time. The server starts and kills this process,
which stores nothing. It ends with the server: the kernel kills it when the server's thread that
started it ends (Linux), and the leash, a socket without messages, is closed when the server is gone
for any reason. Its forks end with it in the same way.
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
"""Lower priority: the server's answers and measurements on this machine come first."""


def main(words: Sequence[str]) -> None:
    """Runs the process; its arguments: pid of the server, and the descriptors of its sockets."""
    parent, leash, looks, *questions = (int(word) for word in words)
    tie_to(parent)
    with suppress(OSError):
        os.nice(_NICE)
    looking = Lane(socket.socket(fileno=looks))
    with suppress(LaneEnded):
        first = looking.receive()
        warm_up()
        # Before a second thread starts: a fork copies only one thread.
        forks = start_forks(partial(work, first["storage"]), (leash, looks, *questions))
        threading.Thread(target=_hold, args=(socket.socket(fileno=leash),), daemon=True).start()
        for one in questions:
            lane = Lane(socket.socket(fileno=one))
            arguments = (lane, AnsweringProcess(forks))
            threading.Thread(target=_answer_all, args=arguments, daemon=True).start()
        _look_all(looking, first, Lanes(forks))
    # Not `sys.exit`: it would wait for threads, which may wait for a fork without a bound.
    os._exit(0)


def _hold(leash: socket.socket) -> None:
    """Ends this process when the server has ended."""
    with suppress(OSError):
        leash.recv(1)
    os._exit(0)


def _look_all(lane: Lane, first: Message, lanes: Lanes) -> None:
    """Looks at the studies whenever the server asks for it."""
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
        except Exception as error:  # noqa: BLE001  A storage that is down may be up again soon.
            lane.send(refusal(error))


def _seen(said: dict[str, Any]) -> RememberedStudy:
    return RememberedStudy(
        stamp=said["stamp"],
        is_running=said["is_running"],
        # The time of the failed attempt is not known here: the study is read again at once, in the
        # lane of the slow ones, where it blocks no other.
        is_unreadable=said["is_unreadable"],
        is_slow=said["is_unreadable"],
    )


def _answer_all(lane: Lane, asked: AnsweringProcess) -> None:
    """Answers questions until the server closes the socket."""
    with suppress(LaneEnded):
        while True:
            lane.send(answer(asked, lane.receive()))


if __name__ == "__main__":
    main(sys.argv[1:])
