"""Asks a running search, with its token, which hosts it has and what they do."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from automesh.errors import AutomeshError, UsageError
from automesh.jsonio import dumps, from_json
from automesh.launch import wire
from automesh.launch.certificates import open_channel, wait_for
from automesh.launch.secret import BrokenSeal, Seal, is_proof, new_nonce, proof

_ANSWER_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """One host of a search, as the search sees its agent.

    Attributes:
      name: name of the host.
      cores, memory_bytes: what the agent may use; the memory that was free when it connected.
      load: load average of the last minute per core; -1 if unknown.
      silent_s: seconds since its last message.
      processes: number of processes that it runs for the search.
      does: what the busy processes are doing, in words.
    """

    name: str
    cores: int
    memory_bytes: int
    load: float
    silent_s: float
    processes: int
    does: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a search.

    Attributes:
      wanted: how many hosts the search needs.
      present: the hosts that are connected.
    """

    wanted: int
    present: tuple[HostStatus, ...]


def ask(
    search: str,
    token: str,
    *,
    trusted: bytes | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Hosts:
    """Asks a search which hosts it has.

    Args:
      search: `address:port` that its agents dial.
      trusted: as for an agent; see `automesh.launch.certificates`.
      say: shows a line while this function waits.

    Raises:
      UsageError: nothing answers there, its token differs, or no encrypted channel is possible.
    """
    wire.check_address(search, port_needed=True)
    with open_channel(search, trusted) as channel:
        if not wait_for(channel, search, trusted, wait_s=_ANSWER_S, say=say):
            raise UsageError(
                f"nothing answers at {search} for {_ANSWER_S:.0f} s",
                hint="is the search running, and does it listen at that address?",
            )
        said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        serve: Any = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
        answers = serve(_until_none(said), timeout=_ANSWER_S)
        try:
            return _conversation(answers, said, token, search)
        except (grpc.RpcError, BrokenSeal, AutomeshError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"the search at {search} does not say what its hosts do") from None
        finally:
            said.put(None)
            with contextlib.suppress(Exception):
                answers.cancel()


def _conversation(
    answers: Iterator[bytes], said: queue.SimpleQueue[bytes | None], token: str, search: str
) -> Hosts:
    mine = new_nonce()
    said.put(dumps({"hello": mine}).encode())
    answer = wire.plain(next(answers, b""))
    theirs = str(answer.get("nonce", ""))
    if not is_proof(answer.get("proof"), proof(token, "search", mine, theirs)):
        raise UsageError(
            f"the search at {search} has another token",
            hint="give both the same AUTOMESH_TOKEN or AUTOMESH_TOKEN_FILE",
        )
    said.put(dumps({"asks": proof(token, "guest", mine, theirs)}).encode())
    found = Seal(token, "search", mine, theirs).read(answers)
    present = from_json(found.get("hosts"), tuple[HostStatus, ...])
    return Hosts(wanted=from_json(found.get("wanted", len(present)), int), present=present)


def _until_none(said: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    while (message := said.get()) is not None:
        yield message
