"""Follow one keeper's control service and tell the directory what it says."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from ray.exceptions import RayError

from placement.engines import EngineInfo, EngineState
from placement.placer import MissingCurve
from workers.board import Change
from workers.control.client import ControlClient, ControlError

log = logging.getLogger("conserve.deploy.directory")

RETRY_S = 0.5


class Listener(Protocol):
    def engine_up(self, info: EngineInfo) -> None: ...

    def engine_state(self, state: EngineState) -> object: ...

    def engine_down(self, engine: str) -> None: ...


class EngineWatch:
    """A keeper out of reach is not an engine that is gone: it goes on serving until its lease has run out."""

    def __init__(
        self,
        engine: str,
        listener: Listener,
        address_of: Callable[[str], Awaitable[str]],
        secret: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        known: EngineInfo | None = None,
    ) -> None:
        """`known`: the listener takes that engine to be up, from before it restarted."""
        self._engine, self._listener, self._address_of = engine, listener, address_of
        self._secret, self._lease_s, self._clock = secret, lease_s, clock
        self._up = known
        self._last_address = known.control if known is not None else ""
        self._ask_ray = not self._last_address
        self._heard = clock()

    @property
    def up(self) -> bool:
        """Whether the listener takes the engine to be up."""
        return self._up is not None

    async def run(self) -> None:
        told = ""
        while True:
            try:
                await self._follow()
            except (ControlError, MissingCurve, RayError, TimeoutError, ValueError) as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("keeper not followed engine=%s reason=%r", self._engine, told or repr(error))
            self._ask_ray = not self._ask_ray
            if self._up is not None and self._clock() - self._heard > self._lease_s:
                log.warning("keeper gone for longer than its lease engine=%s", self._engine)
                self._gone()
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        # A restarted keeper listens where it did before, so every other try needs no Ray: what a handle knows
        # of its actor can be out of date after Ray's head was lost.
        address = self._last_address
        if self._ask_ray or not address:
            address = await self._address_of(self._engine)
        if not address:
            return  # it does not listen yet
        async with ControlClient(address, self._secret) as client:
            async for change in client.watch():
                if change.status is not None and change.status.engine != self._engine:
                    raise ControlError(f"at {address} is now the keeper of {change.status.engine}")
                self._heard, self._last_address = self._clock(), address
                self._tell(change)

    def _tell(self, change: Change) -> None:
        if change.down is not None or _over(change, self._up):
            self._gone()
        if change.up is not None:
            self._up = change.up
            self._listener.engine_up(change.up)
        if change.state is not None:
            self._listener.engine_state(change.state)

    def _gone(self) -> None:
        if self._up is not None:
            self._up = None
            self._listener.engine_down(self._engine)


def _over(change: Change, up: EngineInfo | None) -> bool:
    """A keeper that we lost and found again may have lost its engine meanwhile."""
    return bool(change.status and up and change.status.epoch > up.epoch)
