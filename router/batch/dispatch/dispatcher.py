"""Runs the loops of offline work: dispatch requests, validate and finish batches, make results durable."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from router.batch.config import BatchConfig
from router.batch.dispatch.executor import Executor, ResultWriter
from router.batch.dispatch.flex import FlexJob, FlexQueue
from router.batch.dispatch.in_flight import Engines, InFlight
from router.batch.dispatch.lifecycle import BatchLifecycle
from router.batch.dispatch.policy import (
    SUSPECT_AFTER,
    Allowance,
    FairShare,
    Rate,
    allowance_of,
    assign,
    share_out,
)
from router.batch.dispatch.validation import Validator
from router.batch.metrics import BACKLOG, NEAREST_DEADLINE, OLDEST_AGE, STEP_ERRORS, URGENT
from router.batch.store.blobs import Blobs
from router.batch.store.database import StoreTakenOver, reason_of
from router.batch.store.records import Backlog, ClaimedRequest
from router.batch.store.request_table import PutBack
from router.batch.store.store import Store
from router.http import UpstreamPool
from router.identity.prefix_groups import PrefixGroups

log = logging.getLogger("conserve.router.batch.dispatcher")

Value = TypeVar("Value")
_DRY_S = 1.0  # a batch with fewer lines due than were wanted is left alone for this long
_IDLE_S = 2.0  # pause of the loops while no batch is live and no flex turn waits; a new one wakes them
_FAULT_S = 5.0
_GATHER_S = 0.005  # pause after a pass that sent something, so that the next pass claims several at once


class Dispatcher:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        engines: Callable[[], Engines],
        pool: UpstreamPool,
        config: BatchConfig,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._engines = engines
        self._settings = settings = config.dispatch
        self._clock = clock
        self._threads = ThreadPoolExecutor(6, thread_name_prefix="conserve-batch")
        self._wake = asyncio.Event()
        self._validate_wake, self._end_wake = asyncio.Event(), asyncio.Event()
        self._in_flight = InFlight(settings, clock)
        self._results = ResultWriter(store, self._in_thread)
        groups = PrefixGroups(config.shared_prefixes)
        self._executor = Executor(
            pool,
            self._in_flight,
            self._results,
            settings,
            self._tried,
            clock,
            groups,
            config.limits.prompt_bytes_per_token,
        )
        self.flex = FlexQueue(self._in_flight, config.flex_timeout_s, self._wake.set, clock)
        validator = Validator(store, blobs, config, clock)
        self._lifecycle = BatchLifecycle(
            store, blobs, validator, settings.cancel_grace_s, clock, config.file_ttl_s
        )
        self._fair = FairShare()
        self._rate = Rate(clock)
        self._dry: dict[int, float] = {}

    def batches_changed(self) -> None:
        """Wake the loops, because batches were created, validated or cancelled."""
        for event in (self._validate_wake, self._end_wake, self._wake):
            event.set()

    async def run(self) -> None:
        """Run until cancelled, or until another process takes over the store."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._results.run())
                tasks.create_task(self._repeat(self._dispatch, self._wake))
                tasks.create_task(self._repeat(self._validate, self._validate_wake))
                tasks.create_task(self._repeat(self._end, self._end_wake))
        finally:
            await self._executor.stop()
            await asyncio.shield(self._results.flush())
            await asyncio.to_thread(self._threads.shutdown)

    def _pause_s(self) -> float:
        busy = self._lifecycle.live or self.flex.waiting
        return self._settings.tick_s if busy else _IDLE_S

    async def _repeat(self, step: Callable[[], Awaitable[bool]], wake: asyncio.Event) -> None:
        """Repeat `step`, also after errors; pause until woken or for a while, unless it returned True."""
        while True:
            more = False
            try:
                more = await step()
            except StoreTakenOver:
                raise
            except (SQLAlchemyError, OSError) as error:
                STEP_ERRORS.labels("store").inc()
                log.warning("step failed, trying again step=%s reason=%r", step.__name__, reason_of(error))
                await asyncio.sleep(self._settings.tick_s)
            except Exception:  # an error in one step must not end the other loops
                STEP_ERRORS.labels("fault").inc()
                log.exception("step failed, trying again step=%s", step.__name__)
                await asyncio.sleep(_FAULT_S)
            if more:
                continue
            try:
                async with asyncio.timeout(self._pause_s()):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()

    async def _in_thread(self, work: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _validate(self) -> bool:
        worked = await self._in_thread(self._lifecycle.validate_one)
        if worked:
            self.batches_changed()
        return worked

    async def _end(self) -> bool:
        return await self._in_thread(self._lifecycle.end_one)

    async def _dispatch(self) -> bool:
        backlog = await self._in_thread(self._store.requests.backlog)
        self._observe(backlog)
        engines = self._engines()
        slots = self._in_flight.slots(engines)
        self._executor.abort_closed({batch.batch for batch in backlog})
        self._executor.abort_lost(engines)
        allowances = {one.engine: allowance_of(one, self._settings) for one in slots}
        usable = [allowance for allowance in allowances.values() if allowance.requests]
        free = Allowance(sum(one.requests for one in usable), sum(one.tokens for one in usable))
        waiting = [*self.flex.backlog(), *self._not_dry(backlog)]
        if not backlog and not waiting:
            self._rate.idle()
        wanted, urgent = share_out(waiting, free, self._fair, self._clock(), self._rate.value)
        if not wanted:
            return False
        URGENT.inc(urgent)
        jobs: list[ClaimedRequest | FlexJob] = []
        for number in (number for number in wanted if number < 0):
            jobs += self.flex.take(number, wanted[number])
        jobs += await self._claim({batch: count for batch, count in wanted.items() if batch > 0}, waiting)
        placed, left = assign(jobs, slots, allowances, self._in_flight.warm)
        await self._send(placed, engines)
        for job in left:
            if isinstance(job, ClaimedRequest):
                suspect = job.tries >= SUSPECT_AFTER  # waits until another suspect has ended
                until = self._clock() + _DRY_S if suspect else 0.0
                self._results.put_back(PutBack(job.batch, job.line, until, counts_as_try=False))
        await asyncio.sleep(_GATHER_S)
        return False

    def _not_dry(self, backlog: list[Backlog]) -> list[Backlog]:
        now = self._clock()
        self._dry = {batch: until for batch, until in self._dry.items() if until > now}
        return [batch for batch in backlog if batch.batch not in self._dry]

    async def _claim(self, wanted: dict[int, int], waiting: list[Backlog]) -> list[ClaimedRequest]:
        if not wanted:
            return []
        now = self._clock()
        claimed = await self._in_thread(lambda: self._store.requests.claim(wanted, now))
        for batch in waiting:
            missing = wanted.get(batch.batch, 0) - sum(line.batch == batch.batch for line in claimed)
            if missing > 0:
                self._dry[batch.batch] = now + _DRY_S
                self._fair.charge(batch.owner, -missing * batch.est_tokens)
        return claimed

    async def _send(self, placed: list[tuple[ClaimedRequest | FlexJob, str]], engines: Engines) -> None:
        known = {info.engine: (info, state) for info, state in engines}
        requests = [(job, engine) for job, engine in placed if isinstance(job, ClaimedRequest)]
        lines = await self._in_thread(lambda: [self._line(request) for request, _ in requests])
        for (request, engine), line in zip(requests, lines, strict=True):
            if line is None:
                until = self._clock() + _DRY_S
                self._results.put_back(PutBack(request.batch, request.line, until, counts_as_try=False))
            else:
                self._executor.send(request, line, *known[engine])
        for job, engine in placed:
            if isinstance(job, FlexJob):
                self.flex.grant(job, *known[engine])

    def _line(self, request: ClaimedRequest) -> bytes | None:
        """Read the bytes of a request's line. Return None if the files are unavailable."""
        try:
            return self._blobs.part(request.input_file_id, request.offset, request.length)
        except OSError as error:
            STEP_ERRORS.labels("store").inc()
            kind = type(error).__name__
            log.warning("line not read, trying again file=%s error=%s", request.input_file_id, kind)
            return None

    def _tried(self, request: ClaimedRequest, tokens: int | None) -> None:
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
