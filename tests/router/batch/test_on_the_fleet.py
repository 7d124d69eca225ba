"""On the laptop fleet, batches complete while an agent talks, through the SDK and the command line."""

import asyncio
import json
import time
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from tests.router.batch.jobs import ended, in_progress, jsonl, lines_of, submit
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1_800)]
COUNT = 48


def requests(model: str, endpoint: str) -> bytes:
    lines = []
    for number in range(COUNT):
        text = f"Number {number}. " + "Tell me more about it. " * (number % 12)
        asked: dict[str, object] = {"prompt": text}
        if endpoint.endswith("chat/completions"):
            asked = {
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
            }
        body = {"model": model, "max_tokens": 4 + number % 8, **asked}
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": body})
    return jsonl(lines)


async def test_batches_complete_while_an_agent_holds_a_conversation(laptop_fleet: RunningFleet) -> None:
    model = laptop_fleet.model
    async with AsyncOpenAI(base_url=f"{laptop_fleet.url}/v1", api_key="batcher", timeout=300) as client:
        endpoints = ("/v1/chat/completions", "/v1/completions")
        batches = [await submit(client, requests(model, endpoint), endpoint) for endpoint in endpoints]
        messages = [{"role": "user", "content": "How are you?"}]
        for _ in range(3):
            answer = await client.chat.completions.create(
                model=model,
                messages=messages,
                max_tokens=8,  # type: ignore[arg-type]
            )
            assert answer.usage is not None and answer.usage.completion_tokens > 0
            messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": "And then?"}]
        flex = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "No hurry."}],
            max_tokens=4,
            service_tier="flex",
        )
        assert flex.choices
        for batch in batches:
            done = await ended(client, batch, within_s=900)
            assert done.status == "completed" and done.request_counts is not None
            errors = await lines_of(client, done.error_file_id)
            assert done.request_counts.completed == COUNT, errors[:2]
            results = await lines_of(client, done.output_file_id)
            assert [result["custom_id"] for result in results] == [f"r{number}" for number in range(COUNT)]
            for number, result in enumerate(results):
                assert result["response"]["body"]["usage"]["completion_tokens"] <= 4 + number % 8
            assert done.usage is not None and done.usage.output_tokens > 0


async def test_a_batch_completes_from_the_command_line(laptop_fleet: RunningFleet, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(requests(laptop_fleet.model, "/v1/chat/completions"))
    arguments = ("batch", "submit", str(file), "--out", str(out), "--fleet", laptop_fleet.fleet.name)
    answer = await asyncio.to_thread(laptop_fleet.cli, *arguments, timeout_s=900)
    assert answer.returncode == 0, answer.stderr
    ids = [json.loads(text)["custom_id"] for text in out.read_text().splitlines()]
    assert ids == [f"r{number}" for number in range(COUNT)]


async def test_a_batch_completes_after_its_batch_process_was_killed_and_restarted(
    laptop_fleet: RunningFleet,
) -> None:
    fleet, model = laptop_fleet, laptop_fleet.model
    url = f"{fleet.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="killed", timeout=300, max_retries=0) as client:
        batch = await submit(client, requests(model, "/v1/completions"), "/v1/completions")
        await in_progress(client, batch, done=1)
        for victim in ("batch", "supervisor", "batch"):
            if victim == "batch":
                (pid,) = set(fleet.processes("router.batch")) - set(fleet.processes("workers.host"))
                fleet.kill(pid)
            else:  # the process continues, and the restarted actor adopts it
                fleet.kill(fleet.actor("GatewaysActor"))
            killed = time.monotonic()
            answer = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Still there?"}], max_tokens=4
            )
            assert answer.choices
            while True:
                try:
                    await client.batches.retrieve(batch.id)
                    break
                except openai.InternalServerError as away:
                    assert away.status_code == 503 and away.response.headers["retry-after"]
                    assert time.monotonic() - killed < 20
                    await asyncio.sleep(0.1)
            print(f"{victim} killed: batches are served again after {time.monotonic() - killed:.1f} s")
        batch = await ended(client, batch, within_s=900)
        results = await lines_of(client, batch.output_file_id)
        assert [result["custom_id"] for result in results] == [f"r{number}" for number in range(COUNT)]
