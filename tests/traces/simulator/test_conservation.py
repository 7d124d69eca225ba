"""No system creates or loses tokens, KV, time or energy, even under pressure."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings, Redisaggregation
from traces.format import TraceConversation, TraceTurn
from traces.simulator.kv import Pressure
from traces.simulator.metrics import Leak, check
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import SimulatedFleet, SimulatedTier

from .conftest import POWER, fleet, profile


def trace(seed: int, count: int = 40, rate: float = 3.0) -> list[TraceConversation]:
    """Return a random trace with broken prefixes, large appends, and long and short waits."""
    random, at, found = Random(seed), 0.0, []
    for number in range(count):
        at += random.expovariate(rate)
        context, turns = 0, []
        for index in range(random.randint(1, 6)):
            cached = context if random.random() < 0.8 else random.randint(0, context)
            appended = random.choice([1, 50, 400, 9_000]) if index else random.randint(1, 12_000)
            wait = random.choice([0.0, 0.3, 20.0]) if index else 0.0
            turn = TraceTurn(appended, cached, random.randint(0, 120), wait)
            context = turn.context_tokens
            turns.append(turn)
        found.append(TraceConversation(f"c{number}", at, tuple(turns)))
    return found


def settings_for(system: System, pressure: Pressure = Pressure.PARK, **more: float) -> SimulationSettings:
    rule = Redisaggregation(above_tokens=4_000)
    placer = PlacerSettings(max_prefill_wait_s=20, fill=0.9, headroom_tokens=64, redisaggregation=rule)
    return SimulationSettings(
        SystemSettings(system, error_rate=0.3), placer, pressure, park_after_s=5, **more
    )


def fleet_for(system: System, **more: int) -> SimulatedFleet:
    if system in (System.COLLOCATED, System.STICKY):
        return SimulatedFleet((SimulatedTier("mixed", Role.MIXED, 3, profile(**more)),))  # type: ignore[arg-type]
    return fleet(**more)


@pytest.mark.parametrize("system", list(System))
@pytest.mark.parametrize("pressure", list(Pressure))
def test_every_simulated_system_serves_every_turn_and_leaves_nothing_behind(
    system: System, pressure: Pressure
) -> None:
    # The engines hold little, so that conversations are parked, dropped, preempted or have to wait.
    found = trace(1)
    result = Simulation(fleet_for(system, kv_tokens=60_000), settings_for(system, pressure)).run(found)
    totals = result.totals
    served = totals.conversations - totals.refused - totals.abandoned
    assert len(result.e2e) == served > 30
    assert totals.recomputed_tokens >= 0
    if not totals.abandoned and not totals.refused:
        assert totals.decoded_tokens == sum(
            max(1, turn.output_tokens) for conversation in found for turn in conversation.turns
        )


@settings(max_examples=25, deadline=None)
@example(seed=1, system=System.STICKY, pressure=Pressure.PIN, kv=20_000)
@given(
    st.integers(0, 10**6),
    st.sampled_from(list(System)),
    st.sampled_from(list(Pressure)),
    st.sampled_from([20_000, 40_000, 100_000]),
)
def test_no_simulated_system_leaks_kv_on_any_trace(
    seed: int, system: System, pressure: Pressure, kv: int
) -> None:
    Simulation(fleet_for(system, kv_tokens=kv), settings_for(system, pressure, linger_s=3.0)).run(
        trace(seed, 25)
    )


def test_the_energy_of_a_run_lies_between_that_of_idle_and_of_busy_engines() -> None:
    totals = Simulation(fleet(), settings_for(System.PREFILLER)).run(trace(2)).totals
    assert 4 * POWER.idle_w * totals.horizon_s < totals.joules < 4 * POWER.limit_w * totals.horizon_s


@pytest.mark.parametrize("system", list(System))
def test_the_same_seed_gives_the_same_simulated_run(system: System) -> None:
    runs = [Simulation(fleet_for(system), settings_for(system)).run(trace(3)) for _ in range(2)]
    assert list(runs[0].e2e) == list(runs[1].e2e)
    assert runs[0].totals == runs[1].totals


def test_another_seed_makes_ampd_misroute_other_turns() -> None:
    base = settings_for(System.AMPD)
    runs = [Simulation(fleet(), replace(base, seed=seed)).run(trace(3)).totals for seed in (0, 1)]
    assert runs[0].transfers != runs[1].transfers


def test_kv_that_stays_resident_at_the_end_is_reported_as_a_leak() -> None:
    simulation = Simulation(fleet(), settings_for(System.PREFILLER))
    simulation.run(trace(4))
    engine = next(iter(simulation.fleet.engines.values()))
    engine.kv.resident += 1
    with pytest.raises(Leak, match="resident"):
        check(simulation.tally, [engine], simulation.events.now, waiting=0)
