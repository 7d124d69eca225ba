"""Passes requests from a gateway to the batch process, together with their owner.

The gateway authenticates callers. It sends the batch process the caller's owner and, instead of the client's
key, a key that no client has. Of the client's own headers, it sends only those in
`router/requests/forwarded_headers.py`.
"""

import hmac
import math

from router.auth.keys import Key
from router.batch.routes import canonical_target
from router.errors import Unauthorized
from router.gateway.config import BatchAddress
from router.gateway.turn.turn import Turn
from router.http import (
    Endpoint,
    Headers,
    RawHeaders,
    Request,
    Responder,
    StreamObserver,
    UpstreamPool,
    UpstreamRequest,
    forward,
)
from router.requests.forwarded_headers import forwarded

_CALLER = b"x-conserve-caller"
MOST_BYTES, MOST_BATCHES = b"x-conserve-most-bytes", b"x-conserve-most-batches"  # limits of the owner
GIB = 1 << 30
_FORM_BYTES = 1 << 20  # of an upload, beside the file
_ABSENT = "Batches and flex requests are not served at the moment; try again. Other requests are served."


class BatchForwarding:
    """Forwards requests to the batch process. Flex turns and other requests have separate connections."""

    def __init__(self, address: BatchAddress, pool: UpstreamPool) -> None:
        self._address = address
        self._endpoint = Endpoint.parse(f"http://{address.http}")
        self._key = address.key.encode()
        self._pool = pool
        self._short = UpstreamPool(pool.limits)

    async def handle(self, request: Request, responder: Responder, key: Key) -> None:
        """Forward a request of the Files and Batch APIs, streaming both bodies."""
        passed = UpstreamRequest(
            method=request.method,
            target=canonical_target(request.path) + (b"?" + request.query if request.query else b""),
            headers=[*self._headers(request.headers.raw, key.owner), *_limits(key)],
            stream=request.body if request.body.length != 0 else None,
            max_bytes=self._address.max_file_bytes + _FORM_BYTES,
        )
        await forward(self._short, self._endpoint, passed, responder, absent=_ABSENT)

    async def flex(self, turn: Turn, responder: Responder, observer: StreamObserver) -> None:
        """Forward a flex turn; the batch process answers once there is capacity."""
        request = UpstreamRequest(
            method="POST",
            target=turn.api.target,
            headers=self._headers(turn.headers, turn.space),
            body=turn.raw,
            first_byte_timeout_s=math.inf,  # the batch process bounds the wait
        )
        await forward(self._pool, self._endpoint, request, responder, absent=_ABSENT, observer=observer)

    async def close(self) -> None:
        await self._short.close()

    def _headers(self, client: RawHeaders, space: str) -> RawHeaders:
        return [*forwarded(client), (b"authorization", b"Bearer " + self._key), (_CALLER, space.encode())]


def _limits(key: Key) -> RawHeaders:
    stored, batches = key.limits.stored_gib, key.limits.batches
    found = [(MOST_BYTES, int(stored * GIB))] if stored is not None else []
    found += [(MOST_BATCHES, batches)] if batches is not None else []
    return [(name, b"%d" % most) for name, most in found]


def caller_of(headers: Headers, key: str) -> str:
    """Return the owner for whom a gateway asks; raise Unauthorized if the caller lacks the gateways' key."""
    given = headers.get(b"authorization") or b""
    caller = headers.text(_CALLER)
    if not hmac.compare_digest(given, b"Bearer " + key.encode()) or not caller:
        raise Unauthorized("only gateways of this fleet may call the batch process")
    return caller
