"""The engines as pushed by the directory: enough to serve turns while it is away."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from placement.engines import EngineInfo, EngineState
from router import metrics
from router.directory import directory_pb2 as pb
from router.directory import messages

_KV_KINDS = {  # label of the metric: field of what is pushed
    "in_use": "kv_in_use",
    "live": "live_tokens",
    "parked": "parked_tokens",
    "offline": "offline_tokens",
    "free": "free_tokens",
    "host_used": "host_used_tokens",
    "host_free": "host_free_tokens",
}


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the directory last pushed of an engine, beyond what it is."""

    state: EngineState
    suspect: bool
    conversations: int
    kv_in_use: int  # tokens, with what is promised to conversations that it has not reported yet


class EngineList:
    def __init__(self) -> None:
        self._infos: dict[str, EngineInfo] = {}
        self._loads: dict[str, EngineLoad] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._infos)

    def infos(self) -> Iterable[EngineInfo]:
        return self._infos.values()

    def load(self, engine: str) -> EngineLoad:
        return self._loads[engine]

    def state(self, engine: str) -> EngineState | None:
        load = self._loads.get(engine)
        return load.state if load is not None else None

    def alive(self, engine: str, epoch: int) -> EngineInfo | None:
        """The engine, if it still is in that epoch: what it held for a conversation is there."""
        info = self._infos.get(engine)
        return info if info is not None and info.epoch == epoch else None

    def get(self, engine: str) -> EngineInfo | None:
        return self._infos.get(engine)

    def usable(self) -> list[EngineInfo]:
        """Engines any of which may answer what needs no conversation, the least busy first."""
        able = [info for info in self._infos.values() if not self._loads[info.engine].suspect]
        return sorted(able, key=lambda info: self._busy(info.engine))

    def take(self, pushed: pb.Engines) -> None:
        seen = {message.engine for message in pushed.engines}
        if pushed.settled:  # before, the directory may not have heard of all that are alive
            for gone in self._infos.keys() - seen:
                del self._infos[gone]
                self._loads.pop(gone, None)
                _forget(gone)
        for message in pushed.engines:
            if not message.seq and self.alive(message.engine, message.epoch):
                continue  # it has not reported to a directory that restarted: what was known of it holds
            self._infos[message.engine] = messages.engine_info(message)
            self._loads[message.engine] = EngineLoad(
                messages.engine_state(message), message.suspect, message.conversations, message.kv_in_use
            )
            metrics.ENGINE_CONVERSATIONS.labels(message.engine).set(message.conversations)
            for kind, field in _KV_KINDS.items():
                metrics.ENGINE_KV_TOKENS.labels(message.engine, kind).set(getattr(message, field))
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, engine: str, epoch: int, bound_s: float) -> EngineInfo | None:
        """An answer may name an engine before the push that announces it has come."""
        try:
            async with asyncio.timeout(bound_s):
                while (info := self.alive(engine, epoch)) is None:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return info

    async def wait_for_any(self, bound_s: float) -> bool:
        try:
            async with asyncio.timeout(bound_s):
                while not self._infos:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _busy(self, engine: str) -> tuple[bool, int]:
        state = self._loads[engine].state
        return state.draining, state.running + state.waiting


def _forget(engine: str) -> None:
    """An engine that left for good is not shown with what it last held."""
    metrics.ENGINE_CONVERSATIONS.remove(engine)
    for kind in _KV_KINDS:
        metrics.ENGINE_KV_TOKENS.remove(engine, kind)
