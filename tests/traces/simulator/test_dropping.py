"""A simulated fleet that is short of KV drops parameters, serves turns sooner, and restores parameters."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.engines import Role
from placement.overload.drop_plan import DropLimits
from placement.routing.placer_settings import PlacerSettings
from traces import TraceError
from traces.format import TraceConversation, TraceTurn
from traces.simulator.dropping import DroppingSettings
from traces.simulator.kv import Pressure
from traces.simulator.metrics import percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier

from .conftest import profile
from .test_conservation import fleet_for, settings_for, trace

pytestmark = pytest.mark.slow

KV = 40_000
DROP = DroppingSettings(DropLimits(tbt_s=1.0), look_s=0.25)


def layered(kv_tokens: int = KV, **more: int) -> EngineProfile:
    """Return a profile whose parameters take as much memory as its KV, and a link that moves the KV in a
    fifth of a second.
    """
    kv_bytes = kv_tokens * profile().kv_bytes_per_token
    return replace(
        profile(kv_tokens=kv_tokens, **more), layers=20, layer_bytes=kv_bytes / 20, activation_bytes=2e3
    )  # type: ignore[arg-type]


def burst(count: int = 600, every_s: float = 0.02) -> list[TraceConversation]:
    """Return short prompts with long answers: they need twice four engines' KV, but little computing."""
    return [
        TraceConversation(f"c{i}", every_s * i, (TraceTurn(300, 0, 600 + i % 7 * 50),)) for i in range(count)
    ]


def play(
    found: list[TraceConversation], dropping: DroppingSettings | None, engine: EngineProfile | None = None
) -> Simulation:
    placer = PlacerSettings(max_prefill_wait_s=1e9, fill=0.9, headroom_tokens=300)
    fleet = SimulatedFleet((SimulatedTier("mixed", Role.MIXED, 4, engine or layered()),))
    simulation = Simulation(
        fleet,
        SimulationSettings(
            SystemSettings(System.COLLOCATED), placer, reserved_until_held=True, dropping=dropping
        ),
    )
    simulation.run(found)
    return simulation


def ttft(simulation: Simulation, p: float) -> float:
    return percentile(np.asarray(simulation.recorder.turn_ttft), p)


def test_dropping_serves_long_answers_sooner_and_is_undone_afterwards() -> None:
    without, dropped = play(burst(), None), play(burst(), DROP)
    assert dropped.dropping is not None
    tally = dropped.dropping.tally
    assert tally.drops > 0 and tally.restores > 0
    assert ttft(dropped, 99) < 0.5 * ttft(without, 99)
    for engine in dropped.fleet.engines.values():
        assert engine.kv.capacity == KV and engine.pipeline is None


def test_a_fleet_with_enough_kv_drops_no_layers() -> None:
    found = burst(40, every_s=0.5)
    without, dropped = play(found, None), play(found, DROP)
    assert dropped.dropping is not None and not dropped.dropping.tally.drops
    assert list(without.recorder.turn_ttft) == list(dropped.recorder.turn_ttft)


def test_a_fleet_whose_bottleneck_is_computing_drops_no_layers() -> None:
    prompts = [TraceConversation(f"c{i}", 0.05 * i, (TraceTurn(9_000, 0, 2),)) for i in range(200)]
    slow = replace(layered(400_000), latency=replace(profile().latency, per_token=1e-3))
    simulation = play(prompts, DROP, slow)
    assert simulation.dropping is not None and not simulation.dropping.tally.drops
    assert ttft(simulation, 99) > 10


def test_dropping_over_a_slower_link_gives_later_first_tokens() -> None:
    slow, slower = (replace(layered(), network_bytes_per_s=rate) for rate in (2e9, 5e8))
    assert ttft(play(burst(), DROP, slower), 99) > ttft(play(burst(), DROP, slow), 99)


def test_dropping_layers_is_refused_for_a_profile_that_has_no_layers() -> None:
    with pytest.raises(TraceError, match="to drop layers, its profile needs `layers`"):
        play(burst(4), DROP, profile())


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([System.COLLOCATED, System.PREFILLER, System.ELASTIC, System.STICKY]),
    st.sampled_from(list(Pressure)),
    st.sampled_from([20_000, 40_000]),
    st.booleans(),
)
def test_no_kv_or_token_is_lost_while_engines_drop_and_restore_layers(
    seed: int, system: System, pressure: Pressure, kv: int, held: bool
) -> None:
    base = fleet_for(system, kv_tokens=kv)
    tiers = tuple(replace(tier, profile=layered(kv)) for tier in base.tiers)
    run = replace(settings_for(system, pressure, linger_s=3.0), dropping=DROP, reserved_until_held=held)
    Simulation(SimulatedFleet(tiers), run).run(trace(seed, 25, rate=10.0))
