"""Blocks come back from the disk unchanged, or not at all."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtransfer.checkpoint.copier import CheckpointWorker, Copier
from kvtransfer.checkpoint.copy_orders import FIRST_DISK_SLOT, BlockCopy, CheckpointOrder, DiskMove
from kvtransfer.checkpoint.cuda_mover import CudaMover
from kvtransfer.checkpoint.disk_slots import DiskSlots
from kvtransfer.checkpoint.host_slots import HostMover, HostSlots, Mover, block_bytes
from tests.kvtransfer.checkpoint.test_copier import BLOCKS, SLOTS, CopyingHost, same
from tests.kvtransfer.test_side_streams import LateCuda

DISK_SLOTS = 6
D0, D1, D2 = (FIRST_DISK_SLOT + number for number in range(3))


class HostWithDisk(CopyingHost):
    def __init__(self, folder: Path, mover: type[Mover]) -> None:
        super().__init__()
        self.copier.close()
        made = HostMover(self.device) if mover is HostMover else CudaMover(self.device, LateCuda())
        self.disk = DiskSlots(folder, DISK_SLOTS, block_bytes(self.device))
        self.memory = HostSlots(SLOTS, block_bytes(self.device), disk=self.disk, scratch=made.at_once)
        self.copier = Copier(self.memory, made)

    def move(self, *moves: DiskMove) -> set[int]:
        """Move blocks to the disk; return the disk slots that could not be written."""
        self.copier.submit(CheckpointOrder(moves=list(moves)))
        moved, unmoved, limit = set[int](), set[int](), time.monotonic() + 5
        while not {move.disk_slot for move in moves} <= moved:
            assert time.monotonic() < limit, "the move did not end"
            report = self.copier.take_report()
            moved |= set(report.moved)
            unmoved |= report.unmoved
            time.sleep(0.001)
        return unmoved


@pytest.fixture(params=[HostMover, CudaMover])
def host(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HostWithDisk]:
    host = HostWithDisk(tmp_path / "kv", request.param)
    yield host
    host.copier.close()


def test_blocks_return_from_the_disk_and_from_memory_in_one_load(host: HostWithDisk) -> None:
    before = [host.block(number) for number in range(3)]
    host.store(*(BlockCopy(number, slot=number, generation=number + 1) for number in range(3)))
    assert not host.move(DiskMove(0, 1, D2, 4), DiskMove(2, 3, D0, 5))
    host.store(BlockCopy(9, slot=0, generation=6), BlockCopy(9, slot=2, generation=7))  # in both freed slots
    for tensor in host.kv.values():
        tensor[:3] = 0
    load = BlockCopy(6, D2, 4), BlockCopy(7, slot=1, generation=2), BlockCopy(8, D0, 5)
    assert not host.load(*load).failed_blocks
    assert all(same(host.block(6 + number), before[number]) for number in range(3))


def test_a_byte_flipped_on_the_disk_is_found(host: HostWithDisk) -> None:
    host.store(BlockCopy(1, slot=0, generation=1), BlockCopy(2, slot=1, generation=2))
    assert not host.move(DiskMove(0, 1, D0, 3), DiskMove(1, 2, D1, 4))
    row = np.empty(block_bytes(host.device), np.uint8)
    host.disk.read(D1, row)
    row[-1] ^= 1
    host.disk.write(D1, row)
    assert host.load(BlockCopy(6, D0, 3), BlockCopy(7, D1, 4)).failed_blocks == {7}
    assert host.copier.take_report().corrupt == {D1}
    assert same(host.block(6), host.block(1))


def test_a_copy_is_refused_if_its_slot_has_other_contents_than_ordered(host: HostWithDisk) -> None:
    host.store(BlockCopy(1, slot=0, generation=2))
    assert host.move(DiskMove(0, 1, D0, 3)) == {D0}
    assert not host.move(DiskMove(0, 2, D0, 4))
    assert host.load(BlockCopy(6, D0, 3)).failed_blocks == {6}
    assert host.load(BlockCopy(6, D1, 3)).failed_blocks == {6}
    assert not host.load(BlockCopy(6, D0, 4)).failed_blocks


def test_a_failing_disk_loses_only_the_blocks_on_it(host: HostWithDisk) -> None:
    host.store(BlockCopy(1, slot=0, generation=1), BlockCopy(2, slot=1, generation=2))
    assert not host.move(DiskMove(0, 1, D0, 3))
    host.disk.close()  # reads and writes fail from now on, with an error of the kernel
    assert host.move(DiskMove(1, 2, D1, 4)) == {D1}
    assert host.load(BlockCopy(6, D0, 3)).failed_blocks == {6}
    assert host.copier.take_report().failed == {D0}
    assert not host.load(BlockCopy(7, slot=1, generation=2)).failed_blocks


def test_the_file_of_the_disk_tier_has_no_name_in_its_folder(tmp_path: Path, host: HostWithDisk) -> None:
    assert list((tmp_path / "kv").iterdir()) == []


def test_an_engine_starts_without_a_disk_tier_if_the_disk_lacks_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = SimpleNamespace(capacity=SLOTS, disk_capacity=1 << 40)
    context = SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=BLOCKS),
        kv_state=SimpleNamespace(host=index),
        config=SimpleNamespace(disk_path=str(tmp_path)),
    )
    worker = CheckpointWorker(context, 0)  # type: ignore[arg-type]
    worker.register({"layer": torch.zeros(BLOCKS, 2, 4, 8)})
    try:
        assert "kv.disk_gib cannot be reserved" in caplog.text
        worker.before_step(CheckpointOrder(moves=[DiskMove(0, 1, D0, 2)]))
        limit = time.monotonic() + 5
        while (report := worker.report()) is None:
            assert time.monotonic() < limit
        assert report.unmoved == {D0}
    finally:
        worker.shutdown()
