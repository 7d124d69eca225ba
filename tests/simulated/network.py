"""Network between simulated hosts: byte streams for HTTP, and calls instead of gRPC's channels.

Applications on TCP see no lost messages; the network models the faults that they do see. Each message has
its own delay, so calls overtake each other. A cut link holds messages until it is mended, or loses them with
their connection. A reset connection ends its calls with an error, whether or not they were carried out. A
request that was sent again on a new connection can arrive twice, the second time late.
"""

import asyncio
import itertools
import select
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import aiohttp.connector
import grpc

from tests.simulated.loop import SimulatedProcess, VirtualLoop, current
from workers import processes

RTO_S = 30.0  # a host gives up a connection after this long without an answer
LATEST_S = 2.0  # a message takes at most this long on a link that is not cut
UNAVAILABLE, DEADLINE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


@dataclass
class Faults:
    """Probabilities and durations of message faults."""

    delay_s: float = 0.001  # mean
    late: float = 0.0  # share of messages that take much longer
    late_s: float = 0.5  # mean delay of these messages
    reset: float = 0.0  # share of calls whose connection is reset under way
    breaks: float = 0.0  # share of streams that are reset under way
    twice: float = 0.0  # share of requests that arrive twice
    twice_s: float = 1.0  # mean time until the second arrival


class Network:
    """Network of hosts, with the links between them and their listeners."""

    def __init__(self, loop: VirtualLoop, faults: Faults) -> None:
        self.loop, self.faults = loop, faults
        self._random = Random(loop.random.random())
        self._listeners: dict[tuple[str, int], Any] = {}
        self._ports = 20_000
        self._cut: dict[tuple[str, str], float] = {}  # from, to -> since when
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = defaultdict(list)
        self._connections: dict[Connection, None] = {}
        self.names: dict[str, str] = {}  # name -> host that it resolves to

    # Links

    def cut(self, one: str, other: str, *, both_ways: bool = True) -> None:
        """Cut the link between two hosts: nothing arrives until `mend`."""
        for link in ((one, other), (other, one))[: 2 if both_ways else 1]:
            self._cut.setdefault(link, self.loop.time())

    def mend(self, one: str, other: str) -> None:
        for link in ((one, other), (other, one)):
            if self._cut.pop(link, None) is not None:
                for send in self._held.pop(link, ()):
                    send()

    def is_cut(self, one: str, other: str) -> bool:
        return (one, other) in self._cut or (other, one) in self._cut

    def delay(self) -> float:
        faults, draw = self.faults, self._random
        late = faults.late and draw.random() < faults.late
        delay_s = draw.expovariate(1.0 / (faults.late_s if late else faults.delay_s))
        return min(delay_s, LATEST_S)

    def send(
        self,
        sender: SimulatedProcess,
        receiver: SimulatedProcess,
        deliver: Callable[..., None],
        *args: Any,
        after: float = 0.0,
    ) -> float:
        """Call `deliver` in the receiving process when a message arrives; return the planned time of that.

        A cut link delivers the message later than planned. No message arrives before `after`, so that the
        messages of one stream keep their order.
        """
        link = sender.host, receiver.host
        at = max(after, self.loop.time() + self.delay())
        if link in self._cut:
            self._held[link].append(
                lambda: self.loop.call_at(
                    max(after, self.loop.time() + self.delay()), deliver, *args, context=receiver.context
                )
            )
            return at
        self.loop.call_at(at, deliver, *args, context=receiver.context)
        return at

    def chance(self, share: float) -> bool:
        return bool(share) and self._random.random() < share

    def some_time(self, mean_s: float) -> float:
        return self._random.expovariate(1.0 / mean_s)

    # Listening

    def bind(self, process: SimulatedProcess, port: int, listener: Any) -> int:
        port = port or self.free_port()
        place = process.host, port
        if not process.alive:  # rest of a step in which its host lost power
            raise OSError(5, "the host has no power")
        if place in self._listeners:
            raise OSError(98, "Address already in use")
        self._listeners[place] = listener
        process.on_end.append(lambda: self.unbind(process.host, port, listener))
        return port

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    def unbind(self, host: str, port: int, listener: Any) -> None:
        if self._listeners.get((host, port)) is listener:
            del self._listeners[host, port]

    def listener(self, host: str, port: int) -> Any:
        return self._listeners.get((host, port))

    def answers(self, asker: str, host: str, port: int) -> bool:
        """Return whether something listens at `host` and `port`, and `asker` can reach it."""
        return not self.is_cut(asker, host) and self.listener(host, port) is not None

    # Connections: what two processes share and lose together

    def opened(self, connection: "Connection") -> None:
        self._connections[connection] = None

    def closed(self, connection: "Connection") -> None:
        self._connections.pop(connection, None)

    def process_ended(self, process: SimulatedProcess, *, silently: bool) -> None:
        """Notify the peers of an ended process. With `silently` its host is gone too, and nothing answers."""
        for connection in [one for one in self._connections if process in one.ends]:
            peer = connection.ends[1] if connection.ends[0] is process else connection.ends[0]
            connection.peer_lost(process, peer, self.loop.time() + (RTO_S if silently else self.delay()))

    def reset_some(self, share: float) -> None:
        """Reset a share of the open connections."""
        for connection in list(self._connections):
            if self.chance(share):
                connection.reset()

    def reset_between(self, one: str, other: str) -> None:
        """Reset all connections between two hosts."""
        for connection in list(self._connections):
            if {end.host for end in connection.ends} == {one, other}:
                connection.reset()

    # HTTP

    def listen(
        self, process: SimulatedProcess, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> Any:
        return StreamListener(self, process, factory, host, port)

    async def connect(
        self, process: SimulatedProcess, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Open a byte stream to a listener."""
        for _ in itertools.takewhile(lambda _: self.is_cut(process.host, host), itertools.count()):
            await asyncio.sleep(0.2)  # until the caller's time-out
        await asyncio.sleep(self.delay())
        listener = self.listener(host, port)
        if not isinstance(listener, StreamListener) or not listener.process.alive:
            raise ConnectionRefusedError(111, f"Connect call failed ('{host}', {port})")
        return listener.accept(process, factory)


class Connection:
    """Base class of streams and calls: what two processes share, one end each."""

    ends: tuple[SimulatedProcess, SimulatedProcess]

    def peer_lost(self, lost: SimulatedProcess, peer: SimulatedProcess, at: float) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError


class StreamListener:
    """Listening socket, as `loop.create_server` returns it."""

    def __init__(
        self, network: Network, process: SimulatedProcess, factory: Callable[[], Any], host: str, port: int
    ) -> None:
        self.network, self.process, self.factory = network, process, factory
        self.host, self.port = host, network.bind(process, port, self)
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        return self.host, self.port

    def close(self) -> None:
        self.network.unbind(self.process.host, self.port, self)

    async def wait_closed(self) -> None:
        pass

    def accept(
        self, client: SimulatedProcess, factory: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        stream = Stream(self.network, client, self.process)
        near, far = stream.near, stream.far
        near.protocol = protocol = factory()
        protocol.connection_made(near)

        def arrived() -> None:
            far.protocol = self.factory()
            far.protocol.connection_made(far)
            far.begin()

        self.network.send(client, self.process, arrived)
        near.begin()
        if self.network.chance(self.network.faults.breaks):
            self.network.loop.call_later(self.network.some_time(1.0), stream.reset)
        return near, protocol


class Stream(Connection):
    """TCP connection between two processes."""

    def __init__(self, network: Network, client: SimulatedProcess, server: SimulatedProcess) -> None:
        self.network = network
        self.ends = client, server
        self.near, self.far = StreamEnd(self, client, server), StreamEnd(self, server, client)
        self.near.peer, self.far.peer = self.far, self.near
        network.opened(self)

    def peer_lost(self, lost: SimulatedProcess, peer: SimulatedProcess, at: float) -> None:
        self.network.closed(self)
        end = self.near if self.near.process is peer else self.far
        end.process.loop.call_at(max(at, end.arrives), end.lose, context=peer.context)

    def reset(self) -> None:
        self.network.closed(self)
        for end in (self.near, self.far):
            end.process.loop.call_soon(end.lose, context=end.process.context)


class StreamEnd(asyncio.Transport):
    """One end of a byte stream."""

    def __init__(self, stream: Stream, process: SimulatedProcess, other: SimulatedProcess) -> None:
        super().__init__({"peername": (other.host, 1), "sockname": (process.host, 1)})
        self.stream, self.process, self.other = stream, process, other
        self.peer: StreamEnd
        self.protocol: Any = None
        self.arrives = 0.0  # when the newest message for this end arrives
        self._closing = self._lost = self._begun = False
        self._paused = False
        self._waiting: deque[bytes | None] = deque()  # arrived and not handed over; None: the end

    # The protocol's side

    def write(self, data: Any) -> None:
        if data and not (self._closing or self._lost):
            self._pass_on(bytes(data))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def write_eof(self) -> None:
        self._pass_on(None)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._pass_on(None)
            self.process.loop.call_soon(self.lose)

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            peer = self.peer
            self.stream.network.send(self.process, self.other, peer.lose, after=peer.arrives)
            self.process.loop.call_soon(self.lose)

    def is_closing(self) -> bool:
        return self._closing or self._lost

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol  # type: ignore[no-any-return]

    def is_reading(self) -> bool:
        return not self._paused

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self.process.loop.call_soon(self._hand_over)

    # The network's side

    def begin(self) -> None:
        self._begun = True
        self._hand_over()

    def lose(self) -> None:
        """End this side of the connection, and tell its protocol that the connection is lost."""
        if not self._lost:
            self._lost = self._closing = True
            self._waiting.clear()
            if self.peer._lost:
                self.stream.network.closed(self.stream)
            if self.protocol is not None:
                self.protocol.connection_lost(None)

    def _pass_on(self, data: bytes | None) -> None:
        peer = self.peer
        peer.arrives = self.stream.network.send(
            self.process, self.other, peer._arrive, data, after=peer.arrives + 1e-9
        )

    def _arrive(self, data: bytes | None) -> None:
        if not self._lost:
            self._waiting.append(data)
            self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting and self._begun and not (self._paused or self._lost):
            data = self._waiting.popleft()
            if data is not None:
                self.protocol.data_received(data)
            elif not self.protocol.eof_received():
                self.close()


# gRPC


class CallError(grpc.aio.AioRpcError):  # type: ignore[misc]
    """Error that a call raises, with status code and details like gRPC's own."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class Aborted(Exception):
    """Raised by `Context.abort`, with which a handler ends its call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Context:
    """The parts of gRPC's servicer context that handlers use."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Any:
        return self._metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise Aborted(code, details)


class SimulatedCall(Connection):
    """One call: the request, its answers, and how each side learns of the other's end."""

    def __init__(
        self,
        channel: "SimulatedChannel",
        path: str,
        request: bytes,
        timeout: float | None,
        metadata: Any,
        ready: bool,
    ) -> None:
        self.channel, self.network = channel, channel.network
        self.client, self.loop = current(), channel.network.loop
        self._path, self._request, self._metadata, self._ready = path, request, metadata, ready
        self._deadline = None if timeout is None else self.loop.time() + timeout
        self._answers: deque[bytes] = deque()
        self._ended: tuple[grpc.StatusCode | None, str] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._server: SimulatedProcess | None = None
        self._task: asyncio.Task[None] | None = None  # of the handler
        self._arrives = 0.0
        if self._deadline is not None:
            self.loop.call_at(self._deadline, self._end, DEADLINE, "Deadline Exceeded")
        self._connect()

    # The client's side

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._read()

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._one().__await__()

    def cancel(self) -> None:
        if self._ended is None:
            self._end(grpc.StatusCode.CANCELLED, "cancelled")

    async def _one(self) -> bytes:
        try:
            async for answer in self._read():
                return answer
        finally:
            self.cancel()
        raise CallError(grpc.StatusCode.INTERNAL, "no answer")

    async def _read(self) -> AsyncIterator[bytes]:
        while True:
            while self._answers:
                yield self._answers.popleft()
            if self._ended is not None:
                if self._ended[0] is not None:
                    raise CallError(*self._ended)
                return
            self._wake = self.loop.create_future()
            await self._wake

    def _connect(self) -> None:
        """Reach the server, or retry while the caller waits for it."""
        if self._ended is not None:
            return
        host, port = self.channel.resolve(self.client.host)
        server = self.network.listener(host, port)
        cut = self.network.is_cut(self.client.host, host)
        if cut or not isinstance(server, CallServer) or not server.listens:
            if not self._ready and not cut:
                self._end(UNAVAILABLE, "failed to connect to all addresses")
            else:
                self.loop.call_later(0.3, self._connect)
                if not self._ready:
                    self.loop.call_later(20.0, self._end, UNAVAILABLE, "connection timed out")
            return
        self._server = server.process
        self.ends = self.client, server.process
        self.network.opened(self)
        self.network.send(self.client, server.process, self._arrived, server, True)
        faults = self.network.faults
        if self.network.chance(faults.twice):
            self.loop.call_later(
                self.network.some_time(faults.twice_s),
                lambda: self.network.send(self.client, server.process, self._arrived, server, False),
            )
        if self.network.chance(faults.reset):
            self.loop.call_later(self.network.some_time(0.005), self.reset)
        if self.channel.keepalive_s is not None:
            self._watch_link(0.0)

    def _watch_link(self, silent_s: float) -> None:
        """End the call if its two hosts could not reach each other for longer than the keep-alive allows."""
        if self._ended is None:
            silent_s = silent_s + 1.0 if self.network.is_cut(*(one.host for one in self.ends)) else 0.0
            if silent_s > (self.channel.keepalive_s or 0.0):
                self._end(UNAVAILABLE, "keepalive watchdog timeout")
            else:
                self.loop.call_later(1.0, self._watch_link, silent_s)

    def _answer(self, data: bytes) -> None:
        if self._ended is None:
            self._answers.append(data)
            self._woken()

    def _finish(self, code: grpc.StatusCode | None, details: str) -> None:
        if self._ended is None:
            self._ended = code, details
            self.network.closed(self)
            self._woken()

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        """End the call on the client's side, and tell the server."""
        if self._ended is None:
            self._finish(code, details)
            if self._server is not None:
                self.network.send(self.client, self._server, self._cancel_handler)

    def _woken(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # The server's side

    def _arrived(self, server: "CallServer", first: bool) -> None:
        if not server.listens:
            self._reply(None, UNAVAILABLE, "the server is shutting down")
            return
        task = asyncio.get_running_loop().create_task(self._handle(server, first))
        if first:
            self._task = task
            if self._ended is not None:
                task.cancel()
        else:  # its connection is gone, so nobody gets its answer
            self.loop.call_later(self.network.some_time(0.01), task.cancel)
        server.calls[task] = None
        task.add_done_callback(lambda task: server.calls.pop(task, None))

    async def _handle(self, server: "CallServer", first: bool) -> None:
        def reply(data: bytes | None, code: grpc.StatusCode | None = None, details: str = "") -> None:
            if first:
                self._reply(data, code, details)

        handler, context = server.handler_of(self._path), Context(self._metadata)
        try:
            if handler is None:
                raise Aborted(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            if handler.response_streaming:
                async for answer in handler.unary_stream(self._request, context):
                    reply(answer)
            else:
                reply(await handler.unary_unary(self._request, context))
            reply(None)
        except Aborted as end:
            reply(None, end.code, end.details)
        except asyncio.CancelledError:
            reply(None, grpc.StatusCode.CANCELLED, "cancelled by the server")
            raise
        except Exception as fault:  # noqa: BLE001  as gRPC does
            server.process.loop.on_fault(server.process, {"exception": fault, "message": self._path})
            reply(None, grpc.StatusCode.UNKNOWN, f"Unexpected {type(fault)}: {fault}")

    def _reply(self, data: bytes | None, code: grpc.StatusCode | None = None, details: str = "") -> None:
        deliver = (self._answer, data) if data is not None else (self._finish, code, details)
        assert self._server is not None
        self._arrives = self.network.send(
            self._server,
            self.client,
            *deliver,
            after=self._arrives + 1e-9,  # type: ignore[arg-type]
        )

    def _cancel_handler(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # Faults

    def peer_lost(self, lost: SimulatedProcess, peer: SimulatedProcess, at: float) -> None:
        self.network.closed(self)
        if peer is self.client:
            if self.channel.keepalive_s is not None:
                at = min(at, self.loop.time() + self.channel.keepalive_s)
            finish = self._finish, UNAVAILABLE, "Socket closed"
            self.loop.call_at(max(at, self._arrives), *finish, context=peer.context)
        else:
            self.loop.call_at(at, self._cancel_handler, context=peer.context)

    def reset(self) -> None:
        if self._ended is None and self._server is not None:
            soon = self.loop.time() + self.network.delay()
            self.loop.call_at(
                soon,
                self._finish,
                UNAVAILABLE,
                "recvmsg:Connection reset by peer",
                context=self.client.context,
            )
            self.loop.call_at(soon, self._cancel_handler, context=self._server.context)


class SimulatedChannel:
    """Channel of simulated calls, in place of `grpc.aio.insecure_channel`."""

    def __init__(self, network: Network, address: str, options: Any = None) -> None:
        self._name, _, port = address.rpartition(":")
        self.network, self._port = network, int(port)
        self._host = ""  # host that the name resolved to at the last connection
        given = dict(options or ())
        ping_s, answer_s = given.get("grpc.keepalive_time_ms"), given.get("grpc.keepalive_timeout_ms", 20_000)
        self.keepalive_s = None if ping_s is None else (ping_s + answer_s) / 1000
        self._calls: list[SimulatedCall] = []

    def resolve(self, asker: str) -> tuple[str, int]:
        """Return host and port of the server. The channel stays with one host for as long as it answers."""
        if not self._host or not self.network.answers(asker, self._host, self._port):
            self._host = self.network.names.get(self._name, self._name)
        return self._host, self._port

    def unary_unary(self, path: str) -> Callable[..., SimulatedCall]:
        return self._open(path)

    unary_stream = unary_unary

    def _open(self, path: str) -> Callable[..., SimulatedCall]:
        def call(
            request: bytes,
            timeout: float | None = None,
            metadata: Any = (),
            wait_for_ready: bool = False,
        ) -> SimulatedCall:
            made = SimulatedCall(self, path, request, timeout, metadata, wait_for_ready)
            self._calls = [one for one in self._calls if one._ended is None]
            self._calls.append(made)
            return made

        return call

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()


class CallServer:
    """Server of simulated calls, in place of `grpc.aio.server`."""

    def __init__(self, network: Network) -> None:
        self.network, self.process = network, current()
        self.listens = False
        self.calls: dict[asyncio.Task[None], None] = {}
        self._handlers: Any = ()
        self._port = 0

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers = handlers

    def add_insecure_port(self, address: str) -> int:
        self._port = self.network.bind(self.process, int(address.rpartition(":")[2]), self)
        return self._port

    async def start(self) -> None:
        self.listens = True

    async def stop(self, grace: float | None = None) -> None:
        self.listens = False
        self.network.unbind(self.process.host, self._port, self)
        if self.calls and grace:
            await asyncio.wait(list(self.calls), timeout=grace)
        for task in list(self.calls):
            task.cancel()

    def handler_of(self, path: str) -> Any:
        details = SimpleNamespace(method=path)
        return next((found for one in self._handlers if (found := one.service(details)) is not None), None)


class Unconnected:
    """Stands in for the socket that aiohttp connects before it makes a transport of it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    def close(self) -> None:
        pass


async def _start_connection(addr_infos: Any, **_: Any) -> Unconnected:
    return Unconnected(addr_infos[0][4][:2])


def install(network: Network) -> None:
    """Route all channels and servers of gRPC, and all connections of aiohttp, through this network."""
    grpc.aio.insecure_channel = lambda address, options=None, **_: SimulatedChannel(network, address, options)
    grpc.aio.server = lambda *_, **__: CallServer(network)
    aiohttp.connector.aiohappyeyeballs.start_connection = _start_connection
    processes.listens = lambda host, port: network.answers(current().host, host, port)
    processes.listen_problem = lambda host, port: "taken" if network.listener(host, port) else ""
    if hasattr(select, "epoll"):
        del select.epoll  # gateways splice the sockets of streams with it; here there are none
