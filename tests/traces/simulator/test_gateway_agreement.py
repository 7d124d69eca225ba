"""The real gateway and directory, with engines that only take time, decide as the simulation does.

Each conversation is bound to the same decoder, and its first prompt is computed on the same kind of engine.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from placement.engines import Role
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.scheduling.latency_model import LatencyModel
from placement.scheduling.prefill_curve import PrefillCurve
from tests.support import fake_fleet
from tests.support.agreement import SECONDS_A_TOKEN, TOGETHER, TraceAgents, bursts, conversations
from tests.support.binding_agreement import LiveBinding, compare
from traces.format import TraceConversation
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import SimulationSettings
from traces.simulator.tiers import SimulatedFleet, SimulatedTier

from .conftest import fleet, profile

pytestmark = pytest.mark.slow

HEADROOM, FILL, KV = 100, 0.95, 100_000
PLACER = PlacerSettings(headroom_tokens=HEADROOM, fill=FILL, max_prefill_wait_s=1e9)
PLACING = {"headroom_tokens": HEADROOM, "fill": FILL, "max_prefill_wait_s": 1e9}


async def play(
    live: fake_fleet.FakeFleet, parts: list[list[TraceConversation]], at_once: int
) -> list[LiveBinding]:
    """Play `parts` one after the other through a gateway; return bindings with simulated engine names."""
    headers = {"Authorization": "Bearer agreement"}
    async with aiohttp.ClientSession(live.urls[0], headers=headers) as session:
        agents = TraceAgents(session, fake_fleet.MODEL, at_once)
        await agents.learn_sizes()
        for engine in live.engines.values():
            engine.held.clear()
        found = []
        for part in parts:
            await live.settle()
            found += await agents.play(part)
    return [replace(one, decoder=tier(one.decoder), prefiller=tier(one.prefiller)) for one in found]


def tier(engine: Any) -> Any:
    return engine and engine.replace("d", "decode-").replace("p", "prefill-")


async def test_every_binding_of_the_gateway_equals_the_simulated_binding(tmp_path: Path) -> None:
    trace = list(conversations(20, HEADROOM))
    async with fake_fleet.fleet(tmp_path, engine={"kv_tokens": KV}, placing=PLACING) as live:
        bindings = await play(live, [trace], 3)
    assert len({one.decoder for one in bindings}) == 2
    settings = SimulationSettings(placer=PLACER, linger_s=600.0, park_after_s=600.0)
    agreement = compare(fleet(decoders=2, kv_tokens=KV), settings, trace, bindings)
    assert agreement.compared == len(trace)
    assert agreement.differences == ()


async def test_elastic_placing_computes_each_prompt_where_the_simulation_computes_it(tmp_path: Path) -> None:
    headroom = 10
    parts = list(bursts(5, headroom))
    curves = {name: PrefillCurve(0.0, seconds, 0.0) for name, seconds in SECONDS_A_TOKEN.items()}
    no_risk = {"headroom_tokens": headroom, "ttft_s": 1e9}
    placing = {**PLACING, **no_risk, "first_turns": FirstTurns.ELASTIC}
    engine: dict[str, Any] = {"kv_tokens": KV, "handed_over": {}}
    async with fake_fleet.fleet(tmp_path, engine=engine, placing=placing, curves=curves) as live:
        for one in live.engines.values():
            one.curve = curves[one.info.tier]
            one.prompt_tokens_per_s = 1 / one.curve.b
        bindings = await play(live, parts, len(TOGETHER))
    trace = [conversation for part in parts for conversation in part]
    assert len({one.decoder for one in bindings}) == 2
    assert 8 <= sum(one.prefiller is None for one in bindings) <= 12
    engines = {
        name: profile(LatencyModel(seconds, 0.0, 0.0, 1e-6), kv_tokens=KV)
        for name, seconds in SECONDS_A_TOKEN.items()
    }
    simulated = SimulatedFleet(
        (
            SimulatedTier("decode", Role.DECODE, 2, engines["decode"]),
            SimulatedTier("prefill", Role.PREFILL, 1, engines["prefill"]),
        )
    )
    placer = replace(PLACER, **no_risk)
    settings = SimulationSettings(SystemSettings(System.ELASTIC), placer, linger_s=600.0, park_after_s=600.0)
    agreement = compare(simulated, settings, trace, bindings)
    assert agreement.compared == len(trace)
    assert agreement.differences == ()
