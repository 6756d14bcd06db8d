"""The agent of a host: starts processes for a search on another host and passes on their messages.

The agent decides nothing. It dials the search, so that only one port has to be open in a cluster.
It ends, with all processes that it started, when the search ends, is lost, or tells it to.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil

from automesh.errors import UsageError
from automesh.hlo.store import default_store
from automesh.jsonio import dumps, from_json, to_json
from automesh.launch import wire
from automesh.launch.certificates import open_channel, read_trusted, wait_for
from automesh.launch.facts import HostFacts, own_facts
from automesh.launch.secret import BrokenSeal, Seal, is_proof, new_nonce, proof, read_token
from automesh.reading import Unreadable, read_bytes
from automesh.texts.terminal import clean
from automesh.worker.executables import executables_here
from automesh.worker.messages import Surroundings
from automesh.worker.place import PLACE, GangPlace
from automesh.worker.process import Ending, Process
from automesh.worker.protocol import NO_CHANNEL
from automesh.worker.temporary import temporary_folder
from automesh.worker.wire import Message, WireError

_TICK_S = 1.0
_MEMORY_SHARE = 0.9
_LEAST_MEMORY_BYTES = 2**28
_STOPPED_S = 8.0  # A stopped process blocks all others; after this time it is killed.
_SEVERED_S = 10.0  # A process that closed its channel must have ended by then.
_END_S = 3.0
_LOG_BYTES = 8 * 2**20
_MOST_PROGRAM_BYTES = 48 * 2**20  # As text a third longer; a message may have 80 MiB.
_GREETING_S = 2 * wire.HANDSHAKE_S  # The search gives up earlier, with a better message.

_First = queue.SimpleQueue[bytes | Seal | None]
"""The first, unsealed messages of an agent; then the seal for all later ones, or None if none
follow."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    """A process that the agent has started.

    Attributes:
      name: the search's name for it.
      sends_programs: whether programs that it compiles and stores here are sent to the search.
      stopped_since_s: when the agent first saw it stopped; None while it runs.
      severed_at_s: when its channel ended, so that it can answer no more; None before.
      was_stopped: True if it was stopped by a signal when it was killed.
      reason: why this agent ended it without an order; empty if it did not.
    """

    name: str
    process: Process
    limit_bytes: int
    sends_programs: bool = False
    stopped_since_s: float | None = None
    severed_at_s: float | None = None
    is_killed: bool = False
    was_stopped: bool = False
    reason: str = ""


class HostAgent:
    """An agent that serves one search.

    Args:
      search: `address:port` of the search.
      token: see `launch.secret`.
      name: name of this host, shown to people; empty for the host's own name.
      wait_s: how long to try to reach the search.
      trusted: PEM certificates that the agent trusts; None for a channel without encryption.
      say: is called with a sentence for each event.
    """

    def __init__(
        self,
        *,
        search: str,
        token: str,
        name: str = "",
        wait_s: float = 60.0,
        trusted: bytes | None = None,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        wire.check_address(search, port_needed=True)
        self._search = search
        self._token = token
        self._name = name
        self._wait_s = wait_s
        self._trusted = trusted
        self._say = say
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)
        self._bell.setblocking(False)
        self._children: dict[str, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._heard_s = time.monotonic()
        self._logs = Path()
        self._number = 0
        self._is_beside = False  # True if the agent runs on the machine of the search.

    def serve(self) -> None:
        """Serves the search until it ends.

        Raises:
          UsageError: nothing answers there, one side refuses the other, or the search was lost.
        """
        try:
            with (
                temporary_folder("agent") as self._logs,
                open_channel(self._search, self._trusted) as channel,
            ):
                call = self._connect(channel)
                try:
                    self._loop()
                finally:
                    self._end_all()
                    self._outbox.put(None)
                    call.cancel()
        finally:
            self._selector.close()
            self._bell.close()
            self._button.close()

    def _connect(self, channel: Any) -> Any:
        is_there = wait_for(
            channel, self._search, self._trusted, wait_s=self._wait_s, say=self._say
        )
        if not is_there:
            raise UsageError(
                f"nothing answers at {self._search} that this agent can speak to, for "
                f"{self._wait_s:.0f} s",
                hint="is the search running, does it listen at that address, and does a firewall "
                "let the port through?",
            )
        facts = own_facts(name=self._name, search=self._search)
        mine = new_nonce()
        serve = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
        first: _First = queue.SimpleQueue()
        first.put(dumps({"hello": mine}).encode())
        call = serve(self._outgoing(first))
        is_late = threading.Event()
        timer = threading.Timer(_GREETING_S, lambda: (is_late.set(), call.cancel()))
        timer.daemon = True
        timer.start()
        own = None
        try:
            own, theirs = self._shake_hands(call, mine, facts, first)
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            why = (
                f"has not greeted this agent within {_GREETING_S:.0f} s"
                if is_late.is_set()
                else f"broke off: {_said(error)}"
            )
            raise UsageError(f"the search at {self._search} {why}") from None
        finally:
            timer.cancel()
            first.put(own)
            if own is None:
                call.cancel()
        threading.Thread(target=self._listen, args=(call, theirs), daemon=True).start()
        return call

    def _shake_hands(
        self,
        call: Any,
        mine: str,
        facts: HostFacts,
        first: _First,
    ) -> tuple[Seal, Seal]:
        """Exchanges proofs of the token; returns the seals of both sides, the agent's own first."""
        answer = self._first_of(call)
        nonce = str(answer.get("nonce", ""))
        if not is_proof(answer.get("proof"), proof(self._token, "search", mine, nonce)):
            first.put(dumps({"other_token": True}).encode())
            with contextlib.suppress(grpc.RpcError):
                next(call, b"")  # Waits until the search has read that and closes the stream.
            raise UsageError(
                f"the search at {self._search} has another token than this agent",
                hint="give both the same AUTOMESH_TOKEN or AUTOMESH_TOKEN_FILE",
            )
        own = Seal(self._token, "agent", mine, nonce)
        seal = Seal(self._token, "search", mine, nonce)
        body = b"".join(own.close({"facts": to_json(facts, HostFacts)})).hex()
        mine_proof = proof(self._token, "agent", mine, nonce)
        first.put(dumps({"proof": mine_proof, "facts": body}).encode())
        data = next(call, b"")
        if why := wire.plain(data).get("refused"):
            raise UsageError(f"the search at {self._search} refuses this agent: {why}")
        welcome = self._opened(seal, data)
        if welcome is None or "welcome" not in welcome:
            raise UsageError(f"the search at {self._search} refuses this agent")
        self._is_beside = welcome.get("machine") == facts.machine
        self._say(f"agent {facts.name} serves the search at {self._search}")
        return own, seal

    def _first_of(self, call: Any) -> Message:
        answer = wire.plain(next(call, b""))
        if why := answer.get("refused"):
            raise UsageError(f"the search at {self._search} refuses this agent: {clean(str(why))}")
        return answer

    def _opened(self, seal: Seal, data: bytes) -> Message | None:
        try:
            return seal.open(data)
        except BrokenSeal as error:
            raise UsageError(f"the search at {self._search} cannot be trusted: {error}") from None

    def _outgoing(self, first: _First) -> Iterator[bytes]:
        while isinstance(seal := first.get(), bytes):
            yield seal
        while seal is not None:
            try:
                message = self._outbox.get(timeout=wire.BEAT_S)
            except queue.Empty:
                message = {"beat": True, "load": _load()}
            if message is None:
                return
            yield from seal.close(message)

    def _listen(self, call: Any, seal: Seal) -> None:
        """Receives the search's messages, in a thread of its own, and wakes the loop."""
        try:
            for data in call:
                self._heard_s = time.monotonic()
                if (message := seal.open(data)) is not None:
                    self._inbox.put(message)
                    self._wake_loop()
        except (grpc.RpcError, BrokenSeal):
            pass
        self._inbox.put(None)
        self._wake_loop()

    def _wake_loop(self) -> None:
        with contextlib.suppress(OSError):
            self._button.send(b"!")

    # The loop: children and orders.

    def _loop(self) -> None:
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        looked_s = time.monotonic()
        while True:
            for key, events in self._selector.select(_TICK_S):
                data: Any = key.data
                if data is None:
                    with contextlib.suppress(OSError):
                        self._bell.recv(4096)
                else:
                    child, part = data
                    self._attend(child, part, events)
            while not self._inbox.empty():
                message = self._inbox.get()
                if message is None:
                    raise UsageError(
                        f"the search at {self._search} was lost",
                        hint="run the search again: it goes on where it stopped",
                    )
                if "bye" in message:
                    return
                self._obey(message)
            now_s = time.monotonic()
            if now_s - self._heard_s > wire.LOST_S:
                raise UsageError(
                    f"the search at {self._search} has been silent for {wire.LOST_S:.0f} s"
                )
            if now_s - looked_s >= _TICK_S:
                looked_s = now_s
                self._end_stopped(now_s)
                self._end_severed(now_s)

    def _obey(self, message: Message) -> None:
        if "port" in message:
            self._outbox.put({"port": message["port"], "number": _free_port()})
        elif "start" in message:
            self._start(message)
        elif (child := self._children.get(str(message.get("to")))) is None:
            return
        elif "send" in message:
            child.process.channel.send(self._with_own_folders(message["send"], child))
            self._watch(child)
        elif "kill" in message:
            self._kill(child, force=bool(message["kill"]))

    def _start(self, message: Message) -> None:
        name = str(message["start"])
        around = from_json(message["surroundings"], Surroundings)
        if message["place"] is not None:  # It is part of a gang.
            variables = dict(around.variables) | {
                PLACE: from_json(message["place"], GangPlace).text
            }
            around = replace(around, variables=tuple(sorted(variables.items())))
        limit = self._limit_bytes(int(message["memory_bytes"]), int(message["share"]))
        self._number += 1
        try:
            process = Process(
                surroundings=around,
                log=self._logs / f"worker-{self._number:04}.log",
                memory_limit_bytes=limit,
                handler=str(message["handler"]),
            )
        except OSError as error:
            reason = f"its process could not be started: {error}"
            self._outbox.put({"from": name, "ended": reason})
            return
        child = self._children[name] = _Child(name=name, process=process, limit_bytes=limit)
        self._selector.register(process.leash, selectors.EVENT_READ, (child, "leash"))
        self._watch(child)

    @staticmethod
    def _limit_bytes(wanted: int, share: int) -> int:
        """Returns the memory limit of a process if `share` of them run on this machine."""
        free = int(_MEMORY_SHARE * psutil.virtual_memory().available / max(share, 1))
        return wanted or max(free, _LEAST_MEMORY_BYTES)

    def _with_own_folders(self, message: Message, child: _Child) -> Message:
        """Adapts an order to this host: compiled programs are kept in folders of this host."""
        job = message.get("job")
        if not isinstance(job, dict):
            return message
        own: Message = {}
        if job.get("cache_dir"):
            here = executables_here(str(job["cache_dir"]), os.environ)
            own["cache_dir"] = str(here or self._logs / "executables")
        if job.get("store_dir"):
            own["store_dir"] = str(default_store(os.environ).folder)
            # On another machine an equal path need not be the same folder.
            is_shared = own["store_dir"] == job["store_dir"] and self._is_beside
            child.sends_programs = not is_shared
        return {**message, "job": {**job, **own}} if own else message

    def _send_programs(self, child: _Child, answer: Message) -> None:
        """Sends the stored programs that an answer names, before the answer itself."""
        store = default_store(os.environ)
        for key in stored_in(answer):
            data = store.packed(key)
            if data is not None and len(data) <= _MOST_PROGRAM_BYTES:
                packed = base64.b64encode(data).decode()
                self._outbox.put({"from": child.name, "program": key, "data": packed})

    def _watch(self, child: _Child) -> None:
        channel = child.process.channel
        if channel.ended:  # A closed channel would be readable for ever.
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        if channel in self._selector.get_map():
            self._selector.modify(channel, events, (child, "channel"))
        else:
            self._selector.register(channel, events, (child, "channel"))

    def _attend(self, child: _Child, part: str, events: int) -> None:
        if child.name not in self._children:  # Its end was handled in this same round.
            return
        if part == "leash":
            if child.process.has_ended():
                self._pass_on(child)
                self._report_ending(child)
            return
        if events & selectors.EVENT_WRITE:
            child.process.channel.flush()
            self._watch(child)
        if events & selectors.EVENT_READ:
            self._pass_on(child)

    def _pass_on(self, child: _Child) -> None:
        channel = child.process.channel
        if channel.ended:
            return
        try:
            messages = channel.receive()
        except WireError as error:
            child.reason = f"the worker's message cannot be read: {error}"
            self._kill(child, force=False)
            channel.ended, messages = True, list[Message]()
        for message in messages:
            if "failure" in message:
                message["tail"] = child.process.log_tail(str(message.pop("last_line", "")))
            elif child.sends_programs and "answer" in message:
                self._send_programs(child, message["answer"])
            self._outbox.put({"from": child.name, "message": message})
        if channel.ended:
            child.severed_at_s = time.monotonic()
            if channel in self._selector.get_map():
                self._selector.unregister(channel)

    def _report_ending(self, child: _Child) -> None:
        del self._children[child.name]
        for end in (child.process.leash, child.process.channel):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        ending = child.process.collect_ending()
        said: Message = {
            "from": child.name,
            "ended": child.reason or to_json(ending, Ending),
            "limit_bytes": child.limit_bytes,
            "stopped": child.was_stopped,
            "tail": child.process.log_tail(),
            "log": _text_of(child.process.log),
        }
        self._outbox.put(said)
        child.process.log.unlink(missing_ok=True)

    def _kill(self, child: _Child, *, force: bool) -> None:
        if not child.is_killed:
            child.was_stopped = _is_stopped(child.process)
        child.is_killed = True
        if force:
            child.process.kill_deputy()
        else:
            child.process.kill()

    def _end_stopped(self, now_s: float) -> None:
        """Ends processes that a signal has stopped: a gang would wait for them for ever."""
        for child in list(self._children.values()):
            if child.is_killed or not _is_stopped(child.process):
                child.stopped_since_s = None
            elif child.stopped_since_s is None:
                child.stopped_since_s = now_s
            elif now_s - child.stopped_since_s > _STOPPED_S:
                child.reason = f"its process was stopped by a signal for {_STOPPED_S:.0f} s"
                self._kill(child, force=False)

    def _end_severed(self, now_s: float) -> None:
        """Ends processes that closed their channel but still run: the search would wait for
        them."""
        for child in list(self._children.values()):
            since_s = child.severed_at_s
            if since_s is not None and not child.is_killed and now_s - since_s > _SEVERED_S:
                child.reason = NO_CHANNEL
                self._kill(child, force=False)

    def _end_all(self) -> None:
        for child in self._children.values():
            child.process.kill()
        deadline = time.monotonic() + _END_S
        while self._children and time.monotonic() < deadline:
            for child in list(self._children.values()):
                if child.process.has_ended():
                    self._report_ending(child)
            time.sleep(0.02)
        for child in self._children.values():
            child.process.kill_deputy()


def stored_in(answer: Any) -> list[str]:
    """Returns the keys of all stored programs that an answer names, each once."""
    found: dict[str, None] = {}
    waiting = [answer]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(key := one.get("stored"), str) and key:
                found[key] = None
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return list(found)


def serve_search(search: str, *, name: str = "", wait_s: float, ca: str = "") -> None:
    """Runs an agent as a program, with the token from its environment, until the search ends.

    Args:
      ca: file with the certificates that the agent trusts; empty for no encryption.

    Raises:
      UsageError: as `HostAgent.serve`, there is no token, or the file cannot be used.
    """
    trusted = read_trusted(ca) if ca else None
    HostAgent(
        search=search,
        token=read_token(os.environ),
        trusted=trusted,
        name=name,
        wait_s=wait_s,
        say=lambda text: sys.stderr.write(f"{text}\n"),
    ).serve()


def _load() -> float:
    """Returns the load average of the last minute per core of this machine."""
    return round(psutil.getloadavg()[0] / (psutil.cpu_count() or 1), 2)


def _free_port() -> int:
    """Returns a port that is free now; jax binds it a moment later."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _is_stopped(process: Process) -> bool:
    """Whether a worker or its guardian is stopped by a signal."""
    try:
        for one in psutil.Process(process.deputy_pid).children(recursive=True)[:2]:
            if one.status() == psutil.STATUS_STOPPED:
                return True
    except psutil.Error:
        return False
    return False


def _text_of(log: Path) -> str:
    try:
        return read_bytes(log, limit_bytes=_LOG_BYTES).decode(errors="replace")
    except Unreadable as error:
        return f"(the log cannot be read: {error.message})"


def _said(error: Any) -> str:
    return clean(str(error.details() if hasattr(error, "details") else error))
