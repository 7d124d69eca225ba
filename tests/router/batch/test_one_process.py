"""One batch process at a time writes the store, for its fleet's gateways; the next continues its work."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

from router.identity.conversation_ids import namespace
from tests.router.batch.fake_engine import OfflineEngine
from tests.router.batch.gateway import FrontGateway, GatewayWithBatch, StaticFleet
from tests.router.batch.jobs import ended, jsonl, line, lines_of, submit
from tests.router.batch.processes import batch_process, free_port


async def test_the_batch_process_answers_only_gateways_of_its_fleet(sqlite_gateway: GatewayWithBatch) -> None:
    forged = {"authorization": "Bearer guess", "x-conserve-caller": "somebody"}
    async with httpx.AsyncClient(base_url=f"http://{sqlite_gateway.batch}") as http:
        for path in ("/v1/files", "/v1/batches"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=forged)).status_code == 401
        answer = await http.post("/v1/chat/completions", json={"model": "tiny"}, headers=forged)
        assert answer.status_code == 401
        assert (await http.get("/metrics")).status_code == 200
    other = FrontGateway(sqlite_gateway.batch, secret="of another fleet")
    await other.start()
    async with other.client() as client:
        with pytest.raises(openai.AuthenticationError):
            await client.batches.list()
    await other.stop()


async def test_a_client_cannot_name_another_owner_in_a_header(sqlite_gateway: GatewayWithBatch) -> None:
    async with sqlite_gateway.client("sk-one") as one, httpx.AsyncClient() as http:
        file = await one.files.create(file=("a.jsonl", jsonl([line("a")])), purpose="batch")
        url = f"{sqlite_gateway.url}/v1/files"
        own = (await http.get(url, headers={"authorization": "Bearer sk-one"})).json()
        assert [found["id"] for found in own["data"]] == [file.id]
        forged = {"authorization": "Bearer sk-two", "x-conserve-caller": namespace("sk-one")}
        assert (await http.get(url, headers=forged)).json()["data"] == []


async def test_batch_and_flex_requests_get_a_503_while_the_batch_process_is_away(tmp_path: Path) -> None:
    gateway = FrontGateway(f"127.0.0.1:{free_port()}")
    await gateway.start()
    async with gateway.client() as client:
        for ask in (
            client.batches.list(),
            client.files.create(file=("a", b"{}"), purpose="batch"),
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], service_tier="flex"
            ),
        ):
            with pytest.raises(openai.InternalServerError) as refused:
                await ask
            assert refused.value.status_code == 503
            assert int(refused.value.response.headers["retry-after"]) >= 1
    await gateway.stop()


async def test_a_new_batch_process_continues_the_batches_of_the_former(
    engine: OfflineEngine, either_url: str, tmp_path: Path
) -> None:
    one, other = (
        GatewayWithBatch(either_url, str(tmp_path / "files"), StaticFleet(engine.address)) for _ in range(2)
    )
    await one.start()
    async with one.client() as client:
        batch = await submit(client, jsonl([line(f"r{i}", f"sleep=0.1 {i}") for i in range(40)]))
        await engine.asked.wait()
        await one.stop()
    await other.start()
    async with other.client() as client:
        batch = await ended(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 40
        ids = [entry["custom_id"] for entry in await lines_of(client, batch.output_file_id)]
        assert ids == [f"r{i}" for i in range(40)]
    await other.stop()
    assert max(Counter(engine.served).values()) == 1


async def test_a_batch_process_ends_when_another_takes_over_its_store(
    sqlite_url: str, tmp_path: Path
) -> None:
    engine = OfflineEngine(0.05)
    former = batch_process(sqlite_url, tmp_path / "files", 8, await engine.start())
    await former.start()
    gateway = FrontGateway(former.address)
    await gateway.start()
    async with gateway.client() as client:
        batch = await submit(client, jsonl([line(f"r{i}") for i in range(200)]))
        await asyncio.wait_for(engine.asked.wait(), 30)
        later = GatewayWithBatch(sqlite_url, str(tmp_path / "files"), StaticFleet(engine.address))
        await later.start()
        await former.ended(within_s=10.0)
    async with later.client() as client:
        batch = await ended(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 200
        ids = Counter(entry["custom_id"] for entry in await lines_of(client, batch.output_file_id))
        assert ids == Counter(f"r{i}" for i in range(200))
    await gateway.stop()
    await later.stop()
    await engine.stop()
