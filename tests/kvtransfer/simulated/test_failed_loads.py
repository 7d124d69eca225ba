"""A request whose load fails is computed, however little room there is."""

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SimulatedEngine, next_token


def test_a_refused_transfer_of_a_prompt_that_is_also_on_the_host_does_not_wait_for_itself() -> None:
    """vLLM reserves room for a failed load until its request runs: a second load would wait for that room."""
    engine = SimulatedEngine(ConnectorConfig(engine="d", host_kv_gib=0.005, timeout_s=1.0), blocks=60)
    prompt = [n % 250 for n in range(40 * BLOCK_TOKENS + 5)]  # more than half of the blocks
    engine.add("first", prompt, 2, session="a")
    engine.run(2000)
    end = time.monotonic() + 10
    while engine.side("checkpoint").copying_block_ids() and time.monotonic() < end:
        engine.add("settle", [1, 2, 3], 2)  # copies to the host end in a step
        engine.run(2000)
    assert engine.scheduler.reset_prefix_cache()

    nobody = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_host": "127.0.0.1",
        "remote_port": free_port(),
        "remote_epoch": 1,
    }
    engine.add("second", prompt, 2, session="a", params=nobody)
    engine.add("behind", [4, 5, 6], 2)
    residence = engine.residence
    assert residence.host.stored_prefix(residence.conversations.get("a").chain, 0, 40) == 40
    engine.run(2000)

    assert engine.answers["second"][0] == next_token(prompt)
    assert len(engine.answers["behind"]) == 2
    assert engine.wrong == [] and engine.faults() == []
    engine.close()
