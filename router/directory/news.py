"""What gateways are told without asking: collected for each, and sent when its stream takes more."""

import asyncio
from collections.abc import Iterable

from router.directory.incarnation import supersedes

MAX_PENDING = 100_000


class Watcher:
    """One gateway's stream. What waits is merged: a slow gateway costs memory only by what changed."""

    def __init__(self, page: str = "") -> None:
        self.page = page  # host:port of the gateway's metrics
        self.ended: list[tuple[str, str]] = []
        self.foreign: list[str] = []
        self.engines = True  # the first message has them
        self.overrun = False
        self._wake = asyncio.Event()
        self._wake.set()

    async def wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    def wake(self) -> None:
        if len(self.ended) + len(self.foreign) > MAX_PENDING:
            self.overrun = True
        self._wake.set()

    def take(self) -> tuple[list[tuple[str, str]], list[str], bool]:
        taken = self.ended, self.foreign, self.engines
        self.ended, self.foreign, self.engines = [], [], False
        return taken


class Watchers:
    def __init__(self) -> None:
        self._by_gateway: dict[str, Watcher] = {}

    def __len__(self) -> int:
        return len(self._by_gateway)

    def __contains__(self, gateway: str) -> bool:
        return gateway in self._by_gateway

    @property
    def pages(self) -> list[str]:
        return sorted({watcher.page for watcher in self._by_gateway.values() if watcher.page})

    def join(self, gateway: str, page: str = "") -> Watcher:
        watcher = self._by_gateway[gateway] = Watcher(page)
        return watcher

    def leave(self, gateway: str, watcher: Watcher) -> bool:
        """False when the gateway has a newer stream already."""
        if self._by_gateway.get(gateway) is not watcher:
            return False
        del self._by_gateway[gateway]
        return True

    def supersede(self, gateway: str) -> list[str]:
        """Forget the processes that had its name before; a stream of theirs ends."""
        earlier = [one for one in self._by_gateway if supersedes(gateway, one)]
        for one in earlier:
            watcher = self._by_gateway.pop(one)
            watcher.overrun = True
            watcher.wake()
        return earlier

    def tell(self, ended: Iterable[tuple[str, str]], foreign: Iterable[tuple[str, str]]) -> None:
        ended = list(ended)
        if ended:
            for watcher in self._by_gateway.values():
                watcher.ended += ended
                watcher.wake()
        for gateway, key in foreign:
            one = self._by_gateway.get(gateway)
            if one is not None:
                one.foreign.append(key)
                one.wake()

    def tell_engines(self) -> None:
        for watcher in self._by_gateway.values():
            watcher.engines = True
            watcher.wake()

    def close(self) -> None:
        for watcher in self._by_gateway.values():
            watcher.overrun = True
            watcher.wake()
