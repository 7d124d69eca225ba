"""All keepers of a node share one server, which restarts at the same address."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import processes
from workers.keeper.launch import ProcessCommand
from workers.keeper.lmcache_server import LmcacheServer
from workers.keeper.process_lease import RECORD, LeasedProcess, ProcessRecord


class AnyServer(LmcacheServer):
    """LMCache server that is really any HTTP server, because the tests only start and end it."""

    def command(self, port: int, http_port: int) -> ProcessCommand:
        argv = (sys.executable, "-m", "http.server", str(http_port), "--bind", "127.0.0.1")
        return ProcessCommand(argv, dict(os.environ))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "lmcache"
    LeasedProcess(tmp_path / "lmcache", record_in(tmp_path / "lmcache")).end(1.0)


def record_in(directory: Path) -> ProcessRecord:
    record = ProcessRecord.read(directory / RECORD)
    assert record is not None
    return record


def keeper(directory: Path, gib: float = 1.0) -> LmcacheServer:
    return AnyServer(directory, gib, 32, str(directory))


def test_keepers_share_a_server_and_restart_it_at_its_address(directory: Path) -> None:
    first, second = keeper(directory), keeper(directory)
    first.ensure()
    began = record_in(directory)
    second.ensure()
    assert record_in(directory) == began
    assert asyncio.run(second.address(30)) == f"127.0.0.1:{began.ports[0]}"

    os.killpg(began.pid, signal.SIGKILL)
    limit = time.monotonic() + 30
    while processes.find(began.pid, began.started) is not None and time.monotonic() < limit:
        time.sleep(0.01)
    second.ensure()
    again = record_in(directory)
    assert again.pid != began.pid and again.ports == began.ports
    assert asyncio.run(first.address(30)) == f"127.0.0.1:{again.ports[0]}"


def test_a_keeper_with_another_size_starts_another_server(directory: Path) -> None:
    keeper(directory).ensure()
    began = record_in(directory)
    keeper(directory, gib=2.0).ensure()
    assert record_in(directory).pid != began.pid


def test_an_engine_waits_for_its_server_only_for_a_limited_time(directory: Path) -> None:
    made = keeper(directory)
    assert asyncio.run(made.address(0.4)) == ""
    made.ensure()
