"""The Files and Batch methods of the OpenAI SDK work without changes, on both kinds of store."""

import json

import openai
import pytest

from tests.router.batch.fake_engine import OfflineEngine
from tests.router.batch.gateway import GatewayWithBatch
from tests.router.batch.jobs import ended, jsonl, line, lines_of, submit, upload


async def test_a_batch_completes_with_one_result_for_each_line(
    gateway: GatewayWithBatch, engine: OfflineEngine
) -> None:
    async with gateway.client() as client:
        lines = [line(f"r{i}") for i in range(100)]
        batch = await submit(client, jsonl(lines), metadata={"who": "test"})
        assert batch.status == "validating" and batch.object == "batch" and batch.id.startswith("batch_")
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
        assert batch.metadata == {"who": "test"} and batch.model == "tiny" and batch.error_file_id is None
        assert batch.usage is not None and batch.usage.output_tokens == 500
        moments = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert all(moment is not None for moment in moments)
        assert list(moments) == sorted(moment for moment in moments if moment is not None)
        results = await lines_of(client, batch.output_file_id)
        assert [entry["custom_id"] for entry in results] == [f"r{i}" for i in range(100)]
        first = results[0]
        assert first["error"] is None and first["response"]["status_code"] == 200
        assert first["response"]["body"]["choices"][0]["message"]["content"] == "echo r0"
        assert sorted(engine.served) == sorted(f"r{i}" for i in range(100))
        assert all(body["priority"] > 0 for body in engine.bodies)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "x"}),
        ("/v1/responses", {"model": "tiny", "input": "x"}),
        ("/v1/embeddings", {"model": "tiny", "input": "x"}),
    ],
)
async def test_a_batch_may_use_endpoints_other_than_chat_completions(
    sqlite_gateway: GatewayWithBatch, endpoint: str, body: dict[str, str]
) -> None:
    async with sqlite_gateway.client() as client:
        batch = await submit(client, jsonl([line("a", url=endpoint, body=body)]), endpoint)
        batch = await ended(client, batch)
        assert batch.status == "completed"
        (result,) = await lines_of(client, batch.output_file_id)
        assert result["response"]["body"]["model"] == "tiny"


async def test_files_are_listed_in_pages_and_deleted(gateway: GatewayWithBatch) -> None:
    async with gateway.client() as client:
        files = [await upload(client, jsonl([line(f"f{i}")]), f"f{i}.jsonl") for i in range(5)]
        newest_first = [file async for file in client.files.list(limit=2)]
        assert [file.id for file in newest_first] == [file.id for file in reversed(files)]
        oldest = await client.files.list(order="asc", limit=1)
        assert oldest.data[0].id == files[0].id and oldest.has_more
        assert (await client.files.list(purpose="batch_output")).data == []
        got = await client.files.retrieve(files[2].id)
        assert (got.filename, got.purpose, got.bytes) == ("f2.jsonl", "batch", files[2].bytes)
        assert (await client.files.content(files[2].id)).content == jsonl([line("f2")])
        assert (await client.files.delete(files[2].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(files[2].id)
        with pytest.raises(openai.NotFoundError):
            await client.files.delete(files[2].id)


async def test_a_downloaded_file_keeps_its_name(gateway: GatewayWithBatch) -> None:
    async with gateway.client() as client:
        file = await upload(client, jsonl([line("f")]), "../../etc/passwd")
        content = await client.files.content(file.id)
        assert content.response.headers["content-disposition"].endswith("''..%2F..%2Fetc%2Fpasswd")


async def test_batches_are_listed_newest_first(gateway: GatewayWithBatch) -> None:
    async with gateway.client() as client:
        batches = [await submit(client, jsonl([line("a")])) for _ in range(5)]
        listed = [batch.id async for batch in client.batches.list(limit=2)]
        assert listed == [batch.id for batch in reversed(batches)]


async def test_a_key_does_not_see_batches_and_files_of_another(gateway: GatewayWithBatch) -> None:
    async with gateway.client("sk-one") as one, gateway.client("sk-two") as two:
        batch = await submit(one, jsonl([line("a")]))
        assert [b async for b in two.batches.list()] == [] and [f async for f in two.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await two.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            await two.batches.cancel(batch.id)
        with pytest.raises(openai.NotFoundError):
            await two.files.content(batch.input_file_id)
        with pytest.raises(openai.BadRequestError):
            await two.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )


async def test_a_file_with_a_lifetime_states_its_expiry_time(gateway: GatewayWithBatch) -> None:
    async with gateway.client() as client:
        file = await client.files.create(
            file=("a.jsonl", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert file.expires_at == file.created_at + 3600


async def test_a_deleted_input_file_stays_readable_for_its_batch(gateway: GatewayWithBatch) -> None:
    async with gateway.client() as client:
        batch = await submit(client, jsonl([line(f"r{i}", f"sleep=0.05 {i}") for i in range(30)]))
        await client.files.delete(batch.input_file_id)
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert len(await lines_of(client, batch.output_file_id)) == 30


async def test_custom_ids_and_text_come_back_unchanged(sqlite_gateway: GatewayWithBatch) -> None:
    async with sqlite_gateway.client() as client:
        custom_id = 'q"uote\\ \u2028 é 😀'
        batch = await ended(client, await submit(client, jsonl([line(custom_id, "tab\t\u0001 😀")])))
        content = await client.files.content(batch.output_file_id or "")
        (entry,) = [json.loads(text) for text in content.content.split(b"\n") if text]
        assert entry["custom_id"] == custom_id
        assert entry["response"]["body"]["choices"][0]["message"]["content"] == "echo tab\t\u0001 😀"
