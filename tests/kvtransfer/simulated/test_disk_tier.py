"""Idle conversations move from full host memory to the disk, and return without recomputation."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.checkpoint.disk_moves import KEPT_FREE
from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.retained_conversations import RetentionPhase
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

LONG = 6  # blocks of a conversation
KEYS = "abcdefghijklmnop"


class ConversationsOnDisk:
    """An engine whose accelerator and host memory are too small for its conversations."""

    def __init__(self, folder: Path, disk_gib: float) -> None:
        config = ConnectorConfig(
            engine="d",
            transfer=False,
            park_after_s=600.0,
            host_kv_gib=0.00105,
            disk_gib=disk_gib,
            disk_path=str(folder) if disk_gib else "",
        )
        self.engine = SteppedEngine(config, blocks=20)
        self.said: dict[str, list[int]] = {}

    def turn(self, key: str) -> int:
        """Play a turn, and return how many tokens of its prompt were computed."""
        before = self.engine.computed_prompt_tokens
        start = self.said.get(key) or [ord(key) + n % 100 for n in range(LONG * BLOCK_TOKENS)]
        prompt, name = [*start, 1, 2, 3], f"{key}{time.monotonic()}"
        self.engine.add(name, prompt, 4, session=key, params={"conversation": {"park_after_s": 0.0}})
        self.engine.run()
        self.said[key] = prompt + self.engine.answers[name]
        self.settle()
        return self.engine.computed_prompt_tokens - before

    def settle(self) -> None:
        """Step until copies and moves have ended, as an engine with other requests does."""
        limit = time.monotonic() + 10
        quiet = 0
        while quiet < 20:
            assert time.monotonic() < limit
            self.engine.step()
            time.sleep(0.002)
            moving = self.engine.kv_state.host.moving or self.engine.kv_state.holders.any_held
            quiet = 0 if moving else quiet + 1


@pytest.fixture
def with_disk(tmp_path: Path) -> Iterator[ConversationsOnDisk]:
    one = ConversationsOnDisk(tmp_path, 0.002)
    yield one
    one.engine.close()


def test_conversations_return_from_the_disk_without_recomputation(
    with_disk: ConversationsOnDisk,
) -> None:
    for key in KEYS:
        with_disk.turn(key)
    host = with_disk.engine.kv_state.host
    assert host.used_on_disk >= (len(KEYS) * LONG - host.capacity)
    assert host.free + host.moving >= host.capacity // KEPT_FREE
    computed = [with_disk.turn(key) for key in KEYS]
    assert max(computed) < 2 * BLOCK_TOKENS, computed
    counts = with_disk.engine.counts
    assert counts["disk_restored_blocks"] >= LONG and "left_host" not in counts
    assert not with_disk.engine.wrong and not with_disk.engine.faults()


def test_without_a_disk_the_longest_idle_conversations_lose_their_kv(tmp_path: Path) -> None:
    without = ConversationsOnDisk(tmp_path, 0.0)
    try:
        for key in KEYS:
            without.turn(key)
        assert without.turn("a") > LONG * BLOCK_TOKENS
        assert without.engine.counts["left_host"]
    finally:
        without.engine.close()


def test_on_a_full_disk_the_longest_idle_conversation_loses_its_kv(tmp_path: Path) -> None:
    small = ConversationsOnDisk(tmp_path, 0.0004)
    try:
        for key in KEYS:
            small.turn(key)
        assert small.turn(KEYS[-1]) < 2 * BLOCK_TOKENS and small.turn("a") > LONG * BLOCK_TOKENS
        assert small.engine.counts["left_host"]
        assert not small.engine.wrong and not small.engine.faults()
    finally:
        small.engine.close()


def test_when_the_disk_fails_conversations_displace_each_other_in_memory_again(
    with_disk: ConversationsOnDisk,
) -> None:
    copier = with_disk.engine.worker.worker_side("checkpoint").copier
    copier.memory.disk.close()  # reads and writes fail from now on, with an error of the kernel
    for key in KEYS:
        with_disk.turn(key)
    assert with_disk.turn(KEYS[-1]) < 2 * BLOCK_TOKENS
    counts = with_disk.engine.counts
    assert counts["failed_disk_moves"] and counts["left_host"] and "disk_blocks" not in counts
    assert not with_disk.engine.wrong and not with_disk.engine.faults()


def test_a_turn_that_ends_while_host_memory_is_full_is_stored_when_moves_have_made_room(
    with_disk: ConversationsOnDisk,
) -> None:
    """The free eighth of host memory is smaller than the turn."""
    for key in KEYS:
        with_disk.turn(key)
    host, long = with_disk.engine.kv_state.host, [n % 240 for n in range(16 * BLOCK_TOKENS)]
    assert host.free < 16
    with_disk.said["long"] = long
    with_disk.turn("long")
    conversation = with_disk.engine.kv_state.conversations.get("long")
    assert conversation is not None and not conversation.unstored
    with_disk.engine.kv_state.park_and_expire()
    assert conversation.phase is RetentionPhase.PARKED
    assert not with_disk.engine.wrong and not with_disk.engine.faults()
