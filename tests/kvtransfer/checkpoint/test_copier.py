"""Blocks come back from the host as they went, or not at all."""

import time
from collections.abc import Iterator, Sequence

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make install")

from kvtransfer.checkpoint.copier import Copier  # noqa: E402
from kvtransfer.checkpoint.movers import HostMover  # noqa: E402
from kvtransfer.checkpoint.orders import Copy, Load  # noqa: E402
from kvtransfer.checkpoint.slots import HostSlots  # noqa: E402
from kvtransfer.parts import LoadsEnded  # noqa: E402

BLOCKS, SLOTS = 12, 8


class Host:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.kv = {f"layer{n}": torch.randn(BLOCKS, 2, 4, 8) for n in range(3)}
        self.device = list(self.kv.values())
        self.memory = HostSlots(self.device, SLOTS)
        self.copier = Copier(self.memory, HostMover(self.device))

    def block(self, number: int) -> list[object]:
        return [tensor[number].clone() for tensor in self.kv.values()]

    def store(self, *copies: Copy) -> None:
        self.copier.submit(list(copies), [])
        stored: set[int] = set()
        while not {copy.slot for copy in copies} <= stored:
            stored |= set(self.copier.take_report().stored)
            time.sleep(0.001)

    def load(self, *copies: Copy) -> LoadsEnded:
        self.copier.submit([], [Load("r", list(copies))])
        limit = time.monotonic() + 5
        while time.monotonic() < limit:
            if (ended := self.copier.take_ended()).requests:
                return ended
            time.sleep(0.001)
        raise AssertionError("the load did not end")


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.copier.close()


def same(one: list[object], other: list[object]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_block_returns_as_it_was_to_another_place(host: Host) -> None:
    before = host.block(3)
    host.store(Copy(3, slot=5, generation=1))
    for tensor in host.kv.values():
        tensor[3] = 0
    assert not host.load(Copy(9, slot=5, generation=1)).failed_blocks
    assert same(host.block(9), before)


def test_a_byte_flipped_on_the_host_is_found_and_not_copied(host: Host) -> None:
    host.store(Copy(1, slot=0, generation=1), Copy(2, slot=1, generation=2))
    host.memory.rows[2][1].view(-1).view(torch.uint8)[17] ^= 1
    untouched = host.block(7)
    ended = host.load(Copy(6, slot=0, generation=1), Copy(7, slot=1, generation=2))
    assert ended.requests == {"r"} and ended.failed_blocks == {7}
    assert host.copier.take_report().corrupt == {1}
    assert same(host.block(7), untouched) and same(host.block(6), host.block(1))


def test_a_byte_flipped_while_its_block_is_stored_is_found(host: Host) -> None:
    rows = host.memory.rows[1]

    class FlippedOnArrival(type(rows)):  # type: ignore[misc]
        def index_copy_(self, *copy: object) -> None:
            rows.index_copy_(*copy)
            rows[3].view(-1).view(torch.uint8)[5] ^= 1

    host.memory.rows[1] = rows.as_subclass(FlippedOnArrival)
    host.store(Copy(2, slot=3, generation=1))
    assert host.load(Copy(7, slot=3, generation=1)).failed_blocks == {7}


def test_a_byte_flipped_after_the_check_is_not_what_is_copied(host: Host) -> None:
    class FlippedBeforeCopy(HostMover):
        def to_device(self, pieces: Sequence[torch.Tensor], blocks: list[int]) -> None:
            host.memory.rows[1][3].view(-1).view(torch.uint8)[5] ^= 1
            super().to_device(pieces, blocks)

    host.store(Copy(2, slot=3, generation=1))
    host.copier.close()
    host.copier = Copier(host.memory, FlippedBeforeCopy(host.device))
    assert not host.load(Copy(7, slot=3, generation=1)).failed_blocks
    assert same(host.block(7), host.block(2))


def test_a_copy_that_raises_ends_and_the_next_one_is_done(host: Host) -> None:
    class Failing(HostMover):
        def from_device(self, blocks: list[int]) -> list[torch.Tensor]:
            raise IndexError(blocks)

        def to_device(self, pieces: Sequence[torch.Tensor], blocks: list[int]) -> None:
            raise MemoryError

    host.store(Copy(1, slot=0, generation=1))
    host.copier.close()
    host.copier = Copier(host.memory, Failing(host.device))
    host.store(Copy(2, slot=1, generation=2))
    assert host.load(Copy(6, slot=0, generation=1)).failed_blocks == {6}
    assert host.load(Copy(7, slot=0, generation=1)).failed_blocks == {7}
    report = host.copier.take_report()
    assert report.failed == {0} and not report.corrupt


def test_contents_of_another_generation_are_not_copied(host: Host) -> None:
    host.store(Copy(1, slot=0, generation=1))
    host.store(Copy(2, slot=0, generation=2))  # the slot went to another block
    assert host.load(Copy(6, slot=0, generation=1)).failed_blocks == {6}


def test_a_slot_never_written_is_not_copied(host: Host) -> None:
    assert host.load(Copy(6, slot=4, generation=1)).failed_blocks == {6}


def test_a_turn_waiting_for_its_blocks_goes_before_checkpoints(host: Host) -> None:
    done: list[str] = []

    class RecordingMover(HostMover):
        def from_device(self, blocks: list[int]) -> list[torch.Tensor]:
            done.append("store")
            return super().from_device(blocks)

        def to_device(self, pieces: Sequence[torch.Tensor], blocks: list[int]) -> None:
            done.append("load")

    host.store(Copy(1, slot=0, generation=1))
    host.copier.close()
    host.copier = Copier(host.memory, RecordingMover(host.device))
    many = [Copy(n % BLOCKS, slot=1 + n % 6, generation=n) for n in range(200)]
    host.copier.submit(many, [Load("r", [Copy(6, slot=0, generation=1)])])
    limit = time.monotonic() + 5
    while len(done) < 5 and time.monotonic() < limit:
        time.sleep(0.001)
    assert done == ["load", "store", "store", "store", "store"]
