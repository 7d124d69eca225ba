"""Ray actor that keeps as many replicas of a tier as the load needs, within the tier's limits.

It asks Ray for keepers with the tier's resources. Ray's own autoscaler, if there is one, adds nodes for them.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from deploy.fleet.components import EngineName, scale_limits, thresholds
from deploy.fleet.schema import TierSpec
from deploy.home import FleetHome, FleetKeys, Purpose
from deploy.lifecycle import status as ask
from deploy.ray.common import Background, SealedFleet, log_to_stderr, replica
from deploy.ray.keepers import Keepers
from placement.sizing.autoscaling import TierScaler
from placement.sizing.capacity import judge
from workers.keeper.engine_status import KeeperPhase
from workers.oom_score import OomScore, set_oom_score
from workers.profiles import Coefficients

log = logging.getLogger("conserve.deploy.autoscaler")

GIVE_UP_AFTER = 3  # failures of an engine that has not served for long in between


class AutoscalerActor:
    """Ray actor that runs the autoscaler."""

    def __init__(
        self,
        sealed: SealedFleet,
        home: FleetHome,
        directory: str,
        host: str | None,
        profiles: Mapping[str, Coefficients],
    ) -> None:
        log_to_stderr()
        set_oom_score(OomScore.KEEPER)
        keys = FleetKeys.here(home.name)
        fleet = self._fleet = sealed.opened(keys)
        self._directory, self._secret = directory, keys.of(Purpose.DIRECTORY)
        self._keepers = Keepers(fleet, home, host, profiles)
        self._scaled = [
            (tier, TierScaler(scale_limits(fleet, tier.autoscale)))
            for tier in fleet.tiers
            if tier.autoscale is not None
        ]
        self._every_s = min(5.0, max(1.0, fleet.capacity.window / 10))
        self._background = Background(self._work)

    async def _work(self) -> None:
        for tier, _ in self._scaled:  # a former autoscaler of this fleet may have ended while it drained one
            for engine in await asyncio.to_thread(self._present, tier):
                await asyncio.to_thread(self._keepers.resume, engine)
        while True:
            await asyncio.sleep(self._every_s)
            for tier, scaler in self._scaled:
                await self._follow(tier, scaler)

    async def _follow(self, tier: TierSpec, scaler: TierScaler) -> None:
        answer = await ask.capacity(self._directory, self._secret)
        if answer is None:
            return  # the load is not known, so nothing is changed
        present = await asyncio.to_thread(self._present, tier)
        starting = await asyncio.to_thread(self._starting, present)
        longest_wait_s = self._fleet.conversation.prefiller_wait
        judged = judge(tier.role, answer.signals, thresholds(self._fleet), longest_wait_s)
        if starting and judged.load >= self._fleet.capacity.low:
            return  # engines that start do not show in the load yet
        decision = scaler.decide(judged, len(present), time.monotonic())
        if decision.reason:
            change = (tier.name, len(present), decision.replicas, decision.reason)
            log.info("tier scaled tier=%s from=%d to=%d reason=%s", *change)
        for index in _free(present, decision.replicas - len(present)):
            self._keepers.start(EngineName(f"{tier.name}-{index}", tier))
        for engine in present[decision.replicas :]:
            await asyncio.to_thread(self._retire, engine)

    def _present(self, tier: TierSpec) -> list[str]:
        return [engine for engine in self._keepers.engines() if replica(engine)[0] == tier.name]

    def _starting(self, engines: list[str]) -> bool:
        """Return whether one of `engines` is starting, after ending those that failed to start."""
        starting = False
        for engine in engines:
            status = self._keepers.status(engine)
            failing = status is not None and status.phase is KeeperPhase.BACKING_OFF
            if status is not None and failing and status.failures >= GIVE_UP_AFTER:
                log.error("engine given up engine=%s reason=%s", engine, status.failure)
                self._keepers.end(engine)
            starting |= status is None or status.phase is not KeeperPhase.SERVING
        return starting

    def _retire(self, engine: str) -> None:
        clean = self._keepers.drain(engine, self._fleet.capacity.drain)
        self._keepers.end(engine)
        log.info("engine ended engine=%s drained=%s", engine, clean)


def _free(present: list[str], count: int) -> list[int]:
    """Return the `count` lowest indices that none of the present replicas has."""
    taken = {replica(engine)[1] for engine in present}
    free = (index for index in range(len(taken) + max(0, count)) if index not in taken)
    return [index for index, _ in zip(free, range(count), strict=False)]
