"""`conserve batch` submits, shows, cancels and downloads batches through a real gateway."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.auth.keyring import Keyring
from router.auth.keys import Key, hash_secret
from tests.router.batch.fake_engine import OfflineEngine
from tests.router.batch.gateway import GatewayWithBatch, StaticFleet
from tests.router.batch.jobs import jsonl, line


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayWithBatch]:
    engine = OfflineEngine()
    running = GatewayWithBatch(
        f"sqlite:///{tmp_path}/batch.db", str(tmp_path / "files"), StaticFleet(await engine.start())
    )
    await running.start()
    yield running
    await running.stop()
    await engine.stop()


async def conserve(gateway: GatewayWithBatch, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "deploy.cli", "batch", *arguments, "--url", gateway.url]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.slow
async def test_conserve_batch_submits_a_file_and_writes_its_results(
    gateway: GatewayWithBatch, tmp_path: Path
) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(jsonl([line(f"r{i}") for i in range(30)]))
    code, text, wrong = await conserve(gateway, "submit", str(file), "--out", str(out), "-m", "who=me")
    assert code == 0, wrong
    batch_id = text.split()[0]
    assert batch_id.startswith("batch_") and "completed: 30 done, 0 failed, 30 in all" in text
    assert [json.loads(entry)["custom_id"] for entry in out.read_text().splitlines()] == [
        f"r{i}" for i in range(30)
    ]
    code, text, _ = await conserve(gateway, "list")
    assert code == 0 and batch_id in text and "completed" in text
    code, text, _ = await conserve(gateway, "results", batch_id)
    assert code == 0 and len(text.splitlines()) == 30
    code, _, wrong = await conserve(gateway, "results", batch_id, "--errors")
    assert code == 1 and "no request" in wrong
    code, _, wrong = await conserve(gateway, "cancel", batch_id)
    assert code == 1 and "409" in wrong and "completed" in wrong


@pytest.mark.slow
async def test_conserve_batch_prints_which_lines_of_a_file_are_invalid(
    gateway: GatewayWithBatch, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([line("a"), line("b", method="GET"), line("a")]))
    code, text, _ = await conserve(gateway, "submit", str(file), "--wait")
    assert code == 1 and "failed" in text
    assert "line 2:" in text and "invalid_method" in text and "line 3:" in text
    code, _, wrong = await conserve(gateway, "show", "batch_none")
    assert code == 1 and "404" in wrong


@pytest.mark.slow
async def test_conserve_batch_without_a_required_api_key_says_how_to_give_one(
    gateway: GatewayWithBatch,
) -> None:
    gateway.front.keys = Keyring([Key("one", "one", hash_secret("ck-one"))], None)
    code, _, wrong = await conserve(gateway, "list")
    assert code == 1 and "asks for a key: give --api-key, or set $CONSERVE_API_KEY" in wrong
    code, _, wrong = await conserve(gateway, "list", "--api-key", "ck-two")
    assert code == 1 and "401" in wrong
    code, _, wrong = await conserve(gateway, "list", "--api-key", "ck-one")
    assert code == 0, wrong
