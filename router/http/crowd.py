"""Connections that ask for nothing, by address: which of them gives way when there are as many as may be.

An open connection costs a client nothing, so that one address could hold all of a server's, with or without
bytes of a head. It keeps them while there is place. Then a new one is accepted all the same, and the address
with most of them loses the one that has asked for nothing longest: nobody who holds few is kept out by
somebody who holds many. Of a load balancer's these are kept-alive ones, which may end at any time.
"""

from typing import Any, Protocol


class Idle(Protocol):
    """A connection without a request under way, or the handshake before one."""

    def give_way(self) -> None:
        """End now."""


class Crowd:
    def __init__(self) -> None:
        self._of: dict[str, dict[Idle, None]] = {}  # by address, longest idle first

    def add(self, address: str, one: Idle) -> None:
        self._of.setdefault(address, {})[one] = None

    def discard(self, address: str, one: Idle) -> None:
        """It has a request now, or has ended."""
        there = self._of.get(address, {})
        there.pop(one, None)
        if not there:
            self._of.pop(address, None)

    def make_way(self) -> bool:
        """One of them ends; False where all have requests under way."""
        if not self._of:
            return False
        address, most = max(self._of.items(), key=lambda of: len(of[1]))
        one = next(iter(most))
        self.discard(address, one)
        one.give_way()
        return True


def address_of(peer: Any) -> str:
    """Of a transport's `peername`; empty for what has none."""
    return str(peer[0]) if isinstance(peer, tuple) else ""
