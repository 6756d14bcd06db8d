"""The agents of a search, seen by the search: a port that they dial, and gangs that are started.

Threads of gRPC take what agents say and hand it to the gang that it concerns; all decisions are
made in the thread of the pool (`launch.gang`).
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import queue
import re
import shlex
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from automesh.errors import AutomeshError, UsageError
from automesh.hlo.store import ModuleStore
from automesh.jsonio import dumps, from_json, to_json
from automesh.launch import wire
from automesh.launch.asking import HostStatus
from automesh.launch.certificates import quiet, told_by
from automesh.launch.facts import (
    LOCAL_DEVICES,
    HostFacts,
    joined_address,
    own_versions,
    shares_of,
    version_difference,
)
from automesh.launch.gang import Gang
from automesh.launch.launcher import Launcher, Order
from automesh.launch.secret import BrokenSeal, Seal, is_proof, new_nonce, proof
from automesh.texts.terminal import clean
from automesh.worker.messages import Surroundings
from automesh.worker.place import Place
from automesh.worker.wire import Message

_MOST_AGENTS = 1024
_HUNG_UP = "it hung up before it had said who it is"
_MOST_TOLD = 20  # Refusals: who scans ports may knock without end.
_PORT_S = 10.0  # For an agent to say which port is free on its host: milliseconds as a rule.
_COME_BACK_S = 100.0  # For agents that are started again: below the limit of a worker's start.
_STOP_S = 1.0
_POLL_S = 0.2


@dataclass(slots=True, kw_only=True, eq=False)
class _Agent:
    """An agent that is connected.

    Attributes:
      number: in the order in which they came.
      members: its processes by name: the gang, and the rank in it.
      close: ends the stream.
      ports: questions for a free port, by number, each with a place for the answer.
      load: processes that wanted a core in the last minute, for each core; -1 if it was not said.
    """

    number: int
    facts: HostFacts
    close: Callable[[], object]
    heard_s: float
    outbox: queue.SimpleQueue[Message | None] = field(
        default_factory=queue.SimpleQueue["Message | None"]
    )
    members: dict[str, tuple[Gang, int]] = field(default_factory=dict[str, tuple[Gang, int]])
    ports: dict[int, queue.SimpleQueue[int]] = field(
        default_factory=dict[int, "queue.SimpleQueue[int]"]
    )
    load: float = -1.0
    is_lost: bool = False


class _Process:
    """One process of a gang; see `automesh.launch.gang.Member`.

    Until its host is known it keeps what it is to be told.
    """

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.name = name
        self._fleet = fleet
        self._agent: _Agent | None = None
        self._kept: list[Message] = []
        self._lock = threading.Lock()

    @property
    def host(self) -> str:
        return self._agent.facts.name if self._agent is not None else "a host to come"

    def place(self, agent: _Agent, start: Message) -> None:
        """Starts it on a host; from any thread."""
        with self._lock:
            self._agent = agent
            for message in (start, *self._kept):
                agent.outbox.put(message)
            self._kept.clear()

    def send(self, message: Message) -> None:
        self._put({"to": self.name, "send": message})

    def kill(self, *, force: bool) -> None:
        self._put({"to": self.name, "kill": force})

    def abandon(self) -> None:
        if self._agent is not None:
            self._fleet.lose(self._agent, "it does not end its processes", hangs=True)

    def _put(self, message: Message) -> None:
        with self._lock:
            if self._agent is None:
                self._kept.append(message)
            else:
                self._agent.outbox.put(message)


class _Handshake:
    """What came of a connection's beginning; whoever knows it first says so, and nobody else.

    Args:
      tell: is called with words for the user, from any thread.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._unsettled = threading.Lock()

    def settle(self, text: str = "") -> None:
        """Ends it.

        Args:
          text: why it failed; empty if that is nothing for the user.
        """
        if self._unsettled.acquire(blocking=False) and text:
            self._tell(text)


class Fleet:
    """The agents of one search. Use it as a context manager.

    Args:
      token: see `launch.secret`.
      listen: address and port to bind; port 0 for any that is free.
      hosts: agents that the search is for.
      processes: of a gang, spread over the hosts; 0 for one on each.
      is_virtual: their devices are virtual ones, and need not be dealt to those of one host.
      launcher: that starts the agents; None if the user does.
      memory_limit_bytes: of one process; 0 for its share of what is free on its host.
      certificates: private key and certificate chain, PEM; None: no encryption.
      ca: file with what the agents trust that the launcher starts.
      notice: told what the user should know, in the thread that calls `wait` or `start_gang`.
      store: where programs go that were compiled on other hosts.
    """

    def __init__(
        self,
        *,
        token: str,
        listen: tuple[str, int],
        hosts: int,
        processes: int = 0,
        is_virtual: bool = True,
        launcher: Launcher | None = None,
        memory_limit_bytes: int = 0,
        certificates: tuple[bytes, bytes] | None = None,
        ca: str = "",
        notice: Callable[[str], object] = lambda _: None,
        store: ModuleStore | None = None,
    ) -> None:
        self.hosts = hosts
        self.processes = processes or hosts
        self._is_virtual = is_virtual
        self._token = token
        self._listen = listen
        self._launcher = launcher
        self._memory_limit_bytes = memory_limit_bytes
        self._certificates = certificates
        self._ca = ca
        self._notice = notice
        self._store = store
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._agents: dict[int, _Agent] = {}
        self._numbers = itertools.count(1)
        self._names = itertools.count(1)
        self._losses: list[str] = []
        self._refusals = itertools.count(1)
        self._closing = threading.Event()
        self._server: Any = None
        self._threads: futures.ThreadPoolExecutor | None = None
        self.address = ""

    def __enter__(self) -> Fleet:
        """Listens, and has the agents started.

        Raises:
          UsageError: the address cannot be bound, or the launcher cannot start them.
        """
        self._bind()
        threading.Thread(target=self._watch, daemon=True).start()
        if self._launcher is not None:
            try:
                order = Order(search=self.address, token=self._token, hosts=self.hosts, ca=self._ca)
                self._launcher.start(order)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def facts(self) -> tuple[HostFacts, ...]:
        """The hosts that are there, in the order in which they came."""
        return tuple(agent.facts for agent in self._present())

    def wait(self, limit_s: float, tick: Callable[[], object] = lambda: None) -> None:
        """Waits until all hosts are there.

        Args:
          tick: called several times a second.

        Raises:
          UsageError: some have not come in time, or do not go together.
        """
        deadline = time.monotonic() + limit_s
        while len(self._present()) < self.hosts:
            tick()
            self._tell()
            trouble = self._launcher.trouble() if self._launcher is not None else ""
            if trouble or time.monotonic() > deadline:
                raise UsageError(self._too_few(limit_s, trouble), hint=self._how_to_come())
            time.sleep(_POLL_S)
        self._tell()
        for facts in self.facts:
            self._check_devices(facts)

    def _check_devices(self, facts: HostFacts) -> None:
        """Refuses a host whose devices cannot be dealt to its processes.

        Raises:
          UsageError: says which, and why.
        """
        each = self.processes // self.hosts
        if self._is_virtual or each == 1 or facts.platforms == "cpu":
            return
        try:
            shares_of(facts.devices, each)
        except ValueError as error:
            platform = facts.platforms.partition(",")[0]
            raise UsageError(
                f"{facts.name} cannot have {each} processes: of `{platform}`, {error}",
                hint="give a divisor of its number of GPUs with --processes-per-host; a host of "
                "TPUs has one process",
            ) from None

    def start_gang(
        self, *, surroundings: Surroundings, log: Path, memory_limit_bytes: int, handler: str
    ) -> Gang:
        """Starts a gang on the hosts; see `automesh.worker.process.StartWorker`.

        Args:
          memory_limit_bytes: what is free on this host, which says nothing of the others.

        """
        del memory_limit_bytes
        self._tell()
        gang = Gang(log)
        members = [_Process(self, f"process-{next(self._names)}") for _ in range(self.processes)]
        gang.set_members(members)
        order = {"handler": handler, "memory_bytes": self._memory_limit_bytes}
        # Agents may have to come back, and the pool has others to look after meanwhile.
        threading.Thread(
            target=self._place, args=(gang, members, surroundings, order), daemon=True
        ).start()
        return gang

    def _place(
        self, gang: Gang, members: Sequence[_Process], around: Surroundings, order: Message
    ) -> None:
        """In a thread of its own: starts the processes of a gang when the hosts are there."""
        try:
            agents = self._enough()
            placed = [agents[rank * len(agents) // len(members)] for rank in range(len(members))]
            port = self._free_port(placed[0])
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it
            gang.give_up(str(error))
            return
        coordinator = joined_address(placed[0].facts.address, port)
        locals_ = Counter[int]()
        for rank, (member, agent) in enumerate(zip(members, placed, strict=True)):
            local = locals_[agent.number]
            locals_[agent.number] += 1
            place = Place(
                rank=rank,
                count=len(members),
                coordinator=coordinator,
                host=agent.facts.address,
            )
            share = sum(one.facts.machine == agent.facts.machine for one in placed)
            self._start(
                agent,
                gang,
                member,
                rank,
                {
                    "surroundings": self._as_there(around, agent, local),
                    "place": to_json(place, Place),
                    "share": share,
                    **order,
                },
            )

    def _start(
        self, agent: _Agent, gang: Gang, member: _Process, rank: int, order: Message
    ) -> None:
        """Has a process of a gang started on a host."""
        with self._lock:
            agent.members[member.name] = (gang, rank)
        member.place(agent, {"start": member.name, **order})
        if agent.is_lost:  # Since then, and perhaps before it knew of this gang.
            gang.end(rank, {"ended": "its agent was lost"})

    def _as_there(self, around: Surroundings, agent: _Agent, local: int = 0) -> Message:
        """The surroundings of a process on a host.

        Args:
          local: of the processes of its gang on this host, which one.
        """
        facts, each = agent.facts, self.processes // self.hosts
        # What `local` means each host says: that of the search may have no devices.
        if around.cpu_devices <= 0:
            around = replace(around, platforms=facts.platforms)
            if each > 1 and facts.devices:
                own = ",".join(map(str, shares_of(facts.devices, each)[local]))
                variables = {**dict(around.variables), LOCAL_DEVICES: own}
                around = replace(around, variables=tuple(sorted(variables.items())))
        return to_json(around, Surroundings)

    # Processes that are no gang; see `automesh.launch.lending`.

    @property
    def present(self) -> tuple[tuple[int, HostFacts], ...]:
        """The hosts that are there, by the numbers of their agents."""
        return tuple((agent.number, agent.facts) for agent in self._present())

    def start_process(
        self, number: int, gang: Gang, around: Surroundings, handler: str, *, share: int
    ) -> None:
        """Starts a process by itself on the host of an agent.

        Args:
          gang: stands for it, and for nothing else.
          share: how many of them share the host's memory.

        Raises:
          OSError: the agent is gone.
        """
        with self._lock:
            agent = self._agents.get(number)
        if agent is None:
            raise OSError("its host was lost")
        member = _Process(self, f"process-{next(self._names)}")
        gang.set_members([member])
        order: Message = {
            "surroundings": self._as_there(around, agent),
            "place": None,
            "share": share,
            "handler": handler,
            "memory_bytes": self._memory_limit_bytes,
        }
        self._start(agent, gang, member, 0, order)

    def call_back(self) -> None:
        """Has agents started again that were lost, where the launcher does that."""
        self._tell()
        if len(self._present()) < self.hosts and self._launcher is not None:
            self._launcher.refill()

    def lose(self, agent: _Agent, why: str, *, hangs: bool = False) -> None:
        """Gives an agent up, with all processes that it had; from any thread.

        Args:
          hangs: it may be there for ever, and is ended if the launcher can do that.
        """
        with self._lock:
            if agent.is_lost:
                return
            agent.is_lost = True
            self._agents.pop(agent.number, None)
            members = list(agent.members.values())
            agent.members.clear()
        if not self._closing.is_set():
            lost = f"the agent on {agent.facts.name} was lost: {why}"
            self._losses.append(lost)
            self._said.put(lost)
        for gang, rank in members:
            gang.end(rank, {"ended": f"the agent on its host was lost: {why}"})
        agent.outbox.put(None)
        agent.close()
        if hangs and self._launcher is not None:
            self._launcher.give_up(agent.facts.name)

    def close(self) -> None:
        """Says goodbye to all agents, who end what they run, and listens no longer."""
        if self._closing.is_set():
            return
        self._closing.set()
        for agent in self._present():
            agent.outbox.put({"bye": True})
            agent.outbox.put(None)
        if self._server is not None:
            self._server.stop(_STOP_S).wait(2 * _STOP_S)
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    # Who is there

    def _present(self) -> list[_Agent]:
        with self._lock:
            return sorted(self._agents.values(), key=lambda one: one.number)

    def _enough(self) -> list[_Agent]:
        """The agents for a gang, in an order that stays while they do."""
        if len(self._present()) < self.hosts and self._launcher is not None:
            deadline = time.monotonic() + _COME_BACK_S
            # Again and again: an agent that was lost a moment ago has not ended yet.
            while self._launcher.refill() and len(self._present()) < self.hosts:
                if self._closing.wait(_POLL_S) or time.monotonic() > deadline:
                    break
        agents = self._present()
        if len(agents) < self.hosts:
            said = "; ".join(self._losses[-self.hosts :])
            raise OSError(f"of {self.hosts} hosts {len(agents)} are left ({said})")
        chosen = agents[: self.hosts]
        return sorted(chosen, key=_order)

    def _free_port(self, agent: _Agent) -> int:
        wanted = next(self._names)
        answer = agent.ports[wanted] = queue.SimpleQueue[int]()
        agent.outbox.put({"port": wanted})
        try:
            return answer.get(timeout=_PORT_S)
        except queue.Empty:
            raise OSError(f"the agent on {agent.facts.name} does not answer") from None
        finally:
            del agent.ports[wanted]

    def _too_few(self, limit_s: float, trouble: str) -> str:
        names = ", ".join(one.name for one in self.facts)
        there = (
            f"{len(self.facts)} of {self.hosts} agents have come ({names})"
            if names
            else (f"none of {self.hosts} agents has come")
        )
        return f"{there}: {trouble}" if trouble else f"{there} within {limit_s:.0f} s"

    def _how_to_come(self) -> str:
        if self._launcher is not None:
            return "see what the launcher says, and whether the hosts reach " + self.address
        return f"run `{self.agent_words}` on each host, with the same token"

    @property
    def agent_words(self) -> str:
        """The command of an agent that somebody starts by hand."""
        words = f"automesh agent {self.address}"
        if self._certificates is None:
            return words
        return f"{words} --ca {shlex.quote(self._ca) if self._ca else 'FILE'}"

    def _tell(self) -> None:
        while not self._said.empty():
            self._notice(self._said.get())

    def _refuse(self, text: str) -> None:
        """Notes for the user who was refused; from any thread."""
        number = next(self._refusals)
        if number <= _MOST_TOLD:
            self._said.put(text)
        if number == _MOST_TOLD:
            self._said.put(f"{number} connections were refused; further ones are not told")

    def _watch(self) -> None:
        """In a thread of its own: gives up agents that are silent."""
        while not self._closing.wait(1.0):
            now_s = time.monotonic()
            for agent in self._present():
                if now_s - agent.heard_s > wire.LOST_S:
                    self.lose(agent, f"silent for {wire.LOST_S:.0f} s", hangs=True)

    # The server

    def _bind(self) -> None:
        host, port = self._listen
        self._threads = futures.ThreadPoolExecutor(_MOST_AGENTS, thread_name_prefix="fleet")
        with quiet():
            self._server = grpc.server(
                self._threads, options=wire.OPTIONS, maximum_concurrent_rpcs=_MOST_AGENTS
            )
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: method}),)
        )
        try:
            if self._certificates is None:
                bound = self._server.add_insecure_port(f"{host}:{port}")
            else:
                credentials = grpc.ssl_server_credentials([self._certificates])
                bound = self._server.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError:
            bound = 0
        if not bound:
            raise UsageError(
                f"the search cannot listen at {host}:{port}",
                hint="name an address of this host and a port that is free: --listen 10.0.0.1:8600",
            )
        self.address = f"{host}:{bound}"
        self._server.start()

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One agent, from its handshake to its end; in a thread of gRPC's."""
        timer = threading.Timer(wire.HANDSHAKE_S, context.cancel)
        timer.daemon = True
        timer.start()
        peer = clean(str(context.peer())).removeprefix("ipv4:")
        mine, theirs = new_nonce(), ""
        handshake = _Handshake(lambda text: self._closing.is_set() or self._refuse(text))
        # Who hangs up between two answers is seen by nobody else: gRPC asks for no further one.
        context.add_callback(
            lambda: handshake.settle(f"a connection from {peer} was refused: {_HUNG_UP}")
        )
        try:
            hello = wire.plain(next(requests, b""))
            if why := told_by(hello):
                handshake.settle(f"a connection from {peer} was given up: {why}")
                return
            theirs = str(hello.get("hello", ""))
            if not theirs or self._closing.is_set():
                handshake.settle()
                yield _refusal("it speaks another protocol")
                return
            yield dumps(
                {"nonce": mine, "proof": proof(self._token, "search", theirs, mine)}
            ).encode()
            answer = wire.plain(next(requests, b""))
            if is_proof(answer.get("asks"), proof(self._token, "guest", theirs, mine)):
                own = Seal(self._token, "search", theirs, mine)
                hosts = to_json(self.status(), tuple[HostStatus, ...])
                handshake.settle()
                yield from own.close({"hosts": hosts, "wanted": self.hosts})
                return
            if not is_proof(answer.get("proof"), proof(self._token, "agent", theirs, mine)):
                handshake.settle(f"an agent at {peer} was refused: it has another token")
                yield _refusal("it has another token")
                return
            seal = Seal(self._token, "agent", theirs, mine)
            facts = _facts(seal, answer)
        except Exception as error:  # noqa: BLE001 - what a stranger sends may be anything
            handshake.settle(
                f"a connection from {peer} was refused: {clean(str(error)) or _HUNG_UP}"
            )
            yield _refusal("its first message cannot be read")
            return
        finally:
            timer.cancel()
        handshake.settle()
        agent = self._admit(facts, context.cancel)
        if isinstance(agent, str):
            self._refuse(f"the agent on {facts.name} was refused: {agent}")
            yield _refusal(agent)
            return
        context.add_callback(lambda: self.lose(agent, "its connection was closed"))
        threading.Thread(target=self._listen_to, args=(agent, requests, seal), daemon=True).start()
        own = Seal(self._token, "search", theirs, mine)
        yield from own.close({"welcome": agent.number, "machine": socket.gethostname()})
        while True:
            try:
                message = agent.outbox.get(timeout=wire.BEAT_S)
            except queue.Empty:
                message = {"beat": True}
            if message is None:
                return
            yield from own.close(message)

    def _admit(self, facts: HostFacts, close: Callable[[], object]) -> _Agent | str:
        """Takes an agent among those of this search; else gives why it cannot be one."""
        if other := version_difference(dict(own_versions()), dict(facts.versions)):
            return f"it has {other}"
        with self._lock:  # Two may come at once.
            if len(self._agents) >= self.hosts:
                return f"the {self.hosts} hosts of this search are there already"
            for agent in self._agents.values():
                if agent.facts.platforms != facts.platforms:
                    return (
                        f"its devices are of `{facts.platforms}`, and those of "
                        f"{agent.facts.name} of `{agent.facts.platforms}`"
                    )
            number = next(self._numbers)
            agent = _Agent(number=number, facts=facts, close=close, heard_s=time.monotonic())
            self._agents[number] = agent
        return agent

    def _listen_to(self, agent: _Agent, requests: Iterator[bytes], seal: Seal) -> None:
        """In a thread of its own: takes what an agent says."""
        why = "its connection was closed"
        try:
            for data in _until_closed(requests):
                agent.heard_s = time.monotonic()
                if (message := seal.open(data)) is not None:
                    self._hear(agent, message)
        except BrokenSeal as error:
            why = str(error)
        except (KeyError, TypeError, ValueError) as error:
            why = f"its message is not understood: {error!r}"
        self.lose(agent, why)

    def status(self) -> tuple[HostStatus, ...]:
        """What the hosts are and do; from any thread."""
        now_s = time.monotonic()
        with self._lock:
            agents = sorted(self._agents.values(), key=_order)
            working = {agent.number: list(agent.members.values()) for agent in agents}
        return tuple(
            HostStatus(
                name=agent.facts.name,
                cores=agent.facts.cores,
                memory_bytes=agent.facts.memory_bytes,
                load=agent.load,
                silent_s=round(now_s - agent.heard_s, 3),
                processes=len(working[agent.number]),
                does=tuple(
                    what for gang, rank in working[agent.number] if (what := gang.activity(rank))
                ),
            )
            for agent in agents
        )

    def _keep(self, key: str, data: object) -> None:
        """Keeps a program that was compiled elsewhere; what is damaged is compiled again."""
        if self._store is not None and isinstance(data, str):
            with contextlib.suppress(OSError, ValueError):
                self._store.take(key, base64.b64decode(data, validate=True))

    def _hear(self, agent: _Agent, message: Message) -> None:
        agent.load = float(message.get("load", agent.load))
        if "port" in message:
            if (asked := agent.ports.get(int(message["port"]))) is not None:
                asked.put(int(message["number"]))
        elif "program" in message:
            self._keep(str(message["program"]), message.get("data"))
        elif (member := agent.members.get(str(message.get("from")))) is not None:
            gang, rank = member
            if "ended" in message:
                with self._lock:
                    agent.members.pop(str(message["from"]), None)
                gang.end(rank, message)
            else:
                gang.deliver(rank, dict(message["message"]))


def _order(agent: _Agent) -> tuple[int, list[str | int], int]:
    """As their engine numbers the hosts, else by name, in which `host-10` follows `host-9`."""
    parts = re.split(r"(\d{1,18})", agent.facts.name)
    natural = [int(part) if number % 2 else part for number, part in enumerate(parts)]
    return agent.facts.order, natural, agent.number


def _until_closed(requests: Iterator[bytes]) -> Iterator[bytes]:
    """What arrives, until the stream ends: then gRPC raises a bare exception."""
    with contextlib.suppress(Exception):
        yield from requests


def _refusal(why: str) -> bytes:
    return dumps({"refused": why}).encode()


def _facts(seal: Seal, answer: Message) -> HostFacts:
    try:
        said = seal.open(bytes.fromhex(str(answer.get("facts", "")))) or {}
        return from_json(said["facts"], HostFacts)
    except (AutomeshError, KeyError, ValueError):
        raise ValueError("it does not say what its host is") from None
