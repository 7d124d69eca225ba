"""The simulator binds each conversation of a run to the decoder that the real fleet has chosen."""

import asyncio

import aiohttp
import pytest

from deploy.cli.commands.simulate import simulated_fleet, simulation_settings
from tests.fleet.talk import get
from tests.support.agreement import TraceAgents, conversations
from tests.support.binding_agreement import LiveBinding, compare
from tests.support.fleet import RunningFleet
from traces.format import TraceConversation
from traces.simulator.profiles import find

AT_ONCE = 2

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]


def in_use(fleet: RunningFleet) -> int:
    engines = get(fleet.url, "/dashboard/state")["engines"]
    return sum(one["kv"]["live"] + one["kv"]["reserved"] for one in engines if one["role"] == "decode")


async def run(fleet: RunningFleet, trace: list[TraceConversation]) -> list[LiveBinding]:
    headers, patience = {"Authorization": "Bearer agreement"}, aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(fleet.url, headers=headers, timeout=patience) as session:
        agents = TraceAgents(session, fleet.model, AT_ONCE)
        await agents.learn_sizes()
        limit_s = fleet.fleet.conversation.park_after + 300
        await asyncio.to_thread(
            fleet.until, lambda: not in_use(fleet), limit_s, "the KV of earlier tests to be parked"
        )
        return await agents.play(trace)


def test_the_simulator_binds_each_conversation_to_the_decoder_that_the_fleet_chose(
    unused_fleet: RunningFleet,
) -> None:
    file = unused_fleet.fleet
    trace = list(conversations(9, file.conversation.headroom_tokens, AT_ONCE, longest=4_500))
    live = asyncio.run(run(unused_fleet, trace))
    # What has been idle for `park_after` is parked: on a slow machine later than in the simulation.
    parks_from = min(one.at for one in live) + file.conversation.park_after
    live = [one for one in live if one.at < parks_from]
    assert len(live) >= 6
    assert len({one.decoder for one in live}) == 2
    settings = simulation_settings(file, None, 0.0, 0)
    found = compare(simulated_fleet(file, find("laptop")), settings, trace, live)
    assert found.compared == len(live)
    assert found.differences == ()
