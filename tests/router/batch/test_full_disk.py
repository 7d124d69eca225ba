"""A batch whose store's disk fills up waits, and goes on when there is space again."""

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.router.batch.gateway import FrontGateway
from tests.router.batch.jobs import ended, in_progress, jsonl, line, lines_of, submit, upload
from tests.router.batch.processes import Process, batch_process, engine_process
from tests.support.small_disk import small_disk

LINES = 80


async def store_errors(batches: Process) -> float:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{batches.address}/metrics") as response,
    ):
        [shown] = [
            one
            for one in (await response.text()).splitlines()
            if one.startswith('conserve_batch_step_errors_total{cause="store"}')
        ]
    return float(shown.split()[-1])


async def test_each_line_is_computed_once_although_the_disk_was_full_meanwhile(tmp_path: Path) -> None:
    store, log = tmp_path / "store", tmp_path / "served.log"
    store.mkdir()
    engine = engine_process(log, 0.05)
    await engine.start()
    batches = batch_process(f"sqlite:///{store}/batch.db", store / "files", 8, engine.address)
    gateway = FrontGateway(batches.address)
    with small_disk(store, kib=16_384) as disk:
        try:
            await batches.start(*disk.within)
            await gateway.start()
            async with gateway.client() as client:
                batch = await submit(client, jsonl([line(str(number)) for number in range(LINES)]))
                await in_progress(client, batch, done=10)
                disk.fill()
                with pytest.raises(openai.InternalServerError, match="free space or fix the disk") as refused:
                    await upload(client, bytes(10_000))
                assert refused.value.status_code == 503
                await asyncio.sleep(0.5)
                halted = await client.batches.retrieve(batch.id)
                assert halted.status == "in_progress" and await store_errors(batches) > 0
                disk.make_room()
                batch = await ended(client, batch, within_s=20.0)
                done = Counter(entry["custom_id"] for entry in await lines_of(client, batch.output_file_id))
        finally:
            await gateway.stop()
            await batches.stop()
            await engine.stop()
    every_line = Counter(str(number) for number in range(LINES))
    assert done == every_line and Counter(log.read_text().split()) == every_line
    assert halted.request_counts and halted.request_counts.completed < LINES
