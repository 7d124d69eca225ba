"""Uploads, validation, results and downloads are streamed, so files may be larger than memory."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.batch.dispatch.validation import Line, split_lines
from router.batch.store.blobs import Blobs
from tests.router.batch.gateway import FrontGateway
from tests.router.batch.jobs import line
from tests.router.batch.processes import batch_process, engine_process


def test_an_input_file_has_the_same_lines_however_its_bytes_are_split() -> None:
    data = b"one\n\ntwo\r\nthree is longer\nlast"
    expected = [
        Line(1, 0, 3, b"one"),
        Line(2, 4, 0, b""),
        Line(3, 5, 4, b"two\r"),
        Line(4, 10, 15, None),
        Line(5, 26, 4, b"last"),
    ]
    for size in range(1, len(data) + 1):
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        assert list(split_lines(pieces, longest=8)) == expected, size
    for entry in expected:
        if entry.data is not None:
            assert data[entry.offset : entry.offset + entry.length] == entry.data


@pytest.mark.parametrize("scheme", ["folder", "memory"])
def test_a_blob_is_readable_after_commit_but_not_after_discard_or_delete(tmp_path: Path, scheme: str) -> None:
    blobs = Blobs(str(tmp_path / "b") if scheme == "folder" else f"memory://{tmp_path.name}")
    writer = blobs.create("a")
    writer.write(b"0123")
    writer.write(b"456789")
    writer.commit()
    assert b"".join(blobs.chunks("a")) == b"0123456789" and writer.written == 10
    assert blobs.part("a", 3, 4) == b"3456"
    gone = blobs.create("b")
    gone.write(b"x")
    gone.discard()
    with pytest.raises(FileNotFoundError):
        blobs.part("b", 0, 1)
    blobs.delete("a")
    blobs.delete("a")
    with pytest.raises(FileNotFoundError):
        list(blobs.chunks("a"))


@pytest.mark.parametrize("scheme", ["folder", "memory"])
def test_an_error_while_writing_keeps_only_committed_blobs(tmp_path: Path, scheme: str) -> None:
    blobs = Blobs(str(tmp_path / "b") if scheme == "folder" else f"memory://{tmp_path.name}")
    with pytest.raises(KeyError), blobs.create("a") as kept, blobs.create("b") as gone:
        for writer in (kept, gone):
            writer.write(b"x")
        kept.commit()
        raise KeyError
    assert b"".join(blobs.chunks("a")) == b"x"
    with pytest.raises(FileNotFoundError):
        blobs.part("b", 0, 1)
    assert scheme == "memory" or [path.name for path in (tmp_path / "b").iterdir()] == ["a"]


LINES = int(os.environ.get("CONSERVE_BATCH_LINES", "100000"))  # 200 MB; with a million they are 2 GB


async def form(lines: int, pad: int) -> AsyncIterator[bytes]:
    """Yield a multipart upload piece by piece, so that it is never in memory as a whole."""
    yield b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    filler = "x" * pad
    for start in range(0, lines, 500):
        some = range(start, min(start + 500, lines))
        yield b"".join(json.dumps(line(f"r{i}", f"{i} {filler}")).encode() + b"\n" for i in some)
    yield b"\r\n--b--\r\n"


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


async def through(tmp_path: Path, lines: int, pad: int, within_s: float, expect: str) -> float:
    """Run a batch of `lines` from upload to download; return the batch process's peak memory in MiB."""
    engine = engine_process(tmp_path / "served.log", 0.0)
    await engine.start()
    store = f"sqlite:///{tmp_path}/batch.db"
    batches = batch_process(store, tmp_path / "files", 64, engine.address)
    await batches.start()
    gateway = FrontGateway(batches.address)
    try:
        base = f"{await gateway.start()}/v1"
        async with httpx.AsyncClient(base_url=base, timeout=600) as http:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            started = time.monotonic()
            uploaded = (await http.post("/files", content=form(lines, pad), headers=headers)).json()
            seconds = {"upload": time.monotonic() - started}
            wanted = {
                "input_file_id": uploaded["id"],
                "endpoint": line("")["url"],
                "completion_window": "24h",
            }
            batch = (await http.post("/batches", json=wanted)).json()
            async with asyncio.timeout(within_s):
                while batch["status"] not in ("completed", "failed", "cancelled"):
                    await asyncio.sleep(0.1)
                    batch = (await http.get(f"/batches/{batch['id']}")).json()
                    seconds.setdefault(batch["status"], time.monotonic() - started)
                    if expect == "cancelled" and batch["status"] == "in_progress":
                        batch = (await http.post(f"/batches/{batch['id']}/cancel")).json()
            assert batch["status"] == expect, batch
            received = 0
            for file_id in (batch["output_file_id"], batch["error_file_id"]):
                if file_id is not None:
                    async with http.stream("GET", f"/files/{file_id}/content") as answer:
                        async for chunk in answer.aiter_bytes():
                            received += chunk.count(b"\n")
            assert received == lines
        peak = peak_mib(batches.pid)
        times = {name: round(value, 1) for name, value in seconds.items()}
        print(f"{uploaded['bytes'] >> 20} MiB, {lines} lines: peak {peak:.0f} MiB; seconds {times}")
        return peak
    finally:
        await gateway.stop()
        await batches.stop()
        await engine.stop()


@pytest.mark.slow
async def test_a_file_much_larger_than_the_processs_memory_is_processed(tmp_path: Path) -> None:
    assert await through(tmp_path, 4_000, 50_000, 120, "completed") < 300  # 200 MB each way


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_many_lines_are_validated_in_bounded_memory(tmp_path: Path) -> None:
    """Upload and validate many lines, then cancel the batch, because only validation is tested here."""
    assert await through(tmp_path, LINES, 1_960, 1_500, "cancelled") < 300


def test_the_measured_peak_memory_includes_memory_that_a_process_allocates() -> None:
    """Other tests check a process's peak memory; this one shows that the measured value includes its heap."""
    code = "b = bytearray(200 << 20); print(open('/proc/self/status').read())"
    status = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(status.split("VmHWM:")[1].split()[0]) / 1024 > 200
