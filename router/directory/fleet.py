"""Tracks the state of engines (announced, reporting, suspected, gone), and the fleet's utilisation."""

import asyncio
import logging
from collections.abc import Callable

from placement.engines import EngineInfo, EngineState
from placement.overload.signal import OverloadReason, OverloadState
from placement.routing.placer import Placer
from placement.sizing.capacity import Action, Thresholds, advise
from router import metrics
from router.directory.api.messages import CapacityReport, EngineRecord
from router.directory.conversations import ConversationRecords

log = logging.getLogger("conserve.router.directory.fleet")

_LOOK_S = 1.0
_ADVISE_EVERY = 5  # in looks, because advice goes through all conversations


def unreported(info: EngineInfo) -> EngineState:
    """Return the state of an engine that has not reported yet."""
    return EngineState(info.engine, info.epoch, 0, 0, 0, 0, 0, 0, 0)


class FleetView:
    """All engines and their newest reports. It also keeps the placer's list of engines up to date.

    An engine that a gateway could not reach is a *suspect*: no conversation is placed there until the engine
    reports again. After a restart of the directory, all engines of the journal are suspects.
    """

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._infos: dict[str, EngineInfo] = {}
        self._states: dict[str, EngineState] = {}
        self._suspects: set[str] = set()
        self._recalled: set[str] = set()  # suspects that are known from the journal only
        self._patient = True
        self.version = 0  # grows when an engine comes, goes, drains or is suspected

    def __contains__(self, engine: str) -> bool:
        return engine in self._infos

    @property
    def recalled(self) -> tuple[str, ...]:
        """Return the engines that were up before the restart and have not reported since."""
        return tuple(sorted(self._recalled))

    @property
    def awaits_some(self) -> bool:
        """Return whether new conversations still wait for recalled engines to report.

        Until all engines have reported, the decoder with the least KV in use may be one without a report.
        """
        return self._patient and bool(self._recalled)

    def await_no_longer(self) -> None:
        self._patient = False

    def info(self, engine: str) -> EngineInfo | None:
        return self._infos.get(engine)

    def records(self) -> list[EngineRecord]:
        return [
            EngineRecord(info, self._states.get(engine) or unreported(info), engine in self._suspects)
            for engine, info in self._infos.items()
        ]

    def placeable(self, engine: str) -> bool:
        return engine in self._infos and engine not in self._suspects

    def draining(self, engine: str) -> bool:
        """Return whether an engine will end soon: it takes nothing new, and its conversations leave."""
        state = self._states.get(engine)
        return state is not None and state.draining

    def shares_layers(self, engine: str) -> bool:
        state = self._states.get(engine)
        return state is not None and state.shares_layers

    def recall(self, info: EngineInfo) -> None:
        """Add an engine from the journal. It was up before the restart; what KV it holds is unknown."""
        self._infos[info.engine] = info
        self._suspects.add(info.engine)
        self._recalled.add(info.engine)

    def up(self, info: EngineInfo) -> bool:
        """Add an announced engine; return False if its epoch is already known."""
        known = self._infos.get(info.engine)
        goes_on = known is not None and known.epoch == info.epoch
        if not goes_on:
            self._placer.engine_up(info)
            self._states.pop(info.engine, None)
            self._trust(info.engine)
        if known != info:
            self._infos[info.engine] = info
            self.version += 1
        return not goes_on

    def newly_parked(self, state: EngineState) -> tuple[list[str], list[str]]:
        """Return the conversations that were parked, and those that were unparked, since the last report."""
        before = self._states.get(state.engine)
        since = before.seq if before is not None else 0
        named = state.parked, state.unparked
        parked, unparked = ([key for key, seq in one.items() if seq > since] for one in named)
        return parked, unparked

    def observe(self, state: EngineState, now: float) -> bool:
        """Apply a report; return False if it is of another epoch, out of order, or of an unknown engine."""
        info = self._infos.get(state.engine)
        before = self._states.get(state.engine)
        if info is None or info.epoch != state.epoch or (before is not None and state.seq <= before.seq):
            return False
        if state.engine in self._suspects:
            self._trust(state.engine)
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
            self._trust(engine)
            self.version += 1
        return info

    def suspect(self, engine: str, epoch: int) -> bool:
        info = self._infos.get(engine)
        if info is None or info.epoch != epoch:
            return False
        if engine in self._suspects:
            self._recalled.discard(engine)  # new conversations need not wait for an unreachable engine
            return False
        self._placer.engine_down(engine)
        self._suspects.add(engine)
        self.version += 1
        return True

    def _trust(self, engine: str) -> None:
        self._suspects.discard(engine)
        self._recalled.discard(engine)


class CapacityWatcher:
    """Watches the fleet's utilisation: sets gauges, and recommends changes of the fleet on request."""

    def __init__(
        self,
        thresholds: Thresholds,
        placer: Placer,
        conversations: ConversationRecords,
        refused_tokens: Callable[[], list[int]],
        clock: Callable[[], float],
    ) -> None:
        self._thresholds, self._placer = thresholds, placer
        self._conversations, self._refused_tokens, self._clock = conversations, refused_tokens, clock
        self.overload = OverloadState.initial()  # as of the last look

    def now(self) -> CapacityReport:
        signals = self._placer.signals(self._conversations.running_tokens(), self._clock())
        wait_s, policy = self._placer.settings.max_prefill_wait_s, self._placer.settings.policy
        advice = advise(signals, self._thresholds, wait_s, prefills=policy.disaggregates)
        return CapacityReport(signals, advice)

    async def run(self) -> None:
        """Update the gauges once a second, until cancelled."""
        looks = 0
        while True:
            self._look()
            if looks % _ADVISE_EVERY == 0:
                self._show()
            looks += 1
            await asyncio.sleep(_LOOK_S)

    def _look(self) -> None:
        state = self._placer.observe_overload(self._clock(), self._refused_tokens())
        metrics.KV_ASKED.set(state.asked)
        for reason in OverloadReason:
            metrics.OVERLOAD.labels(reason).set(reason is state.reason)
        before, self.overload = self.overload, state
        if state.overloaded != before.overloaded:
            shares = state.asked, state.held, state.lacking_tokens
            line = "overload=%s asked=%.2f held=%.2f lacking_tokens=%d"
            log.warning(line, state.declared or "over", *shares)

    def _show(self) -> None:
        report = self.now()
        signals = report.signals
        metrics.PREFILL_LOAD.set(signals.prefill_load)
        metrics.PREFILL_WAIT.set(signals.prefill_wait_s)
        metrics.PREFILLERS_TAKING.set(signals.taking)
        metrics.PREFILL_SATURATES.set(signals.saturates_in_s(self._placer.settings.max_prefill_wait_s))
        metrics.DECODER_PRESSURE.set(signals.decoder_pressure)
        given = {one.action: max(1, one.count) for one in report.advice}
        for action in Action:
            metrics.CAPACITY_ADVICE.labels(action).set(given.get(action, 0))
