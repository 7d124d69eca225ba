"""Queues requests of the service tier flex, which wait for capacity and run as offline requests.

A flex request is not durable, because its client waits for it. It competes with the batches of its owner as
if it were a batch that ends when the request's wait ends. It belongs to no conversation, so any engine may
run it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from placement.engines import EngineInfo, EngineState
from router.batch.dispatch.in_flight import InFlight
from router.batch.metrics import FLEX
from router.batch.store.records import Backlog, OfflineRequest
from router.errors import TooManyRequests


@dataclass(frozen=True, slots=True)
class FlexSlot:
    """Permission for one flex request to run on an engine, which it holds until it ends."""

    engine: EngineInfo
    timeout_s: float  # how long the engine's first byte may take


@dataclass(frozen=True, eq=False, slots=True)
class FlexJob:
    owner: str
    prefix: str
    est_tokens: int
    since: float
    until: float
    granted: asyncio.Future[EngineInfo]
    tries: int = 0


class FlexQueue:
    def __init__(
        self, in_flight: InFlight, timeout_s: float, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._wake = wake
        self._clock = clock
        self._waiting: dict[str, list[FlexJob]] = {}
        self._numbers: dict[int, str] = {}

    @asynccontextmanager
    async def slot(self, owner: str, request: OfflineRequest) -> AsyncIterator[FlexSlot]:
        """Wait for a slot at an engine; raise a 429, as OpenAI does, if no slot becomes free in time."""
        now = self._clock()
        job = FlexJob(
            owner=owner,
            prefix=request.prefix,
            est_tokens=request.est_tokens,
            since=now,
            until=now + self._timeout_s,
            granted=asyncio.get_running_loop().create_future(),
        )
        self._waiting.setdefault(owner, []).append(job)
        self._wake()
        engine = await self._granted(job)
        try:
            yield FlexSlot(engine, max(1.0, job.until - self._clock()))
            FLEX.labels("served").inc()
        finally:
            self._in_flight.remove(job)
            self._wake()

    async def _granted(self, job: FlexJob) -> EngineInfo:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await job.granted
        except (TimeoutError, asyncio.CancelledError) as ended:
            self._forget(job)
            if job.granted.done() and not job.granted.cancelled():  # granted at the same moment
                self._in_flight.remove(job)
                self._wake()
            if isinstance(ended, asyncio.CancelledError):
                FLEX.labels("client_left").inc()
                raise
            FLEX.labels("no_capacity").inc()
            raise TooManyRequests(
                "No capacity for flex work now. Try again later or use the default service tier.",
                code="resource_unavailable",
                retry_after_s=60.0,
            ) from None

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def backlog(self) -> list[Backlog]:
        """Return a backlog for each waiting owner, with a negative number in place of a batch's number."""
        self._numbers = {-number: owner for number, owner in enumerate(sorted(self._waiting), start=1)}
        return [self._backlog_of(number, self._waiting[owner]) for number, owner in self._numbers.items()]

    @staticmethod
    def _backlog_of(number: int, jobs: list[FlexJob]) -> Backlog:
        return Backlog(
            batch=number,
            owner=jobs[0].owner,
            pending=len(jobs),
            leased=0,
            accepting=True,
            est_tokens=sum(job.est_tokens for job in jobs) // len(jobs),
            created_at=int(jobs[0].since),
            expires_at=int(jobs[0].until),
        )

    def take(self, number: int, count: int) -> list[FlexJob]:
        return self._waiting.get(self._numbers[number], [])[:count]

    def grant(self, job: FlexJob, engine: EngineInfo, state: EngineState | None) -> None:
        if job.granted.done():
            return  # its client left while a place was being found
        self._forget(job)
        self._in_flight.add(job, engine, state, job.prefix, job.est_tokens, job.tries)
        job.granted.set_result(engine)

    def _forget(self, job: FlexJob) -> None:
        waiting = self._waiting.get(job.owner, [])
        if job in waiting:
            waiting.remove(job)
        if not waiting:
            self._waiting.pop(job.owner, None)
