"""gRPC service of an engine's keeper: it reports the engine's state and passes commands on to the engine.

Its clients are the directory, the command line and the autoscaler. Tokens of answers never pass through it.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from deploy.errors import DeployError
from kvtransfer.control.control_socket import ControlSocketError
from router.directory.api.rpc import KEEPALIVE, SUPERSEDED, BadReply, Method, Service, Stub, TermFence
from workers import processes
from workers.keeper.engine_status import EngineLink, KeeperReport, SentKv, StatusStore

if TYPE_CHECKING:
    from workers.keeper.idle_moves import KvSender  # imports an HTTP client, which only keepers need

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class DropOrders:
    epoch: int
    members: tuple[str, ...]  # host:port of each member's peer server, in the order of their parts
    part: int  # index of the part of the layers


@dataclass(frozen=True, slots=True)
class PrefetchOrder:
    conversation: str
    due_in_s: float  # until the conversation's next turn is expected


@dataclass(frozen=True, slots=True)
class SendOrder:
    conversation: str
    target: str  # host:port of the other decoder's HTTP server


_SERVICE = "/conserve.workers.v2.EngineControl"
INFO = Method[None, KeeperReport](f"{_SERVICE}/Info", None, KeeperReport)
WATCH = Method[None, KeeperReport](f"{_SERVICE}/Watch", None, KeeperReport)
RELEASE = Method[str, bool](f"{_SERVICE}/Release", str, bool)  # whether the conversation had KV there
PREFETCH = Method[PrefetchOrder, bool](f"{_SERVICE}/Prefetch", PrefetchOrder, bool)  # whether it has the KV
SEND = Method[SendOrder, SentKv](f"{_SERVICE}/Send", SendOrder, SentKv)
DROP = Method[DropOrders, None](f"{_SERVICE}/Drop", DropOrders, None)
RESTORE = Method[int, None](f"{_SERVICE}/Restore", int, None)  # the epoch
DRAIN = Method[bool, None](f"{_SERVICE}/Drain", bool, None)


class ControlError(DeployError, ConnectionError):
    """The keeper refused a command or cannot be reached; the message says why."""


class DirectorySuperseded(DeployError):
    """The keeper refused this directory, because it has heard of a newer one."""


class ControlServer:
    """Server of the control service. It starts before the keeper, which reports the server's address."""

    def __init__(self, store: StatusStore, feed: EngineLink, secret: str, sender: "KvSender") -> None:
        self._store, self._feed, self._sender = store, feed, sender
        service = Service(secret, unavailable=(ControlSocketError,), refuses=TermFence().refuses)
        service.once(INFO, self._info)
        service.stream(WATCH, self._watch)
        service.once(RELEASE, feed.release)
        service.once(PREFETCH, self._prefetch)
        service.once(SEND, self._send)
        service.once(DRAIN, feed.drain)
        service.once(DROP, self._drop)
        service.once(RESTORE, feed.restore)
        self._server = service.server()

    async def start(self, host: str, port: int = 0) -> str:
        """Listen on `port` of `host`, or on a free port if `port` is taken; return the address."""
        if port and processes.listen_problem(host, port):
            port = 0
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return f"{host}:{bound}"

    async def stop(self) -> None:
        await self._server.stop(grace=1.0)

    async def _prefetch(self, order: PrefetchOrder) -> bool:
        return await self._feed.prefetch(order.conversation, order.due_in_s)

    async def _send(self, order: SendOrder) -> SentKv:
        return await self._sender.send(order.conversation, order.target)

    async def _drop(self, orders: DropOrders) -> None:
        await self._feed.drop(orders.epoch, orders.members, orders.part)

    async def _info(self, _: None) -> KeeperReport:
        return self._store.report

    def _watch(self, _: None) -> AsyncIterator[KeeperReport]:
        return self._store.watch()


class ControlClient:
    """Client of one keeper's control service."""

    def __init__(self, address: str, secret: str, timeout_s: float = 5.0, *, term: int = 0) -> None:
        """Create a client. `term` is the term of the directory that uses it; keepers refuse an old one."""
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, KEEPALIVE)
        self._stub, self._timeout_s = Stub(self._channel, secret, term), timeout_s

    async def __aenter__(self) -> "ControlClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def info(self) -> KeeperReport:
        return await self._ask(INFO, None)

    async def release(self, conversation: str) -> bool:
        """Free the KV of an ended conversation; return False if the engine held none."""
        return await self._ask(RELEASE, conversation)

    async def prefetch(self, conversation: str, due_in_s: float) -> bool:
        """Load a parked conversation's KV; return False if the engine no longer has most of it."""
        return await self._ask(PREFETCH, PrefetchOrder(conversation, due_in_s))

    async def send(self, conversation: str, target: str) -> SentKv:
        """Send an idle conversation's KV to the decoder at `target`, which then holds it too."""
        return await self._ask(SEND, SendOrder(conversation, target))

    async def drop(self, epoch: int, members: tuple[str, ...], part: int) -> None:
        """Make the engine keep only part number `part` of the layers; the other `members` keep the others."""
        await self._ask(DROP, DropOrders(epoch, members, part))

    async def restore(self, epoch: int) -> None:
        """Make the engine load all of its layers again."""
        await self._ask(RESTORE, epoch)

    async def drain(self, on: bool = True) -> None:
        """Make the engine accept no new conversations; with `on` False, make it accept them again.

        Conversations that it holds leave with their next turns.
        `EngineState.drained` (placement/engines.py) says when all have left.
        """
        await self._ask(DRAIN, on)

    async def watch(self) -> AsyncIterator[KeeperReport]:
        """Yield the keeper's report now and after each change.

        Raises ControlError when the keeper cannot be reached, and DirectorySuperseded when it has heard of a
        newer directory.
        """
        try:
            async for report in self._stub.stream(WATCH, None, wait_for_ready=False):
                yield report
        except (grpc.aio.AioRpcError, BadReply) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is SUPERSEDED:
                raise DirectorySuperseded(f"the keeper at {self.address} says: {error.details()}") from error
            raise ControlError(f"the keeper at {self.address} went away: {_reason(error)}") from error
        raise ControlError(f"the keeper at {self.address} ended the stream")

    async def _ask(self, method: Method[Any, Reply], request: object) -> Reply:
        try:
            return await self._stub.ask(method, request, self._timeout_s)
        except (grpc.aio.AioRpcError, BadReply) as error:
            raise ControlError(f"the keeper at {self.address} refused: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower().replace('_', ' ')}, {error.details()}"
    return str(error)
