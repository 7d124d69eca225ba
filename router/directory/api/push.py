"""Collects changes for each gateway and pushes them over the gateway's stream.

Only one process at a time has the name of a gateway. When a new process connects under the name, the turns of
the former process count as ended.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from router.directory.api.messages import Engines, Placed, Push, Spent

MAX_PENDING = 100_000
BOUND_AT_ONCE = 5_000  # bindings in one push, which holds a gateway's loop for some milliseconds
BATCH = "batch"  # what the batch process calls itself


def process_name(gateway: str) -> str:
    """Return a name for this process of a gateway that sorts after the names of its earlier processes."""
    return f"{gateway}.{time.time_ns():016x}"


def supersedes(newer: str, older: str) -> bool:
    gateway, _, number = newer.rpartition(".")
    earlier_gateway, _, earlier = older.rpartition(".")
    return gateway == earlier_gateway and earlier < number


class GatewayStream:
    """Stream to one gateway. Waiting pushes are merged, so that a slow gateway needs little memory."""

    def __init__(self, page: str = "") -> None:
        self.page = page  # host:port of the gateway's metrics
        self.ended: list[tuple[str, str]] = []
        self.foreign: list[str] = []
        self.spent: dict[tuple[str, str], Spent] = {}  # gateway, key
        self.bound: dict[str, tuple[str, int]] = {}  # conversation: engine and epoch
        self.engines = True  # the next message has the engines; the first one always does
        self.overrun = False
        self._wake = asyncio.Event()
        self._wake.set()

    async def wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    def wake(self) -> None:
        if len(self.ended) + len(self.foreign) + len(self.spent) > MAX_PENDING:
            self.overrun = True
        self._wake.set()

    def tell_bound(self, bound: Mapping[str, tuple[str, int]]) -> None:
        """Queue bindings that were read a moment ago. A binding that is already queued is newer and stays."""
        self.bound = {**bound, **self.bound}
        self.wake()

    def spend(self, by: str, news: Spent) -> None:
        if (before := self.spent.get((by, news.key))) is not None:
            requests, tokens = before.requests + news.requests, before.tokens + news.tokens
            news = replace(news, requests=requests, tokens=tokens)
        self.spent[by, news.key] = news

    def take(self, engines: Callable[[], Engines]) -> Push:
        """Take the queued changes: the engines if they changed, and at most `BOUND_AT_ONCE` bindings."""
        keys = list(itertools.islice(self.bound, BOUND_AT_ONCE))
        bound = tuple((key, *self.bound.pop(key)) for key in keys)
        if self.bound:
            self._wake.set()
        taken = Push(
            engines() if self.engines else None,
            tuple(self.ended),
            tuple(self.foreign),
            tuple((gateway, one) for (gateway, _), one in self.spent.items()),
            bound,
        )
        self.ended, self.foreign, self.engines, self.spent = [], [], False, {}
        return taken


class GatewayStreams:
    def __init__(self) -> None:
        self._by_gateway: dict[str, GatewayStream] = {}

    def __len__(self) -> int:
        return len(self._by_gateway)

    def __contains__(self, gateway: str) -> bool:
        return gateway in self._by_gateway

    def pages(self, *, of_batch: bool) -> tuple[str, ...]:
        """Return the metrics pages of all gateways, or if `of_batch` is True, that of the batch process."""
        streams = self._by_gateway.items()
        pages = {one.page for name, one in streams if name.startswith(f"{BATCH}.") is of_batch and one.page}
        return tuple(sorted(pages))

    def join(self, gateway: str, page: str = "") -> GatewayStream:
        stream = self._by_gateway[gateway] = GatewayStream(page)
        return stream

    def leave(self, gateway: str, stream: GatewayStream) -> bool:
        """Remove a gateway's stream; return False if the gateway already has a newer stream."""
        if self._by_gateway.get(gateway) is not stream:
            return False
        del self._by_gateway[gateway]
        return True

    def supersede(self, gateway: str) -> list[str]:
        """Forget earlier processes with this gateway's name, and end their streams."""
        earlier = [one for one in self._by_gateway if supersedes(gateway, one)]
        for one in earlier:
            stream = self._by_gateway.pop(one)
            stream.overrun = True
            stream.wake()
        return earlier

    def tell(self, ended: Iterable[tuple[str, str]], foreign: Iterable[tuple[str, str]]) -> None:
        ended = list(ended)
        if ended:
            for stream in self._by_gateway.values():
                stream.ended += ended
                for key, _ in ended:
                    stream.bound.pop(key, None)
                stream.wake()
        for gateway, key in foreign:
            one = self._by_gateway.get(gateway)
            if one is not None:
                one.foreign.append(key)
                one.wake()

    def tell_spent(self, by: str, spent: Iterable[Spent]) -> None:
        spent = list(spent)
        for gateway, stream in self._by_gateway.items():
            if gateway != by and not gateway.startswith(f"{BATCH}."):
                for one in spent:
                    stream.spend(by, one)
                stream.wake()

    def tell_bound(self, placed: Iterable[Placed]) -> None:
        """Tell all gateways of bindings in the journal, so that each can serve them without the directory."""
        if len(self._by_gateway) > 1:
            bound = {one.key: (one.engine, one.epoch) for one in placed}
            for gateway, stream in self._by_gateway.items():
                if not gateway.startswith(f"{BATCH}."):
                    stream.bound |= bound

    def tell_moved(self, key: str, engine: str, epoch: int) -> None:
        """Tell all gateways of a conversation's new binding; call this once the journal holds the binding."""
        for gateway, stream in self._by_gateway.items():
            if not gateway.startswith(f"{BATCH}."):
                stream.bound[key] = engine, epoch
                stream.wake()

    def tell_engines(self) -> None:
        for stream in self._by_gateway.values():
            stream.engines = True
            stream.wake()

    def close(self) -> None:
        for stream in self._by_gateway.values():
            stream.overrun = True
            stream.wake()
