"""Agents on this host: started once, started again while they are wanted, and never after."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from automesh.launch import local
from automesh.launch.launcher import AgentOrder
from automesh.launch.local import LocalLauncher

ORDER = AgentOrder(search="127.0.0.1:1", token="x" * 32, hosts=2)


class Ended:
    """An agent that has ended; while it is killed, a gang that misses it asks for another one."""

    started = 0
    launcher: LocalLauncher
    asking: threading.Thread | None = None

    def __init__(self, *_: object, **__: object) -> None:
        type(self).started += 1

    def kill(self) -> None:
        kind = type(self)
        if kind.asking is None:
            kind.asking = threading.Thread(target=kind.launcher.refill)
            kind.asking.start()
            kind.asking.join(2)

    def has_ended(self) -> bool:
        return True

    def collect_ending(self) -> None: ...

    def log_tail(self) -> str:
        return "it was tired"


def test_none_is_started_while_all_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in: Any = Ended
    monkeypatch.setattr(local, "Guarded", stand_in)
    Ended.launcher = launcher = LocalLauncher(tmp_path)
    launcher.start(ORDER)
    assert launcher.trouble() == "agent 1 has ended: it was tired"
    assert launcher.refill()
    assert Ended.started == 4
    launcher.close()
    assert Ended.asking is not None
    assert not Ended.asking.is_alive()
    assert Ended.started == 4
    assert not launcher.refill()


class Hanging(Ended):
    """An agent that is there until it is killed."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True

    def has_ended(self) -> bool:
        return self.is_killed


def test_one_that_hangs_is_ended_by_the_name_of_its_host_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in: Any = Hanging
    monkeypatch.setattr(local, "Guarded", stand_in)
    monkeypatch.setattr(Hanging, "started", 0)
    launcher = LocalLauncher(tmp_path)
    launcher.start(ORDER)
    launcher.give_up("another-host")
    assert launcher.refill()
    assert Hanging.started == 2
    launcher.give_up("local-2")
    assert launcher.trouble().startswith("agent 2 has ended")
    assert launcher.refill()
    assert Hanging.started == 3
    launcher.close()
