"""Blocks of idle conversations move to the disk, or displace each other in host memory if the disk fails."""

from collections import Counter

import pytest

from kvtransfer.checkpoint.copy_orders import DiskMove
from kvtransfer.checkpoint.disk_moves import LOOKS_A_STEP, PAUSE_S, SILENT_S, WALK_S, DiskMoves
from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.parking import SharedKvState


class HostBeforeADisk:
    """Slots of host memory and of a disk, without bytes, and a clock that each step advances."""

    def __init__(self, slots: int, disk_slots: int) -> None:
        self.now = 1000.0
        self.state = SharedKvState(ConnectorConfig(), slots, lambda: self.now, disk_slots=disk_slots)
        self.moves = DiskMoves(self.state, ranks=1)
        self.under_way: list[DiskMove] = []

    def step(self, seconds: float = WALK_S) -> int:
        """Let `seconds` pass, begin moves, which only `end_moves` ends, and return how many began."""
        self.now += seconds
        began = self.moves.begin()
        self.under_way += began
        return len(began)

    def end_moves(self) -> None:
        self.moves.on_report(Counter(move.disk_slot for move in self.under_way), set())
        self.under_way.clear()

    def idle_conversation(self, key: str, blocks: int) -> int:
        """Store as many blocks of a conversation as there are free slots; return how many were stored."""
        chain = [f"{key}{number}".encode() for number in range(blocks)]
        conversation = self.state.conversations.begin_turn(key, chain)
        self.state.conversations.advance(conversation, chain)
        new = [block for block in chain if block not in self.state.host]
        slots = [slot for block in new if (slot := self.state.claim_host_slot(block, conversation))]
        for slot in slots:
            self.state.host.end_store(slot.number)
        self.state.conversations.end_turn(conversation)
        return len(slots)


def test_blocks_on_the_disk_do_not_delay_moves_of_other_blocks() -> None:
    slots, blocks = 8 * 64, 64
    host = HostBeforeADisk(slots, disk_slots=8 * LOOKS_A_STEP)
    conversations = 4 * LOOKS_A_STEP // blocks + slots // blocks
    for number in range(conversations):
        assert host.idle_conversation(f"old{number}.", blocks) == blocks
        for _ in range(4):
            host.step()
            host.end_moves()
    assert host.state.host.used_on_disk > 3 * LOOKS_A_STEP, "a walk over these takes several steps"
    assert host.idle_conversation("new", blocks) == blocks
    assert host.step() + host.step(), "the first may be the rest of a walk that began before"


def test_new_blocks_of_a_conversation_follow_its_older_blocks_to_the_disk() -> None:
    host = HostBeforeADisk(slots=1, disk_slots=80)
    for blocks in range(1, 4):
        assert host.idle_conversation("a", blocks) == 1
        host.step()
        host.end_moves()
        assert host.state.host.used_on_disk == blocks
        busy = host.state.conversations.begin_turn("busy", [b"busy"])
        host.state.conversations.advance(busy, [b"busy"])
        slot = host.state.claim_host_slot(b"busy", busy)
        assert slot is not None
        host.state.host.end_store(slot.number)
        assert not any(host.step() for _ in range(4)), "what is on the disk moved"
        conversation = host.state.conversations.get("a")
        assert conversation is not None and conversation.on_disk
        host.state.release("busy")
        host.state.conversations.end_turn(busy)


@pytest.mark.parametrize("slots", [1, 5, 8])
def test_blocks_move_to_the_disk_even_from_host_memory_of_a_few_slots(slots: int) -> None:
    host = HostBeforeADisk(slots, disk_slots=80)
    assert host.idle_conversation("a", slots) == slots
    assert host.step() == 1
    host.end_moves()
    assert host.idle_conversation("b", 1) == 1


def test_moves_pause_when_the_disk_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    host = HostBeforeADisk(slots=8, disk_slots=80)
    host.idle_conversation("a", 8)
    assert host.step() and host.idle_conversation("b", 1) == 0
    for _ in range(int(SILENT_S)):
        host.step(1.0)
    assert host.idle_conversation("c", 1) == 1, "what is idle for longest makes room, as without a disk"
    assert not host.state.moves_to_disk and host.state.counts["failed_disk_moves"] == 1
    host.step(PAUSE_S)
    assert not host.state.moves_to_disk and caplog.text.count("does not answer") == 1
    host.end_moves()
    host.step(PAUSE_S + 1)
    assert host.state.moves_to_disk


def test_time_without_steps_does_not_count_as_silence_of_the_disk() -> None:
    host = HostBeforeADisk(slots=8, disk_slots=80)
    host.idle_conversation("a", 8)
    host.step()
    host.step(10 * SILENT_S)
    assert host.state.moves_to_disk
