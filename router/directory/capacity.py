"""How full the fleet is, looked at from time to time: gauges, and advice for whoever asks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from placement.advice import Action, Recommendation, Thresholds, advise
from placement.capacity import Signals
from placement.placer import Placer
from router import metrics
from router.directory.conversations import Conversations


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    thresholds: Thresholds = field(default_factory=Thresholds)
    longest_prefill_wait_s: float = 30.0
    prefills: bool = True  # whether the fleet's policy uses prefillers
    look_s: float = 1.0
    advise_every: int = 5  # looks: advice goes through all conversations


class Capacity:
    def __init__(
        self,
        settings: CapacitySettings,
        placer: Placer,
        conversations: Conversations,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._placer = settings, placer
        self._conversations, self._clock = conversations, clock

    def now(self) -> tuple[Signals, tuple[Recommendation, ...]]:
        settings = self._settings
        signals = self._placer.signals(self._conversations.running_tokens(), self._clock())
        wait_s = settings.longest_prefill_wait_s
        return signals, advise(signals, settings.thresholds, wait_s, prefills=settings.prefills)

    async def run(self) -> None:
        """Until cancelled."""
        looks = 0
        while True:
            self._placer.look(self._clock())
            if looks % self._settings.advise_every == 0:
                self._show()
            looks += 1
            await asyncio.sleep(self._settings.look_s)

    def _show(self) -> None:
        signals, advice = self.now()
        metrics.PREFILL_LOAD.set(signals.prefill_load)
        metrics.PREFILL_WAIT.set(signals.prefill_wait_s)
        metrics.PREFILL_SATURATES.set(signals.saturates_in_s(self._settings.longest_prefill_wait_s))
        metrics.DECODER_PRESSURE.set(signals.decoder_pressure)
        given = {one.action: max(1, one.count) for one in advice}
        for action in Action:
            metrics.CAPACITY_ADVICE.labels(action).set(given.get(action, 0))
