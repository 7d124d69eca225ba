"""Power of one engine's GPUs: sets their cap while the keeper runs, and measures their energy."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from workers.keeper import metrics
from workers.power.limits import WantedLimit, apply, boot_id, set_back
from workers.power.nvml import Gpus, PowerError
from workers.processes import LogOnChange

log = logging.getLogger("conserve.workers.power")


@dataclass(frozen=True, slots=True)
class PowerSettings:
    engine: str
    role: str
    gpus: tuple[str, ...]  # indices or UUIDs
    cap_w: float | None
    record: Path  # record of the original limits of all GPUs of the machine
    interval_s: float = 5.0  # between two readings of energy and cap
    grace_s: float = 90.0  # from the keeper's death to restoring its limits; more than the engine's lease


def visible_gpus(env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` in `env` names them."""
    return tuple(name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip())


# Readings after which a cap that could not be set is tried again: doubles from a minute to an hour.
FIRST_RETRY, LAST_RETRY = 12, 720


class EnginePower:
    """Context in which the engine's power cap is set. If this fails, the engine serves without the cap."""

    def __init__(self, settings: PowerSettings) -> None:
        self._settings = settings
        self._holder = uuid.uuid4().hex
        self._guard: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._capped = False  # whether all GPUs of the engine have the cap
        self._readings, self._retry_after = 0, FIRST_RETRY  # readings since the last try, and until the next
        self._last: dict[str, float] = {}  # GPU -> joules at the last reading

    async def __aenter__(self) -> "EnginePower":
        if self._settings.gpus:
            await asyncio.to_thread(self._cap if self._settings.cap_w is not None else self._clear)
            self._watching = asyncio.create_task(self._watch(), name=f"power-{self._settings.engine}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._guard is not None:
            # This blocks the event loop, because a cancelled task cannot wait for a thread.
            set_back(self._settings.record, self._holder)
            guard, self._guard = self._guard, None
            if guard.stdin:
                guard.stdin.close()

    @property
    def capped(self) -> bool:
        return self._capped

    def _cap(self) -> None:
        settings = self._settings
        if self._guard is None:
            self._guard = start_guard(settings, self._holder)
        cap_w = float(settings.cap_w or 0.0)
        wanted_limits = [WantedLimit(gpu, cap_w, settings.engine) for gpu in settings.gpus]
        try:
            with Gpus() as gpus:
                outcomes = apply(gpus, wanted_limits, settings.record, boot_id(), self._holder)
        except PowerError as error:
            self._not_done(str(error))
            return
        self._capped = all(outcome.done for outcome in outcomes)
        for outcome in outcomes:
            if outcome.done:
                log.info("power engine=%s gpu=%s done=%r", settings.engine, outcome.gpu, outcome.text)
            else:
                self._not_done(f"GPU {outcome.gpu}: {outcome.text}")

    def _clear(self) -> None:
        """Remove a cap that an earlier run, whose keeper and guard are gone, left on these GPUs."""
        settings = self._settings
        if settings.record.exists() and not set_back(settings.record, named=settings.gpus):
            self._not_done("a cap of an earlier run could not be removed")

    def _not_done(self, why: str) -> None:
        metrics.POWER_NOT_DONE.labels(self._settings.engine).inc()
        text = "power limit differs from the fleet file engine=%s reason=%r"
        log.warning(text, self._settings.engine, why)

    async def _watch(self) -> None:
        engine = self._settings.engine
        say = LogOnChange(lambda why: log.warning("power not measured engine=%s reason=%r", engine, why))
        while True:
            try:
                await asyncio.to_thread(self._sample)
                say("")
            except PowerError as error:
                say(str(error))
            await asyncio.sleep(self._settings.interval_s)

    def _sample(self) -> None:
        settings = self._settings
        watts = limit = 0.0
        with Gpus() as gpus:
            for name in settings.gpus:
                gpu = gpus.find(name)
                joules = gpus.joules(gpu.uuid)
                grown = joules - self._last.get(gpu.uuid, joules)
                if grown > 0.0:  # the counter restarts at zero when the driver is loaded again
                    metrics.ENERGY_JOULES.labels(settings.engine, settings.role).inc(grown)
                self._last[gpu.uuid] = joules
                watts += gpus.watts(gpu.uuid)
                limit += gpu.limit_w
        metrics.POWER_WATTS.labels(settings.engine).set(watts)
        if limit:
            metrics.POWER_LIMIT_WATTS.labels(settings.engine).set(limit)
        wanted = (settings.cap_w or 0.0) * len(settings.gpus)
        self._readings += 1
        again = self._capped or self._readings >= self._retry_after
        if settings.cap_w is not None and again and limit > wanted + len(settings.gpus):
            log.warning("power cap was lost and is set again engine=%s now_w=%g", settings.engine, limit)
            self._cap()
            self._readings = 0
            self._retry_after = FIRST_RETRY if self._capped else min(2 * self._retry_after, LAST_RETRY)


def start_guard(settings: PowerSettings, holder: str) -> subprocess.Popen[bytes]:
    """Start the guard in its own session, so that it survives when its keeper's process group is killed.

    SIGTERM is blocked until the guard handles it.
    """
    command = [sys.executable, "-m", "workers.power.limits"]
    command += [str(settings.record), holder, str(settings.grace_s)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # children inherit the mask
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
