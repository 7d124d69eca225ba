"""After kill -9 of any process at any moment, each line gets one result, and no finished line runs again."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from sqlalchemy import select

from router.batch.store.database import Database, results
from tests.router.batch.gateway import FrontGateway
from tests.router.batch.jobs import ENDED, jsonl, line, lines_of, submit
from tests.router.batch.processes import Process, batch_process, engine_process

REQUESTS = 400
WINDOW = 8


def durable_lines(database: Database) -> set[int]:
    with database.read() as connection:
        return set(connection.execute(select(results.c.line)).scalars())


async def status_of(client: AsyncOpenAI, batch: Batch) -> Batch | None:
    try:
        return await client.batches.retrieve(batch.id)
    except (openai.APIConnectionError, openai.InternalServerError):  # 503 without the batch process
        return None


@pytest.mark.slow
async def test_a_batch_survives_kills_of_its_processes_at_random_moments(
    either_url: str, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    log = tmp_path / "served.log"
    engines = [engine_process(log, 0.15), engine_process(log, 0.15)]
    for engine in engines:
        await engine.start()
    batches = batch_process(either_url, tmp_path / "files", WINDOW, *(engine.address for engine in engines))
    await batches.start()
    gateway = FrontGateway(batches.address)
    await gateway.start()
    database = Database(either_url)
    done_before: list[tuple[int, set[int]]] = []  # length of the log, and the lines with results at that time
    async with gateway.client() as client:
        batch = await submit(client, jsonl([line(str(i)) for i in range(1, REQUESTS + 1)]))
        victims: list[Process] = [batches, *engines] * 2
        rng.shuffle(victims)
        while not durable_lines(database):  # kill only while something is in flight
            await status_of(client, batch)
        for victim in victims:
            await asyncio.sleep(rng.uniform(0.05, 1.2))
            await victim.kill()
            if victim is batches:
                done = durable_lines(database)
                await asyncio.sleep(0.1)  # by now, requests at the engines have ended or were aborted
                done_before.append((len(log.read_text().split()), done))
            await victim.start()
        ended: Batch | None = None
        async with asyncio.timeout(400):
            while ended is None or ended.status not in ENDED:
                await asyncio.sleep(0.1)
                ended = await status_of(client, batch)
        output = await lines_of(client, ended.output_file_id)
        error = await lines_of(client, ended.error_file_id)
    await gateway.stop()
    for process in (batches, *engines):
        await process.stop()
    database.close()
    ids = Counter(entry["custom_id"] for entry in output + error)
    assert ids == Counter(str(i) for i in range(1, REQUESTS + 1))
    assert ended.status == "completed" and all(process.kills >= 2 for process in (batches, *engines))
    served = log.read_text().split()
    for length, done in done_before:
        again = {int(text) for text in served[length:]} & done
        assert not again, f"finished before the kill and done again: {sorted(again)[:10]}"
    twice = len(served) - len(set(served))
    kills = sum(process.kills for process in (batches, *engines))
    found = [len(done) for _, done in done_before]
    print(f"{kills} kills, the batch process's found {found} results; {twice} requests were done twice")
    assert twice <= kills * WINDOW * len(engines)
    assert all(found)


@pytest.mark.slow
async def test_a_batch_survives_kills_during_its_validation_and_while_it_is_finished(
    either_url: str, tmp_path: Path
) -> None:
    """The batch process is killed several times after the submission, and again once all lines are done."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    total = 1_000
    engine = engine_process(tmp_path / "served.log", 0.0)
    await engine.start()
    batches = batch_process(either_url, tmp_path / "files", 64, engine.address)
    await batches.start()
    gateway = FrontGateway(batches.address)
    await gateway.start()
    seen: Counter[str] = Counter()

    async with gateway.client() as client:
        batch = await submit(client, jsonl([line(str(i), "x" * 2_000) for i in range(total)]))
        state: Batch | None = batch
        early = late = 3
        async with asyncio.timeout(240):
            while state is None or state.status not in ENDED:
                counts = state.request_counts if state is not None else None
                all_in = counts is not None and counts.total > 0 and counts.completed == counts.total
                if state is not None and (early or (all_in and late)):
                    early, late = (early - 1, late) if early else (early, late - 1)
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
                    seen[state.status] += 1
                    await batches.kill()
                    await batches.start()
                await asyncio.sleep(0.01)
                state = await status_of(client, batch)
        output = await lines_of(client, state.output_file_id)
        files = await client.files.list(purpose="batch_output")
    await gateway.stop()
    await batches.stop()
    await engine.stop()
    print(dict(seen))
    assert state.status == "completed" and len(files.data) == 1
    assert Counter(entry["custom_id"] for entry in output) == Counter(str(i) for i in range(total))
