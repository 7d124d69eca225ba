"""What keeping costs each step does not grow with what is kept."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from kvtransfer.residence.conversations import Rank
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SimulatedEngine


def test_steps_beside_kept_conversations_do_not_look_at_each_of_their_blocks() -> None:
    """There is room for a step, although less than what is kept, with what runs counted, leaves."""
    connector = ConnectorConfig(engine="d", epoch=1, port=free_port(), lease_s=0.3, host_kv_gib=0.005)
    engine = SimulatedEngine(connector, blocks=100)
    try:
        for number, output in ((1, 2), (2, 40)):
            prompt = [(n * number) % 250 for n in range(30 * BLOCK_TOKENS)]
            engine.add(f"turn{number}", prompt, output, session=f"s{number}")
            if number == 1:
                engine.run(2000)
        for _ in range(8):
            engine.step()
        keep = engine.half["keep"]
        kept, free = len(keep._residence.conversations.owned(Rank.KEPT)), keep._pool.get_num_free_blocks()
        assert free - kept < keep._window < free - 30
        looked_at: list[Any] = []
        keep._block_of = looked_at.append
        engine.step()
        assert looked_at == []
    finally:
        engine.close()
