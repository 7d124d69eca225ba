"""An exception in a transfer thread is logged, and its request continues."""

import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from kvtransfer.plugins import EngineContext
from kvtransfer.retention.parking import SharedKvState
from kvtransfer.retention.retained_conversations import CacheGroup
from kvtransfer.transfer.peers import TransferSource
from kvtransfer.transfer.scheduler import Fetch, TransferOrder
from kvtransfer.transfer.worker import TransferWorker

SOURCE = TransferSource("127.0.0.1", 1, "transfer-1", None, "digest")
BLOCKS = 8


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferWorker]:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret only for these tests")
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1), cache_config=SimpleNamespace(block_size=4)
    )
    kv_cache_config = SimpleNamespace(num_blocks=BLOCKS)
    groups = (CacheGroup(("layer",), 4, 64),)
    config = ConnectorConfig()
    kv_state = SharedKvState(config, 0, time.monotonic)
    made = TransferWorker(EngineContext(config, vllm_config, kv_cache_config, kv_state, groups), 0)
    made.register({"layer": torch.zeros(BLOCKS, 2, 4, 2)})
    yield made
    made.shutdown()


def eventually(true: Callable[[], bool]) -> bool:
    limit = time.monotonic() + 10
    while not true() and time.monotonic() < limit:
        time.sleep(0.01)
    return true()


def test_a_fetch_that_raises_an_exception_ends_and_is_counted_and_logged(
    worker: TransferWorker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*wanted: object) -> int:
        raise IndexError(wanted)

    monkeypatch.setattr("kvtransfer.transfer.worker.fetch", faulty)
    with caplog.at_level(logging.ERROR):
        worker.before_step(TransferOrder(fetches=[Fetch("r", SOURCE, [0], [[4, 5]])]))
        assert eventually(lambda: "transfer for r failed" in caplog.text)
    ended = worker.loads_ended()
    assert ended.requests == {"r"} and ended.failed_blocks == {4, 5}
    assert worker.take_counts() == {"refused.internal": 1}
    assert "IndexError" in caplog.text


def test_a_dismissal_that_raises_an_exception_is_logged(
    worker: TransferWorker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("kvtransfer.transfer.worker.dismiss", faulty)
    with caplog.at_level(logging.ERROR):
        worker.before_step(TransferOrder(dismissed=[SOURCE]))
        assert eventually(lambda: "transfer for transfer-1 failed" in caplog.text)
    assert "a defect" in caplog.text
