"""Gateway, directory and batch process serve one API, which survives `kill -9` of the batch process."""

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from router.auth.keys import inline_keys
from router.batch.config import BatchConfig, dump
from router.gateway.config import BatchAddress, ServedModel
from tests.router.batch.gateway import FAST
from tests.router.batch.jobs import ended, in_progress, jsonl, line, lines_of, submit
from tests.router.batch.processes import free_port
from tests.support.fake_fleet import MODEL, FakeFleet, fleet

pytestmark = pytest.mark.slow

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


class BatchProcess:
    """Process that runs `python -m router.batch --config FILE` for the fleet of a test."""

    def __init__(self, small: FakeFleet, folder: Path) -> None:
        self.port = free_port()
        config = BatchConfig(
            f"sqlite:///{folder}/batch.db",
            str(folder / "files"),
            models=(ServedModel(MODEL),),
            directory=small.address,
            secret="s3cret",
            key="of gateways",
            port=self.port,
            dispatch=replace(FAST, request_timeout_s=60.0),
        )
        file = folder / "batch.json"
        file.write_bytes(dump(config))
        self._command = [sys.executable, "-m", "router.batch", "--config", str(file)]
        self.start()

    def start(self) -> None:
        # The process lowers the priority of its session, which must not be the session of the tests.
        self._process = subprocess.Popen(self._command, start_new_session=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    async def answers(self) -> None:
        async with httpx.AsyncClient() as http, asyncio.timeout(30):
            while True:
                try:
                    await http.get(f"http://127.0.0.1:{self.port}/metrics")
                    return
                except httpx.TransportError:
                    await asyncio.sleep(0.05)


@pytest.fixture
def processes() -> Iterator[list[BatchProcess]]:
    started: list[BatchProcess] = []
    yield started
    for process in started:
        process.kill()


async def test_batches_complete_while_conversations_run(
    tmp_path: Path, processes: list[BatchProcess]
) -> None:
    async with fleet(tmp_path, gateways=0) as small:
        processes.append(BatchProcess(small, tmp_path))
        batch_address = BatchAddress(f"127.0.0.1:{processes[0].port}", "of gateways")
        keys = inline_keys(("sk-one", "sk-two"), ())
        url = await small.add_gateway(directory_secret="s3cret", batch=batch_address, keys=keys)
        await processes[0].answers()
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-one", max_retries=0) as one,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-two", max_retries=0) as two,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-none", max_retries=0) as stranger,
        ):
            batch = await submit(one, jsonl([line(f"r{i}", body=ASK) for i in range(40)]))
            answer = await one.chat.completions.create(**ASK)  # type: ignore[call-overload]
            assert answer.choices[0].message.content
            flex = await two.chat.completions.create(**ASK, service_tier="flex")  # type: ignore[call-overload]
            assert flex.choices[0].message.content
            batch = await ended(one, batch)
            assert batch.status == "completed" and len(await lines_of(one, batch.output_file_id)) == 40
            with pytest.raises(openai.NotFoundError):
                await two.batches.retrieve(batch.id)
            with pytest.raises(openai.AuthenticationError):
                await stranger.batches.list()
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.create(file=("a", b"{}"), purpose="batch")
        seen = [one for engine in small.engines.values() for one in engine.seen]
        offline = [one for one in seen if one.body.get("priority")]
        assert len(offline) == 41  # the batch and flex
        assert all("kv_transfer_params" not in one.body for one in offline)
        assert not any(one.body.get("priority") for one in small.prefills())


async def test_conversations_are_served_while_the_batch_process_is_killed(
    tmp_path: Path, processes: list[BatchProcess]
) -> None:
    async with fleet(tmp_path, gateways=0, engine={"token_s": 0.02}) as small:
        processes.append(BatchProcess(small, tmp_path))
        batch_address = BatchAddress(f"127.0.0.1:{processes[0].port}", "of gateways")
        url = await small.add_gateway(directory_secret="s3cret", batch=batch_address)
        await processes[0].answers()
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-one", max_retries=0) as client:
            batch = await submit(client, jsonl([line(f"r{i}", body=ASK) for i in range(300)]))
            await in_progress(client, batch, done=5)
            for _ in range(3):
                processes[0].kill()
                with pytest.raises(openai.InternalServerError) as refused:
                    await client.batches.retrieve(batch.id)
                assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
                answer = await client.chat.completions.create(**ASK)  # type: ignore[call-overload]
                assert answer.choices[0].message.content
                killed = time.monotonic()
                processes[0].start()
                await processes[0].answers()
                print(f"answers {time.monotonic() - killed:.1f} s after its start")
                await asyncio.sleep(0.3)
            batch = await ended(client, batch)
            output = await lines_of(client, batch.output_file_id)
            assert batch.status == "completed" and batch.error_file_id is None
            assert Counter(entry["custom_id"] for entry in output) == Counter(f"r{i}" for i in range(300))
