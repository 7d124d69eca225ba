"""HTTP for gateways: a server, connections to engines, and the relay between them (see README.md)."""

from router.http.exchange import RelayEnd, RelayOutcome, UpstreamResponse
from router.http.limits import ServerLimits, UpstreamLimits, descriptors_problem, reserve_descriptors
from router.http.pool import UpstreamPool
from router.http.relay import fetch, forward, relay
from router.http.request import Headers, RawHeaders, Request, end_to_end
from router.http.response import Handler, Responder
from router.http.server import Server
from router.http.streams.resume import StreamProgress
from router.http.streams.sse_observer import Observation, StreamObserver, TokenUsage, usage_from
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
    "Server",
    "ServerLimits",
    "StreamObserver",
    "StreamProgress",
    "TlsError",
    "TokenUsage",
    "UpstreamLimits",
    "UpstreamPool",
    "UpstreamRequest",
    "UpstreamResponse",
    "descriptors_problem",
    "end_to_end",
    "fetch",
    "forward",
    "relay",
    "reserve_descriptors",
    "usage_from",
]
