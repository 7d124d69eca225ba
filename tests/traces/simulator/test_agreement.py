"""Each binding of a live run is compared with the binding in a simulation of the run."""

import pytest

from placement.routing.placer_settings import PlacerSettings
from tests.support.binding_agreement import LiveBinding, compare
from traces.format import TraceConversation, TraceTurn
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

from .conftest import fleet
from .test_conservation import trace

SETTINGS = SimulationSettings(SystemSettings(System.PREFILLER), PlacerSettings(max_prefill_wait_s=1e9))


def live_run(found: list[TraceConversation], offset: float) -> list[LiveBinding]:
    """Return the bindings of a simulated run as a live fleet records them, on another clock."""
    simulation = Simulation(fleet(decoders=4), SETTINGS)
    simulation.run(found)
    engines = {key: (decoder, prefiller) for key, decoder, prefiller in simulation.bound}
    return [
        LiveBinding.from_placement(
            conversation.id,
            {
                "at": offset + conversation.arrival_s,
                "decoder": engines[conversation.id][0],
                "prefiller": engines[conversation.id][1],
                "receipt": {"prompt_tokens": conversation.turns[0].prompt_tokens},
            },
        )
        for conversation in found
    ]


def test_a_simulated_run_agrees_with_the_same_run_on_another_clock() -> None:
    found = trace(11)
    agreement = compare(fleet(decoders=4), SETTINGS, found, live_run(found, offset=1e6))
    assert agreement.compared == len(found) and agreement.share > 0.95


def test_a_comparison_reports_a_conversation_with_another_decoder_or_prefiller() -> None:
    found = [TraceConversation(f"c{i}", float(i), (TraceTurn(4_000, 0, 400),)) for i in range(6)]
    live = live_run(found, 0.0)
    moved = LiveBinding("c3", 3.0, 4_000, "decode-9", "prefill-0")
    local = LiveBinding("c4", 4.0, 4_000, live[4].decoder, None)
    agreement = compare(fleet(decoders=4), SETTINGS, found, [*live[:3], moved, local, live[5]])
    found_out = [(one.conversation, one.live) for one in agreement.differences]
    assert found_out == [("c3", ("decode-9", "prefill-0")), ("c4", (live[4].decoder, None))]
    assert agreement.share == pytest.approx(4 / 6)


def test_the_simulation_uses_the_prompt_sizes_of_the_live_run() -> None:
    """After two prompts of different length, the third goes to the decoder of the shorter one."""
    found = [TraceConversation(f"c{i}", 0.0, (TraceTurn(1_000, 0, 2_000),)) for i in range(3)]
    live = [
        LiveBinding("c0", 0.0, 9_000, "decode-0", "prefill-0"),
        LiveBinding("c1", 0.001, 2_000, "decode-1", "prefill-0"),
        LiveBinding("c2", 0.002, 500, "decode-1", "prefill-0"),
    ]
    settings = SimulationSettings(placer=PlacerSettings(headroom_tokens=0))
    assert compare(fleet(decoders=2), settings, found, live).share == 1.0
