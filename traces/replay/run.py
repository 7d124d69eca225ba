"""Runs a replay: calibrates, plays probes, plays every conversation, and reads counters."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from traces import ReplayError
from traces.format import TraceConversation
from traces.replay.client import Calibration, ChatClient, Clock, ReplayOptions, calibrate, first_model
from traces.replay.player import Dialogue, Player
from traces.replay.results import (
    ConversationResult,
    MeterReading,
    PlayOutcome,
    Replay,
    TurnResult,
    Unloaded,
    fit,
    probes,
)

WINDOW_S = 10.0  # time over which the progress bar's rate is computed


class ReplayWatcher:
    """Observer of a running replay. This base class shows nothing."""

    def phase(self, name: str, conversations: int) -> None: ...
    def started(self, conversation: TraceConversation) -> None: ...
    def answered(self, turn: TurnResult) -> None: ...
    def ended(self, result: ConversationResult) -> None: ...


class ProgressBar(ReplayWatcher, Progress):
    """Progress bar with the conversations done, in flight and failed, and the rate of the last seconds."""

    def __init__(self, console: Console) -> None:
        state = TextColumn("{task.fields[state]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, state, console=console)
        self._shown: TaskID | None = None
        self._running = self._failed = 0
        self._recent: list[tuple[float, int]] = []

    def phase(self, name: str, conversations: int) -> None:
        self._running = self._failed = 0
        self._shown = self.add_task(name, total=conversations, state="")

    def started(self, conversation: TraceConversation) -> None:
        self._running += 1
        self._show(0)

    def answered(self, turn: TurnResult) -> None:
        self._recent.append((time.monotonic(), turn.output_tokens))
        self._show(0)

    def ended(self, result: ConversationResult) -> None:
        self._running = max(0, self._running - 1)
        self._failed += result.outcome is PlayOutcome.FAILED
        self._show(1)

    def _show(self, advance: int) -> None:
        if self._shown is None:
            return
        now = time.monotonic()
        self._recent = [(at, tokens) for at, tokens in self._recent if now - at <= WINDOW_S]
        rate = sum(tokens for _, tokens in self._recent) / WINDOW_S
        failed = f", {self._failed} failed" if self._failed else ""
        state = f"{self._running} in flight{failed}, {rate:,.0f} tok/s"
        self.update(self._shown, advance=advance, state=state)


PREFIXES = ("conserve_", "vllm:")
JOULES = "conserve_energy_joules_total"
TIMEOUT = aiohttp.ClientTimeout(total=10.0)


async def read_counters(session: aiohttp.ClientSession, urls: Sequence[str]) -> MeterReading:
    """Return the counters of metrics pages, summed over labels and pages."""
    counters: dict[str, float] = {}
    unread: list[str] = []

    async def read(url: str) -> None:
        try:
            async with session.get(url, timeout=TIMEOUT, raise_for_status=True) as response:
                _add_counters(counters, await response.text())
        except (aiohttp.ClientError, TimeoutError) as error:
            unread.append(f"{url}: {type(error).__name__}: {error}")

    await asyncio.gather(*map(read, urls))
    return MeterReading(counters, None, tuple(sorted(unread)))


def _add_counters(counters: dict[str, float], page: str) -> None:
    for family in text_string_to_metric_families(page):
        if family.type in ("counter", "histogram", "summary") and family.name.startswith(PREFIXES):
            for sample in family.samples:
                if sample.name.endswith(("_total", "_sum", "_count")):
                    counters[sample.name] = counters.get(sample.name, 0.0) + sample.value


def between(before: MeterReading, after: MeterReading) -> MeterReading:
    """Return the counts between two readings. A counter that fell was restarted, and counts from 0."""
    grown: dict[str, float] = {}
    for name, value in sorted(after.counters.items()):
        earlier = before.counters.get(name, 0.0)
        grown[name] = value - earlier if value >= earlier else value
    unread = tuple(dict.fromkeys((*before.unread, *after.unread)))
    return MeterReading({name: more for name, more in grown.items() if more}, grown.get(JOULES), unread)


log = logging.getLogger("conserve.traces.replay")


async def replay(
    conversations: Sequence[TraceConversation],
    options: ReplayOptions,
    watcher: ReplayWatcher,
    label: str = "",
    trace: str = "",
    stop: asyncio.Event | None = None,
    clock: Clock = time.monotonic,
) -> Replay:
    """Play `conversations`, sorted by arrival, until all are done, time is up, or `stop` is set."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        model = options.model or await first_model(session, options.url)
        client = ChatClient(session, options, model, clock)
        sizes = await calibrate(session, options.url, client, options.tools)
        run = _Run(client, sizes, options, watcher, clock, conversations)
        unloaded = await run.unloaded()
        pages = (f"{options.url.rstrip('/')}/metrics", *options.metrics_urls)
        before = await read_counters(session, pages)
        watcher.phase("replay", len(conversations))
        results = await run.play(stop or asyncio.Event())
        duration = clock() - run.epoch
        after = await read_counters(session, pages)
    return Replay(
        label=label or trace or options.url,
        trace=trace,
        url=options.url,
        model=model,
        options=_recorded_options(options),
        duration_s=duration,
        chars_per_token=sizes.chars_per_token,
        calibrated_by=sizes.source,
        slo_factor=options.slo_factor,
        unloaded=unloaded,
        meters=between(before, after),
        conversations=tuple(results),
    )


def _recorded_options(options: ReplayOptions) -> dict[str, str | float | int | bool]:
    """Return the options to store with the results, without the API key and values stored elsewhere."""
    elsewhere = {"url", "model", "api_key", "probes", "slo_factor", "metrics_urls"}
    return {name: value for name, value in asdict(options).items() if name not in elsewhere}


class _Run:
    """Conversations of a replay. Each starts at its arrival, or later when a slot is free."""

    def __init__(
        self,
        client: ChatClient,
        sizes: Calibration,
        options: ReplayOptions,
        watcher: ReplayWatcher,
        clock: Clock,
        conversations: Sequence[TraceConversation],
    ) -> None:
        self._client, self._sizes, self._options = client, sizes, options
        self._watcher, self._clock, self._conversations = watcher, clock, conversations
        self._slots = asyncio.Semaphore(options.max_conversations)
        self._known = {conversation.id: conversation for conversation in conversations}
        self._results: dict[str, ConversationResult] = {}
        self._players: dict[str, Player] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.epoch = clock()

    async def unloaded(self) -> Unloaded | None:
        chosen = probes(self._conversations, self._options.probes)
        if not chosen:
            return None
        self._watcher.phase("unloaded latency", len(chosen))
        played: list[ConversationResult] = []
        # Another id gives other words, so that no probe finds the warm-up in a cache.
        first = replace(chosen[0], id=f"warm-up-{chosen[0].id}")
        warm_up = await self._player(first).play()
        if warm_up.outcome is not PlayOutcome.DONE:
            raise ReplayError(f"the first probe failed, so the replay would fail, too: {warm_up.error}")
        for conversation in chosen:
            result = await self._player(conversation).play()
            self._watcher.ended(result)
            if result.outcome is not PlayOutcome.DONE:
                raise ReplayError(f"a probe failed with nothing else running: {result.error}")
            played.append(result)
        return fit(played)

    async def play(self, stop: asyncio.Event) -> list[ConversationResult]:
        self.epoch = self._clock()
        all_done = asyncio.create_task(self._feed(), name="replay-feed")
        stopped = asyncio.create_task(stop.wait(), name="replay-stop")
        limit = self._options.time_limit_s
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

    def _player(self, conversation: TraceConversation) -> Player:
        parent, options = conversation.parent, self._options
        root = parent if parent is not None and parent in self._known else conversation.id
        dialogue = Dialogue(conversation, self._sizes, options.tools, options.salt, root)
        answered = self._watcher.answered
        return Player(
            conversation, dialogue, self._client, self._clock, self.epoch, options.retries, answered
        )

    async def _feed(self) -> None:
        for conversation in self._conversations:
            await asyncio.sleep(self.epoch + conversation.arrival_s - self._clock())
            await self._slots.acquire()
            task = asyncio.create_task(self._one(conversation), name=f"conversation-{conversation.id}")
            self._tasks.add(task)
            task.add_done_callback(self._over)
        await asyncio.gather(*self._tasks)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._slots.release()
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)

    async def _one(self, conversation: TraceConversation) -> None:
        player = self._players[conversation.id] = self._player(conversation)
        self._watcher.started(conversation)
        result = self._results[conversation.id] = await player.play()
        self._watcher.ended(result)

    def _result(self, conversation: TraceConversation) -> ConversationResult:
        if conversation.id in self._results:
            return self._results[conversation.id]
        if conversation.id in self._players:
            return self._players[conversation.id].unfinished()
        arrival = conversation.arrival_s
        effective = conversation.effective_turn
        return ConversationResult(conversation.id, arrival, arrival, PlayOutcome.NOT_STARTED, effective, ())
