"""A killed keeper loses nothing, and a killed engine is started again in a new epoch."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.ray.control import ControlClient, ControlError
from deploy.small_model import make_model
from tests.support.keeper_process import KEYS, LEASE_S, SECRET
from workers import processes
from workers.keeper.engine_status import KeeperPhase, KeeperReport
from workers.keeper.process_lease import ProcessRecord

pytestmark = pytest.mark.engine

START_S = 400
ROOT = Path(__file__).resolve().parents[2]


class KeeperRig:
    """Folder of one engine, with the engine's current keeper process."""

    def __init__(self, base: Path) -> None:
        self.directory, self.model = base / "engine-0", base / "model"
        make_model(self.model)
        self.keeper: subprocess.Popen[bytes] | None = None

    def start_keeper(self, options: dict[str, object] | None = None) -> None:
        (self.directory / "control").unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.support.keeper_process", str(self.directory), str(self.model)]
        self.keeper = subprocess.Popen([*command, json.dumps(options or {})], cwd=ROOT)
        until((self.directory / "control").exists, 60, "the keeper to listen")

    def kill_keeper(self) -> None:
        assert self.keeper is not None
        self.keeper.kill()
        self.keeper.wait()

    def info(self) -> KeeperReport:
        async def ask() -> KeeperReport:
            async with ControlClient((self.directory / "control").read_text(), SECRET) as client:
                return await client.info()

        return asyncio.run(ask())

    def serving(self, after_a_loss: bool = False) -> KeeperReport:
        """Wait until the engine serves and has reported its state, and return the keeper's report."""
        found: list[KeeperReport] = []

        def look() -> bool:
            try:
                change = self.info()
            except ControlError:
                return False
            assert after_a_loss or not change.status.failure, change.status
            serving = change.status.phase is KeeperPhase.SERVING
            if serving and change.info is not None and change.state is not None:
                found.append(change)
            return bool(found)

        until(look, START_S, "the engine to serve")
        return found[0]

    def record(self) -> ProcessRecord:
        record = ProcessRecord.read(self.directory / "engine.json")
        assert record is not None
        return record

    def session(self) -> list[int]:
        return [process.pid for process in processes.session(self.record().pid)]

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.kill()
            self.keeper.wait()
        (self.directory / "lease").unlink(missing_ok=True)
        until(lambda: not self.session(), 30, "the engine to end")


def until(true: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.3)


def listens_at(pid: int) -> set[int]:
    connections = psutil.Process(pid).net_connections("tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


VLLMS = {"workers.serve", "VLLM::EngineCore", "VLLM::Worker"}


def vllms(host: int) -> list[psutil.Process]:
    """Return the processes of the server and of the engine core, which contains the worker."""
    found = processes.tree(psutil.Process(host))
    vllms = [one for one in found if one.pid != host and VLLMS & {*one.cmdline()}]
    assert len(vllms) == 2, [one.cmdline() for one in found]
    return vllms


def libc_at(process: psutil.Process) -> str:
    """Return the address of libc, which differs between processes that were executed separately."""
    return min(one.addr for one in process.memory_maps(grouped=False) if "libc.so" in one.path)


def complete(address: str) -> httpx.Response:
    body = {"model": "small", "prompt": [7] * 50, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    headers = {"x-conserve-key": KEYS.http}
    return httpx.post(f"http://{address}/v1/completions", json=body, headers=headers, timeout=120)


@pytest.fixture(scope="module")
def rig() -> Iterator[KeeperRig]:
    with tempfile.TemporaryDirectory(prefix="keeper-") as base:
        found = KeeperRig(Path(base))
        found.start_keeper()
        try:
            yield found
        finally:
            found.close()


@pytest.mark.timeout(900)
def test_a_killed_keeper_changes_nothing_and_a_killed_engine_starts_a_new_epoch(rig: KeeperRig) -> None:
    first = rig.serving()
    assert first.info is not None
    assert (first.info.kv_tokens, first.info.block_tokens, first.info.max_context) == (256 * 32, 32, 4096)
    page = httpx.get(f"http://{first.info.http}/metrics", timeout=30).text
    computed = re.search(r"^vllm:prompt_tokens_total\{.*\} (\S+)", page, re.MULTILINE)
    assert computed is not None and float(computed[1]) > 1.75 * 2048, "it has been warmed with prompts"
    before = sorted(rig.session())
    port = int(first.info.http.rpartition(":")[2])
    at_the_port = [pid for pid in before if port in listens_at(pid)]
    assert at_the_port == [psutil.Process(first.status.pid).children()[0].pid], "the server, not its forks"
    assert len({libc_at(process) for process in vllms(first.status.pid)}) == 1, "forked, none has loaded anew"

    rig.kill_keeper()
    assert sorted(rig.session()) == before
    rig.start_keeper()
    adopted = rig.serving()
    assert adopted.info is not None
    assert (adopted.info.epoch, adopted.status.pid) == (first.info.epoch, first.status.pid)
    assert adopted.info.http == first.info.http
    assert sorted(rig.session()) == before

    front_end = psutil.Process(first.status.pid).children()[0]
    os.kill(front_end.pid, signal.SIGKILL)
    until(lambda: not front_end.is_running(), 10, "the front end to die")
    until(lambda: rig.record().epoch > first.info.epoch, 60, "a new start")
    again = rig.serving(after_a_loss=True)
    assert again.info is not None and again.info.epoch > first.info.epoch
    assert not set(before) & {process.pid for process in psutil.process_iter()}, (
        "a process of the old epoch is left"
    )

    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(complete, again.info.http)
        until(lambda: (state := rig.info().state) is not None and state.running, 60, "a request to run")
        os.kill(again.status.pid, signal.SIGTERM)
        assert answer.result().json()["usage"]["completion_tokens"] == 300, "what runs is not cut"
    until(lambda: rig.record().epoch > again.info.epoch, 60, "a new start")

    rig.kill_keeper()
    killed = time.monotonic()
    until(lambda: not rig.session(), LEASE_S + 40, "an engine without a keeper to end itself")
    assert time.monotonic() - killed > LEASE_S / 2


@pytest.mark.timeout(300)
def test_an_engine_that_cannot_start_reports_its_reason(tmp_path: Path) -> None:
    base = Path(tempfile.mkdtemp(prefix="keeper-"))
    rig = KeeperRig(base)
    rig.start_keeper({"max-numb-seqs": 4})
    try:
        until(lambda: rig.info().status.failure, 120, "the failure")
        status = rig.info().status
        assert status.failure.startswith("wrong argument: ")
        assert any("--max-numb-seqs" in line for line in status.log_lines)
    finally:
        rig.close()


@pytest.mark.timeout(600)
def test_an_engine_over_its_memory_limit_is_restarted() -> None:
    rig = KeeperRig(Path(tempfile.mkdtemp(prefix="keeper-")))
    rig.start_keeper({"memory_gib": 0.2})
    try:
        until(lambda: rig.info().status.failure, START_S, "the engine to be ended")
        status = rig.info().status
        assert status.failure.startswith("its processes had "), status.failure
        assert "may have 0.2 GiB" in status.failure and "engine.memory_gib" in status.failure
        first = rig.record().epoch
        until(lambda: rig.record().epoch > first or rig.info().status.restarts > 1, 120, "another start")
    finally:
        rig.close()
