"""Drains one decoder while agents talk: do conversations move with their KV, and is any stream cut?"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from benchmarks.chaos.agents import AgentLengths, Agents
from benchmarks.harness.fleet import RANDOM, brought_up, changed, counted
from deploy.fleet import load_fleet
from deploy.home import FleetHome, Purpose
from deploy.lifecycle.status import FleetStatus, fleet_status, keys_of, serving
from deploy.ray.control import ControlClient

CONVERSATIONS, QUICK_CONVERSATIONS = 40, 12
AT_ONCE = 10
DECODERS, BLOCKS = 3, 1024
DRAIN_LIMIT_S, LIMIT_S = 300.0, 600.0
LENGTHS = AgentLengths(words=(40, 80, 160), tokens=(16, 32, 64), waits_s=(0.0, 0.5, 2.0))


def drain_under_load(quick: bool) -> dict[str, Any]:
    """Bring up a fleet of three decoders, drain one of them under load, and return the measurements."""
    fleet = load_fleet(RANDOM)
    tiers = [changed(tier, replicas=DECODERS) if tier.name == "decode" else tier for tier in fleet.tiers]
    fleet = changed(fleet, name="drain", tiers=tiers, engine={"args": {"num-gpu-blocks-override": BLOCKS}})
    with brought_up(fleet) as home:
        conversations = QUICK_CONVERSATIONS if quick else CONVERSATIONS
        return drain_one(home, "decode-0", conversations)


def drain_one(home: FleetHome, engine: str, conversations: int) -> dict[str, Any]:
    """Drain an engine of a running fleet while agents talk, end the drain, and return the measurements."""
    return asyncio.run(_drain(home, fleet_status(home), engine, conversations))


async def _drain(home: FleetHome, status: FleetStatus, engine: str, conversations: int) -> dict[str, Any]:
    # Gateways count moves with a turn, the directory counts moves between turns.
    pages = [f"http://{page}" for page in (*status.gateways, status.metrics) if page]
    address = next(one.control for one in status.engines if one.engine == engine)
    agents = Agents(serving(home).endpoint, load_fleet(home.fleet_file).model.name, 0, LENGTHS)
    await agents.learn()

    def count(name: str) -> int:
        return int(counted(pages, f"conserve_{name}_total"))

    names = ("conversations_moved", "moved_recomputed_tokens", "streams_cut")
    before = {name: count(name) for name in names}
    playing = asyncio.create_task(agents.run(AT_ONCE, time.monotonic() + LIMIT_S, conversations))
    key = keys_of(load_fleet(home.fleet_file), home).of(Purpose.KEEPERS)
    async with ControlClient(address, key) as keeper:
        # At that time about half of the first conversations are bound, and none is near its end.
        await _until(lambda: agents.seen.turns >= AT_ONCE // 2 or playing.done())
        began = time.monotonic()
        await keeper.drain()
        try:
            drained_s, held_s = await _until_drained(keeper, began, lambda: count("conversations_moved"))
            await playing
        finally:
            await keeper.drain(False)
    seen = agents.seen
    moved, recomputed, cut = (count(name) - before[name] for name in names)
    return {
        "drain_conversations": seen.conversations,
        "drain_turns": seen.turns,
        "drain_seconds": drained_s,
        "drain_seconds_after_last_move": held_s,
        "moved_conversations": moved,
        "moved_recomputed_tokens": recomputed,
        "cut_streams": cut + sum(tries for outcome, tries in seen.tries.items() if outcome != "answered"),
        "moved_other_outputs": len(seen.wrong) + len(seen.lost) + len(seen.hung),
    }


async def _until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def _until_drained(
    keeper: ControlClient, began: float, moved: Callable[[], int]
) -> tuple[float, float]:
    """Wait until the engine holds nothing any more; return the seconds since `began` and since a move."""
    so_far, moved_at = moved(), began
    async with asyncio.timeout(DRAIN_LIMIT_S):
        async for report in keeper.watch():
            if report.state is not None and report.state.drained:
                break
            if (now := await asyncio.to_thread(moved)) != so_far:
                so_far, moved_at = now, time.monotonic()
    ended = time.monotonic()
    return ended - began, ended - moved_at
