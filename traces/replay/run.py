"""A whole replay: size the texts, measure the unloaded latency, then let the conversations arrive."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import aiohttp

from traces.errors import ReplayError
from traces.format import Conversation
from traces.replay import meters
from traces.replay.calibration import Calibration, calibrate
from traces.replay.client import ChatClient, Clock, first_model
from traces.replay.dialogue import Dialogue
from traces.replay.options import ReplayOptions
from traces.replay.player import Player
from traces.replay.results import ConversationResult, Outcome, Replay, TurnResult, Unloaded
from traces.replay.unloaded import fit, probes

log = logging.getLogger("conserve.traces.replay")


class Watcher(Protocol):
    """Told what happens while it happens."""

    def phase(self, name: str, conversations: int) -> None: ...
    def started(self, conversation: Conversation) -> None: ...
    def answered(self, turn: TurnResult) -> None: ...
    def ended(self, result: ConversationResult) -> None: ...


class Silent:
    """A watcher that shows nothing."""

    def phase(self, name: str, conversations: int) -> None: ...
    def started(self, conversation: Conversation) -> None: ...
    def answered(self, turn: TurnResult) -> None: ...
    def ended(self, result: ConversationResult) -> None: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """What every conversation of a run is played with."""

    client: ChatClient
    sizes: Calibration
    options: ReplayOptions
    watcher: Watcher
    clock: Clock

    def player(self, conversation: Conversation, root: str, epoch: float) -> Player:
        options = self.options
        dialogue = Dialogue(conversation, self.sizes, options.tools, options.salt, root)
        return Player(
            conversation, dialogue, self.client, self.clock, epoch, options.retries, self.watcher.answered
        )


async def replay(
    conversations: Sequence[Conversation],
    options: ReplayOptions,
    watcher: Watcher,
    label: str = "",
    trace: str = "",
    stop: asyncio.Event | None = None,
    clock: Clock = time.monotonic,
) -> Replay:
    """Play `conversations` (sorted by arrival) until all are done, the time limit, or `stop`."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        model = options.model or await first_model(session, options.url)
        client = ChatClient(session, options, model, clock)
        sizes = await calibrate(session, options.url, client, options.tools)
        stage = Stage(client, sizes, options, watcher, clock)
        unloaded = await _unloaded(conversations, stage)
        pages = (f"{options.url.rstrip('/')}/metrics", *options.metrics_urls)
        before = await meters.read(session, pages)
        watcher.phase("replay", len(conversations))
        epoch = clock()
        results = await _Run(stage, conversations, epoch).play(stop or asyncio.Event())
        duration = clock() - epoch
        after = await meters.read(session, pages)
    return Replay(
        label=label or trace or options.url,
        trace=trace,
        url=options.url,
        model=model,
        options=_told(options),
        duration_s=duration,
        chars_per_token=sizes.chars_per_token,
        calibrated_by=sizes.source,
        slo_factor=options.slo_factor,
        unloaded=unloaded,
        meters=meters.between(before, after),
        conversations=tuple(results),
    )


def _told(options: ReplayOptions) -> dict[str, str | float | int | bool]:
    """Options for the record: no key, no addresses twice."""
    return {
        "dialect": options.dialect.value,
        "tools": options.tools.value,
        "max_conversations": options.max_conversations,
        "time_limit_s": options.time_limit_s,
        "request_timeout_s": options.request_timeout_s,
        "retries": options.retries,
        "conversation_header": options.conversation_header,
        "salt": options.salt,
    }


async def _unloaded(conversations: Sequence[Conversation], stage: Stage) -> Unloaded | None:
    chosen = probes(conversations, stage.options.probes)
    if not chosen:
        return None
    stage.watcher.phase("unloaded latency", len(chosen))
    played: list[ConversationResult] = []
    first = replace(chosen[0], id=f"warm-up-{chosen[0].id}")  # words of its own: a probe must find no cache
    warm_up = await stage.player(first, first.id, stage.clock()).play()
    if warm_up.outcome is not Outcome.DONE:
        raise ReplayError(f"the first probe failed, so the replay would: {warm_up.error}")
    for conversation in chosen:
        result = await stage.player(conversation, conversation.id, stage.clock()).play()
        stage.watcher.ended(result)
        if result.outcome is not Outcome.DONE:
            raise ReplayError(f"a probe failed with nothing else running: {result.error}")
        played.append(result)
    return fit(played)


class _Run:
    """Conversations in flight: each starts at its arrival, or when a slot is free."""

    def __init__(self, stage: Stage, conversations: Sequence[Conversation], epoch: float) -> None:
        self._stage = stage
        self._conversations = conversations
        self._epoch = epoch
        self._slots = asyncio.Semaphore(stage.options.max_conversations)
        self._known = {conversation.id: conversation for conversation in conversations}
        self._results: dict[str, ConversationResult] = {}
        self._players: dict[str, Player] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def play(self, stop: asyncio.Event) -> list[ConversationResult]:
        all_done = asyncio.create_task(self._feed(), name="replay-feed")
        stopped = asyncio.create_task(stop.wait(), name="replay-stop")
        limit = self._stage.options.time_limit_s
        done, _ = await asyncio.wait((all_done, stopped), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        leftover = [all_done, stopped, *self._tasks]
        for task in leftover:
            task.cancel()
        ended = await asyncio.gather(*leftover, return_exceptions=True)
        for problem in ended:
            if isinstance(problem, Exception):
                raise problem
        if all_done not in done:
            log.warning("stopped with %d conversations not done", len(self._known) - len(self._results))
        return [self._result(conversation) for conversation in self._conversations]

    async def _feed(self) -> None:
        for conversation in self._conversations:
            await asyncio.sleep(self._epoch + conversation.arrival_s - self._stage.clock())
            await self._slots.acquire()
            task = asyncio.create_task(self._one(conversation), name=f"conversation-{conversation.id}")
            self._tasks.add(task)
            task.add_done_callback(self._over)
        await asyncio.gather(*self._tasks)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._slots.release()
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)

    async def _one(self, conversation: Conversation) -> None:
        player = self._stage.player(conversation, self._root(conversation), self._epoch)
        self._players[conversation.id] = player
        self._stage.watcher.started(conversation)
        result = await player.play()
        self._results[conversation.id] = result
        self._stage.watcher.ended(result)

    def _root(self, conversation: Conversation) -> str:
        parent = conversation.parent
        return parent if parent is not None and parent in self._known else conversation.id

    def _result(self, conversation: Conversation) -> ConversationResult:
        if conversation.id in self._results:
            return self._results[conversation.id]
        if conversation.id in self._players:
            return self._players[conversation.id].unfinished()
        arrival = conversation.arrival_s
        effective = conversation.effective_turn
        return ConversationResult(conversation.id, arrival, arrival, Outcome.NOT_STARTED, effective, ())
