"""Ask a fleet's directory, over its gRPC service; needs no Ray."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from placement.advice import Recommendation
from placement.capacity import Signals
from router.directory import directory_pb2 as pb
from router.directory import directory_pb2_grpc as rpc
from router.directory import messages
from router.directory.auth import metadata

LIMIT_S = 3.0


async def engines(address: str, secret: str) -> pb.EnginesReply | None:
    """None: it does not answer."""
    reply: pb.EnginesReply | None = await _ask(
        address, secret, lambda stub: stub.Engines, pb.EnginesRequest()
    )
    return reply


async def capacity(address: str, secret: str) -> tuple[Signals, tuple[Recommendation, ...]] | None:
    """None: it does not answer."""
    reply = await _ask(address, secret, lambda stub: stub.Capacity, pb.CapacityRequest())
    return None if reply is None else (messages.signals(reply), messages.advice(reply))


async def _ask(
    address: str, secret: str, method: Callable[[Any], Callable[..., Awaitable[Any]]], request: object
) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.DirectoryStub(channel)  # type: ignore[no-untyped-call]
        try:
            return await method(stub)(request, metadata=metadata(secret), timeout=LIMIT_S)
        except grpc.aio.AioRpcError:
            return None
