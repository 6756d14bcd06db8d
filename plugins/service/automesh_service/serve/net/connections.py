"""The open connections, and the choice of one to close when there are too many.

Each connection needs a descriptor, and a process has a bounded number of them. So there is a bound
for all connections, and one for the connections of one address. At a bound the new connection is
accepted, and another one is closed: the oldest stranger of the address that has the most strangers.
A stranger is a connection that has not sent a valid token. The head of a normal request arrives
within milliseconds, so the request is answered while thousands of half-sent ones replace each
other.
"""

from __future__ import annotations

import ipaddress
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Client = tuple[str, int]
"""Address and port of a client."""
_OF_ONE = 4
"""One address may have this fraction (1/4) of all connections: an office may be behind it."""
_LOOKED_AT = 32
"""Number of the oldest strangers among which one without an active request is searched."""
_IPV6_BITS = 64
"""Leading bits of an IPv6 address that identify a network: a client there has 2^64 addresses."""


@dataclass(slots=True, kw_only=True, eq=False)
class OpenConnection:
    """A connection that is open.

    Attributes:
      place: the client's address, or its network.
      close: closes the connection at once; only the thread of the event loop calls it.
      is_begun: whether the protocol has taken it over: its TLS handshake, if there is one, is
        complete.
      is_known: whether it has sent a valid token.
      is_at_work: whether a request is being answered.
    """

    number: int
    client: Client
    place: str
    close: Callable[[], None]
    is_begun: bool = False
    is_known: bool = False
    is_at_work: bool = False


@dataclass(slots=True, kw_only=True)
class _Place:
    """The connections of one address, in the order in which they were opened."""

    strangers: dict[int, OpenConnection] = field(default_factory=dict[int, OpenConnection])
    known: dict[int, OpenConnection] = field(default_factory=dict[int, OpenConnection])

    def __len__(self) -> int:
        return len(self.strangers) + len(self.known)


class Connections:
    """The connections of a service. Only the thread of the event loop uses them, except `know`.

    Args:
      most: how many connections may be open.
      proxies: addresses that many users share, which have no bound of their own; this machine's own
        addresses have none either.
    """

    def __init__(self, *, most: int, proxies: Iterable[str] = ()) -> None:
        self.most = most
        self.most_of_one = max(1, most // _OF_ONE)
        self.closed = 0
        self._proxies = frozenset(place_of(one) for one in proxies)
        self._places: dict[str, _Place] = {}
        self._by_client: dict[Client, OpenConnection] = {}
        self._numbers = itertools.count()
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def enter(self, client: Client, close: Callable[[], None]) -> OpenConnection | None:
        """Counts a new connection, and closes another one if there are too many.

        Returns:
          None if no other one can be closed: then the caller must close the new one.
        """
        place = place_of(client[0])
        held = OpenConnection(number=next(self._numbers), client=client, place=place, close=close)
        with self._lock:
            there = self._places.setdefault(place, _Place())
            there.strangers[held.number] = held
            self._by_client[client] = held
            self._count += 1
            victim = self._victim(held)
            if victim is not None:
                self._remove(victim)
                self.closed += 1
        if victim is None:
            return held
        if victim is held:
            return None
        victim.close()
        return held

    def leave(self, held: OpenConnection) -> None:
        """Stops counting a connection; does nothing if it was closed to make room for another
        one."""
        with self._lock:
            self._remove(held)

    def of(self, client: Client | None) -> OpenConnection | None:
        """Returns the connection of a client, if it is still counted."""
        return None if client is None else self._by_client.get(client)

    def know(self, client: Client | None) -> None:
        """Notes that a connection has sent a valid token; any thread may call it."""
        with self._lock:
            held = self.of(client)
            if held is None or held.is_known:
                return
            there = self._places[held.place]
            held.is_known = True
            there.known[held.number] = there.strangers.pop(held.number)

    def _victim(self, newcomer: OpenConnection) -> OpenConnection | None:
        """Returns the connection that is closed for a new one; None if there is room."""
        place = newcomer.place
        there = self._places[place]
        is_bounded = place not in self._proxies and not _is_this_machine(place)
        if is_bounded and len(there) > self.most_of_one:
            return _oldest(there, newcomer)
        if self._count <= self.most:
            return None
        most = max(self._places.values(), key=lambda one: len(one.strangers))
        if len(most.strangers) > 1:
            return _oldest(most, newcomer)
        known = (one for there in self._places.values() for one in there.known.values())
        resting = (one for one in known if not one.is_at_work)
        return min(resting, key=lambda one: one.number, default=newcomer)

    def _remove(self, held: OpenConnection) -> None:
        there = self._places.get(held.place)
        if there is None:
            return
        found = there.strangers.pop(held.number, None) or there.known.pop(held.number, None)
        if found is None:
            return
        self._count -= 1
        if not len(there):
            del self._places[held.place]
        if self._by_client.get(held.client) is held:
            del self._by_client[held.client]


def _oldest(there: _Place, newcomer: OpenConnection) -> OpenConnection:
    """Returns the connection of an address that is closed first: a stranger, if possible one
    without an active request; else a known connection without one; else the new one."""
    waiting = itertools.islice(there.strangers.values(), _LOOKED_AT)
    strangers = [one for one in waiting if one is not newcomer]
    resting = (one for one in there.known.values() if not one.is_at_work)
    return next(
        (one for one in strangers if not one.is_at_work),
        strangers[0] if strangers else next(resting, newcomer),
    )


def place_of(address: str) -> str:
    """Returns the address under which a connection is counted; for IPv6, the network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    if found.is_loopback:
        return str(found)
    return str(ipaddress.ip_network((found, _IPV6_BITS), strict=False).network_address)


def _is_this_machine(place: str) -> bool:
    try:
        return ipaddress.ip_address(place).is_loopback
    except ValueError:
        return False
