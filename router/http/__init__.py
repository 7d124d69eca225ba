"""The gateway's HTTP: a server, connections to engines, and the relay between them (see README.md)."""

from router.http.limits import ServerLimits, UpstreamLimits, descriptors_problem, reserve_descriptors
from router.http.pool import UpstreamPool
from router.http.relay import (
    RelayEnd,
    RelayOutcome,
    UpstreamResponse,
    break_off,
    fetch,
    forward,
    relay,
)
from router.http.request import Headers, RawHeaders, Request, end_to_end
from router.http.responder import Handler, Responder, SentPieces
from router.http.server import Server
from router.http.stream import Observation, StreamObserver, TokenUsage, usage_of
from router.http.tls import Certificate, TlsError
from router.http.upstream import Endpoint, UpstreamRequest

__all__ = [
    "Certificate",
    "Endpoint",
    "Handler",
    "Headers",
    "Observation",
    "RawHeaders",
    "RelayEnd",
    "RelayOutcome",
    "Request",
    "Responder",
    "SentPieces",
    "Server",
    "ServerLimits",
    "StreamObserver",
    "TlsError",
    "TokenUsage",
    "UpstreamLimits",
    "UpstreamPool",
    "UpstreamRequest",
    "UpstreamResponse",
    "break_off",
    "descriptors_problem",
    "end_to_end",
    "fetch",
    "forward",
    "relay",
    "reserve_descriptors",
    "usage_of",
]
