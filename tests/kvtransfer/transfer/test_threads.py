"""What a thread of a transfer raises is in the log, and the request it was for goes on."""

import logging
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make install")

import threading

from kvtransfer.parts import LoadsEnded
from kvtransfer.transfer.client import Source
from kvtransfer.transfer.orders import Fetch, TransferOrder
from kvtransfer.transfer.worker import TransferWorker

SOURCE = Source("127.0.0.1", 1, "transfer-1", None, "digest")


class FaultyMemory:
    layout = "any"

    def reserve(self, blocks: list[int]) -> bool:
        raise IndexError(blocks)


def a_worker() -> Any:
    worker = TransferWorker.__new__(TransferWorker)
    worker._threads = ThreadPoolExecutor(1)
    worker._cancellations = {}
    worker._lock = threading.Lock()
    worker._ended = LoadsEnded()
    worker._counts = defaultdict(float)
    worker._memory = FaultyMemory()  # type: ignore[assignment]
    worker._publisher = SimpleNamespace(begin_step=lambda _progress: None)  # type: ignore[assignment]
    return worker


def test_a_fetch_that_raises_is_counted_logged_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    worker = a_worker()
    with caplog.at_level(logging.ERROR):
        worker.before_step(TransferOrder(fetches=[Fetch("r", SOURCE, 0, [4, 5])]))
        worker._threads.shutdown(wait=True)
    ended = worker.loads_ended()
    assert ended.requests == {"r"} and ended.failed_blocks == {4, 5}
    assert worker.take_counts() == {"refused.internal": 1}
    assert "transfer for r failed" in caplog.text and "IndexError" in caplog.text


def test_a_dismissal_that_raises_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = a_worker()

    def faulty(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("kvtransfer.transfer.worker.dismiss", faulty)
    worker._consumer = None
    with caplog.at_level(logging.ERROR):
        worker.before_step(TransferOrder(dismissed=[SOURCE]))
        worker._threads.shutdown(wait=True)
    assert "transfer for transfer-1 failed" in caplog.text and "a defect" in caplog.text
