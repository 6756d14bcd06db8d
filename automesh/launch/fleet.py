"""The search's side of its agents: the port that they dial, and the start of gangs on their hosts.

Threads of gRPC receive the messages of agents and hand each one to its gang; the gang makes all
decisions in the thread of the pool (`launch.gang`).
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
from automesh.launch.certificates import silenced_grpc, told_by
from automesh.launch.facts import (
    LOCAL_DEVICES,
    HostFacts,
    joined_address,
    own_versions,
    shares_of,
    version_difference,
)
from automesh.launch.gang import Gang
from automesh.launch.launcher import AgentOrder, Launcher
from automesh.launch.secret import BrokenSeal, Seal, is_proof, new_nonce, proof
from automesh.texts.terminal import clean
from automesh.worker.messages import Surroundings
from automesh.worker.place import GangPlace
from automesh.worker.wire import Message

_MOST_AGENTS = 1024
_HUNG_UP = "it closed the connection before it said who it is"
_MOST_TOLD = 20  # Refusals shown to the user: a port scanner may connect without end.
_PORT_S = 10.0  # An agent names a free port of its host within milliseconds.
_COME_BACK_S = 100.0  # How long restarted agents may take: less than the limit of a worker's start.
_STOP_S = 1.0
_POLL_S = 0.2


@dataclass(slots=True, kw_only=True, eq=False)
class _Agent:
    """A connected agent.

    Attributes:
      number: its number in the order in which agents connected.
      members: the gang and rank of each of its processes, by the process's name.
      close: closes its stream.
      ports: open questions for a free port, by number, each with a queue for the answer.
      load: load average of the last minute per core; -1 if unknown.
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

    It keeps messages until its host is known.
    """

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.name = name
        self._fleet = fleet
        self._agent: _Agent | None = None
        self._kept: list[Message] = []
        self._lock = threading.Lock()

    @property
    def host(self) -> str:
        return self._agent.facts.name if self._agent is not None else "a host that is not known yet"

    def place(self, agent: _Agent, start: Message) -> None:
        """Starts the process on a host; from any thread."""
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
    """Reports the outcome of a handshake to the user once, whichever thread learns of it first.

    Args:
      tell: is called with a message for the user, from any thread.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._unsettled = threading.Lock()

    def settle(self, text: str = "") -> None:
        """Sets the outcome.

        Args:
          text: why it failed; empty if the user need not know.
        """
        if self._unsettled.acquire(blocking=False) and text:
            self._tell(text)


class Fleet:
    """The agents of one search. Use it as a context manager.

    Args:
      token: see `launch.secret`.
      listen: address and port to bind; port 0 for any free port.
      hosts: number of agents that the search needs.
      processes: processes of a gang, spread over the hosts; 0 for one on each host.
      is_virtual: the devices are virtual, so that processes on one host need not share them.
      launcher: starts the agents; None if the user does.
      memory_limit_bytes: limit of one process; 0 for its share of its host's free memory.
      certificates: private key and certificate chain as PEM; None for no encryption.
      ca: file with the certificates that agents of the launcher trust.
      notice: is called with messages for the user, in the thread that calls `wait` or `start_gang`.
      store: receives programs that other hosts compiled.
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
        """Listens for agents and asks the launcher to start them.

        Raises:
          UsageError: the address cannot be bound, or the launcher cannot start them.
        """
        self._bind()
        threading.Thread(target=self._watch, daemon=True).start()
        if self._launcher is not None:
            try:
                order = AgentOrder(
                    search=self.address, token=self._token, hosts=self.hosts, ca=self._ca
                )
                self._launcher.start(order)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def facts(self) -> tuple[HostFacts, ...]:
        """The facts of the connected hosts, in the order in which they connected."""
        return tuple(agent.facts for agent in self._present())

    def wait(self, limit_s: float, tick: Callable[[], object] = lambda: None) -> None:
        """Waits until all hosts are connected.

        Args:
          tick: called several times a second.

        Raises:
          UsageError: some have not connected in time, or two hosts differ.
        """
        deadline = time.monotonic() + limit_s
        while len(self._present()) < self.hosts:
            tick()
            self._tell()
            trouble = self._launcher.trouble() if self._launcher is not None else ""
            if trouble or time.monotonic() > deadline:
                raise UsageError(self._too_few(limit_s, trouble), hint=self._how_to_connect())
            time.sleep(_POLL_S)
        self._tell()
        for facts in self.facts:
            self._check_devices(facts)

    def _check_devices(self, facts: HostFacts) -> None:
        """Checks that the devices of a host can be shared among its processes.

        Raises:
          UsageError: they cannot.
        """
        each = self.processes // self.hosts
        if self._is_virtual or each == 1 or facts.platforms == "cpu":
            return
        try:
            shares_of(facts.devices, each)
        except ValueError as error:
            platform = facts.platforms.partition(",")[0]
            raise UsageError(
                f"{facts.name} cannot have {each} processes: on `{platform}`, {error}",
                hint="give a divisor of its number of GPUs with --processes-per-host; a host with "
                "TPUs has one process",
            ) from None

    def start_gang(
        self, *, surroundings: Surroundings, log: Path, memory_limit_bytes: int, handler: str
    ) -> Gang:
        """Starts a gang on the hosts; see `automesh.worker.process.StartWorker`.

        Args:
          memory_limit_bytes: not used: it is the free memory of the search's own host.

        """
        del memory_limit_bytes
        self._tell()
        gang = Gang(log)
        members = [_Process(self, f"process-{next(self._names)}") for _ in range(self.processes)]
        gang.set_members(members)
        order = {"handler": handler, "memory_bytes": self._memory_limit_bytes}
        # In a thread: agents may have to reconnect first, and the pool must not wait for that.
        threading.Thread(
            target=self._place, args=(gang, members, surroundings, order), daemon=True
        ).start()
        return gang

    def _place(
        self, gang: Gang, members: Sequence[_Process], around: Surroundings, order: Message
    ) -> None:
        """Starts the processes of a gang once all hosts are connected; runs in a thread of its
        own."""
        try:
            agents = self._agents_for_gang()
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
            place = GangPlace(
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
                    "surroundings": self._surroundings_on(around, agent, local),
                    "place": to_json(place, GangPlace),
                    "share": share,
                    **order,
                },
            )

    def _start(
        self, agent: _Agent, gang: Gang, member: _Process, rank: int, order: Message
    ) -> None:
        """Asks an agent to start a process of a gang."""
        with self._lock:
            agent.members[member.name] = (gang, rank)
        member.place(agent, {"start": member.name, **order})
        if agent.is_lost:  # It may have been lost before the gang was known to it.
            gang.end(rank, {"ended": "its agent was lost"})

    def _surroundings_on(self, around: Surroundings, agent: _Agent, local: int = 0) -> Message:
        """Adapts the surroundings of a process to a host.

        Args:
          local: the number of the process among those of its gang on this host.
        """
        facts, each = agent.facts, self.processes // self.hosts
        # Each host names its own platform for `local`: the search's host may have no devices.
        if around.cpu_devices <= 0:
            around = replace(around, platforms=facts.platforms)
            if each > 1 and facts.devices:
                own = ",".join(map(str, shares_of(facts.devices, each)[local]))
                variables = {**dict(around.variables), LOCAL_DEVICES: own}
                around = replace(around, variables=tuple(sorted(variables.items())))
        return to_json(around, Surroundings)

    # Single processes, which are no gang; see `automesh.launch.lending`.

    @property
    def present(self) -> tuple[tuple[int, HostFacts], ...]:
        """The connected hosts, with the numbers of their agents."""
        return tuple((agent.number, agent.facts) for agent in self._present())

    def start_process(
        self, number: int, gang: Gang, around: Surroundings, handler: str, *, share: int
    ) -> None:
        """Starts a single process on the host of an agent.

        Args:
          gang: the gang whose only process it is.
          share: how many such processes share the host's memory.

        Raises:
          OSError: the agent was lost.
        """
        with self._lock:
            agent = self._agents.get(number)
        if agent is None:
            raise OSError("its host was lost")
        member = _Process(self, f"process-{next(self._names)}")
        gang.set_members([member])
        order: Message = {
            "surroundings": self._surroundings_on(around, agent),
            "place": None,
            "share": share,
            "handler": handler,
            "memory_bytes": self._memory_limit_bytes,
        }
        self._start(agent, gang, member, 0, order)

    def restart_lost(self) -> None:
        """Restarts lost agents, if the launcher can."""
        self._tell()
        if len(self._present()) < self.hosts and self._launcher is not None:
            self._launcher.refill()

    def lose(self, agent: _Agent, why: str, *, hangs: bool = False) -> None:
        """Gives up an agent and all its processes; from any thread.

        Args:
          hangs: the agent may never end by itself, so the launcher ends it if it can.
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
        """Tells all agents to end their processes and themselves, and stops listening."""
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

    # Connected agents

    def _present(self) -> list[_Agent]:
        with self._lock:
            return sorted(self._agents.values(), key=lambda one: one.number)

    def _agents_for_gang(self) -> list[_Agent]:
        """Returns the agents for a gang, in an order that does not change while they are
        connected."""
        if len(self._present()) < self.hosts and self._launcher is not None:
            deadline = time.monotonic() + _COME_BACK_S
            # Asked repeatedly: an agent that was lost a moment ago may not have ended yet.
            while self._launcher.refill() and len(self._present()) < self.hosts:
                if self._closing.wait(_POLL_S) or time.monotonic() > deadline:
                    break
        agents = self._present()
        if len(agents) < self.hosts:
            said = "; ".join(self._losses[-self.hosts :])
            raise OSError(f"{len(agents)} of {self.hosts} hosts are left ({said})")
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
            f"{len(self.facts)} of {self.hosts} agents have connected ({names})"
            if names
            else (f"none of {self.hosts} agents has connected")
        )
        return f"{there}: {trouble}" if trouble else f"{there} within {limit_s:.0f} s"

    def _how_to_connect(self) -> str:
        if self._launcher is not None:
            return "look at the launcher's output, and check that the hosts reach " + self.address
        return f"run `{self.agent_words}` on each host, with the same token"

    @property
    def agent_words(self) -> str:
        """The command by which people start an agent by hand."""
        words = f"automesh agent {self.address}"
        if self._certificates is None:
            return words
        return f"{words} --ca {shlex.quote(self._ca) if self._ca else 'FILE'}"

    def _tell(self) -> None:
        while not self._said.empty():
            self._notice(self._said.get())

    def _refuse(self, text: str) -> None:
        """Notes a refused connection for the user; from any thread."""
        number = next(self._refusals)
        if number <= _MOST_TOLD:
            self._said.put(text)
        if number == _MOST_TOLD:
            self._said.put(f"{number} connections were refused; further ones are not shown")

    def _watch(self) -> None:
        """Gives up agents that are silent; runs in a thread of its own."""
        while not self._closing.wait(1.0):
            now_s = time.monotonic()
            for agent in self._present():
                if now_s - agent.heard_s > wire.LOST_S:
                    self.lose(agent, f"silent for {wire.LOST_S:.0f} s", hangs=True)

    # The server

    def _bind(self) -> None:
        host, port = self._listen
        self._threads = futures.ThreadPoolExecutor(_MOST_AGENTS, thread_name_prefix="fleet")
        with silenced_grpc():
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
        """Serves one agent from its handshake to its end, in a thread of gRPC."""
        timer = threading.Timer(wire.HANDSHAKE_S, context.cancel)
        timer.daemon = True
        timer.start()
        peer = clean(str(context.peer())).removeprefix("ipv4:")
        mine, theirs = new_nonce(), ""
        handshake = _Handshake(lambda text: self._closing.is_set() or self._refuse(text))
        # Only this callback notices a client that closes the connection between two answers.
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
        """Adds an agent to those of this search; returns the reason if it is refused."""
        if other := version_difference(dict(own_versions()), dict(facts.versions)):
            return f"it has {other}"
        with self._lock:  # Two may connect at the same time.
            if len(self._agents) >= self.hosts:
                return f"the {self.hosts} hosts of this search are connected already"
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
        """Receives the messages of an agent, in a thread of its own."""
        why = "its connection was closed"
        try:
            for data in _until_closed(requests):
                agent.heard_s = time.monotonic()
                if (message := seal.open(data)) is not None:
                    self._handle(agent, message)
        except BrokenSeal as error:
            why = str(error)
        except (KeyError, TypeError, ValueError) as error:
            why = f"its message is not understood: {error!r}"
        self.lose(agent, why)

    def status(self) -> tuple[HostStatus, ...]:
        """Returns the hosts and what they do; from any thread."""
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
        """Stores a program that another host compiled; drops a damaged one, which is then compiled
        again."""
        if self._store is not None and isinstance(data, str):
            with contextlib.suppress(OSError, ValueError):
                self._store.take(key, base64.b64decode(data, validate=True))

    def _handle(self, agent: _Agent, message: Message) -> None:
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
    """Returns a sort key: the engine's order of the hosts, else their names, where `host-10`
    follows `host-9`."""
    parts = re.split(r"(\d{1,18})", agent.facts.name)
    natural = [int(part) if number % 2 else part for number, part in enumerate(parts)]
    return agent.facts.order, natural, agent.number


def _until_closed(requests: Iterator[bytes]) -> Iterator[bytes]:
    """Yields messages until the stream ends, which gRPC signals by a bare exception."""
    with contextlib.suppress(Exception):
        yield from requests


def _refusal(why: str) -> bytes:
    return dumps({"refused": why}).encode()


def _facts(seal: Seal, answer: Message) -> HostFacts:
    try:
        said = seal.open(bytes.fromhex(str(answer.get("facts", "")))) or {}
        return from_json(said["facts"], HostFacts)
    except (AutomeshError, KeyError, ValueError):
        raise ValueError("it did not describe its host") from None
