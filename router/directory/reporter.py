"""What happened to turns, sent to the directory in order, many at a time, off the request's path."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from router import metrics
from router.directory import directory_pb2 as pb

log = logging.getLogger("conserve.router.directory.reporter")

_BATCH = 2000
_MAX_PENDING = 200_000
_TIMEOUT_S = 5.0
_PACE_S = 0.02
_RETRY_S = 0.25


class Reporter:
    def __init__(self, stub: Any, gateway: str, on_unknown: Callable[[str], None]) -> None:
        self._stub = stub
        self._gateway = gateway
        self._on_unknown = on_unknown
        self._pending: deque[pb.Activity] = deque()
        self._some = asyncio.Event()

    def add(self, activity: pb.Activity) -> None:
        if len(self._pending) >= _MAX_PENDING:
            self._pending.popleft()
            metrics.FALLBACKS.labels("report_dropped").inc()
        self._pending.append(activity)
        self._some.set()

    async def run(self) -> None:
        """No delay after a pause; then at most one call a `_PACE_S`, with all that came meanwhile: a call
        costs the gateway as much as a turn."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(_BATCH, len(self._pending)))]
                if await self._send(batch):
                    await asyncio.sleep(_PACE_S)
                else:
                    self._pending.extendleft(reversed(batch))
                    await asyncio.sleep(_RETRY_S)

    async def _send(self, batch: list[pb.Activity]) -> bool:
        request = pb.ReportRequest(gateway=self._gateway, activities=batch)
        try:
            reply = await self._stub.Report(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as wrong:
            log.debug("report not delivered reason=%s", wrong.code().name)
            return False
        for key in reply.unknown:
            self._on_unknown(key)
        return True
