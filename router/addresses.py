"""Callers' addresses: that of the connection, or where a proxy that is trusted made it, the one it names.

Whoever calls may write any `X-Forwarded-For`; each proxy appends whom it was called by. So the list is read
from its end for as long as trusted proxies wrote it: the first address that is not theirs is the caller's.
"""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from router.http import Request

FORWARDED_FOR = b"x-forwarded-for"
_REMEMBERED = 4096
_MOST_HOPS = 32
_LONGEST = 64  # characters of a hop: an address and a port have fewer

Address = IPv4Address | IPv6Address


class Addresses:
    def __init__(self, trusted: Sequence[str]) -> None:
        """`trusted`: networks of proxies, as in 10.0.0.0/8."""
        self._trusted = [ip_network(one) for one in trusted]
        self._read = lru_cache(_REMEMBERED)(_parsed)

    def of(self, request: Request) -> str:
        peer = request.peer[0] if request.peer is not None else ""
        if not self._trusted or not self._trusts(self._read(peer)):
            return peer
        said = b",".join(value for name, value in request.headers.raw if name.lower() == FORWARDED_FOR)
        caller = peer
        for hop in reversed(said.decode("latin-1").split(",")[-_MOST_HOPS:]):
            address = self._read(hop) if len(hop) <= _LONGEST and "%" not in hop else None
            if address is None:
                break  # whoever wrote that names nobody (a zone as in %eth0 is any text): the one before it
            caller = str(address)
            if not self._trusts(address):
                break
        return caller

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _parsed(text: str) -> Address | None:
    """Without a port, which some proxies write too."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
