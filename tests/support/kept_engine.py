"""A fake engine with its keeper's control service: `python -m tests.support.kept_engine NAME HOST SECRET`."""

import asyncio
import sys
from typing import Any

from deploy.ray.control import ControlServer
from tests.support.fake_engine import FakeEngine
from workers.keeper.engine_status import StatusStore
from workers.keeper.idle_moves import KvSender

CONTROL_PORT = 9000
REPORT_EVERY_S = 0.1


class DirectFeed:
    """Stand-in for a `ControlSocket` that passes a keeper's commands directly to the fake engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def release(self, conversation: str) -> bool:
        held = conversation in self._engine.held
        self._engine.release(conversation)
        return held

    async def prefetch(self, conversation: str, due_in_s: float) -> bool:
        return self._engine.prefetch(conversation, due_in_s)

    async def drain(self, on: bool) -> None:
        self._engine.draining = on

    async def drop(self, epoch: int, members: tuple[str, ...], part: int) -> None:
        raise NotImplementedError

    async def restore(self, epoch: int) -> None:
        raise NotImplementedError


async def main(name: str, host: str, secret: str) -> None:
    engine = FakeEngine(name, host=host, token_s=0.01, control=f"{host}:{CONTROL_PORT}")
    await engine.start()
    store, feed = StatusStore(name), DirectFeed(engine)
    sender: Any = KvSender(feed, store, "small", "")  # type: ignore[arg-type]
    await ControlServer(store, feed, secret, sender).start(host, CONTROL_PORT)  # type: ignore[arg-type]
    store.engine_up(engine.info)
    print(engine.port, flush=True)
    while True:
        store.engine_state(engine.state())
        await asyncio.sleep(REPORT_EVERY_S)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
