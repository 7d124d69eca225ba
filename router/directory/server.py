"""Serves the directory over gRPC: each handler translates a message and calls `Directory`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from placement.routing.placer import Placer
from placement.routing.receipts import Refusal
from router.directory.api import messages as m
from router.directory.api.push import GatewayStream
from router.directory.api.rpc import Service
from router.directory.directory import Directory, DirectorySettings, Prefetch, Release, Send
from router.directory.dropping import ShareLayers
from router.directory.journal import JournalError
from router.directory.waiting import Waiter
from router.errors import RouterError

_MAX_PAGE = 1000
_MAX_TAILS = 8
_DISK_RETRY_S = 1.0

Outcome = m.Placed | Refusal


class NotSettled(RouterError):
    """Some engines have not reported since a restart, so an answer would cover only part of the fleet."""


class DirectoryServer(Directory):
    """Directory with its network server. `deploy` runs it, and announces engines and their reports to it.

    `release` tells an engine's keeper that a conversation is over; `share` asks keepers to let their engines
    share layers.
    """

    def __init__(
        self,
        settings: DirectorySettings,
        placer: Placer,
        journal: Path,
        release: Release,
        *,
        secret: str,
        clock: Callable[[], float] | None = None,
        share: ShareLayers | None = None,
        prefetch: Prefetch | None = None,
        send: Send | None = None,
    ) -> None:
        super().__init__(settings, placer, journal, release, clock, share, prefetch, send)
        service = Service(secret, unavailable=(NotSettled,), broken=(JournalError,), refuses=self._refuses)
        service.stream(m.PLACE, self._place)
        service.stream(m.WATCH, self._watch)
        service.once(m.IDENTIFY, self._identify)
        service.once(m.REPORT, self._report)
        service.once(m.SPEND, self._spend)
        service.once(m.END, self._end)
        service.once(m.PREFETCH, self._prefetch_for)
        service.once(m.DESCRIBE, self._describe)
        service.once(m.LIST, self._list)
        service.once(m.STATUS, self._status)
        service.once(m.CAPACITY, self._capacity)
        service.once(m.TIMELINE, self._timeline)
        self._service = service
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Replay the journal, serve, and return the port."""
        self.replay()
        self._server = self._service.server([("grpc.so_reuseport", 0)])
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        self.begin()
        return int(bound)

    async def stop(self, grace_s: float = 1.0) -> None:
        self.gateways.close()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)
            await self.close()

    def _refuses(self, term: int) -> str:
        """Return why to refuse a gateway that knows a directory with this term; an empty text to serve it."""
        return "a newer directory serves this fleet" if term > self.term else ""

    async def _place(self, asks: m.Asks) -> AsyncIterator[m.PlaceAnswers]:
        self.check_journal()
        with PlaceCall(self, asks) as call:
            async for answers in call.answers():
                yield answers

    async def _identify(self, request: m.IdentifyRequest) -> m.IdentifyReply:
        tails: list[tuple[int, tuple[int, ...]]] = []
        nodes = self.table.nodes
        for index, digest in enumerate(request.digests or request.links):
            if request.links and (lengths := nodes.tails(digest)):
                tails.append((index, tuple(lengths)))
            if holders := nodes.holders(digest, request.name):
                found = tuple(
                    m.FoundHolder(one.conversation, one.tip, self.running(one.conversation))
                    for one in holders
                )
                return m.IdentifyReply(index, found, tuple(tails))
            if len(tails) >= _MAX_TAILS:
                break
        return m.IdentifyReply(tails=tuple(tails))

    async def _report(self, request: m.ReportRequest) -> tuple[str, ...]:
        now, gateway = self.clock(), request.gateway
        seen = self.activities_seen(gateway, request.first, len(request.activities))
        repeated, news = request.activities[:seen], request.activities[seen:]
        unknown = {one.key for one in repeated if self.table.conversations.get(one.key) is None}
        unknown |= {one.key for one in news if not self._take(one, gateway, now)}
        self.changed()
        return tuple(sorted(unknown))

    async def _spend(self, request: m.SpentRequest) -> None:
        self.gateways.tell_spent(request.gateway, request.spent)

    async def _end(self, request: m.EndRequest) -> bool:
        known = self.table.end(request.key, request.cause, self.clock())
        self.changed()
        if known:
            await self.durable()
        return known

    async def _watch(self, request: m.WatchRequest) -> AsyncIterator[m.Push]:
        stream = self.gateways.join(request.gateway, request.metrics)
        self.gateway_came(request.gateway)
        telling = self._spawn(self._tell_bindings(stream))
        try:
            while True:
                await stream.wait()
                if stream.overrun:
                    return
                yield replace(stream.take(lambda: m.Engines(self.engines(), self.settled)), term=self.term)
        finally:
            telling.cancel()
            if self.gateways.leave(request.gateway, stream):
                self.gateway_left(request.gateway)

    async def _tell_bindings(self, stream: GatewayStream) -> None:
        """Tell a gateway, which may have just started, of all bindings that are in the journal."""
        while True:
            bound = self.table.bindings()
            try:
                await self.durable()
            except JournalError:  # what is on the disk cannot be told apart from what is not
                await asyncio.sleep(_DISK_RETRY_S)
            else:
                stream.tell_bound(bound)
                return

    async def _prefetch_for(self, request: m.PrefetchRequest) -> str:
        return await self.prefetch(request.key, request.due_in_s)

    async def _describe(self, key: str) -> m.Described | None:
        return self.table.describe(key)

    async def _list(self, request: m.ListRequest) -> list[m.Described]:
        limit = min(max(request.limit, 1), _MAX_PAGE)
        return self.table.page(request.prefix, request.after, limit)

    async def _timeline(self, seconds: float) -> m.TimelineReport:
        now = self.clock()
        shown = list(self.timeline.newest_first(now - seconds))
        return m.TimelineReport(now, shown, dict(self.met), dict(self.missed))

    async def _capacity(self, _: None) -> m.CapacityReport:
        if self.table.fleet.awaits_some:  # reports of some engines are no basis to add or end engines
            raise NotSettled("engines have not reported since the restart")
        return self.capacity.now()

    async def _status(self, _: None) -> m.DirectoryStatus:
        return m.DirectoryStatus(
            engines=self.engines(),
            metrics=self.metrics_page,
            gateways=self.gateways.pages(of_batch=False),
            batch=self.gateways.pages(of_batch=True),
            journal_problem=self.journal_problem,
        )

    def _take(self, activity: m.Activity, gateway: str, now: float) -> bool:
        """Apply a report about a turn; return False if its conversation is unknown."""
        key, turn = activity.key, activity.turn
        if activity.first_token:
            self.timeline.first_token(key, now)
        elif activity.began is not None:
            known = self.table.turn_began(key, gateway, activity.began, now, turn)
            if known and (binding := self.table.binding(key)):
                self.timeline.turn_started(key, binding.engine, transferred=False, now=now)
            return known
        elif activity.prefilled is not None:
            self.table.prefill_done(key, now, activity.prefilled.tokens, activity.prefilled.cached)
            if activity.prefilled.lost is not None:
                self.table.fleet.suspect(*activity.prefilled.lost)
            if self.table.waiting:
                self.serve_soon()
        elif (ended := activity.ended) is not None:
            self.met.update(ended.met)
            self.missed.update(ended.missed)
            self.timeline.turn_ended(key, ended.tool_call, ended.tokens, now)
            known = self.table.turn_ended(key, gateway, now, ended, turn)
            if (conversation := self.table.conversations.get(key)) and conversation.parked:
                self.timeline.parked(key, now)
            return known
        return True


class PlaceCall:
    """Handles one call for many placements, each of which is answered as soon as possible.

    Use it as a context manager: at its end, placements that were not sent to the gateway are undone.
    """

    def __init__(self, directory: Directory, asks: tuple[m.Ask, ...]) -> None:
        self._directory, self._table, self._asks = directory, directory.table, asks
        self._open = set(range(len(asks)))
        self._waiters: dict[int, Waiter] = {}
        self._settled: list[tuple[int, Outcome]] = []
        self._some = asyncio.Event()

    def __enter__(self) -> "PlaceCall":
        now = self._directory.clock()
        for index, ask in enumerate(self._asks):
            self._directory.heard_from(ask.gateway)
            settle = partial(self._settle, index)
            outcome = self._table.place(ask, now, settle)
            if isinstance(outcome, Waiter):
                self._waiters[index] = outcome
            else:
                settle(outcome)
        self._directory.changed()
        return self

    async def answers(self) -> AsyncIterator[m.PlaceAnswers]:
        """Yield answers in groups as they become known. A placement is sent once it is in the journal."""
        while self._open:
            await self._some.wait()
            self._some.clear()
            ready = list(self._settled)
            if placed := [outcome for _, outcome in ready if isinstance(outcome, m.Placed)]:
                await self._directory.durable()
                self._directory.gateways.tell_bound(placed)
            now = self._directory.clock()
            answers = []
            for index, outcome in ready:
                if isinstance(outcome, Refusal):
                    answers.append(m.PlaceAnswer(index, refused=outcome))
                    continue
                transferred = outcome.prefiller is not None
                self._directory.timeline.turn_started(outcome.key, outcome.engine, transferred, now)
                answers.append(m.PlaceAnswer(index, outcome))
            self._settled = self._settled[len(ready) :]
            self._open.difference_update(index for index, _ in ready)
            yield tuple(answers)

    def __exit__(self, *_: object) -> None:
        if not self._open:
            return
        for index, outcome in self._settled:
            if isinstance(outcome, m.Placed):
                self._table.unused(outcome, self._asks[index], self._directory.clock())
        for waiter in self._waiters.values():
            self._table.give_up(waiter)
        self._directory.changed()

    def _settle(self, index: int, outcome: Outcome) -> None:
        self._waiters.pop(index, None)
        self._settled.append((index, outcome))
        self._some.set()
