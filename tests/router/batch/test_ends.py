"""Cancelled, expired and partly failed batches end in the right state and keep their finished results."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from placement.engines import EngineState, SplitState
from placement.overload.drop_plan import EngineShape
from tests.router.batch.fake_engine import OfflineEngine
from tests.router.batch.gateway import FAST, GatewayWithBatch, StaticFleet, engine_info
from tests.router.batch.jobs import ended, in_progress, jsonl, line, lines_of, submit

pytestmark = pytest.mark.slow


async def results_of(client: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    output = {entry["custom_id"]: entry for entry in await lines_of(client, batch.output_file_id)}
    error = {entry["custom_id"]: entry for entry in await lines_of(client, batch.error_file_id)}
    assert not output.keys() & error.keys()
    return output, error


async def test_a_cancelled_batch_keeps_its_finished_results(
    gateway: GatewayWithBatch, engine: OfflineEngine
) -> None:
    async with gateway.client() as client:
        quick = [line(f"a{i}", f"a{i}") for i in range(8)]
        slow = [line(f"b{i}", f"sleep=0.5 b{i}") for i in range(40)]
        batch = await submit(client, jsonl(quick + slow))
        await in_progress(client, batch, done=1)
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling" and cancelled.cancelling_at is not None
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")  # again
        batch = await ended(client, batch)
        assert batch.status == "cancelled" and batch.cancelled_at is not None
        output, error = await results_of(client, batch)
        assert output and error and len(output) + len(error) == 48
        assert {entry["error"]["code"] for entry in error.values()} == {"batch_cancelled"}
        counts = batch.request_counts
        assert counts is not None and (counts.total, counts.completed) == (48, len(output))
        served = len(engine.served)
        await asyncio.sleep(0.2)
        assert len(engine.served) == served  # no line of the batch runs any more
        with pytest.raises(openai.NotFoundError):
            await client.batches.cancel("batch_other")


async def test_an_ended_batch_cannot_be_cancelled(gateway: GatewayWithBatch) -> None:
    async with gateway.client() as client:
        batch = await ended(client, await submit(client, jsonl([line("a")])))
        with pytest.raises(openai.ConflictError, match="completed"):
            await client.batches.cancel(batch.id)


WORDS = "word " * 30_000  # more text than 8,192 tokens can be
LONG: dict[str, dict[str, Any]] = {
    "whole": {"messages": [{"role": "user", "content": WORDS}]},
    "to be cut": {"messages": [{"role": "user", "content": WORDS}], "truncate_prompt_tokens": 10},
    "a tool that looks like a file": {"tools": [{"file": "", "function": {"description": WORDS}}]},
    "a document that looks like an image": {"documents": [{"image": "", "body": WORDS}]},
    "arguments that look like an image": {"chat_template_kwargs": {"type": "image", "x": WORDS}},
}


@pytest.mark.parametrize("more", LONG.values(), ids=LONG)
async def test_a_line_too_long_for_every_engine_fails_without_being_sent(
    gateway: GatewayWithBatch, engine: OfflineEngine, more: dict[str, Any]
) -> None:
    """An engine that got the line would tokenize all of it, and so would the next engine at a retry."""
    async with gateway.client() as client:
        long = line("long")
        long["body"] |= more
        batch = await ended(client, await submit(client, jsonl([line("a"), long, line("b")])))
        output, error = await results_of(client, batch)
        assert output.keys() == {"a", "b"} and error.keys() == {"long"}
        response = error["long"]["response"]
        assert response["status_code"] == 400
        assert response["body"]["error"]["code"] == "context_length_exceeded"
        assert len(engine.bodies) == 2


async def test_a_line_validated_by_an_earlier_version_is_checked_before_it_is_sent(
    gateway: GatewayWithBatch, engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batch.dispatch.validation.check_answers", lambda body, most: 1)
    monkeypatch.setattr("router.batch.dispatch.validation.check_items", lambda body: None)
    image = {"type": "image_url", "image_url": None, "uuid": "another owner's"}
    lines = [
        line("good"),
        {**line("many"), "body": {**line("many")["body"], "n": 128, "bad_words": ["x"] * 2}},
        {
            **line("image"),
            "body": {**line("image")["body"], "messages": [{"role": "user", "content": [image]}]},
        },
    ]
    async with gateway.client() as client:
        batch = await ended(client, await submit(client, jsonl(lines)))
        output, error = await results_of(client, batch)
    assert output.keys() == {"good"}
    assert "it may have 128" in str(error["many"]) and "uuid" in str(error["image"])
    assert len(engine.served) == 1


async def test_an_expired_batch_keeps_its_finished_results(
    gateway: GatewayWithBatch, engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batch.parameters.window_seconds", lambda _window: 5)  # five seconds
    async with gateway.client() as client:
        quick = [line(f"a{i}") for i in range(4)]
        slow = [line(f"b{i}", f"sleep=30 b{i}") for i in range(20)]
        batch = await ended(client, await submit(client, jsonl(quick + slow)))
        assert batch.status == "expired" and batch.expired_at is not None and batch.finalizing_at is not None
        output, error = await results_of(client, batch)
        assert len(output) + len(error) == 24 and output.keys() <= {f"a{i}" for i in range(4)}
        assert {entry["error"]["code"] for entry in error.values()} == {"batch_expired"}
        await asyncio.wait_for(engine.idle.wait(), 60)  # lines in flight were aborted


async def test_a_batch_with_failed_lines_completes_with_an_output_and_an_error_file(
    gateway: GatewayWithBatch,
) -> None:
    async with gateway.client() as client:
        lines = [line(f"r{i}", f"status=400 {i}" if i % 2 else f"fine {i}") for i in range(20)]
        batch = await ended(client, await submit(client, jsonl(lines)))
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 20, "completed": 10, "failed": 10}
        output, error = await results_of(client, batch)
        assert set(output) == {f"r{i}" for i in range(0, 20, 2)}
        assert set(error) == {f"r{i}" for i in range(1, 20, 2)}
        refused = error["r1"]["response"]
        assert refused["status_code"] == 400 and "told to" in refused["body"]["error"]["message"]


async def test_a_line_is_retried_after_a_temporary_error_of_its_engine(gateway: GatewayWithBatch) -> None:
    async with gateway.client() as client:
        batch = await ended(
            client, await submit(client, jsonl([line(f"r{i}", f"flaky {i}") for i in range(10)]))
        )
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.completed == 10


async def test_a_line_that_fails_at_every_try_does_not_stop_the_others(
    gateway: GatewayWithBatch, engine: OfflineEngine
) -> None:
    async with gateway.client() as client:
        poison = [line("p500", "status=500"), line("pdrop", "drop it")]
        batch = await ended(client, await submit(client, jsonl(poison + [line(f"r{i}") for i in range(20)])))
        assert batch.status == "completed"
        output, error = await results_of(client, batch)
        assert set(output) == {f"r{i}" for i in range(20)} and set(error) == {"p500", "pdrop"}
        assert error["p500"]["response"]["status_code"] == 500
        assert (
            error["pdrop"]["error"]["code"] == "set_aside" and "3 tries" in error["pdrop"]["error"]["message"]
        )
        tried = [body["messages"][0]["content"] for body in engine.bodies]
        assert tried.count("status=500") == FAST.max_tries
        # One try may send a request twice, because a kept-alive connection may have been dead before.
        assert FAST.max_tries <= tried.count("drop it") <= 2 * FAST.max_tries


async def test_lines_that_a_busy_engine_refuses_are_sent_again_later(
    gateway: GatewayWithBatch, engine: OfflineEngine
) -> None:
    async with gateway.client() as client:
        engine.refuse_all = True
        batch = await submit(client, jsonl([line(f"r{i}") for i in range(10)]))
        await asyncio.sleep(0.6)
        refused = len(engine.bodies)
        assert refused <= 60  # the dispatcher backs off
        engine.refuse_all = False
        batch = await ended(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 10


@pytest.mark.parametrize("why", ["restarted", "shares its layers"])
async def test_lines_at_an_engine_that_restarts_or_shares_layers_go_to_another_engine(
    sqlite_url: str, tmp_path: Path, why: str
) -> None:
    slow, other = OfflineEngine(delay_s=30.0), OfflineEngine()
    fleet = StaticFleet(await slow.start(), await other.start())
    # A request that waits at an engine for a while does not count as a try.
    settings = replace(FAST, max_tries=1) if why == "shares its layers" else replace(FAST, lost_after_s=0.6)
    gateway = GatewayWithBatch(sqlite_url, str(tmp_path / "files"), fleet, settings)
    await gateway.start()
    async with gateway.client() as client:
        batch = await submit(client, jsonl([line(f"r{i}") for i in range(40)]))
        await asyncio.wait_for(slow.asked.wait(), 60)
        if why == "restarted":
            fleet.infos[0] = engine_info("e0", other.address, epoch=2)  # the earlier process answers nobody
        else:
            split = SplitState("host:1", EngineShape(4, 1.0, 1_000, 1.0, 1.0, 1.0, None), epoch=3)
            fleet.states["e0"] = EngineState("e0", 1, 1, 0, 0, 0, 90_000, 0, 0, split=split)
        batch = await ended(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 40
        assert sorted(other.served) == sorted(f"r{i}" for i in range(40))
    await gateway.stop()
    await slow.stop()
    await other.stop()
