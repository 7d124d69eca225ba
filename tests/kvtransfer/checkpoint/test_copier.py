"""The copier loads blocks from the host unchanged or reports that it cannot, and rests while steps run."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.checkpoint.copier import Copier
from kvtransfer.checkpoint.copy_orders import BlockCopy, BlockLoad, CheckpointOrder
from kvtransfer.checkpoint.host_slots import THREADS, HostMover, HostSlots, block_bytes
from kvtransfer.plugins import LoadsEnded

BLOCKS, SLOTS = 12, 8


class CopyingHost:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.kv = {f"layer{n}": torch.randn(BLOCKS, 2, 4, 8) for n in range(3)}
        self.device = list(self.kv.values())
        self.memory = HostSlots(SLOTS, block_bytes(self.device))
        self.copier = Copier(self.memory, HostMover(self.device))

    def block(self, number: int) -> list[object]:
        return [tensor[number].clone() for tensor in self.kv.values()]

    def store(self, *copies: BlockCopy) -> None:
        self.copier.submit(CheckpointOrder(stores=list(copies)))
        stored: set[int] = set()
        while not {copy.slot for copy in copies} <= stored:
            stored |= set(self.copier.take_report().stored)
            time.sleep(0.001)

    def load(self, *copies: BlockCopy) -> LoadsEnded:
        self.copier.submit(CheckpointOrder(loads=[BlockLoad("r", list(copies))]))
        limit = time.monotonic() + 5
        while time.monotonic() < limit:
            if (ended := self.copier.take_ended()).requests:
                return ended
            time.sleep(0.001)
        raise AssertionError("the load did not end")


@pytest.fixture
def host() -> Iterator[CopyingHost]:
    host = CopyingHost()
    yield host
    host.copier.close()


def same(one: list[object], other: list[object]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_block_returns_unchanged_to_another_position(host: CopyingHost) -> None:
    before = host.block(3)
    host.store(BlockCopy(3, slot=5, generation=1))
    for tensor in host.kv.values():
        tensor[3] = 0
    assert not host.load(BlockCopy(9, slot=5, generation=1)).failed_blocks
    assert same(host.block(9), before)


def test_a_byte_flipped_on_the_host_is_found(host: CopyingHost) -> None:
    host.store(BlockCopy(1, slot=0, generation=1), BlockCopy(2, slot=1, generation=2))
    host.memory.rows[1][700] ^= 1
    ended = host.load(BlockCopy(7, slot=1, generation=2), BlockCopy(6, slot=0, generation=1))
    assert ended.requests == {"r"} and ended.failed_blocks == {7}
    assert host.copier.take_report().corrupt == {1}
    assert same(host.block(6), host.block(1))


def test_a_byte_flipped_while_its_block_is_stored_is_found(host: CopyingHost) -> None:
    class FlippedOnArrival(np.ndarray):  # type: ignore[type-arg]
        def __setitem__(self, place: Any, came: Any) -> None:
            super().__setitem__(place, came)
            self[place].view(np.ndarray)[0] ^= 1

    host.memory.rows = host.memory.rows.view(FlippedOnArrival)
    host.store(BlockCopy(2, slot=3, generation=1))
    assert host.load(BlockCopy(7, slot=3, generation=1)).failed_blocks == {7}


def test_a_byte_flipped_during_a_load_is_found(host: CopyingHost) -> None:
    """The digest must cover the bytes that were read, because a second read would find the row intact."""
    flips = [1]

    class FlippedWhenRead(np.ndarray):  # type: ignore[type-arg]
        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            if isinstance(place, slice) and flips:
                found = found.copy()
                found[0] ^= flips.pop()
            return found

    host.store(BlockCopy(2, slot=3, generation=1))
    host.memory.rows = host.memory.rows.view(FlippedWhenRead)
    assert host.load(BlockCopy(7, slot=3, generation=1)).failed_blocks == {7}
    assert not host.load(BlockCopy(8, slot=3, generation=1)).failed_blocks


def test_the_next_copy_succeeds_after_a_copy_raised_an_exception(host: CopyingHost) -> None:
    class Failing(HostMover):
        def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
            raise IndexError(copies)

        def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
            raise MemoryError

    host.store(BlockCopy(1, slot=0, generation=1))
    host.copier.close()
    host.copier = Copier(host.memory, Failing(host.device))
    host.store(BlockCopy(2, slot=1, generation=2))
    assert host.load(BlockCopy(6, slot=0, generation=1)).failed_blocks == {6}
    assert host.load(BlockCopy(7, slot=0, generation=1)).failed_blocks == {7}
    report = host.copier.take_report()
    assert report.failed == {0} and not report.corrupt


def test_a_load_from_a_slot_that_now_holds_another_block_fails(host: CopyingHost) -> None:
    host.store(BlockCopy(1, slot=0, generation=1))
    host.store(BlockCopy(2, slot=0, generation=2))  # the slot went to another block
    assert host.load(BlockCopy(6, slot=0, generation=1)).failed_blocks == {6}


def test_a_load_from_a_slot_that_was_never_written_fails(host: CopyingHost) -> None:
    assert host.load(BlockCopy(6, slot=4, generation=1)).failed_blocks == {6}


def test_the_copier_does_a_load_before_the_stores_of_the_same_order(host: CopyingHost) -> None:
    done: list[str] = []

    class RecordingMover(HostMover):
        def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
            done.append("store")
            super().store(memory, copies, at)

        def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
            done.append("load")
            return copies

    host.store(BlockCopy(1, slot=0, generation=1))
    host.copier.close()
    mover = RecordingMover(host.device)
    mover.at_once = 64
    host.copier = Copier(host.memory, mover)
    many = [BlockCopy(n % BLOCKS, slot=1 + n % 6, generation=n) for n in range(200)]
    host.copier.submit(CheckpointOrder(many, [BlockLoad("r", [BlockCopy(6, slot=0, generation=1)])]))
    limit = time.monotonic() + 5
    while len(done) < 5 and time.monotonic() < limit:
        time.sleep(0.001)
    assert done[0] == "load" and len(done) > 4 and set(done[1:]) == {"store"}


def in_two_pieces(host: CopyingHost, takes_cores: bool) -> list[list[int]]:
    """Store two blocks, and make loads move one block at a time; return a list that records each move."""
    moved: list[list[int]] = []

    class OneBlockAtOnce(HostMover):
        def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
            moved.append([copy.block for copy in copies])
            return super().load(memory, copies, at)

    host.store(BlockCopy(1, slot=0, generation=1), BlockCopy(2, slot=1, generation=1))
    host.copier.close()
    mover = OneBlockAtOnce(host.device)
    mover.at_once, mover.takes_cores = 1, takes_cores
    host.copier = Copier(host.memory, mover)
    return moved


def load_beside_a_step(host: CopyingHost) -> None:
    load = BlockLoad("r", [BlockCopy(6, slot=0, generation=1), BlockCopy(7, slot=1, generation=1)])
    host.copier.step_began()
    host.copier.submit(CheckpointOrder(loads=[load], beside_step=True))


def ends(host: CopyingHost, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if host.copier.take_ended().requests:
            return True
        time.sleep(0.001)
    return False


@pytest.fixture
def hours_of_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.checkpoint.copier.SHARE_BESIDE_STEPS", 1e-9)


def test_the_copier_rests_between_parts_of_a_load_while_a_step_computes(
    host: CopyingHost, hours_of_rest: None
) -> None:
    moved = in_two_pieces(host, takes_cores=True)
    load_beside_a_step(host)
    assert not ends(host, 0.2) and moved in ([], [[6]])


def test_the_copier_does_not_rest_when_steps_have_ended(host: CopyingHost, hours_of_rest: None) -> None:
    moved = in_two_pieces(host, takes_cores=True)
    load_beside_a_step(host)
    assert not ends(host, 0.2)
    host.copier.submit(CheckpointOrder(beside_step=False))
    assert ends(host, 5) and moved == [[6], [7]]


def test_the_copier_ends_its_rest_when_no_further_step_begins(host: CopyingHost, hours_of_rest: None) -> None:
    """An idle engine sends no further order, so the copier has to notice itself that no step follows."""
    moved = in_two_pieces(host, takes_cores=True)
    load_beside_a_step(host)
    assert not ends(host, 0.2)
    host.copier.step_ended()
    assert ends(host, 5) and moved == [[6], [7]]


def test_the_copier_does_not_rest_if_its_mover_takes_no_cores(host: CopyingHost, hours_of_rest: None) -> None:
    in_two_pieces(host, takes_cores=False)
    load_beside_a_step(host)
    assert ends(host, 5)


class PartsOnTheBus(HostMover):
    """Mover that takes no cores from the model, and records the size and the thread of each part."""

    takes_cores = False

    def __init__(self, device: list[Any]) -> None:
        super().__init__(device)
        self.at_once = 2 * THREADS
        self.parts: list[int] = []
        self.threads: set[str] = set()

    def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
        self._note(copies)
        super().store(memory, copies, at)

    def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
        self._note(copies)
        return super().load(memory, copies, at)

    def _note(self, copies: list[BlockCopy]) -> None:
        self.parts.append(len(copies))
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def bus(host: CopyingHost, monkeypatch: pytest.MonkeyPatch) -> PartsOnTheBus:
    monkeypatch.setattr("os.cpu_count", lambda: THREADS)
    host.copier.close()
    mover = PartsOnTheBus(host.device)
    host.copier = Copier(host.memory, mover)
    return mover


def store_eight(host: CopyingHost, beside_step: bool) -> None:
    copies = [BlockCopy(n, slot=n, generation=1) for n in range(8)]
    host.copier.submit(CheckpointOrder(copies, beside_step=beside_step))
    stored = 0
    limit = time.monotonic() + 5
    while stored < 8 and time.monotonic() < limit:
        stored += sum(host.copier.take_report().stored.values())
        time.sleep(0.001)
    assert stored == 8


def test_one_thread_stores_blocks_part_by_part_while_steps_run(host: CopyingHost, bus: PartsOnTheBus) -> None:
    """A load that arrives during a store then waits for one part only."""
    host.copier.step_began()
    store_eight(host, beside_step=True)
    assert bus.parts == [2, 2, 2, 2] and len(bus.threads) == 1


def test_several_threads_share_a_store_while_no_step_runs(host: CopyingHost, bus: PartsOnTheBus) -> None:
    store_eight(host, beside_step=False)
    assert bus.parts == [2, 2, 2, 2] and len(bus.threads) > 1


def test_several_threads_share_a_load_even_while_steps_run(host: CopyingHost, bus: PartsOnTheBus) -> None:
    store_eight(host, beside_step=False)
    bus.parts.clear()
    bus.threads.clear()
    host.copier.step_began()
    load = BlockLoad("r", [BlockCopy(4 + n, slot=n, generation=1) for n in range(8)])
    host.copier.submit(CheckpointOrder(loads=[load], beside_step=True))
    assert ends(host, 5) and bus.parts == [2, 2, 2, 2] and len(bus.threads) > 1
