"""What a keeper knows of its engine, for all who watch: a slow watcher is told less often, never wrongly."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum

from placement.engines import EngineInfo, EngineState


class Phase(StrEnum):
    WAITING = "waiting"  # for its turn to start, where engines start one at a time
    STARTING = "starting"
    WARMING = "warming"
    SERVING = "serving"
    BACKING_OFF = "backing off"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Status:
    """For people: what the keeper is doing."""

    engine: str
    phase: Phase
    detail: str = ""
    epoch: int = 0
    pid: int = 0
    restarts: int = 0
    failure: str = ""  # why the last start or run ended
    log_lines: tuple[str, ...] = ()  # the last of the log at that failure
    metrics: str = ""  # host:port of the keeper's metrics page


@dataclass(frozen=True, slots=True)
class Change:
    """What changed since the watcher was last told; None where nothing did."""

    status: Status | None = None
    up: EngineInfo | None = None
    down: EngineInfo | None = None
    state: EngineState | None = None


class Board:
    def __init__(self, engine: str) -> None:
        self.status = Status(engine, Phase.WAITING)
        self.info: EngineInfo | None = None
        self.state: EngineState | None = None
        self._watchers: set[_Watcher] = set()

    def tell(self, phase: Phase, detail: str = "", **values: object) -> None:
        status = replace(self.status, phase=phase, detail=detail, **values)  # type: ignore[arg-type]
        if status != self.status:
            self.status = status
            self._post(Change(status=status))

    def engine_up(self, info: EngineInfo) -> None:
        self.info, self.state = info, None
        self._post(Change(up=info))

    def engine_down(self) -> None:
        if self.info is not None:
            gone, self.info, self.state = self.info, None, None
            self._post(Change(down=gone))

    def engine_state(self, state: EngineState) -> None:
        if self.info is not None and state.epoch == self.info.epoch:
            self.state = state
            self._post(Change(state=state))

    async def watch(self) -> AsyncIterator[Change]:
        """First all that is known, then each change."""
        watcher = _Watcher(Change(status=self.status, up=self.info, state=self.state))
        self._watchers.add(watcher)
        try:
            while True:
                yield await watcher.take()
        finally:
            self._watchers.discard(watcher)

    def _post(self, change: Change) -> None:
        for watcher in self._watchers:
            watcher.add(change)


class _Watcher:
    def __init__(self, first: Change) -> None:
        self._pending = first
        self._news = asyncio.Event()
        self._news.set()

    def add(self, change: Change) -> None:
        self._pending = merge(self._pending, change)
        self._news.set()

    async def take(self) -> Change:
        await self._news.wait()
        self._news.clear()
        change, self._pending = self._pending, Change()
        return change


def merge(earlier: Change, later: Change) -> Change:
    """Both changes as one.

    A state keeps the conversations named in one it replaces; an engine that came or went takes the other's
    place, and states of the epoch before go with it.
    """
    if later.up or later.down:
        return Change(later.status or earlier.status, later.up, later.down or earlier.down, later.state)
    state = later.state or earlier.state
    if later.state and earlier.state and later.state.epoch == earlier.state.epoch:
        confirmed = dict.fromkeys((*earlier.state.confirmed, *later.state.confirmed))
        parked = dict.fromkeys((*earlier.state.parked, *later.state.parked))
        state = replace(later.state, confirmed=tuple(confirmed), parked=tuple(parked))
    return Change(later.status or earlier.status, earlier.up, earlier.down, state)
