"""Asks the directory for places, many in one call: turns that begin together share its cost."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc

from router.directory import directory_pb2 as pb

_BATCH = 500
_PACE_S = 0.002


@dataclass(slots=True)
class _Asked:
    request: pb.PlaceRequest
    timeout_s: float
    answer: asyncio.Future[pb.PlaceReply] = field(default_factory=asyncio.Future)


class Asker:
    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._pending: list[_Asked] = []
        self._some = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, request: pb.PlaceRequest, timeout_s: float) -> pb.PlaceReply:
        """Raises grpc's error or TimeoutError. Who gives up on it reports its turn as ended."""
        asked = _Asked(request, timeout_s)
        self._pending.append(asked)
        self._some.set()
        async with asyncio.timeout(timeout_s):
            return await asked.answer

    async def run(self) -> None:
        """The first after a pause is asked at once; what comes while it is, in the next call."""
        try:
            while True:
                await self._some.wait()
                self._some.clear()
                while self._pending:
                    batch, self._pending = self._pending[:_BATCH], self._pending[_BATCH:]
                    call = asyncio.create_task(self._call([one for one in batch if not one.answer.done()]))
                    self._calls.add(call)
                    call.add_done_callback(self._calls.discard)
                    await asyncio.sleep(_PACE_S)
        finally:
            for call in self._calls:
                call.cancel()

    async def _call(self, batch: list[_Asked]) -> None:
        if not batch:
            return
        request = pb.PlacesRequest(asks=[one.request for one in batch])
        longest = max(one.timeout_s for one in batch)
        wrong: Exception = TimeoutError("the directory ended the call without an answer")
        try:
            async for some in self._stub.Place(request, timeout=longest, wait_for_ready=True):
                for reply in some.replies:
                    if not batch[reply.index].answer.done():
                        batch[reply.index].answer.set_result(reply)
        except grpc.aio.AioRpcError as error:
            wrong = error
        finally:
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(wrong)
