"""Keep one engine running: start or adopt it, warm it, announce it, watch it, start it again when lost."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from placement.engines import EngineInfo
from workers.keeper import engine_log, metrics
from workers.keeper.engine_http import EngineFacts, EngineHttp, EngineHttpError
from workers.keeper.engine_log import Diagnosis, diagnose
from workers.keeper.engine_memory import MemoryLimit, machine_bytes
from workers.keeper.engine_status import ConnectorFeed, KeeperPhase, StatusStore
from workers.keeper.launch import EngineKeys, LaunchSpec, Start, engine_command
from workers.keeper.lmcache_server import LmcacheServer
from workers.keeper.process_lease import LeasedProcess, last_epoch, start_slot
from workers.oom_score import OomScore
from workers.processes import Backoff, WorkerError, free_port
from workers.profiles import StartingKnowledge

log = logging.getLogger("conserve.workers.keeper")


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    start_together: int | None = None  # engines of this host that may start at the same time; None: all
    start_limit_s: float = 900.0  # not healthy by then: failed
    stall_limit_s: float = 300.0  # nothing logged for so long while starting: failed
    warm_limit_s: float = 300.0
    tier_limit_s: float = 120.0  # the shared tier's server does not answer by then: the engine starts without
    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0
    health_misses: int = 10  # in a row, before a restart
    memory_gib: float | None = None  # of the engine's processes, before a restart; None: see `MemoryLimit.of`
    kv_gib: float = 0.0  # KV that the engine keeps in host memory
    lease_s: float = 60.0
    end_grace_s: float = 10.0
    backoff_first_s: float = 1.0
    backoff_longest_s: float = 60.0
    calm_after_s: float = 300.0  # serving for so long, the next failure starts again at the first back-off


class StartFailed(WorkerError):
    """The engine did not come to serve; says why, and how its log ended."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(str(diagnosis))
        self.diagnosis = diagnosis


@dataclass(frozen=True, slots=True)
class Running:
    process: LeasedProcess
    http: EngineHttp
    log_from: int  # where this run begins in the log


class Keeper:
    def __init__(
        self,
        spec: LaunchSpec,
        settings: KeeperSettings,
        store: StatusStore,
        feed: ConnectorFeed,
        *,
        keys: EngineKeys,
        control: str,
        shared_tier: LmcacheServer | None = None,
        known: StartingKnowledge | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._settings, self._store, self._feed = spec, settings, store, feed
        self._keys, self._control, self._clock = keys, control, clock
        self._shared_tier, self._known = shared_tier, known or StartingKnowledge()
        self._process: LeasedProcess | None = None
        metrics.from_zero(spec.engine)
        self._backoff = Backoff(settings.backoff_first_s, settings.backoff_longest_s, settings.calm_after_s)

    async def run(self) -> None:
        """Until cancelled; the engine then goes on for its lease. `end` ends it."""
        renewing = asyncio.create_task(self._renew())
        tier = asyncio.create_task(self._shared_tier.keep()) if self._shared_tier else None
        try:
            adopted = await asyncio.to_thread(self._adopt)
            while True:
                reason, lines = await self._one_epoch(adopted)
                adopted = None
                await self._end_process()
                wait_s = self._backoff.next(self._clock())
                log.warning(
                    "engine does not serve engine=%s reason=%r next_start_s=%.0f",
                    self._spec.engine,
                    reason,
                    wait_s,
                )
                self._store.tell(
                    KeeperPhase.BACKING_OFF,
                    f"next start in {wait_s:.0f} s",
                    pid=0,
                    failure=reason,
                    log_lines=lines,
                    restarts=self._store.status.restarts + 1,
                    failures=self._backoff.failures,
                )
                await asyncio.sleep(wait_s)
        finally:
            renewing.cancel()
            if tier is not None:
                tier.cancel()

    async def end(self) -> None:
        """End the engine and its whole tree."""
        await self._end_process()
        self._store.tell(KeeperPhase.STOPPED, pid=0)

    async def _one_epoch(self, adopted: LeasedProcess | None) -> tuple[str, tuple[str, ...]]:
        """Bring the engine up and watch it until it is lost; says why, and how its log ended."""
        self._store.tell(KeeperPhase.WAITING)
        slots = None if adopted else self._settings.start_together
        began = self._clock()
        outcome = "adopted" if adopted else "served"
        try:
            async with start_slot(self._spec.directory.parent, slots):
                running = self._resume(adopted) if adopted else self._start(await self._tier_address())
                try:
                    info = await self._bring_up(running, adopted is None)
                except BaseException:
                    await running.http.close()
                    raise
        except StartFailed as failure:
            metrics.ENGINE_STARTS.labels(self._spec.engine, "failed").inc()
            return str(failure), failure.diagnosis.excerpt
        metrics.ENGINE_STARTS.labels(self._spec.engine, outcome).inc()
        metrics.ENGINE_START_SECONDS.labels(self._spec.engine).observe(self._clock() - began)
        log.info(
            "engine serves engine=%s start=%s epoch=%d http=%s",
            self._spec.engine,
            outcome,
            info.epoch,
            info.http,
        )
        try:
            return await self._serve(running, info)
        finally:
            await running.http.close()

    def _adopt(self) -> LeasedProcess | None:
        grace_s = self._settings.end_grace_s
        self._process = LeasedProcess.adopt(self._spec.directory, self._spec.fingerprint(), grace_s)
        return self._process

    def _resume(self, process: LeasedProcess) -> Running:
        return Running(process, self._http(process), max(0, engine_log.log_size(process.log) - (64 << 10)))

    async def _tier_address(self) -> str:
        """Empty without a shared tier, or when its server does not answer: the engine serves without."""
        if self._shared_tier is None:
            return ""
        address = await self._shared_tier.address(self._settings.tier_limit_s)
        if not address:
            metrics.WITHOUT_TIER.labels(self._spec.engine).inc()
            log.warning("engine %s starts without LMCache: its server does not answer", self._spec.engine)
        return address

    def _start(self, lmcache: str) -> Running:
        spec = self._spec
        # Later than any epoch before, also of the same engine on a node that is gone with its records.
        epoch = max(last_epoch(spec.directory) + 1, int(time.time()))
        start = Start(epoch, free_port(spec.host), free_port(spec.host), lmcache, self._known)
        log_from = engine_log.log_size(spec.directory / "log")
        self._process = LeasedProcess.start(
            spec.directory,
            engine_command(spec, start, self._keys, os.environ),
            fingerprint=spec.fingerprint(),
            epoch=epoch,
            ports=(start.http_port, start.transfer_port),
            lease_s=self._settings.lease_s,
            grace_s=self._settings.end_grace_s,
            oom_score=OomScore.ENGINE,
        )
        return Running(self._process, self._http(self._process), log_from)

    def _http(self, process: LeasedProcess) -> EngineHttp:
        address = f"{self._spec.host}:{process.record.ports[0]}"
        embeds = ("runner", "pooling") in self._spec.options
        return EngineHttp(address, self._spec.served_name, self._keys.http, embeds=embeds)

    async def _bring_up(self, running: Running, new: bool) -> EngineInfo:
        record = running.process.record
        self._store.tell(KeeperPhase.STARTING, epoch=record.epoch, pid=record.pid)
        await self._until_healthy(running)
        self._store.tell(KeeperPhase.WARMING)
        try:
            facts = await running.http.facts(self._settings.warm_limit_s)
            await running.http.first(self._settings.warm_limit_s)
        except EngineHttpError as error:
            raise StartFailed(self._diagnosis(running, str(error))) from error
        if new:  # one that is adopted serves users meanwhile
            await self._warm(running, facts)
        return self._info(running, facts)

    async def _warm(self, running: Running, facts: EngineFacts) -> None:
        """It serves without, too: then a user's first prompt waits for what this would have done."""
        try:
            await running.http.warm(self._settings.warm_limit_s, facts.warm_tokens)
        except EngineHttpError as error:
            metrics.NOT_WARMED.labels(self._spec.engine).inc()
            log.warning("engine %s serves without having been warmed: %s", self._spec.engine, error)

    async def _until_healthy(self, running: Running) -> None:
        limit = self._clock() + self._settings.start_limit_s
        size, moved = -1, self._clock()
        while not await running.http.healthy(self._settings.health_timeout_s):
            if not running.process.alive():
                raise StartFailed(self._diagnosis(running, ""))
            grown = engine_log.log_size(running.process.log)
            if grown != size:
                size, moved = grown, self._clock()
                self._store.tell(KeeperPhase.STARTING, engine_log.start_stage(self._lines(running)))
            stage = self._store.status.detail
            if self._clock() - moved > self._settings.stall_limit_s:
                waited = f"logged nothing for {self._settings.stall_limit_s:.0f} s while {stage}"
                raise StartFailed(self._diagnosis(running, waited))
            if self._clock() > limit:
                waited = f"not healthy after {self._settings.start_limit_s:.0f} s, while {stage}"
                raise StartFailed(self._diagnosis(running, waited))
            await asyncio.sleep(self._settings.health_interval_s)

    async def _serve(self, running: Running, info: EngineInfo) -> tuple[str, tuple[str, ...]]:
        self._store.engine_up(info)
        self._store.tell(KeeperPhase.SERVING, failure="", log_lines=())
        metrics.ENGINE_UP.labels(info.engine).set(1)
        self._backoff.serving(self._clock())
        feeding = asyncio.create_task(self._feed.follow(self._store))
        try:
            cause, reason = await self._until_lost(running)
        finally:
            feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await feeding
            metrics.ENGINE_UP.labels(info.engine).set(0)
        metrics.ENGINE_LOST.labels(info.engine, cause).inc()
        self._store.engine_down()
        diagnosis = self._diagnosis(running, reason)
        told = reason if diagnosis.cause == reason else f"{reason} ({diagnosis.cause})"
        return told, diagnosis.excerpt

    async def _until_lost(self, running: Running) -> tuple[str, str]:
        misses = 0
        limit = await asyncio.to_thread(self._memory_limit, running.process)
        while running.process.alive():
            has = await asyncio.to_thread(running.process.memory_bytes, limit.limit_bytes)
            metrics.MEMORY_BYTES.labels(self._spec.engine).set(has)
            if reached := limit.reached(has):
                return "memory", reached
            if await running.http.healthy(self._settings.health_timeout_s):
                misses = 0
            else:
                misses += 1
                metrics.HEALTH_MISSES.labels(self._spec.engine).inc()
                if misses >= self._settings.health_misses:
                    return "unhealthy", f"missed {misses} health checks in a row"
            await asyncio.sleep(self._settings.health_interval_s)
        return "exited", "its process ended"

    def _memory_limit(self, process: LeasedProcess) -> MemoryLimit:
        settings = self._settings
        limit = MemoryLimit.of(settings.memory_gib, settings.kv_gib, process.idle_bytes(), machine_bytes())
        metrics.MEMORY_LIMIT_BYTES.labels(self._spec.engine).set(limit.limit_bytes)
        return limit

    async def _renew(self) -> None:
        while True:
            if self._process is not None:
                self._process.renew()
            await asyncio.sleep(min(1.0, self._settings.lease_s / 10))

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._store.engine_down()
            if not await asyncio.to_thread(process.end, self._settings.end_grace_s):
                log.error("process does not end engine=%s pid=%d", self._spec.engine, process.record.pid)

    def _info(self, running: Running, facts: EngineFacts) -> EngineInfo:
        spec, record = self._spec, running.process.record
        return EngineInfo(
            engine=spec.engine,
            tier=spec.tier,
            role=spec.role,
            epoch=record.epoch,
            http=running.http.address,
            transfer=f"{spec.host}:{record.ports[1]}" if spec.connector else "",
            control=self._control,
            kv_tokens=facts.kv_tokens,
            block_tokens=facts.block_tokens,
            max_context=facts.max_context or spec.max_context or 0,
        )

    def _lines(self, running: Running) -> list[str]:
        return engine_log.last_lines(running.process.log, 1000, since=running.log_from)

    def _diagnosis(self, running: Running, reason: str) -> Diagnosis:
        found = diagnose(self._lines(running))
        if reason and found.cause == "unknown cause":
            return Diagnosis(reason, found.advice, found.evidence, found.excerpt)
        return found
