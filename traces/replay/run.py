"""Run of a replay: calibrate, probe, play every conversation, count."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from traces.errors import ReplayError
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

WINDOW_S = 10.0  # of the live rate


class ReplayWatcher:
    """Told what happens while it happens. This one shows nothing."""

    def phase(self, name: str, conversations: int) -> None: ...
    def started(self, conversation: TraceConversation) -> None: ...
    def answered(self, turn: TurnResult) -> None: ...
    def ended(self, result: ConversationResult) -> None: ...


class ProgressBar(ReplayWatcher):
    """A progress bar: conversations done, in flight, failed, and the rate of the last seconds."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._live = self._failed = 0
        self._recent: list[tuple[float, int]] = []

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str, conversations: int) -> None:
        self._live = self._failed = 0
        self._task = self._progress.add_task(name, total=conversations, state="")

    def started(self, conversation: TraceConversation) -> None:
        self._live += 1
        self._show(0)

    def answered(self, turn: TurnResult) -> None:
        self._recent.append((time.monotonic(), turn.output_tokens))
        self._show(0)

    def ended(self, result: ConversationResult) -> None:
        self._live = max(0, self._live - 1)
        self._failed += result.outcome is PlayOutcome.FAILED
        self._show(1)

    def _show(self, advance: int) -> None:
        if self._task is None:
            return
        now = time.monotonic()
        self._recent = [(at, tokens) for at, tokens in self._recent if now - at <= WINDOW_S]
        rate = sum(tokens for _, tokens in self._recent) / WINDOW_S
        failed = f", {self._failed} failed" if self._failed else ""
        state = f"{self._live} in flight{failed}, {rate:,.0f} tok/s"
        self._progress.update(self._task, advance=advance, state=state)


PREFIXES = ("conserve_", "vllm:")
JOULES = "conserve_energy_joules_total"
TIMEOUT = aiohttp.ClientTimeout(total=10.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    counters: dict[str, float]  # summed over labels and pages
    unread: tuple[str, ...]


async def read_counters(session: aiohttp.ClientSession, urls: Sequence[str]) -> Snapshot:
    pages = await asyncio.gather(*(_page(session, url) for url in urls))
    counters: dict[str, float] = {}
    unread: list[str] = []
    for url, (page, problem) in zip(urls, pages, strict=True):
        if problem:
            unread.append(f"{url}: {problem}")
            continue
        for name, value in _counters(page).items():
            counters[name] = counters.get(name, 0.0) + value
    return Snapshot(counters, tuple(unread))


async def _page(session: aiohttp.ClientSession, url: str) -> tuple[str, str]:
    try:
        async with session.get(url, timeout=TIMEOUT) as response:
            if response.status != 200:
                return "", f"HTTP {response.status}"
            return await response.text(), ""
    except (aiohttp.ClientError, TimeoutError) as error:
        return "", f"{type(error).__name__}: {error}"


def _counters(page: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        if family.type not in ("counter", "histogram", "summary") or not family.name.startswith(PREFIXES):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_total", "_sum", "_count")):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def between(before: Snapshot, after: Snapshot) -> MeterReading:
    """What was counted in between. A counter that fell was restarted: what it says now is all one knows."""
    grown: dict[str, float] = {}
    for name, value in after.counters.items():
        earlier = before.counters.get(name, 0.0)
        grown[name] = value - earlier if value >= earlier else value
    unread = tuple(dict.fromkeys((*before.unread, *after.unread)))
    return MeterReading(
        {name: grown[name] for name in sorted(grown) if grown[name]}, grown.get(JOULES), unread
    )


log = logging.getLogger("conserve.traces.replay")


@dataclass(frozen=True, slots=True)
class Stage:
    """What every conversation of a run is played with."""

    client: ChatClient
    sizes: Calibration
    options: ReplayOptions
    watcher: ReplayWatcher
    clock: Clock

    def player(self, conversation: TraceConversation, root: str, epoch: float) -> Player:
        options = self.options
        dialogue = Dialogue(conversation, self.sizes, options.tools, options.salt, root)
        return Player(
            conversation, dialogue, self.client, self.clock, epoch, options.retries, self.watcher.answered
        )


async def replay(
    conversations: Sequence[TraceConversation],
    options: ReplayOptions,
    watcher: ReplayWatcher,
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
        before = await read_counters(session, pages)
        watcher.phase("replay", len(conversations))
        epoch = clock()
        results = await _Run(stage, conversations, epoch).play(stop or asyncio.Event())
        duration = clock() - epoch
        after = await read_counters(session, pages)
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
        meters=between(before, after),
        conversations=tuple(results),
    )


def _told(options: ReplayOptions) -> dict[str, str | float | int | bool]:
    """Options for the record: no key, nothing that the record has elsewhere."""
    elsewhere = {"url", "model", "api_key", "probes", "slo_factor", "metrics_urls"}
    return {name: value for name, value in asdict(options).items() if name not in elsewhere}


async def _unloaded(conversations: Sequence[TraceConversation], stage: Stage) -> Unloaded | None:
    chosen = probes(conversations, stage.options.probes)
    if not chosen:
        return None
    stage.watcher.phase("unloaded latency", len(chosen))
    played: list[ConversationResult] = []
    first = replace(chosen[0], id=f"warm-up-{chosen[0].id}")  # words of its own: a probe must find no cache
    warm_up = await stage.player(first, first.id, stage.clock()).play()
    if warm_up.outcome is not PlayOutcome.DONE:
        raise ReplayError(f"the first probe failed, so the replay would: {warm_up.error}")
    for conversation in chosen:
        result = await stage.player(conversation, conversation.id, stage.clock()).play()
        stage.watcher.ended(result)
        if result.outcome is not PlayOutcome.DONE:
            raise ReplayError(f"a probe failed with nothing else running: {result.error}")
        played.append(result)
    return fit(played)


class _Run:
    """Conversations in flight: each starts at its arrival, or when a slot is free."""

    def __init__(self, stage: Stage, conversations: Sequence[TraceConversation], epoch: float) -> None:
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

    async def _one(self, conversation: TraceConversation) -> None:
        player = self._stage.player(conversation, self._root(conversation), self._epoch)
        self._players[conversation.id] = player
        self._stage.watcher.started(conversation)
        result = await player.play()
        self._results[conversation.id] = result
        self._stage.watcher.ended(result)

    def _root(self, conversation: TraceConversation) -> str:
        parent = conversation.parent
        return parent if parent is not None and parent in self._known else conversation.id

    def _result(self, conversation: TraceConversation) -> ConversationResult:
        if conversation.id in self._results:
            return self._results[conversation.id]
        if conversation.id in self._players:
            return self._players[conversation.id].unfinished()
        arrival = conversation.arrival_s
        effective = conversation.effective_turn
        return ConversationResult(conversation.id, arrival, arrival, PlayOutcome.NOT_STARTED, effective, ())
