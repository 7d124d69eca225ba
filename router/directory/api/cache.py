"""Caches a gateway's conversations, with bindings and prompts, and the engines that the directory pushed.

The cache is enough to serve later turns while the directory is unreachable.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from placement.engines import EngineInfo, EngineState
from router import metrics
from router.directory.api.messages import EngineRecord, Engines
from router.identity.node_table import NodeTable
from router.identity.prefix_chain import End

_KV_KINDS = {  # label of the metric: field of the state
    "live": "live_tokens",
    "parked": "parked_tokens",
    "offline": "offline_tokens",
    "free": "free_tokens",
    "host_used": "host_used_tokens",
    "host_free": "host_free_tokens",
    "disk_used": "disk_used_tokens",
    "disk_free": "disk_free_tokens",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """Facts about a conversation's newest request and answer, with which its next request is compared."""

    end: bytes  # where its prompt ended
    messages: int
    size: int  # bytes
    tools: bytes  # a digest
    reasoned: bool
    called_tool: bool


@dataclass(slots=True)
class Known:
    """State of a conversation that this gateway serves. The conversation's turns update it in place."""

    key: str
    engine: str
    epoch: int
    prompt_bytes: int = 0  # size of the newest request
    completion_tokens: int = 0  # output of the newest finished turn
    context_tokens: int = 0  # what its decoder holds, after its newest finished turn
    asked: Asked | None = None  # the newest request
    tool_called_at: float | None = None  # by its newest turn; None while a turn runs
    tool_waits: tuple[float, ...] = ()  # seconds that its tools took, the newest last
    waiting_since: float | None = None  # arrival of the user's message that is not answered yet


class Cache:
    """Conversations that this gateway serves, and bindings of conversations that other gateways serve.

    The numbers of both are limited; the least recently used conversations are dropped first.
    """

    def __init__(self, max_conversations: int, max_nodes: int) -> None:
        self._limit = max_conversations
        self._known: OrderedDict[str, Known] = OrderedDict()
        self.elsewhere: OrderedDict[str, tuple[str, int]] = OrderedDict()  # conversation: engine, epoch
        self._running: dict[str, int] = {}  # conversation -> turns in flight here
        self.nodes = NodeTable(max_nodes)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Known | None:
        return self._known.get(key)

    def put(self, known: Known) -> None:
        self.elsewhere.pop(known.key, None)
        self._known[known.key] = known
        self._known.move_to_end(known.key)
        if len(self._known) > self._limit:
            oldest = next((key for key in self._known if key not in self._running), None)
            if oldest is not None:
                self.drop(oldest)

    def drop(self, key: str) -> None:
        self._known.pop(key, None)
        self.elsewhere.pop(key, None)
        self.nodes.forget(key)

    def serve_elsewhere(self, key: str, engine: str = "", epoch: int = 0) -> None:
        """Record that another gateway serves a conversation, so that this cache's record of it is outdated.

        Without `engine`, the conversation stays bound to the engine in this cache.
        """
        known = self._known.get(key)
        if known is not None and (engine, epoch) == (known.engine, known.epoch):
            return  # the binding is the one that this gateway uses
        if known is not None:
            engine, epoch = (engine, epoch) if engine else (known.engine, known.epoch)
            self.drop(key)
        if engine:
            self.elsewhere[key] = engine, epoch
            self.elsewhere.move_to_end(key)
            if len(self.elsewhere) > self._limit:
                self.elsewhere.popitem(last=False)

    def take_over(self, key: str) -> Known | None:
        """Start to serve a conversation that another gateway served, if its binding is known."""
        if (bound := self.elsewhere.get(key)) is None:
            return None
        known = Known(key, *bound)
        self.put(known)
        return known

    def touch(self, known: Known) -> None:
        if known.key in self._known:
            self._known.move_to_end(known.key)

    @contextmanager
    def turn(self, key: str, end: End) -> Iterator[None]:
        """Register a turn in flight, even before it is placed, so that a duplicate request finds it."""
        self.nodes.record(end, key)
        self._running[key] = self._running.get(key, 0) + 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
                if key not in self._known:
                    self.nodes.forget(key)

    def running(self, key: str) -> bool:
        return key in self._running

    def alone(self, key: str) -> bool:
        """Return whether the caller's turn is the only turn of the conversation in flight here."""
        return self._running.get(key, 0) <= 1


class EngineList:
    """Engines of the fleet with their states, as the directory last pushed them."""

    def __init__(self) -> None:
        self.on_gone: Callable[[str], object] = lambda http: None
        """Called with the host:port of an engine that is gone, so that nobody waits for it any longer."""
        self._records: dict[str, EngineRecord] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._records)

    def infos(self) -> list[EngineInfo]:
        return [record.info for record in self._records.values()]

    @property
    def max_context(self) -> int:
        """Return the largest context of any engine; 0 while none is known."""
        return max((record.info.max_context for record in self._records.values()), default=0)

    def load(self, engine: str) -> EngineRecord:
        return self._records[engine]

    def state(self, engine: str) -> EngineState | None:
        record = self._records.get(engine)
        return record.state if record is not None else None

    def get(self, engine: str) -> EngineInfo | None:
        record = self._records.get(engine)
        return record.info if record is not None else None

    def alive(self, engine: str, epoch: int) -> EngineInfo | None:
        """Return the engine if `epoch` is still its epoch, so that it still has its KV; otherwise None."""
        info = self.get(engine)
        return info if info is not None and info.epoch == epoch else None

    def usable(self) -> list[EngineInfo]:
        """Return the engines that can answer requests without a conversation, least busy first."""
        able = [record for record in self._records.values() if not record.suspect]
        able.sort(key=lambda one: (one.state.draining, one.state.running + one.state.waiting))
        return [record.info for record in able]

    def take(self, pushed: Engines) -> None:
        were = {record.info.http for record in self._records.values()}
        if pushed.settled:  # until then, engines that are alive may be missing
            for gone in self._records.keys() - {record.info.engine for record in pushed.engines}:
                del self._records[gone]
                _forget(gone)
        for record in pushed.engines:
            name, state = record.info.engine, record.state
            if not state.seq and self.alive(name, record.info.epoch):
                continue  # a restarted directory has no report of this engine yet; the earlier record stays
            self._records[name] = record
            metrics.ENGINE_CONVERSATIONS.labels(name).set(record.conversations)
            metrics.ENGINE_KV_TOKENS.labels(name, "in_use").set(record.kv_in_use)
            for kind, field in _KV_KINDS.items():
                metrics.ENGINE_KV_TOKENS.labels(name, kind).set(getattr(state, field))
        for http in were - {record.info.http for record in self._records.values()}:
            self.on_gone(http)
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, engine: str, epoch: int, bound_s: float) -> EngineInfo | None:
        """Wait for the push of an engine that the directory's answer named; return None after `bound_s`."""
        try:
            async with asyncio.timeout(bound_s):
                while (info := self.alive(engine, epoch)) is None:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return info


def _forget(engine: str) -> None:
    """Delete the gauges of an engine that left for good, so that no scrape shows its last values."""
    metrics.ENGINE_CONVERSATIONS.remove(engine)
    for kind in ("in_use", *_KV_KINDS):
        metrics.ENGINE_KV_TOKENS.remove(engine, kind)
