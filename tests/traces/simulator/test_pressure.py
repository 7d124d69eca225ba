"""If turns outgrow a decoder, it restores preempted KV if it parks KV, and otherwise recomputes it."""

from dataclasses import replace

import pytest

from placement.routing.placer_settings import PlacerSettings, Redisaggregation
from traces.format import TraceConversation, TraceTurn
from traces.simulator.kv import Pressure
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

from .conftest import fleet

KV = 40_000


def growing(count: int = 12) -> list[TraceConversation]:
    """Return conversations that run at the same time and together need three times one decoder's KV."""
    turns = (TraceTurn(8_000, 0, 600), TraceTurn(200, 8_600, 600, 0.2), TraceTurn(200, 9_400, 600, 0.2))
    return [TraceConversation(f"c{i}", 0.1 * i, turns) for i in range(count)]


def settings(pressure: Pressure, fill: float) -> SimulationSettings:
    placer = PlacerSettings(
        max_prefill_wait_s=1e9,
        fill=fill,
        headroom_tokens=64,
        redisaggregation=Redisaggregation(above_tokens=1 << 30),
    )
    return SimulationSettings(SystemSettings(System.PREFILLER), placer, pressure, park_after_s=60)


@pytest.mark.parametrize("pressure", [Pressure.PARK, Pressure.DROP])
def test_only_a_fleet_that_parks_keeps_all_kv_when_it_is_overbooked(pressure: Pressure) -> None:
    totals = Simulation(fleet(decoders=1, kv_tokens=KV), settings(pressure, 9.0)).run(growing()).totals
    assert totals.preemptions > 0
    if pressure is Pressure.PARK:
        assert totals.recomputed_tokens < 100  # one token for each turn, transfer and preemption
    else:
        assert totals.recomputed_tokens > 8_000


def test_an_evicted_turn_counts_its_whole_kv_as_missing_until_it_returns() -> None:
    simulation = Simulation(fleet(decoders=1, kv_tokens=KV), settings(Pressure.PARK, 9.0))
    lacked: list[int] = []

    def look(_: object) -> None:
        engines = simulation.fleet.engines.values()
        lacked.extend(one.waiting_kv_tokens() // len(one.restoring) for one in engines if one.restoring)
        if simulation.events.more:
            simulation.events.at(simulation.events.now + 0.01, look, None)

    simulation.events.at(0.0, look, None)
    simulation.run(growing())
    assert lacked and min(lacked) >= 8_000


def test_a_new_conversation_does_not_wait_for_kv_that_can_be_parked() -> None:
    """Four idle conversations fill the decoder, and a fifth arrives."""
    idle = [
        TraceConversation(f"i{i}", 2.0 * i, (TraceTurn(8_000, 0, 10), TraceTurn(10, 8_010, 10, 500.0)))
        for i in range(4)
    ]
    found = [*idle, TraceConversation("new", 30.0, (TraceTurn(8_000, 0, 10),))]
    waits = {
        pressure: Simulation(fleet(decoders=1, kv_tokens=KV), settings(pressure, 0.9))
        .run(found)
        .totals.gate_wait_s
        for pressure in (Pressure.PARK, Pressure.PIN)
    }
    assert waits[Pressure.PARK] == 0 and waits[Pressure.PIN] > 400


def test_a_decoder_accepts_conversations_up_to_its_fill_and_preempts_none() -> None:
    simulation = Simulation(fleet(decoders=1, kv_tokens=KV), settings(Pressure.PARK, 0.9))
    totals = simulation.run([replace(one, turns=one.turns[:1]) for one in growing()]).totals
    assert totals.gate_wait_s > 0 and totals.preemptions == 0
