"""The directory as a process part: the table, its journal, its clock, and what leaves it.

`deploy` runs one in an actor: it announces engines and their reports here, and passes a `release` that tells
an engine's keeper that a conversation is over.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import orjson

from placement.engines import EngineInfo, EngineState
from placement.placer import Placer
from router import metrics
from router.directory import directory_pb2 as pb
from router.directory import directory_pb2_grpc as rpc
from router.directory import messages
from router.directory.auth import RequireSecret
from router.directory.capacity import Capacity, CapacitySettings
from router.directory.journal import Journal, JournalError
from router.directory.lanes import Lanes
from router.directory.news import Watchers
from router.directory.service import DirectoryService
from router.directory.table import Table, TableSettings

log = logging.getLogger("conserve.router.directory.server")

Release = Callable[[EngineInfo, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    table: TableSettings = field(default_factory=TableSettings)
    return_s: float = 10.0  # after a start: how long new conversations wait for engines of the journal
    settle_s: float = 20.0  # and bindings for an engine that the journal does not name
    gateway_grace_s: float = 3.0  # a gateway without its stream for longer has no running turns
    release_timeout_s: float = 5.0
    compact_bytes: int = 8 << 20
    tick_s: float = 0.1
    push_states_s: float = 1.0
    capacity: CapacitySettings = field(default_factory=CapacitySettings)


class DirectoryServer:
    def __init__(
        self,
        settings: DirectorySettings,
        placer: Placer,
        journal: Path,
        release: Release,
        *,
        secret: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.table = Table(settings.table, placer)
        self.watchers = Watchers()
        self.lanes = Lanes()
        self.capacity = Capacity(settings.capacity, placer, self.table.conversations, clock)
        self.settled = False
        self.met: Counter[str] = Counter()  # answers to users by objective, of all gateways
        self.missed: Counter[str] = Counter()
        self.metrics_page = ""  # host:port, where there is one
        self._placer = placer
        self._release = release
        self._secret = secret
        self._journal = Journal(journal)
        self._compacted_size = 0
        self._compacting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self._serve_timer: asyncio.TimerHandle | None = None
        self._pushed_version = -1
        self._states_changed = False
        self._states_pushed_at = 0.0
        self._started_at = 0.0

    async def start(self, host: str, port: int) -> int:
        """Replay the journal and serve; returns the port."""
        self.table.replay(self._journal.open())
        self._started_at = self.clock()
        self.settled = not self.table.absent()
        self._show_awaited()
        counts = len(self.table.conversations), len(self.table.fleet.recalled)
        log.info("journal replayed conversations=%d engines=%d", *counts)
        interceptors = [RequireSecret(self._secret)] if self._secret else []
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        rpc.add_DirectoryServicer_to_server(  # type: ignore[no-untyped-call]
            DirectoryService(self), self._server
        )
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        self._spawn(self._tick_forever())
        self._spawn(self.capacity.run())
        return int(bound)

    async def stop(self, grace_s: float = 1.0) -> None:
        self.watchers.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._serve_timer is not None:
            self._serve_timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._journal.close()

    # Told by deploy

    def engine_up(self, info: EngineInfo) -> None:
        """A new engine, or a new epoch of one; said again after its keeper or the directory restarted."""
        if self.table.engine_up(info):
            self.table.conversations.engine_gone(info.engine)  # what its last epoch held
            log.info("engine up engine=%s role=%s epoch=%d", info.engine, info.role, info.epoch)
        self.changed()

    def engine_state(self, state: EngineState) -> bool:
        taken = self.table.engine_state(state, self.clock())
        self._states_changed |= taken
        if taken:
            for key in state.parked:
                if self.table.conversations.park(key, state.engine):
                    self.lanes.parked(key, self.clock())
        if taken and self.table.waiting:
            self.serve_soon()
        if self.table.fleet.version != self._pushed_version:
            self.changed()
        return taken

    def engine_down(self, engine: str) -> None:
        """Its epoch is over and its KV gone. Not for a keeper that is merely out of reach."""
        self.table.conversations.engine_gone(engine)
        self.table.engine_down(engine)
        log.warning("engine down engine=%s", engine)
        self.changed()

    # Called by the service

    async def durable(self) -> None:
        await self._journal.durable()

    def changed(self) -> None:
        """Let out what the table's last calls produced."""
        effects = self.table.effects()
        for record in effects.records:
            self._journal.append(record)
        for engine, key in effects.releases:
            info = self.table.fleet.info(engine)
            if info is not None:
                self._spawn(self._release_on(info, key))
        for key, cause in effects.ended:
            metrics.CONVERSATIONS_ENDED.labels(cause).inc()
            if last := self.table.describe(key):
                metrics.CONVERSATION_SECONDS.observe(last["used_at"] - last["created_at"])
            self.lanes.conversation_ended(key, cause, self.clock())
        for placed in effects.placed:
            log.info("placed conversation=%s receipt=%s", placed.key, orjson.dumps(placed.note).decode())
        metrics.CONVERSATIONS_LIVE.set(len(self.table.conversations))
        metrics.PLACES_WAITING.set(self.table.waiting)
        metrics.CONVERSATIONS_PARKED.set(self.table.conversations.parked)
        self.watchers.tell(effects.ended, effects.foreign)
        if effects.ended and self.table.waiting:
            self.serve_soon()
        if self.table.fleet.version != self._pushed_version:
            self._show_awaited()
            self._push_engines()

    def serve_soon(self) -> None:
        """Many reports come together: look at the queue once for all of them."""
        if self._serve_timer is None:
            self._serve_timer = asyncio.get_running_loop().call_later(0.005, self._serve)

    def engines(self) -> pb.Engines:
        views = self.table.fleet.views()
        return pb.Engines(
            engines=[
                messages.engine(
                    view, self.table.bound_to(view.info.engine), self.table.kv_in_use(view.info.engine)
                )
                for view in views
            ],
            settled=self.settled,
        )

    def running(self, key: str) -> bool:
        """Has it a turn that an equal request would be another of? Not at a gateway that is out of reach: if
        it died, its client asks again at once, and must find its conversation."""
        return any(gateway in self.watchers for gateway in self.table.running_at(key))

    def gateway_came(self, gateway: str) -> None:
        """The process that had its name before has ended, even if its stream still seems open."""
        for earlier in self.watchers.supersede(gateway):
            log.info("gateway superseded gateway=%s by=%s", earlier, gateway)
            self.gateway_left(earlier)

    def gateway_left(self, gateway: str) -> None:
        asyncio.get_running_loop().call_later(self.settings.gateway_grace_s, self._gateway_gone, gateway)

    def _gateway_gone(self, gateway: str) -> None:
        if gateway not in self.watchers:
            self.table.gateway_gone(gateway, self.clock())
            self.changed()

    def _serve(self) -> None:
        self._serve_timer = None
        self.table.serve_waiting(self.clock())
        self.changed()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tick_s)
            now = self.clock()
            if self.table.fleet.awaits_some and now - self._started_at >= self.settings.return_s:
                self._await_no_longer()
            if not self.settled and now - self._started_at >= self.settings.settle_s:
                self.settled = True
                self.table.void_absent()
                self._push_engines()
            self.table.expire(now)
            self.table.serve_waiting(now)
            if self._states_changed and now - self._states_pushed_at >= self.settings.push_states_s:
                self._push_engines()
            self.changed()
            self._compact_when_large()

    def _show_awaited(self) -> None:
        metrics.ENGINES_AWAITED.set(len(self.table.fleet.recalled))

    def _await_no_longer(self) -> None:
        metrics.FALLBACKS.labels("engines_missing").inc()
        log.warning(
            "placing without engines that were up before the restart engines=%s waited_s=%.0f",
            ",".join(self.table.fleet.recalled),
            self.settings.return_s,
        )
        self.table.fleet.await_no_longer()
        self.serve_soon()

    def _push_engines(self) -> None:
        self._pushed_version = self.table.fleet.version
        self._states_changed = False
        self._states_pushed_at = self.clock()
        self.watchers.tell_engines()
        self.serve_soon()

    def _compact_when_large(self) -> None:
        limit = max(self.settings.compact_bytes, 4 * self._compacted_size)
        if self._journal.size > limit and (self._compacting is None or self._compacting.done()):
            self._compacting = self._spawn(self._compact())

    async def _compact(self) -> None:
        before = self._journal.size
        try:
            await self._journal.compact(self.table.snapshot())
        except (JournalError, OSError) as wrong:
            log.error("journal not compacted reason=%r", str(wrong))
            return
        self._compacted_size = self._journal.size
        log.info("journal compacted before_bytes=%d after_bytes=%d", before, self._compacted_size)

    async def _release_on(self, info: EngineInfo, key: str) -> None:
        try:
            async with asyncio.timeout(self.settings.release_timeout_s):
                await self._release(info, key)
        except (OSError, TimeoutError, grpc.RpcError, RuntimeError) as wrong:
            # The engine lets go of it by its own idle time.
            metrics.RELEASES_FAILED.inc()
            log.warning("not released conversation=%s engine=%s reason=%r", key, info.engine, wrong)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
