"""Each system that can be simulated behaves as its definition says."""

import pytest

from placement.routing.least_kv import FirstTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.routing.receipts import Placement
from placement.scheduling.prefill_curve import curve_of
from traces.format import TraceConversation, TraceTurn
from traces.simulator.kv import Pressure
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import prefill_seconds

from .conftest import fleet, profile
from .test_conservation import fleet_for, settings_for, trace


def three_turns(count: int = 5, gap: float = 10.0, wait: float = 1.0) -> list[TraceConversation]:
    turns = (TraceTurn(8_000, 0, 50), TraceTurn(200, 8_050, 50, wait), TraceTurn(200, 8_300, 50, wait))
    return [TraceConversation(f"c{i}", i * gap, turns) for i in range(count)]


@pytest.mark.parametrize(
    ("system", "transfers", "prefilled"),
    [
        # A turn's last token is never computed, so the next one computes it: 201 each. A transfer adds one.
        (System.PREFILLER, 1, 8_000 + 402 + 1),
        (System.STRICT, 1, 8_000 + 402 + 1),
        (System.COLLOCATED, 0, 8_000 + 402),
        (System.STICKY, 0, 8_000 + 402),
        (System.PULL_BACK, 3, 8_000 + 402 + 3),
        (System.FULL_DISAGGREGATION, 3, 8_000 + 8_250 + 8_500 + 3),
    ],
)
def test_each_system_transfers_and_prefills_the_expected_tokens(
    system: System, transfers: int, prefilled: int
) -> None:
    totals = Simulation(fleet_for(system), settings_for(system)).run(three_turns()).totals
    assert totals.transfers == 5 * transfers
    assert totals.prefilled_tokens == 5 * prefilled


def test_ampd_equals_strict_at_error_rate_0_and_pull_back_at_error_rate_1() -> None:
    def run(system: System, error_rate: float) -> list[float]:
        settings = SimulationSettings(SystemSettings(system, error_rate=error_rate))
        return list(Simulation(fleet(), settings).run(trace(5)).e2e)

    assert run(System.AMPD, 0.0) == run(System.STRICT, 0.0)
    assert run(System.AMPD, 1.0) == run(System.PULL_BACK, 0.0)


def test_the_latency_of_a_lone_conversation_is_the_sum_of_prefill_transfer_and_decoding() -> None:
    """After prefill and transfer, the decoder computes one token again, and then a token an iteration."""
    engine = profile()
    run = Simulation(fleet(), settings_for(System.PREFILLER)).run(
        [TraceConversation("c", 0.0, (TraceTurn(8_000, 0, 2),))]
    )
    transfer = 8_000 * engine.kv_bytes_per_token / engine.network_bytes_per_s
    expected = prefill_seconds(engine, 8_000) + transfer + prefill_seconds(engine, 8_000, cached=7_999)
    assert run.ttfet[0] == pytest.approx(expected)
    assert run.last_tbt[0] == pytest.approx(prefill_seconds(engine, 8_001, cached=8_000))


def test_idle_kv_is_parked_and_restored_over_the_host_link() -> None:
    # Waits of 60 s against a limit of 5 s: each of two waits parks the conversation once.
    totals = Simulation(fleet(), settings_for(System.PREFILLER)).run(three_turns(1, wait=60.0)).totals
    assert totals.parked_tokens == 8_049 + 8_299
    assert totals.recomputed_tokens < 10


def test_pinned_kv_that_fits_the_decoder_is_never_evicted() -> None:
    settings = settings_for(System.STRICT, Pressure.PIN)
    totals = Simulation(fleet(kv_tokens=12_000), settings).run(three_turns(9, gap=0.1)).totals
    assert totals.recomputed_tokens < 100 and totals.parked_tokens == 0
    assert totals.gate_wait_s > 0, "conversations had to wait for a pinned one to end"


def test_simulated_bindings_equal_those_of_the_product_placer() -> None:
    """All conversations arrive together without reports in between, so a fresh placer must agree."""
    found = [TraceConversation(f"c{i}", 0.0, (TraceTurn(500 + 137 * i, 0, 5),)) for i in range(60)]
    simulated = fleet(decoders=4, kv_tokens=10_000_000)
    simulation = Simulation(simulated, SimulationSettings(placer=PlacerSettings(headroom_tokens=0)))
    simulation.run(found)
    placer = Placer(
        PlacerSettings(headroom_tokens=0, first_turns=FirstTurns.PREFILLER),
        {tier.name: curve_of(tier.profile.latency, tier.profile.chunk_tokens) for tier in simulated.tiers},
    )
    for tier in simulated.tiers:
        for i in range(tier.replicas):
            placer.engine_up(simulation.fleet.infos[f"{tier.name}-{i}"])
    expected = []
    for conversation in found:
        placed = placer.place(FirstTurn(conversation.id, conversation.turns[0].prompt_tokens), 0.0)
        assert isinstance(placed, Placement)
        expected.append((conversation.id, placed.decoder, placed.prefiller))
    assert simulation.bound == expected
