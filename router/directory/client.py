"""A gateway's side of the directory: asks once a conversation, reports in batches, and keeps what it needs
to serve later turns while the directory is away."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import orjson

from placement.admission import Refusal
from placement.engines import EngineInfo
from router import metrics
from router.directory import auth, incarnation, messages
from router.directory import directory_pb2 as pb
from router.directory import directory_pb2_grpc as rpc
from router.directory.asker import Asker
from router.directory.cache import Cache, Known
from router.directory.engine_list import EngineList
from router.directory.reporter import Reporter
from router.directory.waiting import Ask, Placed
from router.identity.chain import Chain, End
from router.identity.nodes import Found, Holder

log = logging.getLogger("conserve.router.directory.client")

_CHANNEL = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.dns_min_time_between_resolutions_ms", 500),  # by default a lost directory is not found for 30 s
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 << 20),
]
_RETRY_S = 0.1
_ENGINE_PUSH_S = 2.0


class DirectoryUnreachable(RuntimeError):
    """The directory did not answer within the time a caller may be kept waiting."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    call_timeout_s: float = 2.0
    place_grace_s: float = 3.0  # beyond a placement's own waiting time: a directory restart fits into it
    max_conversations: int = 200_000
    max_nodes: int = 500_000


class DirectoryClient:
    def __init__(
        self,
        address: str,
        gateway: str,
        *,
        secret: str = "",
        settings: ClientSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ClientSettings()
        self.gateway = incarnation.begin(gateway)  # its turns are not those of the process before it
        self.engines = EngineList()
        self.cache = Cache(self.settings.max_conversations, self.settings.max_nodes)
        self.connected = False
        self._clock = clock
        self._turns = itertools.count(1)
        self._channel = grpc.aio.insecure_channel(address, _CHANNEL, interceptors=auth.saying(secret))
        self._stub: Any = rpc.DirectoryStub(self._channel)  # type: ignore[no-untyped-call]
        self._asker = Asker(self._stub)
        self._reporter = Reporter(self._stub, self.gateway, self._unknown)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, metrics_page: str = "") -> None:
        """`metrics_page`: host:port of this process's own, for who looks for all of them."""
        self._tasks = [
            asyncio.create_task(self._watch_forever(metrics_page)),
            asyncio.create_task(self._asker.run()),
            asyncio.create_task(self._reporter.run()),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def bound(self, key: str) -> Known | None:
        """The conversation's binding, if its decoder still is what it was bound to."""
        known = self.cache.get(key)
        if known is None or self.engines.alive(known.engine, known.epoch) is None:
            return None
        return known

    def leaving(self, known: Known) -> bool:
        """Its decoder is draining: the next turn may go elsewhere."""
        state = self.engines.state(known.engine)
        return state is not None and state.draining

    async def place(self, ask: Ask) -> tuple[Placed | Refusal, Known | None]:
        """Where a turn goes; its turn counts as begun. Cancelling gives the place back."""
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

    async def find(self, chain: Chain) -> tuple[Found | None, Callable[[str], bool]]:
        """The longest known prefix of a prompt, and which of its conversations have a turn in flight."""
        found = self.cache.nodes.find(chain)
        if found is not None:
            return found, self.cache.running
        remote: Found | None = None
        running: Callable[[str], bool] = self.cache.running
        try:
            remote, running = await self._find_remotely(chain)
        except grpc.aio.AioRpcError as wrong:
            metrics.FALLBACKS.labels("identify_failed").inc()
            log.warning("not looked up, counts as a new conversation reason=%s", wrong.code().name)
        found = self.cache.nodes.find(chain)  # its twin may have come meanwhile
        if found is not None and (remote is None or found.size >= remote.size):
            return found, self.cache.running
        return remote, running

    def next_turn(self) -> int:
        """A number by which the directory knows a turn of this gateway from its others."""
        return next(self._turns)

    def turn_began(self, known: Known, turn: int, end: End) -> None:
        """A turn that needs no place; one that was placed has begun by that."""
        self.cache.touch(known)
        self._reporter.add(pb.Activity(key=known.key, turn=turn, turn_began=messages.node(end)))

    def prefill_done(self, key: str, prompt_tokens: int, lost: EngineInfo | None = None) -> None:
        """`lost`: the prefiller could not be reached."""
        epoch = pb.Epoch(engine=lost.engine, epoch=lost.epoch) if lost else None
        done = pb.PrefillDone(prompt_tokens=prompt_tokens, lost=epoch)
        self._reporter.add(pb.Activity(key=key, prefill_done=done))

    def first_token(self, key: str) -> None:
        self._reporter.add(pb.Activity(key=key, first_token=pb.FirstToken()))

    def abandon(self, key: str, turn: int) -> None:
        """Whoever asked for a place has left. The answer may have been on its way: its turn will not run."""
        self._reporter.add(pb.Activity(key=key, turn=turn, turn_ended=pb.TurnEnded()))

    def turn_ended(
        self,
        known: Known,
        turn: int,
        prompt_tokens: int,
        completion_tokens: int,
        answer: End | None = None,
        *,
        tool_call: bool = False,
        met: Sequence[str] = (),
        missed: Sequence[str] = (),
    ) -> None:
        if prompt_tokens:
            known.turns += 1
            known.completion_tokens = completion_tokens
            known.context_tokens = prompt_tokens + completion_tokens
        ended = pb.TurnEnded(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            tool_call=tool_call,
            met=met,
            missed=missed,
        )
        if answer is not None:
            ended.answer.CopyFrom(messages.node(answer))
            if self.cache.get(known.key) is known:
                self.cache.nodes.record(answer, known.key, alias=True)
        self._reporter.add(pb.Activity(key=known.key, turn=turn, turn_ended=ended))

    async def end(self, key: str, cause: str) -> bool:
        """False when the directory does not know it; raises DirectoryUnreachable."""
        reply = await self._call(self._stub.End, pb.EndRequest(key=key, cause=cause))
        self.cache.drop(key)
        return bool(reply.known)

    async def describe(self, key: str) -> dict[str, Any] | None:
        reply = await self._call(self._stub.Describe, pb.DescribeRequest(key=key))
        return orjson.loads(reply.json) if reply.json else None

    async def lanes(self, seconds: float) -> dict[str, Any]:
        reply = await self._call(self._stub.Lanes, pb.LanesRequest(seconds=seconds))
        lanes: dict[str, Any] = orjson.loads(reply.json)
        return lanes

    async def page(self, prefix: str, after: str, limit: int) -> list[dict[str, Any]]:
        request = pb.ListRequest(prefix=prefix, after=after, limit=limit)
        found: list[dict[str, Any]] = orjson.loads((await self._call(self._stub.List, request)).json)
        return found

    async def engine(self, engine: str, epoch: int) -> Any:
        return await self.engines.wait_for(engine, epoch, _ENGINE_PUSH_S)

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self.settings.call_timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as wrong:
            raise DirectoryUnreachable(f"the directory did not answer ({wrong.code().name})") from wrong

    async def _place(self, ask: Ask) -> Placed | Refusal:
        """Tries again while a directory restarts: a placement made meanwhile is found, not doubled."""
        until = self._clock() + ask.wait_s + self.settings.place_grace_s
        while True:
            left = until - self._clock()
            asked = replace(ask, wait_s=max(0.0, min(ask.wait_s, left - self.settings.place_grace_s)))
            try:
                reply = await self._asker.ask(messages.place_request(asked), max(left, 0.05))
            except (grpc.aio.AioRpcError, TimeoutError) as wrong:
                if self._clock() + _RETRY_S >= until:
                    self.abandon(ask.key, ask.turn)
                    reason = wrong.code().name if isinstance(wrong, grpc.aio.AioRpcError) else "no answer"
                    raise DirectoryUnreachable(f"the directory did not answer ({reason})") from wrong
                ask = replace(ask, again=True)
                await asyncio.sleep(_RETRY_S)
                continue
            return messages.placed_or_refusal(ask.key, reply)

    async def _find_remotely(self, chain: Chain) -> tuple[Found | None, Callable[[str], bool]]:
        timeout = self.settings.call_timeout_s
        last = len(chain.links) - 1
        reply = await self._stub.Identify(pb.IdentifyRequest(links=chain.links[::-1]), timeout=timeout)
        prefixes = [
            (digest, chain.sizes[last - tails.index] + length)
            for tails in reply.tails
            for length in tails.lengths
            if (digest := chain.digest_at(last - tails.index, length)) is not None
        ]
        if prefixes:
            request = pb.IdentifyRequest(digests=[digest for digest, _ in prefixes])
            with_tail = await self._stub.Identify(request, timeout=timeout)
            if with_tail.index >= 0:
                digest, size = prefixes[with_tail.index]
                return _found(digest, size, with_tail)
        if reply.index < 0:
            return None, self.cache.running
        at = last - reply.index
        return _found(chain.links[at], chain.sizes[at], reply)

    def _unknown(self, key: str) -> None:
        """The directory has ended it (or lost it with its disk): the next turn places it again."""
        metrics.FALLBACKS.labels("stale_binding").inc()
        self.cache.drop(key)

    async def _watch_forever(self, metrics_page: str) -> None:
        request = pb.WatchRequest(gateway=self.gateway, metrics=metrics_page)
        while True:
            try:
                async for news in self._stub.Watch(request, wait_for_ready=True):
                    self._take(news)
            except grpc.aio.AioRpcError as wrong:
                log.warning("directory lost, serving from what is known reason=%s", wrong.code().name)
            self.connected = False
            metrics.DIRECTORY_UP.set(0)
            await asyncio.sleep(_RETRY_S)

    def _take(self, news: pb.News) -> None:
        if not self.connected:
            self.connected = True
            metrics.DIRECTORY_UP.set(1)
        if news.HasField("engines"):
            self.engines.take(news.engines)
        for ended in news.ended:
            self.cache.drop(ended.key)
        for key in news.foreign:
            self.cache.drop(key)  # its prompts and sizes as known here are old: ask when it comes back
        metrics.CACHED_BINDINGS.set(len(self.cache))


def _found(digest: bytes, size: int, reply: pb.IdentifyReply) -> tuple[Found, Callable[[str], bool]]:
    running = {holder.conversation for holder in reply.holders if holder.running}
    holders = tuple(Holder(holder.conversation, holder.tip) for holder in reply.holders)
    return Found(digest, size, holders), running.__contains__
