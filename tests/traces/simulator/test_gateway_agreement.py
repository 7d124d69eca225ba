"""Gateway and directory as they run, engines that compute nothing: each binding is the simulation's."""

from dataclasses import replace
from pathlib import Path

import aiohttp

from placement.fleet.placer import PlacerSettings
from tests.support import fake_fleet
from tests.support.agreement import Agents, conversations
from tests.support.binding_agreement import compare
from traces.simulator.simulation import SimulationSettings

from .conftest import fleet

HEADROOM, FILL, KV = 100, 0.95, 100_000


async def test_every_binding_is_the_one_that_the_simulation_makes(tmp_path: Path) -> None:
    trace = list(conversations(20, HEADROOM))
    placing = {"headroom_tokens": HEADROOM, "fill": FILL}
    async with (
        fake_fleet.fleet(tmp_path, engine={"kv_tokens": KV}, placing=placing) as live,
        aiohttp.ClientSession(live.urls[0], headers={"Authorization": "Bearer agreement"}) as session,
    ):
        agents = Agents(session, fake_fleet.MODEL)
        await agents.learn_sizes()
        for engine in live.engines.values():
            engine.held.clear()
        await live.settle()
        found = await agents.play(trace)
    bindings = [replace(one, decoder=f"decode-{one.decoder.removeprefix('d')}") for one in found]
    assert len({one.decoder for one in bindings}) == 2
    settings = SimulationSettings(
        placer=PlacerSettings(headroom_tokens=HEADROOM, fill=FILL), linger_s=600.0, park_after_s=600.0
    )
    agreement = compare(fleet(decoders=2, kv_tokens=KV), settings, trace, bindings)
    assert agreement.compared == len(trace)
    assert agreement.differences == ()
