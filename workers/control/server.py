"""The keeper's side of the control service."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from workers.board import Board, Change
from workers.control import control_pb2 as pb
from workers.control import control_pb2_grpc as rpc
from workers.control.auth import RequireSecret
from workers.control.messages import to_message
from workers.state_feed import FeedUnavailable, StateFeed

Context = Any  # grpc has no types that mypy could follow


class ControlService(rpc.EngineControlServicer):
    def __init__(self, board: Board, feed: StateFeed) -> None:
        self._board, self._feed = board, feed

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.Change:
        return to_message(Change(self._board.status, up=self._board.info, state=self._board.state))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Change]:
        async for change in self._board.watch():
            yield to_message(change)

    async def Release(self, request: pb.ConversationRequest, context: Context) -> pb.HeldReply:
        try:
            return pb.HeldReply(held=await self._feed.release(request.conversation))
        except FeedUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise  # abort has raised already

    async def Park(self, request: pb.ConversationRequest, context: Context) -> pb.HeldReply:
        try:
            return pb.HeldReply(held=await self._feed.park(request.conversation))
        except FeedUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise  # abort has raised already

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        try:
            await self._feed.drain(request.on)
        except FeedUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise  # abort has raised already
        return pb.DrainReply()


class ControlServer:
    """Listens before the keeper runs, so that its address is known when the engine is announced."""

    def __init__(self, board: Board, feed: StateFeed, secret: str) -> None:
        self._server = grpc.aio.server(interceptors=(RequireSecret(secret),))
        rpc.add_EngineControlServicer_to_server(ControlService(board, feed), self._server)

    async def start(self, host: str, port: int = 0) -> str:
        """Listen on `host`, on `port` if it is free, else on another; gives the address."""
        bound = 0
        if port:
            try:
                bound = self._server.add_insecure_port(f"{host}:{port}")
            except RuntimeError:
                bound = 0
        bound = bound or self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        return f"{host}:{bound}"

    async def stop(self) -> None:
        await self._server.stop(grace=1.0)
