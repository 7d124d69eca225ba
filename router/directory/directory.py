"""Runs the binding table and carries out its effects: journal rows, pushes to gateways, releases."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import orjson

from placement.engines import EngineInfo, EngineState
from placement.overload.drop_plan import DropLimits
from placement.routing.placer import Placer
from placement.routing.receipts import MoveReason, Why
from placement.sizing.capacity import Thresholds
from router import metrics
from router.directory.api.messages import EngineRecord
from router.directory.api.push import GatewayStreams
from router.directory.conversations import Timeline
from router.directory.dropping import Dropper, ShareLayers
from router.directory.fleet import CapacityWatcher
from router.directory.journal import Journal, JournalError
from router.directory.moving import IdleMove
from router.directory.table import BindingTable
from router.process import SteadyClock

log = logging.getLogger("conserve.router.directory.directory")

_TICK_S = 0.1
ON_A_PREFILLER = (Why.IDLE_PREFILLER, Why.LAST_RESORT)  # reasons to bind a conversation to a prefiller
_COMMAND_TIMEOUT_S = 5.0
STREAMLESS_S = 20.0  # gRPC's keep-alive lets a gateway notice a lost stream within 15 s
_PROCESSES_REMEMBERED = 10_000  # gateway processes: each restart of a gateway adds one
_SEND_LIMIT_S = 60.0
_RELIEF_LIMIT_S = 5.0  # longest move off a hot decoder: the next turn may wait for it
_MOVE_IDLE_S = 0.5

Release = Callable[[EngineInfo, str], Awaitable[None]]
Send = Callable[[EngineInfo, EngineInfo, str], Awaitable[int | None]]
"""Sends a conversation's KV from one engine to another.

Returns the number of tokens that were computed again; None if the KV did not arrive.
"""
Prefetch = Callable[[EngineInfo, str, float], Awaitable[bool]]  # False: the engine lost most of the KV
_ENGINE_ERRORS = (OSError, TimeoutError, grpc.RpcError, RuntimeError)


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    ttl_s: float  # a conversation without a turn for this long ends
    thresholds: Thresholds = field(default_factory=Thresholds)  # thresholds for advice about the fleet's size
    return_s: float = 10.0  # how long new conversations wait for engines that the journal names
    settle_s: float = 60.0  # after a restart, how long bindings to unknown engines are kept
    gateway_grace_s: float = 3.0  # a gateway without its stream for longer has no running turns
    push_states_s: float = 1.0
    dropping: DropLimits | None = None  # None: engines drop no parameters


class Directory:
    """Directory without a network server. `deploy` reports engines; `server.py` calls it for gateways."""

    def __init__(
        self,
        settings: DirectorySettings,
        placer: Placer,
        journal: Path,
        release: Release,
        clock: Callable[[], float] | None = None,
        share: ShareLayers | None = None,
        prefetch: Prefetch | None = None,
        send: Send | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock = clock or SteadyClock()
        self.table = BindingTable(settings.ttl_s, placer)
        self.gateways = GatewayStreams()
        self.timeline = Timeline()
        self.capacity = CapacityWatcher(
            settings.thresholds, placer, self.table.conversations, self.table.refused_tokens, clock
        )
        self.settled = False
        self.term = 0  # number of this start, greater than those before
        self.met: Counter[str] = Counter()  # answers to users by SLO target, of all gateways
        self.missed: Counter[str] = Counter()
        self.metrics_page = ""  # host:port, where there is one
        self._release = release
        self._prefetch = prefetch
        self._send = send
        self._moved_idle_at = 0.0
        self._dropper: Dropper | None = None
        if settings.dropping is not None and share is not None:
            self._dropper = Dropper(settings.dropping, self.table.fleet.records, share)
        self._journal = Journal(journal)
        self._tasks: set[asyncio.Task[None]] = set()
        self._serve_timer: asyncio.TimerHandle | None = None
        self._activities: dict[str, int] = {}  # gateway -> how many of its activities have been taken in
        self._streamless: set[str] = set()  # gateways that sent requests but have no stream
        self._pushed_version = -1
        self._states_changed = False
        self._states_pushed_at = 0.0
        self._started_at = 0.0

    def replay(self) -> None:
        """Rebuild the table from the journal. This is the first call after the start."""
        newest = self.table.replay(self._journal.read())
        if isinstance(self.clock, SteadyClock):
            self.clock.not_before(newest)
        self._started_at = self.clock()
        self.term = self._journal.take_term(int(self._started_at * 1e6))
        self.settled = not self.table.absent()
        self._show_awaited()
        counts = len(self.table.conversations), len(self.table.fleet.recalled)
        log.info("journal replayed conversations=%d engines=%d", *counts)

    def begin(self) -> None:
        """Start the clock ticks and the capacity watcher."""
        self._spawn(self._tick_forever())
        self._spawn(self.capacity.run())
        if self._dropper is not None:
            self._spawn(self._dropper.run(lambda: self.capacity.overload))

    async def close(self) -> None:
        if self._serve_timer is not None:
            self._serve_timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._journal.close()

    # Called by deploy

    def engine_up(self, info: EngineInfo) -> None:
        """Add an engine, or a new epoch of it. Restarts of its keeper or of the directory repeat the call."""
        if self.table.engine_up(info):
            self.table.conversations.engine_gone(info.engine)  # the KV of its last epoch is gone
            log.info("engine up engine=%s role=%s epoch=%d", info.engine, info.role, info.epoch)
        self.changed()

    def engine_state(self, state: EngineState) -> bool:
        parked, unparked = self.table.fleet.newly_parked(state)
        taken = self.table.engine_state(state, self.clock())
        self._states_changed |= taken
        if taken:
            for key in parked:
                if self.table.conversations.park(key, state.engine):
                    self.timeline.parked(key, self.clock())
            for key in unparked:
                if self.table.conversations.unpark(key, state.engine):
                    self.timeline.unparked(key, self.clock())
        if taken and self.table.waiting:
            self.serve_soon()
        if self.table.fleet.version != self._pushed_version:
            self.changed()
        return taken

    def engine_down(self, engine: str) -> None:
        """Record that an engine has ended and its KV is lost. Do not call this for an unreachable keeper."""
        self.table.conversations.engine_gone(engine)
        self.table.engine_down(engine)
        log.warning("engine down engine=%s", engine)
        self.changed()

    # Called by the service

    @property
    def journal_problem(self) -> str:
        """Return why the disk accepts no journal rows now; an empty text if it accepts them."""
        return self._journal.problem

    def check_journal(self) -> None:
        """Raise JournalError if a new placement could not be written soon."""
        self._journal.check_capacity()

    async def durable(self) -> None:
        await self._journal.durable()

    def changed(self) -> None:
        """Pass the effects of the table's last calls on to the journal, engines and gateways."""
        effects = self.table.effects()
        for row in effects.rows:
            try:
                self._journal.append(row)
            except JournalError as wrong:  # only this row is lost
                log.error("row not written: %s", wrong)
        for engine, key in effects.releases:
            info = self.table.fleet.info(engine)
            if info is not None:
                self._spawn(self._release_on(info, key))
        for key, cause in effects.ended:
            metrics.CONVERSATIONS_ENDED.labels(cause).inc()
            if last := self.table.describe(key):
                metrics.CONVERSATION_SECONDS.observe(last["used_at"] - last["created_at"])
            self.timeline.conversation_ended(key, cause, self.clock())
        for placed in effects.placed:
            log.info("placed conversation=%s receipt=%s", placed.key, orjson.dumps(placed.note).decode())
            receipt = placed.note["receipt"]
            held, computed = receipt["decoder"]["why"], receipt["prefiller"]["why"]
            metrics.PROMPTS_PLACED.labels(held if held in ON_A_PREFILLER else computed).inc()
            if held != Why.BOUND:
                prompt = "prefiller" if placed.prefiller else "decoder"
                metrics.FIRST_TURNS_PLACED.labels(prompt, held).inc()
        metrics.CONVERSATIONS_LIVE.set(len(self.table.conversations))
        metrics.PLACES_WAITING.set(self.table.waiting)
        metrics.CONVERSATIONS_PARKED.set(self.table.conversations.parked)
        self.gateways.tell(effects.ended, effects.foreign)
        if effects.ended and self.table.waiting:
            self.serve_soon()
        if self.table.fleet.version != self._pushed_version:
            self._show_awaited()
            self._push_engines()

    async def prefetch(self, key: str, due_in_s: float) -> str:
        """Have an engine load a parked conversation's KV. Return the outcome, for the gateway's metric."""
        conversation, binding = self.table.conversations.get(key), self.table.binding(key)
        info = self.table.fleet.info(binding.engine) if binding is not None else None
        if conversation is None or not conversation.parked or info is None or self._prefetch is None:
            return "not_parked"
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                return "restored" if await self._prefetch(info, key, due_in_s) else "gone"
        except _ENGINE_ERRORS as wrong:
            log.warning("KV not prefetched conversation=%s engine=%s reason=%r", key, info.engine, wrong)
            return "failed"

    def serve_soon(self) -> None:
        """Place the waiting turns in 5 ms, once for all calls until then."""
        if self._serve_timer is None:
            self._serve_timer = asyncio.get_running_loop().call_later(0.005, self._serve)

    def engines(self) -> tuple[EngineRecord, ...]:
        """Return the engines in the form that gateways receive."""
        table = self.table
        return tuple(
            replace(
                record,
                state=replace(record.state, confirmed={}, parked={}, unparked={}),
                conversations=table.bound_to(record.info.engine),
                kv_in_use=table.kv_in_use(record.info.engine),
            )
            for record in table.fleet.records()
        )

    def running(self, key: str) -> bool:
        """Return whether a conversation has a running turn at a connected gateway.

        A turn at a gateway that died does not count: its client sends it again immediately, and must find
        the conversation.
        """
        return any(gateway in self.gateways for gateway in self.table.running_at(key))

    def gateway_came(self, gateway: str) -> None:
        """Treat earlier processes of this gateway as ended, even if their streams still seem open."""
        for earlier in self.gateways.supersede(gateway):
            log.info("gateway superseded gateway=%s by=%s", earlier, gateway)
            self.gateway_left(earlier)

    def gateway_left(self, gateway: str) -> None:
        asyncio.get_running_loop().call_later(self.settings.gateway_grace_s, self._gateway_gone, gateway)

    def heard_from(self, gateway: str) -> None:
        """Treat a gateway as gone if it sends requests but does not open a stream in time.

        After a restart of the directory, a gateway may ask before its stream is open again. If the gateway
        crashes then, no stream ends to show it, and its turns would count as running for ever.
        """
        if gateway not in self.gateways and gateway not in self._streamless:
            self._streamless.add(gateway)
            asyncio.get_running_loop().call_later(STREAMLESS_S, self._streamless_too_long, gateway)

    def _streamless_too_long(self, gateway: str) -> None:
        self._streamless.discard(gateway)
        self._gateway_gone(gateway)

    def activities_seen(self, gateway: str, first: int, count: int) -> int:
        """Return how many of a report's activities are already known, and count the others as known.

        A gateway repeats a report until it is answered, however long the gateway was silent. A report can
        therefore arrive twice, and late; it must not begin turns again that have ended.
        """
        self.heard_from(gateway)
        taken = self._activities.pop(gateway, 0)
        self._activities[gateway] = max(taken, first + count)
        if len(self._activities) > _PROCESSES_REMEMBERED:
            del self._activities[next(iter(self._activities))]  # the one that has been silent for longest
        return min(max(taken - first, 0), count)

    def _gateway_gone(self, gateway: str) -> None:
        if gateway not in self.gateways:
            self.table.gateway_gone(gateway, self.clock())
            self.changed()

    def _serve(self) -> None:
        self._serve_timer = None
        self.table.serve_waiting(self.clock())
        self.changed()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = self.clock()
            if self.table.fleet.awaits_some and now - self._started_at >= self.settings.return_s:
                self._await_no_longer()
            if not self.settled and now - self._started_at >= self.settings.settle_s:
                self.settled = True
                self.table.void_absent()
                self._push_engines()
            self.table.expire(now)
            self.table.serve_waiting(now)
            if self._send is not None and now - self._moved_idle_at >= _MOVE_IDLE_S:
                self._moved_idle_at = now
                for move in self.table.idle_moves.begin(now):
                    self._spawn(self._move_idle(self._send, move))
            if self._states_changed and now - self._states_pushed_at >= self.settings.push_states_s:
                self._push_engines()
            self.changed()

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
        self.gateways.tell_engines()
        self.serve_soon()

    async def _release_on(self, info: EngineInfo, key: str) -> None:
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                await self._release(info, key)
        except _ENGINE_ERRORS as wrong:
            # The engine is told again when it reports, and in any case frees idle KV by itself.
            metrics.RELEASES_FAILED.inc()
            self.table.not_released(info.engine, info.epoch, key)
            log.warning("KV not released conversation=%s engine=%s reason=%r", key, info.engine, wrong)

    async def _move_idle(self, send: Send, move: IdleMove) -> None:
        recomputed: int | None = None
        try:
            limit_s = _SEND_LIMIT_S if move.reason is MoveReason.DRAIN else _RELIEF_LIMIT_S
            async with asyncio.timeout(limit_s):
                recomputed = await send(move.source, move.target, move.key)
        except _ENGINE_ERRORS as wrong:
            log.warning("KV not sent conversation=%s from=%s reason=%r", move.key, move.source.engine, wrong)
        finally:
            bound = self.table.idle_moves.end(move, recomputed is not None, self.clock())
            self.changed()
            self.serve_soon()
        outcome = "unfinished" if not bound else "recomputed" if recomputed else "with_kv"
        metrics.MOVED.labels(move.reason, outcome).inc()
        if bound and recomputed:
            metrics.MOVED_RECOMPUTED_TOKENS.inc(recomputed)
            metrics.FALLBACKS.labels("move_recomputed").inc()
        log.info(
            "idle conversation moved conversation=%s from=%s to=%s reason=%s outcome=%s recomputed=%d",
            *(move.key, move.source.engine, move.target.engine, move.reason, outcome, recomputed or 0),
        )
        if bound:
            with suppress(JournalError):  # gateways then ask for the next turn's placement
                await self.durable()
                self.gateways.tell_moved(move.key, move.target.engine, move.target.epoch)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
