"""Follows one engine through its keeper, and tells the directory when it starts, reports and ends."""

import asyncio
import logging
import time
from collections.abc import Callable

from deploy.ray.control import ControlClient, ControlError
from placement.engines import EngineInfo
from placement.routing.placer import MissingCurve
from router.directory.directory import Directory
from workers import processes
from workers.keeper.engine_status import KeeperReport
from workers.processes import LogOnChange

log = logging.getLogger("conserve.deploy.directory.engine_watch")

RETRY_S = 0.5


class EngineWatch:
    """Follows the keeper of one engine, and tells the directory what it reports.

    An engine outlives its keeper: for its lease, and under a supervisor until it is told to end. So if the
    keeper cannot be reached for longer than the lease, the engine only counts as gone if it does not listen.
    """

    def __init__(
        self,
        engine: str,
        directory: Directory,
        address_of: Callable[[str], str],
        secret: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        known: EngineInfo | None = None,
    ) -> None:
        """Watch `engine`, whose keeper is at `address_of(engine)`; `known` is its record in the journal."""
        self._engine, self._directory, self._address_of = engine, directory, address_of
        self._secret, self._lease_s, self._clock = secret, lease_s, clock
        self._up = known
        self._last_address = known.control if known is not None else ""
        self._read_address_again = not self._last_address
        self._heard = clock()

    @property
    def up(self) -> bool:
        """Return whether the directory assumes that the engine is up."""
        return self._up is not None

    async def run(self) -> None:
        engine = self._engine
        say = LogOnChange(lambda why: log.warning("keeper not followed engine=%s reason=%r", engine, why))
        while True:
            try:
                await self._follow()
            except (ControlError, MissingCurve, TimeoutError, ValueError) as error:
                say(str(error) or repr(error))
            self._read_address_again = not self._read_address_again
            late = self._clock() - self._heard > self._lease_s
            if self._up is not None and late and not await _listens(self._up):
                log.warning("keeper and engine gone for longer than the lease engine=%s", self._engine)
                self._gone()
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        # A restarted keeper listens where it did before, so every second try uses the last address. What Ray
        # knows may be out of date after Ray's head was lost.
        address = self._last_address
        if self._read_address_again or not address:
            address = self._address_of(self._engine)
        if not address:
            return  # the keeper does not listen yet
        async with ControlClient(address, self._secret, term=self._directory.term) as client:
            async for report in client.watch():
                if report.status.engine != self._engine:
                    raise ControlError(f"at {address} is now the keeper of {report.status.engine}")
                self._heard, self._last_address = self._clock(), address
                self._tell(report)

    def _tell(self, report: KeeperReport) -> None:
        info = report.info
        if self._up is not None and _over(report, self._up):
            self._gone()
        if info is not None and info != self._up:
            self._directory.engine_up(info)
            self._up = info
        if report.state is not None:
            self._directory.engine_state(report.state)

    def _gone(self) -> None:
        if self._up is not None:
            self._up = None
            self._directory.engine_down(self._engine)


async def _listens(info: EngineInfo) -> bool:
    host, _, port = info.http.rpartition(":")
    return await asyncio.to_thread(processes.listens, host, int(port))


def _over(report: KeeperReport, up: EngineInfo) -> bool:
    """Return whether the keeper's `report` implies that epoch `up` of its engine has ended.

    A report without an engine does not end it, because a new keeper may not have adopted the engine yet.
    """
    return report.over >= up.epoch or report.status.epoch > up.epoch
