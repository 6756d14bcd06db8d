"""The load on a service: what it finds wrong, and which of its streams it takes for open."""

from __future__ import annotations

import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from automesh_service.serve.catalogue import Catalogue
from benchmarks.serve_load import GROWN_BYTES, Load, Watchers, faults_of, make_studies
from plugins.service.tests.support.service import read_all

LOAD = Load(studies=3, watchers=2, per_s=1.0, seconds=1.0)


def found(**changes: Any) -> dict[str, Any]:
    times = {"failed": 0, "p99_s": 0.1}
    return {
        "quiet": times,
        "watched": times,
        "searched": times,
        "streams_left": {"watched": 2, "searched": 2},
        "server_bytes": {"half": 2**28, "searched": 2**28 + GROWN_BYTES},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"searched": {"failed": 0, "p99_s": 0.3}}, "a list took 300 ms"),
        ({"watched": {"failed": 3, "p99_s": 0.1}}, "3 requests failed (watched)"),
        ({"streams_left": {"watched": 2, "searched": 1}}, "1 streams were ended (searched)"),
        (
            {"server_bytes": {"half": 0, "searched": GROWN_BYTES + 1}},
            "the server grew by 32 MiB",
        ),
    ],
)
def test_faults(changes: dict[str, Any], said: str) -> None:
    assert faults_of("sqlite", found(), LOAD) == []
    (fault,) = faults_of("sqlite", found(**changes), LOAD)
    assert fault.startswith(f"sqlite: {said}")


def until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("last", [b"0\r\n\r\n", b"5\r\n: a\n\n\r\n0\r\n\r\n", b""])
def test_a_stream_that_the_server_ends_is_not_open(last: bytes) -> None:
    watchers = Watchers()
    pairs = [socket.socketpair() for _ in range(2)]
    for mine, _ in pairs:
        watchers.add(mine)
    thread = threading.Thread(target=watchers.drain)
    thread.start()
    try:
        for _, theirs in pairs:
            theirs.sendall(b"5\r\n: a0\n\r\n")
        until(lambda: watchers.received_bytes == 20)
        assert watchers.open == 2
        if last:
            pairs[0][1].sendall(last)  # and the connection stays
        else:
            pairs[0][1].close()
        until(lambda: watchers.open == 1)
    finally:
        watchers.close()
        thread.join()
        for pair in pairs:
            for one in pair:
                one.close()


def test_copies_of_a_study_are_studies(tmp_path: Path) -> None:
    names = [f"train-gpu-h100-16-{number:08x}" for number in range(LOAD.studies)]
    make_studies(tmp_path, names, "")
    catalogue = Catalogue(lambda: [tmp_path])
    read_all(catalogue)
    known = catalogue.known()
    catalogue.close()
    assert sorted(known) == names
    assert [(one.summary.state, one.summary.has_rule) for one in known.values()] == [
        ("ended", True)
    ] * len(names)
    with closing(sqlite3.connect(tmp_path / names[1] / "study.db")) as copy:
        rows = copy.execute("SELECT study_name FROM studies").fetchall()
    assert rows and all(name.startswith(names[1]) for (name,) in rows)
