"""Host rows for GPU copies are registered in chunks, once, before the engine is ready."""

import logging
import mmap
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from kvtransfer.checkpoint.copier import CheckpointWorker, Copier
from kvtransfer.checkpoint.copy_orders import BlockCopy, CheckpointOrder
from kvtransfer.checkpoint.cuda_mover import CudaMover
from kvtransfer.checkpoint.host_slots import HostSlots, PinnedMemoryRegistrar, block_bytes
from tests.support.device import LateCuda

SLOTS = 40
ROW = 2560  # bytes; eight rows fill five pages
CHUNKS = 5


class RegistryLog(PinnedMemoryRegistrar):
    def __init__(self, refuses: int = 0) -> None:
        self.held: dict[int, int] = {}
        self.asked = 0
        self._refuses = refuses

    def register(self, address: int, nbytes: int) -> str:
        self.asked += 1
        if self.asked <= self._refuses:
            return "no"
        assert address not in self.held
        self.held[address] = nbytes
        return ""

    def unregister(self, address: int) -> None:
        del self.held[address]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.checkpoint.host_slots.CHUNK_BYTES", 8 * ROW)


def copies(*slots: int) -> list[BlockCopy]:
    return [BlockCopy(block, slot, 1) for block, slot in enumerate(slots)]


def test_all_memory_is_registered_once_before_its_first_use() -> None:
    registry = RegistryLog()
    memory = HostSlots(SLOTS, ROW, registry)
    assert registry.held == {memory.rows[at].ctypes.data: 8 * ROW for at in range(0, SLOTS, 8)}
    CudaMover([torch.randn(12, 2, 16, 10) for _ in range(2)], LateCuda()).store(memory, copies(0, 39))
    assert registry.asked == CHUNKS


@pytest.mark.parametrize("row", [ROW, 4096, 4104, 40960])
def test_each_host_slot_lies_in_one_registered_chunk_of_whole_pages(row: int) -> None:
    registry = RegistryLog()
    memory = HostSlots(1030, row, registry)
    chunks = sorted(registry.held.items())
    assert len(chunks) > 1 and all(not (at % mmap.PAGESIZE or size % mmap.PAGESIZE) for at, size in chunks)
    assert all(at + size == then for (at, size), (then, _) in pairwise(chunks))
    starts = [memory.rows[slot].ctypes.data for slot in range(1030)]
    assert all(sum(at <= start and start + row <= at + size for at, size in chunks) == 1 for start in starts)


def test_a_run_of_slots_ends_where_a_registration_ends() -> None:
    memory = HostSlots(SLOTS, ROW, RegistryLog())
    assert list(memory.runs(copies(2, 3, 5, 6, 7, 8, 9, 9, 16))) == [(2, 2), (5, 3), (8, 2), (9, 1), (16, 1)]
    plain = HostSlots(SLOTS, ROW)
    assert list(plain.runs(copies(0, 7, 8, 9))) == [(0, 1), (7, 3)]


def test_closing_host_memory_unregisters_all_its_chunks() -> None:
    registry = RegistryLog()
    memory = HostSlots(SLOTS, ROW, registry)
    assert registry.held
    memory.close()
    assert not registry.held


def test_a_refused_registration_is_counted_and_its_block_is_still_copied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    device = [torch.randn(12, 2, 16, 10) for _ in range(2)]
    before = [layer.clone() for layer in device]
    registry = RegistryLog(refuses=2)
    memory, mover = HostSlots(SLOTS, block_bytes(device), registry), CudaMover(device, LateCuda())
    assert block_bytes(device) == ROW
    with caplog.at_level(logging.ERROR):
        mover.store(memory, copies(0, 1, 9, 17))
        mover.store(memory, copies(2, 10))
    assert len(caplog.records) == 1 and "(no)" in caplog.text
    assert memory.take_refused() == 2 and memory.take_refused() == 0
    assert registry.asked == CHUNKS and len(registry.held) == CHUNKS - 2
    back = [BlockCopy(6, 17, 1), BlockCopy(7, 9, 1)]
    assert mover.load(memory, back) == back
    assert all(torch.equal(layer[[6, 7]], was[[3, 2]]) for layer, was in zip(device, before, strict=True))


def test_the_worker_counts_refusals_and_unregisters_memory_at_its_end() -> None:
    device = [torch.randn(12, 2, 16, 10) for _ in range(2)]
    registry = RegistryLog(refuses=1)
    context = SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=12),
        kv_state=SimpleNamespace(host=SimpleNamespace(capacity=SLOTS)),
        config=SimpleNamespace(disk_path=""),
    )
    worker = CheckpointWorker(context, 0)  # type: ignore[arg-type]
    worker.copier = Copier(HostSlots(SLOTS, ROW, registry), CudaMover(device, LateCuda()))
    worker.before_step(CheckpointOrder(stores=copies(0, 9)))
    until(lambda: bool(worker.report()))
    assert worker.take_counts() == {"unregistered_chunks": 1} and not worker.take_counts()
    worker.shutdown()
    until(lambda: not registry.held)


class RaisingRegistry(RegistryLog):
    def register(self, address: int, nbytes: int) -> str:
        self.asked += 1
        raise RuntimeError("can't start new thread")


def test_a_registration_that_raises_an_exception_counts_as_refused() -> None:
    registry = RaisingRegistry()
    memory = HostSlots(SLOTS, ROW, registry)
    assert registry.asked == CHUNKS and memory.take_refused() == CHUNKS


def test_closing_waits_for_memory_to_be_unregistered() -> None:
    device = [torch.randn(12, 2, 16, 10) for _ in range(2)]
    registry = RegistryLog()
    copier = Copier(HostSlots(SLOTS, ROW, registry), CudaMover(device, LateCuda()))
    copier.submit(CheckpointOrder(stores=copies(0, 9)))
    until(lambda: bool(copier.take_report().stored))
    copier.close()
    assert not registry.held


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 5
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.001)
