"""The loops of one gateway's offline work: heartbeat, dispatch by the policy, care for the batches."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from placement.engines import EngineInfo, EngineState
from router.batch.blobs import Blobs
from router.batch.config import BatchConfig
from router.batch.executor import Executor
from router.batch.fairness import FairShare
from router.batch.fleet import Fleet, Presence
from router.batch.flex import FlexDesk, FlexJob
from router.batch.flights import Flights
from router.batch.intake import Intake
from router.batch.ledger import Ledger
from router.batch.metrics import BACKLOG, NEAREST_DEADLINE, OLDEST_AGE, STEP_ERRORS, TAKEN_OVER, URGENT
from router.batch.policy import Room, assign, room_of, share_out
from router.batch.rate import Rate
from router.batch.records import Backlog, ClaimedRequest
from router.batch.steward import Steward
from router.batch.store.requests import PutBack
from router.batch.store.store import Store
from router.http import UpstreamPool

log = logging.getLogger("conserve.router.batch.dispatcher")

Value = TypeVar("Value")
_DRY_S = 1.0  # a batch whose lines all back off is not asked again for this long
_IDLE_STEWARD_S = 1.0
_FAULT_S = 5.0


class Dispatcher:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        fleet: Fleet,
        pool: UpstreamPool,
        config: BatchConfig,
        engine_api_key: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = f"dispatcher-{secrets.token_hex(8)}"
        self._store = store
        self._blobs = blobs
        self._fleet = fleet
        self._settings = config.dispatch
        self._clock = clock
        self._threads = ThreadPoolExecutor(6, thread_name_prefix="conserve-batch")
        self._wake = asyncio.Event()
        self._tend = asyncio.Event()
        self._flights = Flights(self._settings, clock)
        self._ledger = Ledger(store, self.id, self._in_thread)
        self._executor = Executor(
            pool,
            self._flights,
            self._ledger,
            config.limits,
            self._settings,
            self._landed,
            clock,
            engine_api_key,
        )
        self.flex = FlexDesk(self._flights, config.flex_timeout_s, self._wake.set, clock)
        intake = Intake(store, blobs, config.limits, fleet.models, clock)
        self._steward = Steward(store, blobs, intake, self.id, self._settings.cancel_grace_s, clock)
        self._fair = FairShare()
        self._rate = Rate(clock)
        self._presence = Presence(self._settings.lease_s, clock)
        self._dry: dict[int, float] = {}
        self._dispatchers = 1

    def batches_changed(self) -> None:
        """A batch was created or cancelled here: look at once."""
        self._tend.set()

    async def run(self) -> None:
        """Until cancelled; then gives its leases back."""
        await self._in_thread(self._beat)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ledger.run())
                tasks.create_task(self._repeat(self._heartbeat, self._settings.lease_s / 3))
                tasks.create_task(self._repeat(self._dispatch, self._settings.tick_s, self._wake))
                tasks.create_task(self._repeat(self._take_in, _IDLE_STEWARD_S, self._tend))
                tasks.create_task(self._repeat(self._see_out, self._settings.tick_s))
        finally:
            await self._executor.stop()
            await asyncio.shield(self._leave())
            await asyncio.to_thread(self._threads.shutdown)

    async def _leave(self) -> None:
        await self._ledger.flush()
        await self._in_thread(lambda: self._store.requests.leave(self.id))

    async def _repeat(
        self, step: Callable[[], Awaitable[bool]], pause_s: float, wake: asyncio.Event | None = None
    ) -> None:
        """`step` says whether there is more to do at once. A store that is away is waited for."""
        wake = wake or asyncio.Event()
        while True:
            try:
                more = await step()
            except (SQLAlchemyError, OSError) as error:
                STEP_ERRORS.labels("store").inc()
                log.warning(
                    "step failed, trying again step=%s error=%s reason=%r",
                    step.__name__,
                    type(error).__name__,
                    str(error),
                )
                more = False
                await asyncio.sleep(pause_s)
            except Exception:  # one faulty step must not end the others: counted, logged, repeated
                STEP_ERRORS.labels("fault").inc()
                log.exception("step failed, trying again step=%s", step.__name__)
                more = False
                await asyncio.sleep(max(pause_s, _FAULT_S))
            if more:
                continue
            try:
                async with asyncio.timeout(pause_s):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()

    async def _in_thread(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _beat(self) -> int:
        return self._store.requests.heartbeat(self.id, self._clock(), self._settings.lease_s)

    async def _heartbeat(self) -> bool:
        taken_over = await self._in_thread(self._beat)
        self._dispatchers = max(1, await self._in_thread(self._store.requests.dispatchers_alive))
        if taken_over:
            TAKEN_OVER.inc(taken_over)
            log.warning("taken over from a dispatcher that is gone requests=%d", taken_over)
            self._wake.set()
        return False

    async def _take_in(self) -> bool:
        worked = await self._in_thread(self._steward.take_in)
        if worked:
            self._wake.set()
        return worked

    async def _see_out(self) -> bool:
        return await self._in_thread(self._steward.see_out)

    async def _dispatch(self) -> bool:
        backlog = await self._in_thread(self._store.requests.backlog)
        self._observe(backlog)
        engines = {info.engine: (info, self._fleet.state(info.engine)) for info in self._fleet.engines()}
        self._presence.see([info for info, _ in engines.values()])
        self._executor.abort_closed({batch.batch for batch in backlog})
        self._executor.abort_lost(self._presence.lost)
        views = self._flights.views(list(engines.values()))
        rooms = {view.engine: room_of(view, self._settings, self._dispatchers) for view in views}
        room = Room(
            sum(r.requests for r in rooms.values()), sum(r.tokens for r in rooms.values() if r.requests)
        )
        asking = [*self.flex.backlog(), *self._not_dry(backlog)]
        wanted, urgent = share_out(asking, room, self._fair, self._settings, self._clock(), self._rate.value)
        if not wanted:
            return False
        URGENT.inc(urgent)
        jobs: list[ClaimedRequest | FlexJob] = []
        for number in (number for number in wanted if number < 0):
            jobs += self.flex.take(number, wanted[number])
        jobs += await self._claim({batch: count for batch, count in wanted.items() if batch > 0}, asking)
        placed, left = assign(jobs, views, rooms, self._flights.warm, self._settings)
        await self._send(placed, engines)
        for job in left:
            if isinstance(job, ClaimedRequest):
                suspect = job.tries >= self._settings.suspect_after  # waits for another one to end
                until = self._clock() + _DRY_S if suspect else 0.0
                self._ledger.put_back(PutBack(job.batch, job.line, until, counts_as_try=False))
        await asyncio.sleep(self._settings.gather_s)
        return False

    def _not_dry(self, backlog: list[Backlog]) -> list[Backlog]:
        now = self._clock()
        self._dry = {batch: until for batch, until in self._dry.items() if until > now}
        return [batch for batch in backlog if batch.batch not in self._dry]

    async def _claim(self, wanted: dict[int, int], asking: list[Backlog]) -> list[ClaimedRequest]:
        if not wanted:
            return []
        now = self._clock()
        claimed = await self._in_thread(lambda: self._store.requests.claim(wanted, self.id, now))
        for batch in asking:
            missing = wanted.get(batch.batch, 0) - sum(line.batch == batch.batch for line in claimed)
            if missing > 0:
                self._dry[batch.batch] = now + _DRY_S
                self._fair.charge(batch.owner, -missing * batch.est_tokens)
        return claimed

    async def _send(
        self,
        placed: list[tuple[ClaimedRequest | FlexJob, str]],
        engines: dict[str, tuple[EngineInfo, EngineState | None]],
    ) -> None:
        requests = [(job, engine) for job, engine in placed if isinstance(job, ClaimedRequest)]
        lines = await self._in_thread(lambda: [self._line(request) for request, _ in requests])
        for (request, engine), line in zip(requests, lines, strict=True):
            self._executor.send(request, line, *engines[engine])
        for job, engine in placed:
            if isinstance(job, FlexJob):
                self.flex.grant(job, *engines[engine])

    def _line(self, request: ClaimedRequest) -> bytes:
        return self._blobs.part(request.input_file_id, request.offset, request.length)

    def _landed(self, request: ClaimedRequest, tokens: int | None) -> None:
        if tokens is not None:
            self._rate.add(request.est_tokens)
            self._fair.charge(request.owner, tokens - request.est_tokens)
        self._wake.set()

    def _observe(self, backlog: list[Backlog]) -> None:
        now = self._clock()
        BACKLOG.labels("pending").set(sum(batch.pending for batch in backlog))
        BACKLOG.labels("in_flight").set(sum(batch.leased for batch in backlog))
        OLDEST_AGE.set(max((now - batch.created_at for batch in backlog), default=0))
        NEAREST_DEADLINE.set(max(0, min((batch.expires_at - now for batch in backlog), default=0)))
