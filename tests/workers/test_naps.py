"""Waiting engine processes leave the core to others and still receive every message."""

import threading
import time
from collections.abc import Iterator

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from workers.engine.compat.cpu_build import nap_instead_of_spinning


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MessageQueue, MessageQueue]]:
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # as it was, afterwards
    nap_instead_of_spinning()
    writer = MessageQueue(n_reader=1, n_local_reader=1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join(10)
    yield writer, reader
    reader.shutdown()
    writer.shutdown()


def test_a_waiting_process_uses_no_core_and_misses_no_message(
    ends: tuple[MessageQueue, MessageQueue],
) -> None:
    writer, reader = ends
    writer.enqueue("first")
    assert reader.dequeue(timeout=10) == "first"  # from here vLLM alone would spin for a second
    threading.Timer(0.5, writer.enqueue, ["second"]).start()
    before = time.thread_time()
    assert reader.dequeue(timeout=10) == "second"
    assert time.thread_time() - before < 0.1


def test_messages_in_quick_succession_all_arrive(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends

    def write() -> None:
        for number in range(500):
            writer.enqueue(number, timeout=10)

    writing = threading.Thread(target=write)
    writing.start()
    assert [reader.dequeue(timeout=10) for _ in range(500)] == list(range(500))
    writing.join(10)


def test_a_second_call_does_not_patch_vllm_again(ends: tuple[MessageQueue, MessageQueue]) -> None:
    patched = SpinCondition.wait
    nap_instead_of_spinning()
    assert SpinCondition.wait is patched
