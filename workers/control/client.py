"""The other side of the control service: for the directory and the command line."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import grpc

from workers.board import Change
from workers.control import control_pb2 as pb
from workers.control import control_pb2_grpc as rpc
from workers.control.auth import metadata
from workers.control.messages import from_message


class ControlError(ConnectionError):
    """The keeper did not do what was asked; says why."""


class ControlClient:
    def __init__(self, address: str, secret: str, timeout_s: float = 5.0) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = rpc.EngineControlStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata, self._timeout_s = metadata(secret), timeout_s

    async def __aenter__(self) -> "ControlClient":
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def info(self) -> Change:
        return from_message(await self._call(self._stub.Info, pb.InfoRequest()))

    async def release(self, conversation: str) -> bool:
        return bool(
            (await self._call(self._stub.Release, pb.ConversationRequest(conversation=conversation))).held
        )

    async def park(self, conversation: str) -> bool:
        return bool(
            (await self._call(self._stub.Park, pb.ConversationRequest(conversation=conversation))).held
        )

    async def drain(self, on: bool = True) -> None:
        await self._call(self._stub.Drain, pb.DrainRequest(on=on))

    async def watch(self) -> AsyncIterator[Change]:
        """Until the keeper goes away (ControlError)."""
        try:
            async for message in self._stub.Watch(pb.WatchRequest(), metadata=self._metadata):
                yield from_message(message)
        except grpc.aio.AioRpcError as error:
            raise ControlError(f"the keeper at {self.address} went away: {_reason(error)}") from error
        raise ControlError(f"the keeper at {self.address} ended the stream")

    async def _call(self, method: Any, request: object) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise ControlError(f"the keeper at {self.address} refused: {_reason(error)}") from error


def _reason(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name.lower().replace('_', ' ')}, {error.details()}"
