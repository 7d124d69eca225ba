"""Combines a gateway's messages to the directory into calls: requests for placement, reports on turns."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from placement.routing.receipts import Refusal
from router import metrics
from router.directory.api import messages as m
from router.directory.api.messages import Activity, Ask, Placed
from router.directory.api.rpc import BROKEN, BadReply, Stub

log = logging.getLogger("conserve.router.directory.calls")

_PLACES_A_CALL = 500
_PLACE_CALLS_EVERY_S = 0.002
_ACTIVITIES_A_CALL = 2000
_ACTIVITIES_PENDING = 200_000
_REPORT_EVERY_S = 0.02
REPORT_TIMEOUT_S = 5.0
_REPORT_RETRY_S = 0.25


@dataclass(slots=True)
class _WaitingAsk:
    ask: Ask
    timeout_s: float
    outcome: asyncio.Future[Placed | Refusal] = field(default_factory=asyncio.Future)


class PlaceCalls:
    """Combines requests for placement into calls, so that turns which begin together share the cost."""

    def __init__(self, stub: Stub, on_abandoned: Callable[[Ask], None]) -> None:
        """Create an idle sender. `on_abandoned` receives requests whose caller left before the call ended."""
        self._stub, self._on_abandoned = stub, on_abandoned
        self._pending: list[_WaitingAsk] = []
        self._some = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, ask: Ask, timeout_s: float) -> Placed | Refusal:
        """Ask for one placement. After an error the caller has to report that the turn will not run."""
        waiting = _WaitingAsk(ask, timeout_s)
        self._pending.append(waiting)
        self._some.set()
        async with asyncio.timeout(timeout_s):
            return await waiting.outcome

    async def run(self) -> None:
        """Send requests for placement until cancelled, in at most one call every `_PLACE_CALLS_EVERY_S`."""
        try:
            while True:
                await self._some.wait()
                self._some.clear()
                while self._pending:
                    batch, self._pending = self._pending[:_PLACES_A_CALL], self._pending[_PLACES_A_CALL:]
                    call = asyncio.create_task(self._call([one for one in batch if not one.outcome.done()]))
                    self._calls.add(call)
                    call.add_done_callback(self._calls.discard)
                    await asyncio.sleep(_PLACE_CALLS_EVERY_S)
        finally:
            for call in self._calls:
                call.cancel()

    async def _call(self, batch: list[_WaitingAsk]) -> None:
        if not batch:
            return
        asks = tuple(one.ask for one in batch)
        longest_s = max(one.timeout_s for one in batch)
        wrong: Exception = TimeoutError("the directory ended the call without an answer")
        try:
            async for answers in self._stub.stream(m.PLACE, asks, longest_s):
                for answer in answers:
                    outcome = answer.placed or answer.refused
                    if outcome is not None and not batch[answer.index].outcome.done():
                        batch[answer.index].outcome.set_result(outcome)
        except (grpc.aio.AioRpcError, BadReply) as error:
            wrong = error
        finally:
            for one in batch:
                if not one.outcome.done():
                    one.outcome.set_exception(wrong)
                elif one.outcome.cancelled():  # the directory may have placed the turn all the same
                    self._on_abandoned(one.ask)


class ActivityReports:
    """Sends reports about turns to the directory, in order and many at a time, in a task of its own."""

    def __init__(self, stub: Stub, gateway: str, on_unknown: Callable[[str], None]) -> None:
        self._stub, self._gateway, self._on_unknown = stub, gateway, on_unknown
        self._pending: deque[Activity] = deque()
        self._first = 0  # number of the first pending activity
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, activity: Activity) -> None:
        if len(self._pending) >= _ACTIVITIES_PENDING:
            self._pending.popleft()
            self._first += 1
            metrics.FALLBACKS.labels("report_dropped").inc()
        self._pending.append(activity)
        self._some.set()

    async def run(self) -> None:
        """Send the reports, in at most one call every `_REPORT_EVERY_S`: a call costs as much as a turn."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._pending:
                count = min(_ACTIVITIES_A_CALL, len(self._pending))
                batch = tuple(self._pending.popleft() for _ in range(count))
                if await self._send(batch):
                    self._first += len(batch)
                    await asyncio.sleep(_REPORT_EVERY_S)
                else:
                    self._pending.extendleft(reversed(batch))
                    await asyncio.sleep(_REPORT_RETRY_S)

    async def _send(self, batch: tuple[Activity, ...]) -> bool:
        request = m.ReportRequest(self._gateway, batch, self._first)
        try:
            unknown = await self._stub.ask(m.REPORT, request, REPORT_TIMEOUT_S)
        except (grpc.aio.AioRpcError, BadReply) as wrong:
            log.debug("report not delivered reason=%s", reason_of(wrong))
            return False
        for key in unknown:
            self._on_unknown(key)
        return True


def is_broken(wrong: Exception) -> bool:
    return isinstance(wrong, grpc.aio.AioRpcError) and wrong.code() is BROKEN


def reason_of(wrong: Exception) -> str:
    if isinstance(wrong, grpc.aio.AioRpcError):
        return str(wrong.code().name)
    return str(wrong) or "no answer"
