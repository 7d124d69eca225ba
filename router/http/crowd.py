"""Connections that ask for nothing, by address: which of them gives way when there are as many as may be.

An open connection costs a client nothing, so that one address could hold all of a server's, with or without
bytes of a head. It keeps them while there is place. Then a new one is accepted all the same, and the address
with most of them loses the one that has asked for nothing longest: nobody who holds few is kept out by
somebody who holds many. Of a load balancer's these are kept-alive ones, which may end at any time.
"""

from ipaddress import IPv6Address, ip_network
from itertools import islice
from typing import Any, Protocol

_LOOKED_AT = 64  # of an address's, for one whose answer has gone out


class Idle(Protocol):
    """A connection without a request under way, or the handshake before one."""

    @property
    def sending(self) -> bool:
        """The end of its last answer is still on its way."""

    def give_way(self) -> None:
        """End now."""


class Crowd:
    def __init__(self) -> None:
        self._of: dict[str, dict[Idle, None]] = {}  # by address, longest idle first
        self._holding: dict[
            int, dict[str, None]
        ] = {}  # addresses by how many they have; unchanged longest first

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def add(self, address: str, one: Idle) -> None:
        there = self._of.setdefault(address, {})
        before = len(there)
        there[one] = None
        self._moved(address, before, len(there))

    def discard(self, address: str, one: Idle) -> None:
        """It has a request now, or has ended."""
        there = self._of.get(address, {})
        before = len(there)
        there.pop(one, None)
        self._moved(address, before, len(there))
        if not there:
            self._of.pop(address, None)

    def make_way(self) -> bool:
        """One of them ends; False where all have requests under way."""
        if not self._of:
            return False
        address = next(iter(self._holding[max(self._holding)]))
        there = self._of[address]
        oldest = islice(there, _LOOKED_AT)
        one = next((idle for idle in oldest if not idle.sending), next(iter(there)))
        self.discard(address, one)
        one.give_way()
        return True

    def _moved(self, address: str, before: int, after: int) -> None:
        if before == after:
            return
        if before:
            self._holding[before].pop(address, None)
            if not self._holding[before]:
                del self._holding[before]
        if after:
            self._holding.setdefault(after, {})[address] = None


def address_of(peer: Any) -> str:
    """Of a transport's `peername`; of IPv6 its network, of which a host has all. Empty for what has none."""
    host = str(peer[0]) if isinstance(peer, tuple) else ""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ip_network((address, 64), strict=False))
