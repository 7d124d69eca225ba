"""What retention costs each step does not grow with what is retained."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from kvtransfer.conversations import EvictionRank
from tests.kvtransfer.engine.engines import eventually, free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

pytestmark = pytest.mark.slow


def end_copies(engine: SteppedEngine) -> None:
    """Blocks on their way to the host are not free: a thread copies them, and a step hears of its end."""

    def ended() -> bool:
        engine.step()
        return not any(list(ids()) for ids in engine.residence.references.values())

    assert eventually(ended)


def test_steps_beside_retained_conversations_do_not_look_at_each_of_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room for a step, although less than what is retained, with what runs counted, leaves."""
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
        retained = len(engine.residence.conversations.owned(EvictionRank.RETAINED))
        free, window = pool.get_num_free_blocks(), engine.side("retention").window
        assert free - retained < window < free - 30
        looked_at: list[Any] = []
        monkeypatch.setattr(pool, "get_cached_block", lambda block, groups: looked_at.append(block))
        engine.step()
        assert looked_at == []
    finally:
        engine.close()
