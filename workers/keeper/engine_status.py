"""Status of an engine as its keeper knows it, and the connection on which the engine reports its state.

A watcher always gets the newest report as a whole. A slow watcher skips reports, which loses nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from kvtransfer.control.control_socket import ControlSocketClient, ControlSocketError
from placement.engines import EngineInfo, EngineState
from workers.keeper import metrics
from workers.processes import LogOnChange

log = logging.getLogger("conserve.workers.feed")

RETRY_S = 0.5


class KeeperPhase(StrEnum):
    WAITING = "waiting"  # for a start slot
    STARTING = "starting"
    WARMING = "warming"
    SERVING = "serving"
    BACKING_OFF = "backing off"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """Status of a keeper and its engine, as `conserve status` shows it."""

    engine: str
    phase: KeeperPhase
    detail: str = ""
    epoch: int = 0
    pid: int = 0
    restarts: int = 0
    failures: int = 0  # starts and runs that ended since the engine last served for `calm_after_s`
    failure: str = ""  # why the last start or run ended
    log_lines: tuple[str, ...] = ()  # lines of the log around this failure
    metrics: str = ""  # host:port of the keeper's metrics page


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """Everything that a keeper knows about its engine."""

    status: KeeperStatus
    info: EngineInfo | None = None  # None while the engine does not serve
    state: EngineState | None = None  # the engine's last report
    over: int = 0  # latest epoch that this keeper saw end


@dataclass(frozen=True, slots=True)
class SentKv:
    """Result of sending one conversation's KV to another engine."""

    done: bool  # whether the other engine holds the conversation's KV now
    recomputed_tokens: int = 0  # tokens of the conversation that an engine computed again for it


class StatusStore:
    def __init__(self, engine: str) -> None:
        self.report = KeeperReport(KeeperStatus(engine, KeeperPhase.WAITING))
        self._changed = asyncio.Event()

    @property
    def status(self) -> KeeperStatus:
        return self.report.status

    def tell(self, phase: KeeperPhase, detail: str = "", **values: object) -> None:
        self._put(status=replace(self.status, phase=phase, detail=detail, **values))  # type: ignore[arg-type]

    def engine_up(self, info: EngineInfo) -> None:
        self._put(info=info, state=None)

    def engine_down(self) -> None:
        if (gone := self.report.info) is not None:
            self._put(info=None, state=None, over=gone.epoch)

    def engine_state(self, state: EngineState) -> None:
        if self.report.info is not None and state.epoch == self.report.info.epoch:
            self._put(state=state)

    async def watch(self) -> AsyncIterator[KeeperReport]:
        """Yield the current report, and then the newest report whenever it has changed."""
        while True:
            changed = self._changed
            yield self.report
            await changed.wait()

    def _put(self, **values: object) -> None:
        report = replace(self.report, **values)  # type: ignore[arg-type]
        if report != self.report:
            self.report = report
            self._changed.set()
            self._changed = asyncio.Event()


class EngineLink(ControlSocketClient):
    """Connection of a keeper to its engine's control socket, which reconnects on its own."""

    def __init__(self, engine: str, socket: Path) -> None:
        super().__init__(socket)
        self._engine = engine
        self._draining = False

    async def follow(self, store: StatusStore) -> None:
        """Put the engine's reports into the store, until cancelled."""
        say = LogOnChange(lambda why: log.warning("no state reports engine=%s reason=%r", self._engine, why))
        while True:
            try:
                if self._draining:  # this engine may have been restarted since the drain began
                    await self.drain()
                # Let the engine check its bookkeeping of KV, because it may have served for long.
                for fault in await self.check():
                    metrics.FAULTS_FOUND.labels(self._engine).inc()
                    log.error("integrity engine=%s fault=%r", self._engine, fault)
                async for state in self.states():
                    store.engine_state(state)
                say("the connection ended")
            except ControlSocketError as error:
                say(str(error))
            await asyncio.sleep(RETRY_S)

    def next_engine(self) -> None:
        """Forget a drain of the former engine, so that the next engine is not drained."""
        self._draining = False

    async def drain(self, draining: bool = True) -> None:
        self._draining = draining
        await super().drain(draining)
