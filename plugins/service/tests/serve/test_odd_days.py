"""What happens to a service in its life: stopped processes, clocks that are set, neighbours."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from automesh_service.serve.catalogue import Catalogue
from automesh_service.submissions.database import Database
from automesh_service.submissions.tokens import Holder, Refused, Tokens
from plugins.service.tests.support.serve_process import ServeProcess
from plugins.service.tests.support.service import make_measured, read_all

NAME = "train-gpu-h100-16-0"
DAY_S = 86_400.0
WAIT_S = 300.0


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    make_measured(tmp_path / NAME)
    with closing(Catalogue(lambda: [tmp_path])) as found:
        read_all(found)
        yield found


def until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def copies(catalogue: Catalogue) -> list[int]:
    assert catalogue.reader_pid is not None
    return [one.pid for one in psutil.Process(catalogue.reader_pid).children(recursive=True)]


@pytest.mark.slow
def test_every_copy_of_the_reader_may_be_stopped(catalogue: Catalogue, tmp_path: Path) -> None:
    """Those that read are replaced after their bound; the one that makes them when it is needed."""
    for number in copies(catalogue):
        os.kill(number, signal.SIGSTOP)
    make_measured(tmp_path / NAME, step_s=0.125)

    def is_read() -> bool:
        catalogue.refresh()
        return catalogue.known()[NAME].summary.step_s == 0.125

    until(is_read)


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_clock_that_jumps_by_a_day_ends_no_token_for_good(tmp_path: Path, jump_s: float) -> None:
    now_s = 1e9
    database = Database(tmp_path / "service.db")
    tokens = Tokens(database, lambda: now_s)
    lasting, short = tokens.make("ann", "read", None), tokens.make("ann", "read", 3600.0)
    now_s += jump_s
    assert isinstance(tokens.check(lasting), Holder)
    found = tokens.check(short)
    if jump_s > 0:
        assert isinstance(found, Refused) and found.reason == "expired"
    else:
        assert isinstance(found, Holder)
    now_s -= jump_s
    assert isinstance(tokens.check(short), Holder)
    database.close()


@pytest.mark.slow
def test_two_services_on_one_storage_show_the_same(tmp_path: Path) -> None:
    """Each reads it for itself; a study that one of them shows is the other one's as well."""
    storage, results = str(tmp_path / "all.db"), tmp_path / "results"
    make_measured(results / NAME, storage=storage)
    with (
        closing(Catalogue(lambda: [results], storage)) as one,
        closing(Catalogue(lambda: [results], storage)) as other,
    ):
        read_all(one)
        read_all(other)
        for step_s in (0.5, 0.125):
            make_measured(results / NAME, storage=storage, step_s=step_s)
            for each in (one, other):
                until(
                    lambda each=each, step_s=step_s: (
                        each.refresh() or each.known()[NAME].summary.step_s == step_s
                    )
                )
        assert one.known()[NAME].summary == other.known()[NAME].summary


@pytest.mark.slow
def test_a_server_and_a_runner_that_are_stopped_go_on(tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT of each: what was sent meanwhile is answered, and is done once."""
    served = ServeProcess(folder=tmp_path)
    files = {"train.py": b"a = '\0'\n"}
    try:
        served.start()
        assert served.process is not None
        runners = [
            one
            for one in psutil.Process(served.process.pid).children()
            if "automesh_service.submissions.runner" in one.cmdline()
        ]
        for number, one in enumerate([psutil.Process(served.process.pid), *runners]):
            one.send_signal(signal.SIGSTOP)
            threading.Timer(3.0, one.send_signal, (signal.SIGCONT,)).start()
            sent = served.send(f"while-stopped-{number}", files)
            assert served.send(f"while-stopped-{number}", files) == sent
            until(lambda sent=sent: served.submission(sent)["submission"]["state"] == "failed")
            assert served.submission(sent)["submission"]["runs"] == 1
        assert len(runners) == 1
        assert served.stop() == 0
        assert "Traceback" not in served.said()
    finally:
        served.end()
