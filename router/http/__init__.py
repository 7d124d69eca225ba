"""The gateway's HTTP: a server, connections to engines, and the relay between them (see README.md)."""

from router.http.exchange import Endpoint, UpstreamRequest
from router.http.heap import settle_heap
from router.http.limits import ServerLimits, UpstreamLimits
from router.http.message import Handler, Headers, RawHeaders, Request, end_to_end
from router.http.observer import Observation, StreamObserver, Usage, usage_of
from router.http.pool import UpstreamPool
from router.http.relay import RelayEnd, RelayOutcome, UpstreamResponse, fetch, relay
from router.http.responder import Responder
from router.http.server import Server

__all__ = [
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
    "UpstreamLimits",
    "UpstreamPool",
    "UpstreamRequest",
    "UpstreamResponse",
    "Usage",
    "end_to_end",
    "fetch",
    "relay",
    "settle_heap",
    "usage_of",
]
