"""The cost that retention adds to a step does not grow with the number of retained blocks."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.retained_conversations import EvictionRank
from tests.kvtransfer.engine.engines import eventually, free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

pytestmark = pytest.mark.slow


def end_copies(engine: SteppedEngine) -> None:
    """Wait for the end of copies: blocks that are being stored are not free until a step learns of it."""

    def ended() -> bool:
        engine.step()
        return not any(list(ids()) for ids in engine.kv_state.holders.references.values())

    assert eventually(ended)


def test_a_step_does_not_visit_each_retained_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step has enough free blocks, although retained blocks and running requests leave few."""
    connector = ConnectorConfig(engine="d", epoch=1, port=free_port(), host_kv_gib=0.005, park_after_s=3600.0)
    engine = SteppedEngine(connector, blocks=100)
    try:
        for number, output in ((1, 2), (2, 40)):
            prompt = [(n * number) % 250 for n in range(30 * BLOCK_TOKENS)]
            engine.add(f"turn{number}", prompt, output, session=f"s{number}")
            if number == 1:
                engine.run(2000)
                end_copies(engine)
        for _ in range(8):
            engine.step()
        pool = engine.scheduler.kv_cache_manager.block_pool
        retained = len(engine.kv_state.conversations.owned(EvictionRank.RETAINED))
        free, window = pool.get_num_free_blocks(), engine.side("retention").window
        assert free - retained < window < free - 30
        looked_at: list[Any] = []
        monkeypatch.setattr(pool, "get_cached_block", lambda block, groups: looked_at.append(block))
        engine.step()
        assert looked_at == []
    finally:
        engine.close()


def test_a_step_without_admissions_does_not_scan_the_free_blocks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last scan covered more blocks than the steps since then have taken."""
    connector = ConnectorConfig(engine="d", epoch=1, port=free_port(), park_after_s=3600.0)
    engine = SteppedEngine(connector, blocks=200)
    try:
        engine.add("ended", [7] * 10, 2)  # nobody's blocks join those of conversations
        engine.run()
        looked_at: list[Any] = []
        queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
        following = queue.iter_blocks_after

        def noted(cursor: Any) -> Any:
            for block in following(cursor):
                looked_at.append(block)
                yield block

        monkeypatch.setattr(queue, "iter_blocks_after", noted)
        engine.add("turn", [n % 250 for n in range(2 * BLOCK_TOKENS)], 4 * BLOCK_TOKENS, session="s")
        engine.step()
        assert len(looked_at) >= engine.side("retention").window
        looked_at.clear()
        for _ in range(3 * BLOCK_TOKENS):
            engine.step()
        assert looked_at == []
    finally:
        engine.close()


def test_idle_blocks_are_found_after_the_blocks_before_them_are_taken() -> None:
    """A decoding request takes free blocks one at a time, and not the conversation's."""
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
