"""Service tier flex: a normal request that waits for room among the offline work, and runs as such.

Not durable: its client waits for it. It competes with the batches of its key as a batch that closes first.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from placement.engines import EngineInfo, EngineState
from router.batch.answers import offline_body
from router.batch.executor import OFFLINE_PRIORITY
from router.batch.flights import Flights
from router.batch.metrics import FLEX
from router.batch.prefix import prefix_key
from router.batch.records import Backlog
from router.batch.validate import estimated_tokens
from router.errors import TooManyRequests


@dataclass(frozen=True, slots=True)
class FlexSlot:
    """Room at an engine, held until the request has ended."""

    engine: EngineInfo
    body: bytes  # as it goes to the engine
    timeout_s: float  # for the engine's first byte


@dataclass(frozen=True, eq=False, slots=True)
class FlexJob:
    owner: str
    prefix: str
    est_tokens: int
    since: float
    until: float
    granted: asyncio.Future[EngineInfo]
    tries: int = 0


class FlexDesk:
    def __init__(
        self, flights: Flights, timeout_s: float, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._flights = flights
        self._timeout_s = timeout_s
        self._wake = wake
        self._clock = clock
        self._waiting: dict[str, list[FlexJob]] = {}
        self._numbers: dict[int, str] = {}

    @asynccontextmanager
    async def slot(self, owner: str, body: Mapping[str, Any], size: int) -> AsyncIterator[FlexSlot]:
        """Wait for room, or raise 429 as OpenAI does when flex has none. `size`: bytes of the body."""
        now = self._clock()
        job = FlexJob(
            owner=owner,
            prefix=prefix_key(body),
            est_tokens=estimated_tokens(size, body),
            since=now,
            until=now + self._timeout_s,
            granted=asyncio.get_running_loop().create_future(),
        )
        self._waiting.setdefault(owner, []).append(job)
        self._wake()
        engine = await self._granted(job)
        try:
            left = max(1.0, job.until - self._clock())
            yield FlexSlot(engine, offline_body(body, OFFLINE_PRIORITY), left)
            FLEX.labels("served").inc()
        finally:
            self._flights.land(job)
            self._wake()

    async def _granted(self, job: FlexJob) -> EngineInfo:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await job.granted
        except (TimeoutError, asyncio.CancelledError) as ended:
            self._forget(job)
            if job.granted.done() and not job.granted.cancelled():  # granted in the same moment
                self._flights.land(job)
                self._wake()
            if isinstance(ended, asyncio.CancelledError):
                FLEX.labels("client_left").inc()
                raise
            FLEX.labels("no_room").inc()
            raise TooManyRequests(
                "No room for flex work now. Try again later or use the default service tier.",
                code="resource_unavailable",
                retry_after_s=60.0,
            ) from None

    def backlog(self) -> list[Backlog]:
        """One entry a key, under a negative number so that it meets no batch's."""
        self._numbers = {-number: owner for number, owner in enumerate(sorted(self._waiting), start=1)}
        return [
            Backlog(
                batch=number,
                owner=owner,
                pending=len(self._waiting[owner]),
                leased=0,
                accepting=True,
                est_tokens=sum(job.est_tokens for job in self._waiting[owner]) // len(self._waiting[owner]),
                created_at=int(self._waiting[owner][0].since),
                expires_at=int(self._waiting[owner][0].until),
            )
            for number, owner in self._numbers.items()
        ]

    def take(self, number: int, count: int) -> list[FlexJob]:
        return self._waiting.get(self._numbers[number], [])[:count]

    def grant(self, job: FlexJob, engine: EngineInfo, state: EngineState | None) -> None:
        if job.granted.done():
            return  # its client left while the room was being found
        self._forget(job)
        self._flights.depart(job, engine, state, job.prefix, job.est_tokens, job.tries)
        job.granted.set_result(engine)

    def _forget(self, job: FlexJob) -> None:
        waiting = self._waiting.get(job.owner, [])
        if job in waiting:
            waiting.remove(job)
        if not waiting:
            self._waiting.pop(job.owner, None)
