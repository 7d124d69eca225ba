"""Service tier flex: a normal request runs as offline work, waits for room, and gives up in time."""

import asyncio
from dataclasses import replace

import openai
import pytest
from openai import AsyncOpenAI
from prometheus_client import REGISTRY

from tests.router.batch.fake_engine import MODEL, FakeEngine
from tests.router.batch.gateway import Gateway
from tests.router.batch.jobs import ended, jsonl, line, submit


async def ask(client: AsyncOpenAI, text: str) -> str | None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], service_tier="flex"
    )
    return answer.choices[0].message.content


def served() -> float:
    return REGISTRY.get_sample_value("conserve_batch_flex_requests_total", {"outcome": "served"}) or 0.0


async def test_a_flex_request_runs_as_offline_work(sqlite_gateway: Gateway, engine: FakeEngine) -> None:
    before = served()
    async with sqlite_gateway.client() as client:
        assert await ask(client, "hello") == "echo hello"
    (body,) = engine.bodies
    assert body["priority"] > 0 and "service_tier" not in body
    assert served() == before + 1


async def test_flex_and_batches_share_the_engines(sqlite_gateway: Gateway, engine: FakeEngine) -> None:
    async with sqlite_gateway.client() as client:
        batch = await submit(client, jsonl([line(f"r{i}", f"sleep=0.05 {i}") for i in range(60)]))
        answers = await asyncio.gather(*(ask(client, f"flex {i}") for i in range(12)))
        assert answers == [f"echo flex {i}" for i in range(12)]
        assert (
            await client.batches.retrieve(batch.id)
        ).status != "completed"  # it did not wait for the batch
        batch = await ended(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 60
    assert engine.peak <= sqlite_gateway.config.dispatch.blind_window


async def test_without_room_it_is_refused_in_time(sqlite_gateway: Gateway) -> None:
    sqlite_gateway.fleet.infos.clear()
    async with sqlite_gateway.client() as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client, "hello")
    assert refused.value.code == "resource_unavailable"


async def test_a_client_that_leaves_gives_its_place_up(sqlite_gateway: Gateway, engine: FakeEngine) -> None:
    async with sqlite_gateway.client() as client:
        window = sqlite_gateway.config.dispatch.blind_window
        leaving = [asyncio.create_task(ask(client, f"sleep=30 {i}")) for i in range(window + 4)]
        await asyncio.wait_for(engine.asked.wait(), 60)
        await asyncio.sleep(0.2)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert await ask(client, "after") == "echo after"
    assert not sqlite_gateway.service.flex.backlog()


async def test_an_engine_that_fails_is_seen(sqlite_gateway: Gateway) -> None:
    async with sqlite_gateway.client() as client:
        with pytest.raises(openai.BadRequestError):
            await ask(client, "status=400")
        await sqlite_gateway_engine_stops(sqlite_gateway)
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(client, "hello")
    assert refused.value.code == "engine_unreachable"


async def sqlite_gateway_engine_stops(gateway: Gateway) -> None:
    """The fleet still names it, at a port where nobody listens."""
    gateway.fleet.infos[0] = replace(gateway.fleet.infos[0], http="127.0.0.1:9")
