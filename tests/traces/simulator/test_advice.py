"""On a simulated fleet that follows `conserve advise`, turns no longer wait."""

from collections.abc import Iterable, Iterator

import pytest

from placement.routing.placer_settings import PlacerSettings
from placement.sizing.capacity import Action, Signals, Thresholds, advise
from tests.traces.simulator.conftest import fleet
from traces.format import TraceConversation
from traces.generators import paper
from traces.simulator.metrics import SimulationSummary, summarise
from traces.simulator.simulation import Simulation, SimulationSettings

pytestmark = pytest.mark.slow

WINDOW_S = 60.0
LONGEST_WAIT_S = 10.0


def played(prefillers: int, decoders: int, rate: float, count: int) -> tuple[SimulationSummary, Signals]:
    """Simulate a fleet and return its summary and the signals at the last conversation's arrival."""
    settings = SimulationSettings(placer=PlacerSettings(capacity_window_s=WINDOW_S))
    simulation = Simulation(fleet(prefillers, decoders), settings)
    placer = simulation.fleet.placer
    last: list[Signals] = []

    def arriving(conversations: Iterable[TraceConversation]) -> Iterator[TraceConversation]:
        for conversation in conversations:
            now = simulation.events.now
            placer.prompt_arrived(conversation.turns[0].prompt_tokens, now)
            placer.observe_overload(now)
            last[:] = [placer.signals(0, now)]
            yield conversation

    result = simulation.run(arriving(paper(count, rate, seed=3).conversations))
    return summarise("conserve", result), last[0]


def test_a_fleet_that_follows_the_advice_has_no_queues_and_gets_no_more_advice() -> None:
    engines = {Action.ADD_PREFILLERS: 1, Action.ADD_DECODERS: 6}
    first: SimulationSummary | None = None
    for _ in range(6):
        summary, seen = played(*engines.values(), rate=12.0, count=1500)
        first = first or summary
        added = {one.action: one.count for one in advise(seen, Thresholds(), LONGEST_WAIT_S)}
        added = {action: count for action, count in added.items() if action in engines}
        if not added:
            break
        for action, count in added.items():
            engines[action] += count
    assert not added
    assert first is not None and first.first_turn_ttft_p95_s > 100
    assert summary.first_turn_ttft_p95_s < LONGEST_WAIT_S
    assert engines[Action.ADD_PREFILLERS] == 10, "6.7 seconds of prompts arrive a second, at 70 % each"
    assert engines[Action.ADD_DECODERS] < 20
