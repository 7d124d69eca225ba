"""With a real LMCache server KV outlives its engine, and an engine outlives the server.

These tests run only if LMCache is installed (requirements/lmcache.txt).
"""

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import (
    EngineProcess,
    eventually,
    faults_of,
    running,
    socket_path,
    state_of,
)
from tests.kvtransfer.engine.script import said
from workers.keeper.lmcache_server import LmcacheServer
from workers.keeper.process_lease import LeasedProcess, ProcessRecord

pytest.importorskip("lmcache", reason="no LMCache: pip install --no-deps -r requirements/lmcache.txt")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

BLOCK_TOKENS = 32
EXTERNAL = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LmcacheServer, Path]]:
    directory = tmp_path_factory.mktemp("lmcache")
    made = LmcacheServer(directory, 0.5, BLOCK_TOKENS, str(directory))
    made.ensure()
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(2):
            if (directory / "lease").exists():
                os.utime(directory / "lease")

    renewing = threading.Thread(target=renew, daemon=True)
    renewing.start()
    yield made, directory
    stop.set()
    renewing.join()
    record = ProcessRecord.read(directory / "engine.json")
    if record is not None:
        LeasedProcess(directory, record).end(2)


@pytest.fixture(scope="module")
def decoder(server: tuple[LmcacheServer, Path]) -> Iterator[EngineProcess]:
    address = asyncio.run(server[0].address(200))
    assert address, (server[1] / "log").read_text()[-2000:]
    connector = ConnectorConfig(
        engine="d", transfer=False, host_kv_gib=0.1, lmcache=address, control_socket=socket_path()
    )
    with running(EngineProcess(connector, blocks=200, block_tokens=BLOCK_TOKENS)) as (engine,):
        yield engine


def at_rest(engine: EngineProcess) -> bool:
    engine.ask([9, 9], 1)
    state = state_of(engine)
    return not (state.running or state.waiting) and faults_of(engine) == []


def test_a_new_engine_restores_the_kv_of_a_killed_engine(decoder: EngineProcess) -> None:
    prompt = said(random.Random(1), 2000)
    answer = decoder.ask(prompt, 12, session="c").tokens
    prompt += answer + said(random.Random(2), 40)
    expected = decoder.ask(prompt, 12, session="c").tokens
    assert eventually(lambda: at_rest(decoder), 60)
    decoder.kill()
    decoder.start()

    before = decoder.metrics().get(EXTERNAL, 0.0)
    assert decoder.ask(prompt, 12, session="c").tokens == expected
    assert decoder.metrics()[EXTERNAL] - before >= 0.9 * len(prompt)
    assert eventually(lambda: at_rest(decoder), 60)


def test_serving_continues_when_the_server_dies(
    decoder: EngineProcess, server: tuple[LmcacheServer, Path]
) -> None:
    lost = said(random.Random(3), 1500)
    expected = decoder.ask(lost, 12, session="lost").tokens
    record = ProcessRecord.read(server[1] / "engine.json")
    assert record is not None
    os.killpg(record.pid, signal.SIGKILL)
    for number in range(3):  # within the first time-out, and after it
        assert len(decoder.ask(said(random.Random(10 + number), 900), 8, session=f"n{number}").tokens) == 8
    assert decoder.ask(lost, 12, session="lost").tokens == expected
    assert eventually(lambda: at_rest(decoder), 60)
