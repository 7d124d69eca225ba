"""Finds the address of a caller: the connection's, or the one that a trusted proxy names."""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from router.http import Request

FORWARDED_FOR = b"x-forwarded-for"
_CACHED = 4096
_MAX_HOPS = 32
_MAX_HOP_LENGTH = 64  # an address with a port is shorter

_Address = IPv4Address | IPv6Address


class Addresses:
    """Finds the address of a caller behind trusted proxies.

    Any caller can write an `X-Forwarded-For` header, and each proxy appends the address that called it. The
    list is therefore read from its end, for as long as trusted proxies wrote it: the first address that is
    not a proxy's is the caller's.
    """

    def __init__(self, trusted: Sequence[str]) -> None:
        """Trust the proxies in the networks `trusted`, such as 10.0.0.0/8."""
        self._trusted = [ip_network(network) for network in trusted]
        self._parse = lru_cache(_CACHED)(_parse)

    def of(self, request: Request) -> str:
        """Return the address of the request's caller; an empty text if the connection has no address."""
        peer = request.peer[0] if request.peer is not None else ""
        if not self._trusted or not self._trusts(self._parse(peer)):
            return peer
        values = (value for name, value in request.headers.raw if name.lower() == FORWARDED_FOR)
        hops = b",".join(values).decode("latin-1").split(",")[-_MAX_HOPS:]
        caller = peer
        for hop in reversed(hops):
            # A zone, such as %eth0, can be any text; a hop with a zone is therefore no address.
            address = self._parse(hop) if len(hop) <= _MAX_HOP_LENGTH and "%" not in hop else None
            if address is None:
                break  # the last proxy named nobody, so the caller is that proxy
            caller = str(address)
            if not self._trusts(address):
                break
        return caller

    def _trusts(self, address: _Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _parse(text: str) -> _Address | None:
    """Parse an address, ignoring the port that some proxies append."""
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
