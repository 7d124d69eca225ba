"""Keeper of one engine: starts or adopts it, announces it, and restarts it when it is lost."""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable

from kvtransfer.control.control_socket import ControlSocketError
from placement.engines import EngineInfo
from workers.keeper import engine_log, metrics
from workers.keeper.config import KeeperSettings
from workers.keeper.engine_http import EngineFacts, EngineHttp
from workers.keeper.engine_status import EngineLink, KeeperPhase, StatusStore
from workers.keeper.launch import EngineKeys, LaunchSpec, Start, engine_command
from workers.keeper.lmcache_server import LmcacheServer
from workers.keeper.process_lease import LOG, LeasedProcess, last_epoch, start_slot
from workers.keeper.running_engine import ASKED, RunningEngine, StartFailed
from workers.oom_score import OomScore
from workers.processes import Backoff, free_port
from workers.profiles import StartingKnowledge

log = logging.getLogger("conserve.workers.keeper")

LEAVE_GRACE_S = 30.0  # after the time for a drain, an engine ends even if its keeper does not react
QUIET_S = 1.0  # a turn on its way from a gateway to the engine arrives within this time
LOOK_S = 0.2
ADOPTED_LOG_BYTES = 64 << 10  # bytes at the end of an adopted engine's log that are searched for causes


class Keeper:
    """Keeper of one engine, which runs it through its epochs. The engine outlives the keeper by its lease."""

    def __init__(
        self,
        spec: LaunchSpec,
        settings: KeeperSettings,
        store: StatusStore,
        feed: EngineLink,
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
        """Keep the engine running until cancelled. It then runs on for its lease, unless `end` is called."""
        renewing = asyncio.create_task(self._renew())
        tier = asyncio.create_task(self._shared_tier.keep()) if self._shared_tier else None
        try:
            adopted = await asyncio.to_thread(self._adopt)
            while True:
                reason, lines = await self._one_epoch(adopted)
                adopted = None
                await self._end_process()
                wait_s = self._backoff.next(self._clock())
                text = "engine does not serve engine=%s reason=%r next_start_s=%.0f"
                log.warning(text, self._spec.engine, reason, wait_s)
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
        """End the engine with its whole process tree."""
        await self._end_process()
        self._store.tell(KeeperPhase.STOPPED, pid=0)

    async def _one_epoch(self, adopted: LeasedProcess | None) -> tuple[str, tuple[str, ...]]:
        """Start the engine or use the `adopted` one; when it is lost, return the reason and the log lines."""
        self._store.tell(KeeperPhase.WAITING)
        name, began = self._spec.engine, self._clock()
        slots = None if adopted else self._settings.start_together
        outcome = "adopted" if adopted else "served"
        try:
            async with start_slot(self._spec.directory.parent, slots):
                running = self._running(adopted) if adopted else self._start(await self._tier_address())
                try:
                    info = await self._bring_up(running, new=adopted is None)
                except BaseException:
                    await running.http.close()
                    raise
        except StartFailed as failure:
            metrics.ENGINE_STARTS.labels(name, "failed").inc()
            return str(failure), failure.diagnosis.excerpt
        metrics.ENGINE_STARTS.labels(name, outcome).inc()
        metrics.ENGINE_START_SECONDS.labels(name).observe(self._clock() - began)
        log.info("engine serves engine=%s start=%s epoch=%d http=%s", name, outcome, info.epoch, info.http)
        try:
            return await self._serve(running, info)
        finally:
            await running.http.close()

    def _adopt(self) -> LeasedProcess | None:
        grace_s = self._settings.end_grace_s
        self._process = LeasedProcess.adopt(self._spec.directory, self._spec.fingerprint(), grace_s)
        return self._process

    async def _tier_address(self) -> str:
        """Return the address of the shared tier's server, empty if there is no tier or it does not answer."""
        if self._shared_tier is None:
            return ""
        address = await self._shared_tier.address(self._settings.tier_limit_s)
        if not address:
            metrics.WITHOUT_TIER.labels(self._spec.engine).inc()
            log.warning("engine %s starts without LMCache: its server does not answer", self._spec.engine)
        return address

    def _start(self, lmcache: str) -> RunningEngine:
        spec = self._spec
        # The time is above the epochs of the same engine on a node that is gone with its records.
        epoch = max(last_epoch(spec.directory) + 1, int(time.time()))
        start = Start(epoch, free_port(spec.host), free_port(spec.host), lmcache, self._known)
        log_from = engine_log.log_size(spec.directory / LOG)
        self._process = LeasedProcess.start(
            spec.directory,
            engine_command(spec, start, self._keys, os.environ),
            fingerprint=spec.fingerprint(),
            epoch=epoch,
            ports=(start.http_port, start.transfer_port),
            lease_s=self._settings.lease_s,
            grace_s=self._settings.end_grace_s,
            oom_score=OomScore.ENGINE,
            leave_s=self._settings.drain_s + LEAVE_GRACE_S,
        )
        return self._running(self._process, log_from)

    def _running(self, process: LeasedProcess, log_from: int | None = None) -> RunningEngine:
        spec = self._spec
        embeds = ("runner", "pooling") in spec.options
        address = f"{spec.host}:{process.record.ports[0]}"
        http = EngineHttp(address, spec.served_name, self._keys.http, embeds=embeds)
        if log_from is None:
            log_from = max(0, engine_log.log_size(process.log) - ADOPTED_LOG_BYTES)
        return RunningEngine(spec.engine, process, http, log_from, self._settings, self._clock)

    async def _bring_up(self, running: RunningEngine, *, new: bool) -> EngineInfo:
        record = running.process.record
        self._store.tell(KeeperPhase.STARTING, epoch=record.epoch, pid=record.pid)
        await running.wait_until_healthy(lambda stage: self._store.tell(KeeperPhase.STARTING, stage))
        self._store.tell(KeeperPhase.WARMING)
        return self._info(running, await running.warm(new=new))

    async def _serve(self, running: RunningEngine, info: EngineInfo) -> tuple[str, tuple[str, ...]]:
        self._store.engine_up(info)
        self._store.tell(KeeperPhase.SERVING, failure="", log_lines=())
        metrics.ENGINE_UP.labels(info.engine).set(1)
        self._backoff.serving(self._clock())
        feeding = asyncio.create_task(self._feed.follow(self._store))
        try:
            cause, reason = await running.watch()
            if cause == ASKED:
                await self._let_leave(running)
        finally:
            feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await feeding
            metrics.ENGINE_UP.labels(info.engine).set(0)
        metrics.ENGINE_LOST.labels(info.engine, cause).inc()
        self._store.engine_down()
        diagnosis = running.diagnosis(reason)
        description = reason if diagnosis.cause == reason else f"{reason} ({diagnosis.cause})"
        return description, diagnosis.excerpt

    async def _let_leave(self, running: RunningEngine) -> None:
        """Drain the engine, so that its conversations move away with their KV before it ends."""
        self._store.tell(KeeperPhase.SERVING, "asked to end: conversations move to other engines")
        until, quiet_since = self._clock() + self._settings.drain_s, math.inf
        try:
            await self._feed.drain()
            while running.process.alive() and self._clock() < until:
                state, now = self._store.report.state, self._clock()
                quiet_since = min(quiet_since, now) if state is not None and state.drained else math.inf
                if now - quiet_since >= QUIET_S:
                    return
                await asyncio.sleep(LOOK_S)
            log.warning("engine ends with conversations on it engine=%s", self._spec.engine)
        except ControlSocketError as error:
            log.warning("engine not drained engine=%s reason=%r", self._spec.engine, error)
        finally:
            self._feed.next_engine()

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

    def _info(self, running: RunningEngine, facts: EngineFacts) -> EngineInfo:
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
