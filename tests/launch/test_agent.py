"""Who may be an agent of whom: what is refused, is refused with a sentence on both sides."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from automesh.errors import UsageError
from automesh.jsonio import dumps
from automesh.launch import agent as agent_module
from automesh.launch import fleet as fleet_module
from automesh.launch import wire
from automesh.launch.agent import HostAgent
from automesh.launch.asking import ask
from automesh.launch.fleet import Fleet
from automesh.launch.secret import new_token

TOKEN = new_token()
MakeFleet = Callable[..., Fleet]


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def make_fleet(notices: list[str]) -> Iterator[MakeFleet]:
    fleets: list[Fleet] = []

    def make(hosts: int = 2, **changes: Any) -> Fleet:
        settings: dict[str, Any] = {"token": TOKEN, "listen": ("127.0.0.1", 0), **changes}
        fleets.append(Fleet(hosts=hosts, notice=notices.append, **settings).__enter__())
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


class Serving:
    """An agent in a thread."""

    def __init__(self, fleet: Fleet, token: str = TOKEN, **changes: Any) -> None:
        self.error: UsageError | None = None
        self._agent = HostAgent(search=fleet.address, token=token, wait_s=60.0, **changes)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._agent.serve()
        except UsageError as error:
            self.error = error

    def refusal(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is not None
        return self.error.message

    def ends_well(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None


def heard(fleet: Fleet, notices: list[str]) -> str:
    """What the search has said of one agent."""
    for _ in range(200):
        with pytest.raises(UsageError):
            fleet.wait(0.0)
        if notices:
            break
        time.sleep(0.05)
    (only,) = notices
    return only


def test_an_agent_comes_says_what_it_has_and_goes_with_the_search(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(hosts=1)
    serving = Serving(fleet, name="host-a")
    fleet.wait(60)
    (facts,) = fleet.facts
    assert (facts.name, facts.address, facts.platforms) == ("host-a", "127.0.0.1", "cpu")
    assert facts.cores >= 1
    assert dict(facts.versions).keys() >= {"python", "jax", "jaxlib"}
    fleet.close()
    serving.ends_well()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", _port(fleet)), timeout=5):
        pass


def test_another_token_is_refused(make_fleet: MakeFleet, notices: list[str]) -> None:
    fleet = make_fleet()
    serving = Serving(fleet, new_token())
    wanted = f"the search at {fleet.address} has another token than this agent"
    assert serving.refusal() == wanted
    assert serving.error is not None
    assert "AUTOMESH_TOKEN" in serving.error.hint
    said = heard(fleet, notices)
    assert said.startswith("an agent at 127.0.0.1:")
    assert said.endswith(" was refused: it has another token")


def test_other_versions_are_refused(
    make_fleet: MakeFleet, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = (("python", "3.12"), ("automesh", "0.1.0"), ("jax", "0.12.0"), ("jaxlib", "0.12.0"))
    monkeypatch.setattr(fleet_module, "own_versions", lambda: mine)
    own_facts = agent_module.own_facts

    def other(**where: Any) -> Any:
        return replace(own_facts(**where), versions=(*mine[:2], ("jax", "0.11.0"), mine[3]))

    monkeypatch.setattr(agent_module, "own_facts", other)
    fleet = make_fleet()
    why = "it has jax 0.11.0, and the search 0.12.0"
    wanted = f"the search at {fleet.address} refuses this agent: {why}"
    assert Serving(fleet, name="host-b").refusal() == wanted
    assert heard(fleet, notices) == f"the agent on host-b was refused: {why}"


def test_devices_of_another_platform_than_the_others_are_refused(
    make_fleet: MakeFleet, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet()
    first = Serving(fleet, name="host-a")
    while not fleet.facts:
        time.sleep(0.05)
    own_facts = agent_module.own_facts
    monkeypatch.setattr(
        agent_module, "own_facts", lambda **where: replace(own_facts(**where), platforms="cuda,cpu")
    )
    why = "its devices are of `cuda,cpu`, and those of host-a of `cpu`"
    refused = Serving(fleet, name="host-b").refusal()
    assert refused == f"the search at {fleet.address} refuses this agent: {why}"
    assert heard(fleet, notices) == f"the agent on host-b was refused: {why}"
    fleet.close()
    first.ends_well()


def test_one_agent_too_many_is_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(hosts=1)
    first = Serving(fleet)
    fleet.wait(60)
    assert Serving(fleet).refusal().endswith("the 1 hosts of this search are connected already")
    fleet.close()
    first.ends_well()


def test_a_port_where_nobody_listens_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError) as caught:
            HostAgent(search=address, token=TOKEN, wait_s=0.5).serve()
    assert caught.value.message.startswith(f"nothing answers at {address} ")
    assert "firewall" in caught.value.hint


def test_an_address_that_is_taken_is_a_sentence(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    with pytest.raises(UsageError, match="the search cannot listen at ") as caught:
        make_fleet(listen=("127.0.0.1", _port(fleet)))
    assert "--listen" in caught.value.hint


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "host:70000", "::1:80"])
def test_what_is_no_address_is_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        HostAgent(search=text, token=TOKEN)


def test_addresses() -> None:
    assert wire.check_address("10.0.0.1:8600", port_needed=True) == ("10.0.0.1", 8600)
    assert wire.check_address("host-a", port_needed=False) == ("host-a", 0)
    assert wire.check_address("[::1]:8600", port_needed=True) == ("[::1]", 8600)


def test_a_stranger_that_says_nothing_sensible_is_hung_up_on(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    fleet = make_fleet(hosts=1)
    with socket.create_connection(("127.0.0.1", _port(fleet)), timeout=30) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 16)
        stranger.settimeout(60)
        while stranger.recv(4096):
            pass
    serving = Serving(fleet)
    fleet.wait(60)
    fleet.close()
    serving.ends_well()


class Mute:
    """A server that is dialled as a search is, and says nothing."""

    def __init__(self) -> None:
        self._threads = futures.ThreadPoolExecutor(2)
        self._over = threading.Event()
        self._server = grpc.server(self._threads)
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: method}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _serve(self, requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        self._over.wait(3600)
        yield b""

    def close(self) -> None:
        self._over.set()
        self._server.stop(0).wait(10)
        self._threads.shutdown()


def test_a_search_that_does_not_greet_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_GREETING_S", 0.5)
    mute = Mute()
    before = set(threading.enumerate())
    with pytest.raises(UsageError, match=r"has not greeted this agent within 0 s"):
        HostAgent(search=mute.address, token=TOKEN, wait_s=60.0).serve()
    deadline = time.monotonic() + 300
    # Threads of the server of this test come and go.
    own = threading.enumerate
    while left := [one for one in own() if one not in before and "PoolExecutor" not in one.name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    mute.close()


def test_who_knocks_without_end_is_told_of_for_a_while(
    make_fleet: MakeFleet, notices: list[str]
) -> None:
    fleet: Any = make_fleet()
    for number in range(25):
        fleet._refuse(f"stranger {number} was refused")
    with pytest.raises(UsageError):
        fleet.wait(0.0)
    assert len(notices) == 21
    assert notices[-1] == "20 connections were refused; further ones are not shown"


def test_who_hangs_up_is_told_of(make_fleet: MakeFleet, notices: list[str]) -> None:
    fleet = make_fleet()
    with pytest.raises(UsageError, match="has another token"):
        ask(fleet.address, new_token())
    said = heard(fleet, notices).partition(" was refused: ")[2]
    assert said in ("it has another token", "it closed the connection before it said who it is")


def test_who_hangs_up_between_two_answers_is_told_of(
    make_fleet: MakeFleet, notices: list[str]
) -> None:
    fleet: Any = make_fleet()
    ended: list[Any] = []
    context = mock.Mock(peer=lambda: "ipv4:10.0.0.9:40000", add_callback=ended.append)
    hello = dumps({"hello": "nonce"}).encode()
    answers = fleet._serve(iter([hello]), context)
    assert b"proof" in next(answers)
    for callback in ended:  # gRPC now drops the answers, without asking for another one.
        callback()
    answers.close()
    with pytest.raises(UsageError):
        fleet.wait(0.0)
    assert notices == [
        "a connection from 10.0.0.9:40000 was refused: it closed the connection before it said "
        "who it is"
    ]


def test_a_stranger_cannot_fill_the_memory(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    with grpc.insecure_channel(fleet.address) as channel:
        serve: Any = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
        answers = serve(iter([b" " * 2**21]))
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_of_two_that_come_at_once_for_one_place_one_is_refused(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    different = fleet_module.version_difference

    def later(*versions: Any) -> str:
        both.wait(60)
        return different(*versions)

    monkeypatch.setattr(fleet_module, "version_difference", later)
    fleet = make_fleet(hosts=1)
    agents = [Serving(fleet, name=name) for name in ("host-a", "host-b")]
    deadline = time.monotonic() + 300
    while not any(one.error for one in agents) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(fleet.facts) == 1
    fleet.close()
    (refused,) = (one for one in agents if one.error is not None)
    assert refused.refusal().endswith("the 1 hosts of this search are connected already")


def test_a_search_leaves_no_threads_behind(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(hosts=1)
    serving = Serving(fleet)
    fleet.wait(60)
    assert _of_fleets()
    fleet.close()
    serving.ends_well()
    deadline = time.monotonic() + 300
    while _of_fleets() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _of_fleets() == []


def _of_fleets() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("fleet")]


def _port(fleet: Fleet) -> int:
    return int(fleet.address.rpartition(":")[2])
