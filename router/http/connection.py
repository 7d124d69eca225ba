"""Connection of a client: handles requests in order, one response at a time, with a limit on every wait."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, MutableMapping
from typing import Any, Protocol, cast

from router.errors import ApiError, ExpectationFailed, InternalError, RequestTimeout
from router.http.limits import BodyTimer, ServerLimits
from router.http.parsers import RequestParser
from router.http.request import Request, RequestBody, RequestHead
from router.http.response import Handler, Responder

log = logging.getLogger("conserve.router.http.server")


class ConnectionHost(Protocol):
    """Interface of the server that a connection uses."""

    handler: Handler
    limits: ServerLimits
    loop: asyncio.AbstractEventLoop
    draining: bool

    @property
    def idle_connections(self) -> MutableMapping[Any, None]:
        """Connections that can be evicted, longest idle first."""

    def spawn(self, work: Coroutine[None, None, None]) -> None: ...

    def connection_opened(self, connection: ServerConnection) -> ApiError | None: ...

    def connection_closed(self, connection: ServerConnection) -> None: ...

    def refused(self, error: ApiError) -> None: ...

    def timed_out(self, what: str) -> None: ...


class ServerConnection(asyncio.Protocol):
    """Connection of a client that parses requests ahead, but runs their handlers one after another.

    Answers keep the order of the requests. While a request waits for the answer to the one before, nothing
    more is read, which limits how many requests a client can pipeline.
    """

    def __init__(self, server: ConnectionHost) -> None:
        self._server = server
        self._parser = RequestParser(server.limits, self)
        self._waiting: deque[Request | ApiError] = deque()
        self._incoming: RequestBody | None = None
        self._body_timer: BodyTimer | None = None
        self._request: Request | None = None
        self._responder: Responder | None = None
        self._peer: tuple[str, int] | None = None
        self._pauses = 0
        self._lingering = False
        self._closed = False
        self._write_deadline: float | None = None
        self._deadline = 0.0
        self._flush_deadline = 0.0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._server.loop

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not inherit it
        peer = transport.get_extra_info("peername")
        self._peer = (peer[0], peer[1]) if isinstance(peer, tuple) else None
        limits = self._server.limits
        self._transport.set_write_buffer_limits(limits.write_high_bytes, limits.write_low_bytes)
        self._deadline = self._server.loop.time() + limits.idle_timeout_s
        refusal = self._server.connection_opened(self)
        if refusal is not None:
            self._refuse_connection(refusal)
        self._server.idle_connections[self] = None

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._body_timer is not None:
            self._body_timer.active = True
        in_head_before = self._parser.in_head
        try:
            self._parser.feed(data)
        except ApiError as error:
            self._end_of_input(error)
            return
        if self._parser.in_head and not in_head_before:
            self._deadline = self._server.loop.time() + self._server.limits.head_timeout_s

    def eof_received(self) -> bool:
        # A client that closes its sending side counts as gone, as in Go and nginx.
        if self._responder is not None and not self._lingering:
            self.abort()
        return False

    def pause_writing(self) -> None:
        self._write_deadline = self._server.loop.time() + self._server.limits.write_stall_s
        if self._responder is not None:
            self._responder.writing_paused()

    def resume_writing(self) -> None:
        self._write_deadline = None
        if self._responder is not None:
            self._responder.writing_resumed()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._parser.close()
        self._server.idle_connections.pop(self, None)
        self._server.connection_closed(self)
        self._waiting.clear()
        if self._incoming is not None:
            self._incoming.fail(InternalError("The client left before its request was complete."))
        if self._responder is not None:
            self._responder.client_left()
            self._responder = None

    # Parser events

    def head_complete(self, head: RequestHead) -> None:
        expects = head.headers.get(b"expect") if head.expects_continue else None
        body = RequestBody(
            length=head.content_length if head.content_length is not None or head.has_body else 0,
            max_bytes=self._server.limits.max_body_bytes,
            high_bytes=self._server.limits.read_high_bytes,
            on_demand=self._send_continue if expects else None,
            pause=self._pause_reading,
            resume=self._resume_reading,
        )
        self._incoming = body
        if expects and expects.lower() != b"100-continue":
            self._enqueue(ExpectationFailed("100-continue is the only expectation this server meets."))
            return
        fields = head.method, head.path, head.raw_path, head.query, head.headers
        self._enqueue(Request(*fields, head.http_version, head.keep_alive, body, self._peer))

    def body_received(self, data: bytes) -> None:
        if self._incoming is not None:
            self._incoming.feed(data)

    def request_complete(self) -> None:
        if self._incoming is not None:
            self._incoming.end()
            self._incoming = self._body_timer = None
        self._deadline = self._server.loop.time() + self._server.limits.idle_timeout_s

    # Requests, one at a time

    def _enqueue(self, item: Request | ApiError) -> None:
        if self._responder is None and not self._waiting:
            self._begin(item)
        else:
            if not self._waiting:
                self._pause_reading()
            self._waiting.append(item)

    def _begin(self, item: Request | ApiError) -> None:
        if isinstance(item, ApiError):
            self._refuse_connection(item)
            return
        self._server.idle_connections.pop(self, None)
        self._request = item
        responder = self._responder = Responder(
            self,
            self._transport,
            head_only=item.method == "HEAD",
            http10=item.http_version == "1.0",
            keep_alive=item.keep_alive,
        )
        if self._write_deadline is not None:
            responder.paused = True
        self._server.spawn(self._run(item, responder))

    async def _run(self, request: Request, responder: Responder) -> None:
        error: ApiError | None
        try:
            await self._server.handler(request, responder)
            error = None if responder.finished else InternalError("The request was not answered.")
            if error and not responder.disconnected:
                log.error("handler left a request unfinished method=%s path=%r", request.method, request.path)
        except ApiError as raised:
            error = raised
        except asyncio.CancelledError:
            self.abort()
            raise
        except Exception:
            log.exception("handler failed method=%s path=%r", request.method, request.path)
            error = InternalError("An internal error occurred; the gateway's log has the details.")
        if error is not None and not responder.disconnected and not responder.finished:
            if responder.started:
                self.abort()
            else:
                responder.refuse(error)

    @property
    def must_close(self) -> bool:
        """Return whether the connection has to close after the running request."""
        request = self._request
        return self._server.draining or (request is not None and not request.body.complete)

    def response_finished(self, *, keep_alive: bool) -> None:
        """Handle the connection's next request if ``keep_alive``, otherwise close the connection."""
        request, self._request, self._responder = self._request, None, None
        if request is None or self._closed:
            return
        self._server.idle_connections[self] = None
        if not keep_alive or not request.body.complete or self._server.draining:
            self._close_with_linger()
            return
        request.body.drop()
        self._deadline = self._server.loop.time() + self._server.limits.idle_timeout_s
        if self._waiting:
            item = self._waiting.popleft()
            if not self._waiting:
                self._resume_reading()
            self._begin(item)

    def _end_of_input(self, error: ApiError) -> None:
        """Stop parsing: answer the requests before the faulty one, then send ``error`` and close."""
        self._lingering = True
        body, self._incoming = self._incoming, None
        if body is not None:
            body.fail(error)
        else:
            self._enqueue(error)

    def _refuse_connection(self, error: ApiError) -> None:
        responder = Responder(self, self._transport, keep_alive=False)
        self._request = None
        responder.refuse(error)
        self._server.refused(error)
        self._close_with_linger()

    def _send_continue(self) -> None:
        if self._responder is not None and not self._responder.started:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Ends

    def _close_with_linger(self) -> None:
        """Close in two steps: a close with unread input would reset the connection and lose the answer."""
        self._lingering = True
        self._waiting.clear()
        if self._request is not None:
            self._request.body.drop()
        while self._pauses:
            self._resume_reading()
        now = self._server.loop.time()
        self._flush_deadline = now + self._server.limits.write_stall_s
        if self._transport.can_write_eof():
            self._deadline = now + self._server.limits.linger_s
            self._transport.write_eof()
        else:  # TLS sends its own end, and drops what still arrives
            self._deadline = self._flush_deadline
            self._transport.close()

    def abort(self) -> None:
        if not self._closed:
            self._transport.abort()

    @property
    def sending(self) -> bool:
        """Return whether a part of the last answer still has to be sent."""
        return self._lingering or bool(self._transport.get_write_buffer_size())

    def evict(self) -> None:
        """Close this idle connection, because a new one needs its place."""
        self._server.timed_out("evicted")
        if self.sending or self._parser.in_head or not self._transport.can_write_eof():
            self.abort()  # a close could wait for a client that does not read
        else:
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close the connection for a drain, unless a request is running."""
        if self._responder is None and not self._parser.in_head and not self._lingering:
            self._transport.close()

    def check_deadlines(self, now: float) -> None:
        if self._write_deadline is not None and now > self._write_deadline:
            self._server.timed_out("write")
            self.abort()
        elif self._lingering:
            self._check_linger(now)
        elif self._pauses:
            self._deadline = now + self._server.limits.head_timeout_s
            if self._body_timer is not None:
                self._body_timer.paused(now)
        elif self._parser.in_head:
            if now > self._deadline:
                self._server.timed_out("head")
                self._end_of_input(RequestTimeout("The request's head did not arrive in time; resend it."))
        elif self._incoming is not None:
            body = self._incoming
            if self._body_timer is None:  # a body that arrived between two sweeps needs no timer
                self._body_timer = BodyTimer(self._server.limits, now)
            problem = self._body_timer.problem(now, awaited=body.awaited, received=body.received)
            if problem is not None:
                self._server.timed_out("body")
                self._end_of_input(RequestTimeout(problem))
        elif self._responder is None and now > self._deadline:
            self._server.timed_out("idle")
            self.abort()

    def _check_linger(self, now: float) -> None:
        if self._responder is not None:
            return
        if self._transport.get_write_buffer_size() and now < self._flush_deadline:
            self._deadline = now + self._server.limits.linger_s
        elif now > self._deadline:
            self.abort()

    def _pause_reading(self) -> None:
        self._pauses += 1
        if self._pauses == 1 and not self._closed:
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and not self._closed:
            self._transport.resume_reading()
