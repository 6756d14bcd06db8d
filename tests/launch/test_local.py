"""Agents on this host: started once, started again while they are wanted, and never after."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from automesh.launch import local
from automesh.launch.launcher import Order
from automesh.launch.local import LocalLauncher

ORDER = Order(search="127.0.0.1:1", token="x" * 32, hosts=2)


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

    def bury(self) -> None: ...

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
