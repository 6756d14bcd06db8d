"""Which connection is closed when there are too many."""

from __future__ import annotations

import pytest

from automesh.errors import UsageError
from automesh_service.serve.net.connections import Connections, OpenConnection, place_of
from automesh_service.serve.net.descriptors import RESERVED, connections_for


class Crowd:
    """Connections that come in, and the ports of those that were closed for others."""

    def __init__(self, most: int, *proxies: str) -> None:
        self.all = Connections(most=most, proxies=proxies)
        self.closed: list[int] = []
        self._port = 0

    def come(self, address: str) -> OpenConnection | None:
        self._port += 1
        port = self._port
        held = self.all.enter((address, port), lambda: self.closed.append(port))
        if held is not None:
            held.is_begun = True
        return held

    def known(self, address: str, *, is_at_work: bool = True) -> OpenConnection:
        held = self.come(address)
        assert held is not None
        self.all.know(held.client)
        held.is_at_work = is_at_work
        return held


def test_of_a_flood_the_oldest_strangers_go_and_nobody_else() -> None:
    crowd = Crowd(40)
    friends = [crowd.known("127.0.0.1") for _ in range(3)]
    crowd.known("10.0.0.9")
    stranger = crowd.come("10.0.0.8")
    assert stranger is not None
    for _ in range(1000):
        assert crowd.come("127.0.0.1") is not None  # Whoever is new is listened to.
    assert len(crowd.all) == 40
    assert crowd.closed == list(range(6, 6 + 965))
    for one in (*friends, stranger):
        crowd.all.leave(one)
        crowd.all.leave(one)
    assert len(crowd.all) == 36


def test_an_address_has_its_part_and_a_proxy_all() -> None:
    crowd = Crowd(40, "10.0.0.5")
    for _ in range(100):
        crowd.come("10.0.0.1")
        crowd.come("2001:db8::1")
        crowd.come("2001:db8::2:1")  # of the same network
    assert len(crowd.all) == 20
    for _ in range(100):
        crowd.come("10.0.0.5")
    assert len(crowd.all) == 40
    before = len(crowd.closed)
    crowd.come("10.0.0.1")
    assert len(crowd.closed) == before + 1


def test_who_is_being_answered_stays() -> None:
    crowd = Crowd(4)
    idle = [crowd.known("127.0.0.1", is_at_work=False) for _ in range(2)]
    for _ in range(2):
        crowd.known("127.0.0.1")
    assert crowd.come("127.0.0.1") is not None  # No stranger is there: one that rests goes.
    assert crowd.closed == [idle[0].client[1]]
    one = crowd.come("127.0.0.1")
    assert one is not None and crowd.closed == [1, 5]
    crowd.all.know(one.client)
    one.is_at_work = idle[1].is_at_work = True
    assert crowd.come("127.0.0.1") is None  # There is none that could go for it.
    assert len(crowd.all) == 4


def test_a_stranger_at_work_goes_after_one_that_waits() -> None:
    crowd = Crowd(2)
    at_work = crowd.come("127.0.0.1")
    assert at_work is not None
    at_work.is_at_work = True
    crowd.come("127.0.0.1")
    crowd.come("127.0.0.1")
    assert crowd.closed == [2]


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::"),
        ("2001:db8:1:2:3::", "2001:db8:1:2::"),
        ("", ""),
    ],
)
def test_places(address: str, place: str) -> None:
    assert place_of(address) == place


def test_a_process_with_few_descriptors_has_few_connections() -> None:
    assert connections_for(1024) == (1024 - RESERVED) // 2
    assert connections_for(10**6) == 2000
    with pytest.raises(UsageError, match="no more than 64 files, and needs 224"):
        connections_for(64)
