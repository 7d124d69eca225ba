"""The engines as the directory sees them: announced, reported, suspected, gone."""

from dataclasses import dataclass

from placement.engines import EngineInfo, EngineState
from placement.placer import Placer


@dataclass(frozen=True, slots=True)
class EngineView:
    info: EngineInfo
    state: EngineState | None
    suspect: bool


class Fleet:
    """Keeps the placer's engines. A suspect takes no conversation until it reports again."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._infos: dict[str, EngineInfo] = {}
        self._states: dict[str, EngineState] = {}
        self._suspects: set[str] = set()
        self.version = 0  # grows when an engine comes, goes, drains or is suspected

    def __contains__(self, engine: str) -> bool:
        return engine in self._infos

    def info(self, engine: str) -> EngineInfo | None:
        return self._infos.get(engine)

    def views(self) -> list[EngineView]:
        return [
            EngineView(info, self._states.get(engine), engine in self._suspects)
            for engine, info in self._infos.items()
        ]

    def placeable(self, engine: str) -> bool:
        return engine in self._infos and engine not in self._suspects

    def draining(self, engine: str) -> bool:
        """It is to end soon: it takes nothing new, and its conversations leave it with their next turns."""
        state = self._states.get(engine)
        return state is not None and state.draining

    def up(self, info: EngineInfo) -> None:
        self._placer.engine_up(info)
        self._infos[info.engine] = info
        self._states.pop(info.engine, None)
        self._suspects.discard(info.engine)
        self.version += 1

    def observe(self, state: EngineState, now: float) -> bool:
        """Take in a report; False when it is of another epoch, out of order, or of an unknown engine."""
        info = self._infos.get(state.engine)
        if info is None or info.epoch != state.epoch:
            return False
        if state.engine in self._suspects:
            self._suspects.discard(state.engine)
            self._placer.engine_up(info)
            self.version += 1
        if not self._placer.observe(state, now):
            return False
        if state.draining != self.draining(state.engine):
            self.version += 1
        self._states[state.engine] = state
        return True

    def down(self, engine: str) -> EngineInfo | None:
        info = self._infos.pop(engine, None)
        if info is not None:
            self._placer.engine_down(engine)
            self._states.pop(engine, None)
            self._suspects.discard(engine)
            self.version += 1
        return info

    def suspect(self, engine: str, epoch: int) -> bool:
        info = self._infos.get(engine)
        if info is None or info.epoch != epoch or engine in self._suspects:
            return False
        self._placer.engine_down(engine)
        self._suspects.add(engine)
        self.version += 1
        return True
