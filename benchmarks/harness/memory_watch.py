"""Watches the memory of a fleet's engines during a run, as a multiple of their idle memory."""

import asyncio

from deploy.home import FleetHome
from workers.keeper.process_lease import recorded_below

MEMORY_AIM = 1.5
LOOK_S = 2.0


class MemoryOfEngines:
    """Records the largest memory that any engine takes, as a multiple of its idle memory."""

    def __init__(self, home: FleetHome) -> None:
        self._engines, self.most = home.engines, 0.0

    async def run(self) -> None:
        """Look at the engines' memory again and again until cancelled."""
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        for engine in recorded_below(self._engines):
            self.most = max(self.most, engine.memory_bytes() / max(1, engine.idle_bytes()))
