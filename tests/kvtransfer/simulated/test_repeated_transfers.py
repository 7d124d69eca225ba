"""A second prefill with the id of a transfer does not disturb the first, and leaks no block."""

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import SteppedEngine

LEASE_S = 1.0


@pytest.mark.parametrize("beside", [True, False], ids=["beside the first", "within its lease"])
def test_a_second_prefill_of_a_transfer_is_not_exported(beside: bool) -> None:
    config = ConnectorConfig(engine="p", epoch=1, port=free_port(), lease_s=LEASE_S)
    engine = SteppedEngine(config, blocks=50)
    for number in range(2):
        params = {"do_remote_decode": True, "transfer_id": "t"}
        engine.add(f"prefill{number}", [number] * 100, 1, params=params)
        if not beside:
            engine.run(500)
    engine.run(500)
    held = engine.side("transfer").held_block_ids()
    assert len(held) == 4 and set(engine.answers) == {"prefill0", "prefill1"}
    time.sleep(LEASE_S + 0.05)
    engine.add("last", [1, 2, 3], 2)  # leases end in a step
    engine.run(500)
    assert engine.faults() == []
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == engine.blocks - 1
    engine.close()
