"""A request of service tier flex runs as offline work; it waits for capacity until its time limit."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai import AsyncOpenAI
from prometheus_client import REGISTRY

from router.gateway.config import BatchAddress
from router.http import ServerLimits, UpstreamLimits
from tests.router.batch.fake_engine import MODEL, OfflineEngine
from tests.router.batch.gateway import SECRET, FrontGateway, GatewayWithBatch, StaticFleet
from tests.router.batch.jobs import ended, jsonl, line, submit
from tests.router.test_large_bodies import BOUND_S, Stalls, hostile_request
from tests.router.test_rates import alice, left, limited
from tests.support import fake_fleet

pytestmark = pytest.mark.slow


async def ask(client: AsyncOpenAI, text: str) -> str | None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], service_tier="flex"
    )
    return answer.choices[0].message.content


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("conserve_batch_flex_requests_total", {"outcome": outcome}) or 0.0


async def test_a_flex_request_runs_as_offline_work(
    sqlite_gateway: GatewayWithBatch, engine: OfflineEngine
) -> None:
    before = counted("served")
    async with sqlite_gateway.client() as client:
        assert await ask(client, "hello") == "echo hello"
    (body,) = engine.bodies
    assert body["priority"] > 0 and "service_tier" not in body
    assert counted("served") == before + 1


async def test_offline_requests_carry_the_cache_salt_of_their_owner(
    sqlite_gateway: GatewayWithBatch, engine: OfflineEngine
) -> None:
    entry = line("a")
    entry["body"] |= {"session_id": "another's", "cache_salt": "mine"}
    async with sqlite_gateway.client() as client:
        await ask(client, "hello")
        await ended(client, await submit(client, jsonl([line("b"), entry])))
    salts = {body["cache_salt"] for body in engine.bodies}
    assert len(engine.bodies) == 3 and len(salts) == 2 and "mine" not in salts
    assert not any(body.get("session_id") for body in engine.bodies)


async def test_flex_requests_are_answered_while_a_large_batch_runs(
    sqlite_gateway: GatewayWithBatch, engine: OfflineEngine
) -> None:
    async with sqlite_gateway.client() as client:
        batch = await submit(client, jsonl([line(f"r{i}", f"sleep=0.05 {i}") for i in range(60)]))
        answers = await asyncio.gather(*(ask(client, f"flex {i}") for i in range(12)))
        assert answers == [f"echo flex {i}" for i in range(12)]
        assert (
            await client.batches.retrieve(batch.id)
        ).status != "completed"  # the flex requests did not wait for the batch
        batch = await ended(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 60
    assert engine.peak <= sqlite_gateway.config.dispatch.blind_window


async def test_without_capacity_a_flex_request_is_refused_in_time(sqlite_gateway: GatewayWithBatch) -> None:
    sqlite_gateway.fleet.infos.clear()
    async with sqlite_gateway.client() as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client, "hello")
    assert refused.value.code == "resource_unavailable"


async def test_a_refused_flex_request_costs_no_tokens(
    sqlite_gateway: GatewayWithBatch, tmp_path: Path
) -> None:
    sqlite_gateway.fleet.infos.clear()
    batch = BatchAddress(sqlite_gateway.batch, SECRET)
    async with limited(tmp_path, {"tokens_per_minute": 100_000}, batch=batch) as made:
        refused = await alice(made.urls[0], "x" * 20_000, service_tier="flex")
        assert (refused.status, refused.error["code"]) == (429, "resource_unavailable")
        assert left(refused, "tokens") < 90_000  # the header was made before the refusal
        after = await alice(made.urls[0], "hi")
        assert after.status == 200 and left(after, "tokens") > 95_000


async def test_the_answer_of_a_flex_request_is_stored(
    sqlite_gateway: GatewayWithBatch, tmp_path: Path
) -> None:
    async with fake_fleet.fleet(tmp_path, batch=BatchAddress(sqlite_gateway.batch, SECRET)) as made:
        path = "/v1/responses"
        asked: dict[str, Any] = {"path": path, "service_tier": "flex"}
        assert (await fake_fleet.ask(made.urls[0], "hello", store=False, **asked)).status == 200
        assert (await fake_fleet.get(f"{made.urls[0]}{path}/r"))[0] == 404
        answer = await fake_fleet.ask(made.urls[0], "hello", **asked)
        assert answer.status == 200
        status, shown = await fake_fleet.get(f"{made.urls[0]}{path}/r")
        assert (status, shown["output"][0]["content"][0]["text"]) == (200, "echo hello")
        later = await fake_fleet.ask(made.urls[0], "more", path=path, previous_response_id="r")
        assert later.status == 200
        (seen,) = made.decoder_requests()
        assert [item["role"] for item in seen.body["input"]] == ["user", "assistant", "user"]


async def test_a_flex_client_that_disconnects_frees_its_slot(
    sqlite_gateway: GatewayWithBatch, engine: OfflineEngine
) -> None:
    async with sqlite_gateway.client() as client:
        window, before = sqlite_gateway.config.dispatch.blind_window, counted("client_left")
        leaving = [asyncio.create_task(ask(client, f"sleep=30 {i}")) for i in range(window + 4)]
        await asyncio.wait_for(engine.asked.wait(), 60)
        await asyncio.sleep(0.2)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert await ask(client, "after") == "echo after"
    assert counted("client_left") == before + 4


async def test_a_flex_client_gets_the_error_of_its_engine(sqlite_gateway: GatewayWithBatch) -> None:
    async with sqlite_gateway.client() as client:
        with pytest.raises(openai.BadRequestError):
            await ask(client, "status=400")
        await sqlite_gateway_engine_stops(sqlite_gateway)
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(client, "hello")
    assert refused.value.code == "engine_unreachable"


async def sqlite_gateway_engine_stops(gateway: GatewayWithBatch) -> None:
    """Make the engine unreachable: its entry in the fleet gets a port on which nothing listens."""
    gateway.fleet.infos[0] = replace(gateway.fleet.infos[0], http="127.0.0.1:9")


async def test_waiting_flex_turns_take_no_connections_from_files_and_batches(
    sqlite_gateway: GatewayWithBatch,
) -> None:
    sqlite_gateway.fleet.infos.clear()
    narrow = FrontGateway(
        sqlite_gateway.batch, upstream=UpstreamLimits(max_connections=1, acquire_timeout_s=0.2)
    )
    await narrow.start()
    async with narrow.client() as client:
        waiting = asyncio.create_task(ask(client, "hello"))
        await asyncio.sleep(0.3)
        assert (await client.batches.list()).data == []
        assert not waiting.done()
        with pytest.raises(openai.InternalServerError, match="flex requests are not served"):
            await ask(client, "one more")
        with pytest.raises(openai.RateLimitError):
            await waiting
    await narrow.stop()


async def test_the_batch_process_applies_its_own_connection_and_header_limits(
    engine: OfflineEngine, sqlite_url: str, tmp_path: Path
) -> None:
    gateway = GatewayWithBatch(sqlite_url, str(tmp_path / "files"), StaticFleet(engine.address))
    upstream = UpstreamLimits(max_connections=1, acquire_timeout_s=0.1)
    gateway.config = replace(gateway.config, upstream=upstream, server=ServerLimits(max_headers=9))
    await gateway.start()
    async with gateway.client() as client, httpx.AsyncClient() as http:
        first = asyncio.create_task(ask(client, "sleep=1"))
        await asyncio.wait_for(engine.asked.wait(), 60)
        with pytest.raises(openai.InternalServerError, match="All 1 connections"):
            await ask(client, "hello")
        await first
        many = {f"x-{number}": "y" for number in range(9)}
        assert (await http.get(f"http://{gateway.batch}/metrics", headers=many)).status_code == 431
    await gateway.stop()


async def test_a_large_flex_request_delays_no_other_client(sqlite_gateway: GatewayWithBatch) -> None:
    """Parsing a request with 400,000 objects in the event loop would block it for some 200 ms."""
    sqlite_gateway.fleet.infos.clear()  # so that no engine in this process parses it
    tool = {"type": "function", "function": {"name": "f", "parameters": [{}] * 80}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [tool] * 5_000}
    raw, stalls = orjson.dumps({**body, "service_tier": "flex"}), Stalls()
    watching = asyncio.create_task(stalls.watch())
    status, said = await hostile_request(sqlite_gateway.url, "chat/completions", raw)
    watching.cancel()
    assert (status, b"resource_unavailable" in said) == (429, True)
    assert stalls.longest_s < BOUND_S
