"""A temporarily unavailable store loses no result, and failed validations are repeated."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import openai
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from prometheus_client import REGISTRY
from sqlalchemy.exc import OperationalError

from router.batch.config import BatchConfig, dump
from router.batch.dispatch.executor import ResultWriter
from router.batch.store.blobs import Blobs
from router.batch.store.records import Result
from router.batch.store.request_table import RequestTable
from router.batch.store.store import BatchTable
from router.gateway.config import ServedModel
from tests.router.batch.fake_engine import OfflineEngine
from tests.router.batch.gateway import GatewayWithBatch
from tests.router.batch.jobs import ended, jsonl, line, lines_of, submit
from tests.router.batch.processes import free_port

AWAY = OperationalError("UPDATE", {}, ConnectionError("the store is away"))


def test_a_process_that_cannot_reach_its_store_logs_one_line_without_the_password(tmp_path: Path) -> None:
    config = BatchConfig(
        f"postgresql+psycopg://user:hidden@127.0.0.1:{free_port()}/batches",
        str(tmp_path / "files"),
        models=(ServedModel("small"),),
        directory="127.0.0.1:1",
        secret="s3cret",
        key="of gateways",
    )
    (tmp_path / "batch.json").write_bytes(dump(config))
    command = [sys.executable, "-m", "router.batch", "--config", str(tmp_path / "batch.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, start_new_session=True
    )
    (said,) = done.stderr.splitlines()
    assert done.returncode == 1 and "Connection refused" in said and "user:***@127.0.0.1" in said
    assert "hidden" not in said


def store_errors() -> float:
    return REGISTRY.get_sample_value("conserve_batch_step_errors_total", {"cause": "store"}) or 0.0


def failing_once(work: Callable[..., Any]) -> Callable[..., Any]:
    failures = [AWAY]

    def once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return work(*args)

    return once


async def test_a_batch_is_validated_once_the_store_is_back(
    sqlite_gateway: GatewayWithBatch, engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestTable, "load", failing_once(RequestTable.load))
    monkeypatch.setattr(BatchTable, "finish", failing_once(BatchTable.finish))
    before = store_errors()
    async with sqlite_gateway.client() as client:
        batch = await ended(client, await submit(client, jsonl([line(f"r{i}") for i in range(10)])))
        assert batch.status == "completed" and len(await lines_of(client, batch.output_file_id)) == 10
    assert sorted(engine.served) == sorted(f"r{i}" for i in range(10))
    assert store_errors() == before + 2


async def test_results_are_written_once_the_store_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    all_written = asyncio.Event()

    class Requests:
        @staticmethod
        def record(results: list[Result]) -> set[tuple[int, int]]:
            written.extend(result.line for result in results)
            if len(written) == 3:
                all_written.set()
            return {(result.batch, result.line) for result in results}

    class Away:
        requests = Requests

    async def in_thread(work: Callable[[], None]) -> None:
        await asyncio.sleep(0)
        work()

    monkeypatch.setattr(Requests, "record", failing_once(Requests.record))
    failed = store_errors()
    writer = ResultWriter(Away, in_thread, retry_s=0.0)  # type: ignore[arg-type]
    running = asyncio.create_task(writer.run())
    try:
        for number in (1, 2, 3):
            writer.add(Result(1, number, 200, b"{}", "r"))
            await asyncio.sleep(0)  # one result arrives while another is written
        async with asyncio.timeout(10):
            await all_written.wait()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert sorted(written) == [1, 2, 3]
    assert store_errors() == failed + 1


async def test_lines_whose_file_was_unreadable_are_sent_once_it_is_readable(
    sqlite_gateway: GatewayWithBatch, engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, failures = Blobs.part, [OSError("the files are away") for _ in range(2)]

    def away(blobs: Blobs, blob: str, offset: int, length: int) -> bytes:
        if failures:
            raise failures.pop()
        return part(blobs, blob, offset, length)

    monkeypatch.setattr(Blobs, "part", away)
    before = store_errors()
    async with sqlite_gateway.client() as client:
        batch = await submit(client, jsonl([line(f"r{i}") for i in range(10)]))
        batch = await ended(client, batch, within_s=20.0)
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.completed == 10
    assert sorted(engine.served) == sorted(f"r{i}" for i in range(10))
    assert store_errors() == before + 2


class AwayFileSystem(MemoryFileSystem):
    """Object store that cannot be reached, and raises an exception class of its client library."""

    protocol = "away"

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        class ConnectionBroken(Exception): ...

        raise ConnectionBroken(path)

    cat_file = open


def test_the_error_of_an_unreachable_object_store_counts_as_a_disk_error() -> None:
    """Validation is tried again after a disk error; after any other error the batch fails."""
    fsspec.register_implementation("away", AwayFileSystem, clobber=True)
    blobs = Blobs("away://bucket")
    with pytest.raises(OSError, match="ConnectionBroken"):
        next(blobs.chunks("file-1"))
    with pytest.raises(OSError, match="ConnectionBroken"):
        blobs.part("file-1", 0, 1)


async def test_requests_refused_because_of_a_full_disk_leave_no_files_or_batches(
    sqlite_gateway: GatewayWithBatch, tmp_path: Path
) -> None:
    async with sqlite_gateway.client() as client:
        before = await client.files.create(file=("a", b"x" * 100), purpose="batch")
        with no_file_grows():
            for asked in (
                client.files.create(file=("b", b"y" * 300_000), purpose="batch"),
                client.batches.create(
                    input_file_id=before.id, endpoint="/v1/completions", completion_window="24h"
                ),
            ):
                with pytest.raises(openai.InternalServerError, match="cannot be stored or read") as refused:
                    await asked
                assert refused.value.status_code == 503
                assert refused.value.response.headers["retry-after"] == "5"
        assert [file.id for file in (await client.files.list()).data] == [before.id]
        assert (await client.batches.list()).data == []
        assert not list((tmp_path / "files").glob("*.part"))
        await client.files.create(file=("b", b"y" * 300_000), purpose="batch")


@contextmanager
def no_file_grows() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
