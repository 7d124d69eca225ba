"""A gateway's client of the directory.

It asks for one placement per conversation, reports the events of many turns in one call, and caches what
later turns need while the directory is unreachable.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from placement.engines import EngineInfo
from placement.routing.receipts import Refusal
from router import metrics
from router.directory.api import messages as m
from router.directory.api.cache import Cache, EngineList, Known
from router.directory.api.calls import REPORT_TIMEOUT_S, ActivityReports, PlaceCalls, is_broken, reason_of
from router.directory.api.messages import FAILED, Activity, Ask, Placed, TurnEnded
from router.directory.api.push import process_name
from router.directory.api.rpc import KEEPALIVE, MAX_MESSAGE, BadReply, Method, Stub
from router.errors import DirectoryUnavailable
from router.identity.node_table import MAX_NODES, Holder, KnownNode
from router.identity.prefix_chain import Chain, End

log = logging.getLogger("conserve.router.directory.client")

_CHANNEL = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.dns_min_time_between_resolutions_ms", 500),  # by default a lost directory is not found for 30 s
    *KEEPALIVE,
    MAX_MESSAGE,
]
_CALL_TIMEOUT_S = 2.0
_PLACE_GRACE_S = 3.0  # beyond a placement's own waiting time: a directory restart fits into it
_MAX_CONVERSATIONS = 200_000
_RETRY_S = 0.1
_ENGINE_PUSH_S = 2.0

Reply = TypeVar("Reply")


class DirectoryClient:
    def __init__(
        self,
        address: str,
        gateway: str,
        *,
        secret: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gateway = process_name(gateway)  # distinguishes its turns from those of an earlier process
        self.engines = EngineList()
        self.cache = Cache(_MAX_CONVERSATIONS, MAX_NODES)
        self.connected = False
        self.on_spent: Callable[[Sequence[tuple[str, m.Spent]]], None] = lambda _: None
        self._clock = clock
        self._turns = itertools.count(1)
        self._channel = grpc.aio.insecure_channel(address, _CHANNEL)
        self._stub = Stub(self._channel, secret)
        self._places = PlaceCalls(self._stub, lambda ask: self.abandon(ask.key, ask.turn))
        self._reports = ActivityReports(self._stub, self.gateway, self._unknown)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, metrics_page: str = "") -> None:
        """Connect, and tell the directory the host:port of this process's metrics page, if it has one."""
        self._tasks = [
            asyncio.create_task(self._watch_forever(metrics_page)),
            asyncio.create_task(self._places.run()),
            asyncio.create_task(self._reports.run()),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def bound(self, key: str) -> Known | None:
        """Return the conversation's binding if its decoder is still in the same epoch.

        While the directory is unreachable, bindings that other gateways used count too.
        """
        known = self.cache.get(key)
        if known is None and not self.connected:
            known = self.cache.take_over(key)
        if known is None or self.engines.alive(known.engine, known.epoch) is None:
            return None
        return known

    def leaving(self, known: Known) -> bool:
        """Return whether a conversation's decoder is draining, so that its next turn may go elsewhere."""
        state = self.engines.state(known.engine)
        return self.connected and state is not None and state.draining

    async def place(self, ask: Ask) -> tuple[Placed | Refusal, Known | None]:
        """Ask for a turn's placement, with which the turn begins. Cancelling the call undoes it."""
        ask = replace(ask, gateway=self.gateway, alone=self.cache.alone(ask.key))
        outcome = await self._place(ask)
        if isinstance(outcome, Refusal):
            return outcome, None
        known = self.cache.get(ask.key)
        if known is None:
            known = Known(ask.key, outcome.engine, outcome.epoch)
            self.cache.put(known)
        known.engine, known.epoch = outcome.engine, outcome.epoch
        known.context_tokens = known.context_tokens or outcome.context_tokens
        if not outcome.known:
            known.context_tokens = known.completion_tokens = 0
        return outcome, known

    async def find(self, chain: Chain, name: str = "") -> tuple[KnownNode | None, Callable[[str], bool]]:
        """Find the longest known prefix of a prompt.

        Returns the prefix, and a function that says whether a conversation has a turn in flight. Of several
        conversations with that prefix, those whose id begins with `name` are preferred.
        """
        found = self.cache.nodes.find(chain, name)
        if found is not None:
            return found, self.cache.running
        remote: KnownNode | None = None
        running: Callable[[str], bool] = self.cache.running
        try:
            remote, running = await self._find_remotely(chain, name)
        except (grpc.aio.AioRpcError, BadReply) as wrong:
            metrics.FALLBACKS.labels("identify_failed").inc()
            log.warning("conversation not looked up, a new one begins reason=%s", reason_of(wrong))
        found = self.cache.nodes.find(chain, name)  # an equal request may have arrived meanwhile
        if found is not None and (remote is None or found.size >= remote.size):
            return found, self.cache.running
        return remote, running

    @property
    def unreported(self) -> int:
        """Return the number of activities that have not been reported to the directory yet."""
        return len(self._reports)

    def next_turn(self) -> int:
        """Return a number that distinguishes a turn from the other turns of this gateway."""
        return next(self._turns)

    def turn_began(self, known: Known, turn: int, end: End) -> None:
        """Report the beginning of a turn that needs no placement; a placed turn has already begun."""
        self.cache.touch(known)
        self._reports.add(Activity(known.key, turn, began=end))

    def prefill_done(
        self, key: str, tokens: int = 0, lost: EngineInfo | None = None, cached: int | None = None
    ) -> None:
        """Report the end of a prefill.

        `tokens` is the size of the prompt if the prefiller computed it, and `cached` how many of these tokens
        it had cached, if it reports that. `lost` is the prefiller that could not be reached, if any.
        """
        epoch = (lost.engine, lost.epoch) if lost else None
        self._reports.add(Activity(key, prefilled=m.PrefillDone(epoch, tokens, cached)))

    def first_token(self, key: str) -> None:
        self._reports.add(Activity(key, first_token=True))

    def abandon(self, key: str, turn: int) -> None:
        """Report that a turn will not run because its caller has left, even if it was placed meanwhile."""
        self._reports.add(Activity(key, turn, ended=FAILED))

    def turn_ended(self, known: Known, turn: int, ended: TurnEnded = FAILED) -> None:
        """Report the end of a turn, which counts as failed if `ended` is not given."""
        if ended.prompt_tokens:
            known.completion_tokens = ended.completion_tokens
            known.context_tokens = ended.tokens
        self._reports.add(Activity(known.key, turn, ended=ended))

    async def end(self, key: str, cause: str) -> bool:
        """End a conversation; return False if the directory does not know it. Raises DirectoryUnavailable."""
        known = await self._ask(m.END, m.EndRequest(key, cause))
        self.cache.drop(key)
        return known

    async def tell_spent(self, spent: tuple[m.Spent, ...]) -> bool:
        """Report what API keys used at this gateway; return False if the directory did not take it."""
        try:
            await self._stub.ask(m.SPEND, m.SpentRequest(self.gateway, spent), REPORT_TIMEOUT_S)
        except (grpc.aio.AioRpcError, BadReply):
            return False
        return True

    async def prefetch(self, key: str, due_in_s: float) -> str:
        """Ask for the prefetch of a parked conversation; return its outcome. Raises DirectoryUnavailable."""
        return await self._ask(m.PREFETCH, m.PrefetchRequest(key, due_in_s))

    async def describe(self, key: str) -> dict[str, Any] | None:
        return await self._ask(m.DESCRIBE, key)

    async def timeline(self, seconds: float) -> m.TimelineReport:
        return await self._ask(m.TIMELINE, seconds)

    async def page(self, prefix: str, after: str, limit: int) -> list[dict[str, Any]]:
        return await self._ask(m.LIST, m.ListRequest(prefix, after or None, limit))

    async def engine(self, engine: str, epoch: int) -> Any:
        return await self.engines.wait_for(engine, epoch, _ENGINE_PUSH_S)

    async def _ask(self, method: Method[Any, Reply], request: object) -> Reply:
        try:
            return await self._stub.ask(method, request, _CALL_TIMEOUT_S, wait_for_ready=True)
        except (grpc.aio.AioRpcError, BadReply) as wrong:
            raise _unavailable(wrong) from wrong

    async def _place(self, ask: Ask) -> Placed | Refusal:
        """Ask for a placement, and ask again if the directory restarts: it keeps the placements it has made.

        A directory that cannot write its journal refuses and is not asked again. While the directory
        is unreachable, a turn of a bound conversation runs on its decoder without a placement.
        """
        until = self._clock() + ask.wait_s + _PLACE_GRACE_S
        while True:
            left = until - self._clock()
            asked = replace(ask, wait_s=max(0.0, min(ask.wait_s, left - _PLACE_GRACE_S)))
            try:
                return await self._places.ask(asked, max(left, 0.05))
            except (grpc.aio.AioRpcError, BadReply, TimeoutError) as wrong:
                if is_broken(wrong) or self._clock() + _RETRY_S >= until:
                    self.abandon(ask.key, ask.turn)
                    raise _unavailable(wrong) from wrong
                if not self.connected and ask.lost is None and (bound := self.bound(ask.key)) is not None:
                    return self._stays(ask, bound)
                ask = replace(ask, again=True)
                await asyncio.sleep(_RETRY_S)

    def _stays(self, ask: Ask, bound: Known) -> Placed:
        if ask.end is not None:
            self.turn_began(bound, ask.turn, ask.end)
        return Placed(ask.key, bound.engine, bound.epoch, None, True, "bound", {}, bound.context_tokens)

    async def _find_remotely(self, chain: Chain, name: str) -> tuple[KnownNode | None, Callable[[str], bool]]:
        timeout_s = _CALL_TIMEOUT_S
        last = len(chain.links) - 1
        request = m.IdentifyRequest(links=tuple(chain.links[::-1]), name=name)
        reply = await self._stub.ask(m.IDENTIFY, request, timeout_s)
        prefixes = [
            (digest, chain.sizes[last - index] + length)
            for index, lengths in reply.tails
            for length in lengths
            if (digest := chain.digest_at(last - index, length)) is not None
        ]
        if prefixes:
            request = m.IdentifyRequest(digests=tuple(digest for digest, _ in prefixes), name=name)
            with_tail = await self._stub.ask(m.IDENTIFY, request, timeout_s)
            if with_tail.index >= 0:
                digest, size = prefixes[with_tail.index]
                return _found(digest, size, with_tail)
        if reply.index < 0:
            return None, self.cache.running
        at = last - reply.index
        return _found(chain.links[at], chain.sizes[at], reply)

    def _unknown(self, key: str) -> None:
        """Forget a conversation that the directory does not know; its next turn is placed again."""
        metrics.FALLBACKS.labels("stale_binding").inc()
        self.cache.drop(key)

    async def _watch_forever(self, metrics_page: str) -> None:
        request = m.WatchRequest(self.gateway, metrics_page)
        while True:
            try:
                async for push in self._stub.stream(m.WATCH, request):
                    self._take(push)
            except (grpc.aio.AioRpcError, BadReply) as wrong:
                log.warning("directory unreachable, serving from the cache reason=%s", reason_of(wrong))
            self.connected = False
            metrics.DIRECTORY_UP.set(0)
            await asyncio.sleep(_RETRY_S)

    def _take(self, push: m.Push) -> None:
        if 0 < push.term < self._stub.term:
            raise BadReply("an older directory answers, which a newer one has replaced")
        self._stub.term = max(self._stub.term, push.term)
        if not self.connected:
            self.connected = True
            metrics.DIRECTORY_UP.set(1)
        if push.engines is not None:
            self.engines.take(push.engines)
        for key, _ in push.ended:
            self.cache.drop(key)
        for key in push.foreign:
            self.cache.serve_elsewhere(key)
        for key, engine, epoch in push.bound:
            self.cache.serve_elsewhere(key, engine, epoch)
        if push.spent:
            self.on_spent(push.spent)
        metrics.CACHED_BINDINGS.set(len(self.cache))


def _found(digest: bytes, size: int, reply: m.IdentifyReply) -> tuple[KnownNode, Callable[[str], bool]]:
    running = {holder.conversation for holder in reply.holders if holder.running}
    holders = tuple(Holder(holder.conversation, holder.tip) for holder in reply.holders)
    return KnownNode(digest, size, holders), running.__contains__


def _unavailable(wrong: Exception) -> DirectoryUnavailable:
    if isinstance(wrong, grpc.aio.AioRpcError) and is_broken(wrong):
        return DirectoryUnavailable(str(wrong.details()))
    return DirectoryUnavailable(f"the directory did not answer ({reason_of(wrong)})")
