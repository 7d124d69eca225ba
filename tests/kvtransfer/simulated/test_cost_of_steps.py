"""The cost that retention adds to a step does not grow with the number of retained blocks."""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

import kvtransfer
from kvtransfer.compat.block_cache import cache_blocks
from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.retained_conversations import RetentionPhase
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

PRODUCT = str(Path(kvtransfer.__file__).parent)
POOL = 50_000
CONVERSATIONS, THEIRS = 120, 416  # and blocks of each: together nearly the pool
SHARED = 100  # blocks that pairs of conversations begin with
# Visiting all retained blocks, or those of a tenth of the conversations, would execute more lines.
LINES = 6_000


def lines_executed(run: Callable[[], Any]) -> int:
    """Return how many lines of `kvtransfer` a call executes; each pass of a loop or comprehension is one."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        seen += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return seen


def full_engine(host: bool) -> SteppedEngine:
    """Return an engine whose pool is full of idle conversations, half of which share a prefix in pairs.

    With `host`, half of the conversations are entirely on the host; the others lack their last block there.
    """
    connector = ConnectorConfig(
        engine="d",
        epoch=1,
        port=free_port(),
        host_kv_gib=1.0 if host else 0.0,
        park_after_s=3600.0,
    )
    engine = SteppedEngine(connector, blocks=POOL, context=4096)
    pool, conversations = engine.scheduler.kv_cache_manager.block_pool, engine.kv_state.conversations
    for number in range(CONVERSATIONS):
        begin = b"%03d" % (number // 2 % 30 if number % 2 else number)
        chain = [
            b"%s-%04d" % (begin if at < SHARED else b"%03d!" % number, at) + bytes(20) for at in range(THEIRS)
        ]
        blocks = pool.get_new_blocks(THEIRS)
        cache_blocks(pool, chain, dict(enumerate(blocks)), BLOCK_TOKENS, 0)
        conversation = conversations.begin_turn(f"s{number}", chain)
        conversations.advance(conversation, chain)
        for key in chain[: THEIRS - number % 2] if host else ():
            if key not in engine.kv_state.host and (slot := engine.kv_state.host.begin_store(key)):
                engine.kv_state.host.end_store(slot.number)
        conversations.end_turn(conversation)
        pool.free_blocks(reversed(blocks))
    return engine


@pytest.mark.parametrize("host", [True, False])
def test_no_step_visits_all_retained_blocks(host: bool) -> None:
    """The pool has 50,000 blocks. Each kind of step runs, and the engine reports its state.

    In these steps, requests take the blocks of conversations, conversations are parked under pressure and by
    time, and a conversation ends.
    """
    seen: dict[str, int] = {}
    engine = full_engine(host)
    state, pool = engine.kv_state, engine.scheduler.kv_cache_manager.block_pool

    def step(kind: str, steps: int = 10) -> None:
        seen[kind] = max(lines_executed(engine.step) for _ in range(steps))

    def parked() -> int:
        return sum(one.phase is RetentionPhase.PARKED for one in state.conversations)

    try:
        before = pool.get_num_free_blocks()
        seen["state"] = lines_executed(engine.side("report").snapshot)
        engine.add("stranger", [7] * 40 * BLOCK_TOKENS, 2)
        step("prompt without a conversation")
        engine.add("turn", [n % 250 for n in range(40 * BLOCK_TOKENS)], 3 * BLOCK_TOKENS, session="new")
        step("turn", 3 * BLOCK_TOKENS)
        engine.add("batch", [n % 91 for n in range(20 * BLOCK_TOKENS)], 4, priority=1)
        step("offline request")
        engine.add("again", [n % 77 for n in range(40 * BLOCK_TOKENS)], 4, session="other")
        step("pressure")
        assert (0 < parked() < 10) if host else not parked()
        assert lines_executed(lambda: state.release("s1")) < 100 * THEIRS  # it visits its own blocks
        engine.abort("again")
        for one in state.conversations:
            one.park_after_s = 0.0
        step("idle", 3)
        assert (parked() > 50) if host else not parked()
        seen["state after these steps"] = lines_executed(engine.side("report").snapshot)
        assert before > POOL - 200 and pool.get_num_free_blocks() > before - 100 and engine.wrong == []
    finally:
        engine.close()
    assert max(seen.values()) < LINES, seen


def lines_of_a_decoding_step(conversations: int) -> float:
    """Return the median number of lines that a decoding step executes beside `conversations` idle ones."""
    engine = SteppedEngine(ConnectorConfig(engine="d", epoch=1, port=free_port(), park_after_s=3600.0))
    try:
        engine.kv_state.clock = lambda: 1.0
        idle = engine.kv_state.conversations
        for number in range(conversations):
            conversation = idle.begin_turn(f"idle{number}", [])
            idle.advance(conversation, [b"%032d" % number])
            idle.end_turn(conversation)
        engine.add("turn", [n % 250 for n in range(BLOCK_TOKENS)], 40, session="turn")
        for _ in range(4):
            engine.step()
        return median(lines_executed(engine.step) for _ in range(20))
    finally:
        engine.close()


def test_a_decoding_step_does_not_look_at_every_conversation() -> None:
    assert lines_of_a_decoding_step(300) < lines_of_a_decoding_step(3) + 50


def test_blocks_without_an_owner_are_taken_before_those_of_an_idle_conversation() -> None:
    """A decoding request takes free blocks one at a time, and none of the idle conversation's."""
    connector = ConnectorConfig(engine="d", epoch=1, port=free_port(), park_after_s=3600.0)
    engine = SteppedEngine(connector, blocks=100)
    try:
        engine.add("idle", [n % 250 for n in range(20 * BLOCK_TOKENS)], 2, session="idle")
        engine.run()
        engine.add("stranger", [(n * 3) % 250 for n in range(30 * BLOCK_TOKENS)], 2)
        engine.run()  # its blocks are behind the conversation's
        engine.add("long", [(n * 7) % 250 for n in range(BLOCK_TOKENS)], 70 * BLOCK_TOKENS, session="long")
        engine.run()
        conversation = engine.kv_state.conversations.get("idle")
        pool = engine.scheduler.kv_cache_manager.block_pool
        kept = [pool.get_cached_block(block, [0]) is not None for block in conversation.chain]
        assert all(kept)
    finally:
        engine.close()
