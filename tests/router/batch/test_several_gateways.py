"""Several gateways on one store: each request has one dispatcher; who stops or dies is taken over from."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.router.batch.fake_engine import FakeEngine
from tests.router.batch.gateway import FAST, Gateway, StaticFleet
from tests.router.batch.jobs import ended, jsonl, line, lines_of, submit


async def test_no_request_is_done_by_two(engine: FakeEngine, either_url: str, tmp_path: Path) -> None:
    patient = replace(FAST, lease_s=60.0)  # three in one process on a busy machine: none of them is dead
    gateways = [
        Gateway(either_url, str(tmp_path / "files"), StaticFleet(engine.address), patient) for _ in range(3)
    ]
    for gateway in gateways:
        await gateway.start()
    async with gateways[0].client() as first, gateways[1].client() as second:
        batches = [await submit(first, jsonl([line(f"{b}-{i}") for i in range(150)])) for b in range(3)]
        for number, batch in enumerate(batches):
            done = await ended(second, batch)  # what one took in, another shows
            assert done.status == "completed"
            ids = [entry["custom_id"] for entry in await lines_of(second, done.output_file_id)]
            assert ids == [f"{number}-{i}" for i in range(150)]
    for gateway in gateways:
        await gateway.stop()
    assert max(Counter(engine.served).values()) == 1


async def test_an_orderly_stop_hands_its_work_over_at_once(
    engine: FakeEngine, either_url: str, tmp_path: Path
) -> None:
    one, other = (Gateway(either_url, str(tmp_path / "files"), StaticFleet(engine.address)) for _ in range(2))
    await one.start()
    async with one.client() as client:
        batch = await submit(client, jsonl([line(f"r{i}", f"sleep=0.1 {i}") for i in range(40)]))
        await engine.asked.wait()
        await one.stop()
    await other.start()
    async with other.client() as client:
        batch = await ended(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 40
    await other.stop()
    assert max(Counter(engine.served).values()) == 1
