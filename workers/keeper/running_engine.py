"""Run of an engine from its start to its loss: the keeper waits for it, warms it, and watches it."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from workers.engine_memory import MemoryLimit, machine_bytes
from workers.keeper import engine_log, metrics
from workers.keeper.config import KeeperSettings
from workers.keeper.engine_http import EngineFacts, EngineHttp, EngineHttpError
from workers.keeper.engine_log import Diagnosis, diagnose
from workers.keeper.process_lease import LeasedProcess
from workers.processes import WorkerError

ASKED = "asked_to_end"

log = logging.getLogger("conserve.workers.keeper")


class StartFailed(WorkerError):
    """The engine did not start to serve. The message names the likely cause."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(str(diagnosis))
        self.diagnosis = diagnosis


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """Process of an engine during one run, with a client for it and the part of the log from this run."""

    engine: str
    process: LeasedProcess
    http: EngineHttp
    log_from: int  # where this run begins in the log
    settings: KeeperSettings
    clock: Callable[[], float] = time.monotonic

    async def wait_until_healthy(self, on_stage: Callable[[str], None]) -> None:
        """Wait for the first successful health check, and call `on_stage` with each stage of the start."""
        settings, began = self.settings, self.clock()
        size, moved, stage = -1, began, ""
        while not await self.http.healthy(settings.health_timeout_s):
            if not self.process.alive():
                raise StartFailed(self.diagnosis(""))
            now, grown = self.clock(), engine_log.log_size(self.process.log)
            if grown != size:
                size, moved, stage = grown, now, engine_log.start_stage(self._lines())
                on_stage(stage)
            if now - moved > settings.stall_limit_s:
                waited = f"logged nothing for {settings.stall_limit_s:.0f} s while {stage}"
                raise StartFailed(self.diagnosis(waited))
            if now - began > settings.start_limit_s:
                waited = f"not healthy after {settings.start_limit_s:.0f} s, while {stage}"
                raise StartFailed(self.diagnosis(waited))
            await asyncio.sleep(settings.health_interval_s)

    async def warm(self, *, new: bool) -> EngineFacts:
        """Send a short request, and long ones if the engine is `new`; return the engine's sizes in tokens."""
        limit_s = self.settings.warm_limit_s
        try:
            facts = await self.http.facts(limit_s)
            await self.http.first(limit_s)
        except EngineHttpError as error:
            raise StartFailed(self.diagnosis(str(error))) from error
        if new:
            try:
                await self.http.warm(limit_s, facts.warm_tokens)
            except EngineHttpError as error:  # the only consequence is that a user's first prompt is slower
                metrics.NOT_WARMED.labels(self.engine).inc()
                log.warning("engine %s serves without having been warmed: %s", self.engine, error)
        return facts

    async def watch(self) -> tuple[str, str]:
        """Wait until the engine is lost, and return the cause as a metric label and as a sentence."""
        settings, misses = self.settings, 0
        limit = await asyncio.to_thread(self._memory_limit)
        while self.process.alive():
            used = await asyncio.to_thread(self.process.memory_bytes, limit.limit_bytes)
            metrics.MEMORY_BYTES.labels(self.engine).set(used)
            if reached := limit.reached(used):
                return "memory", reached
            if self.process.asked_to_end():
                return ASKED, "a signal asked it to end"
            if await self.http.healthy(settings.health_timeout_s):
                misses = 0
            else:
                misses += 1
                metrics.HEALTH_MISSES.labels(self.engine).inc()
                if misses >= settings.health_misses:
                    return "unhealthy", f"missed {misses} health checks in a row"
            await asyncio.sleep(settings.health_interval_s)
        return "exited", "its process ended"

    def diagnosis(self, reason: str) -> Diagnosis:
        """Return the cause that the log shows, or `reason` if the log shows none."""
        found = diagnose(self._lines())
        if reason and found.cause == "unknown cause":
            return Diagnosis(reason, found.advice, found.evidence, found.excerpt)
        return found

    def _memory_limit(self) -> MemoryLimit:
        idle, settings = self.process.idle_bytes(), self.settings
        limit = MemoryLimit.of(settings.memory_gib, settings.kv_gib, idle, machine_bytes())
        metrics.MEMORY_LIMIT_BYTES.labels(self.engine).set(limit.limit_bytes)
        return limit

    def _lines(self) -> list[str]:
        return engine_log.last_lines(self.process.log, 1000, since=self.log_from)
