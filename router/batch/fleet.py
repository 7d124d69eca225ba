"""What the dispatcher asks of the fleet: engines, and what they last reported."""

from collections.abc import Callable, Collection
from typing import Protocol

from placement.engines import EngineInfo, EngineState
from router.directory.engine_list import EngineList


class Fleet(Protocol):
    def engines(self) -> list[EngineInfo]:
        """Those that serve now."""

    def state(self, engine: str) -> EngineState | None:
        """The last report of its current epoch; None when there is none."""

    def models(self) -> Collection[str] | None:
        """Names the fleet serves; None while they are not known. Called from other threads."""


class PushedFleet:
    """The fleet as the directory pushes it to a gateway."""

    def __init__(self, engines: EngineList, models: Collection[str]) -> None:
        self._engines = engines
        self._models = frozenset(models)

    def engines(self) -> list[EngineInfo]:
        return [info for info in self._engines.infos() if not self._engines.load(info.engine).suspect]

    def state(self, engine: str) -> EngineState | None:
        state = self._engines.load(engine).state
        return state if state.seq else None  # 0: it is known, and has not reported yet

    def models(self) -> Collection[str]:
        return self._models


class Presence:
    """Tells an engine that is lost from one that the fleet view misses for a moment."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._epochs: dict[str, int] = {}
        self._seen: dict[str, float] = {}

    def see(self, engines: list[EngineInfo]) -> None:
        now = self._clock()
        self._epochs.update({info.engine: info.epoch for info in engines})
        self._seen.update({info.engine: now for info in engines})

    def lost(self, info: EngineInfo) -> bool:
        """A new epoch is proof; absence is, after some patience."""
        if self._epochs.get(info.engine, info.epoch) != info.epoch:
            return True
        return self._clock() - self._seen.get(info.engine, self._clock()) > self._patience_s
