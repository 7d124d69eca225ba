"""States are transferred even if a step computes less than a block.

vLLM frees such a state before the prompt ends, unless it is referenced.
"""

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from kvtransfer.metrics import Reason
from kvtransfer.transfer.scheduler import NULL
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine, next_token


@pytest.mark.parametrize("batched", [8, 16, 20])
@pytest.mark.parametrize("tokens", [90, 94, 190])
def test_a_decoder_receives_the_state_and_nothing_stays_allocated(batched: int, tokens: int) -> None:
    assert batched < BLOCK_TOKENS
    port = free_port()
    prefiller = SteppedEngine(
        ConnectorConfig(engine="p", epoch=1, port=port, lease_s=30.0),
        states=True,
        batched_tokens=batched,
    )
    decoder = SteppedEngine(ConnectorConfig(engine="d", timeout_s=5.0), states=True, batched_tokens=batched)
    prompt = [number % 250 for number in range(tokens)]
    source = {"transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": port, "remote_epoch": 1}
    prefiller.add("prefill", prompt, 1, params={"do_remote_decode": True, "transfer_id": "t"})
    prefiller.run(300)
    decoder.add("decode", prompt, 1, params={"do_remote_prefill": True, **source})
    decoder.run(5000)
    assert decoder.computed_prompt_tokens == tokens - (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert decoder.answers["decode"] == [next_token(prompt)]
    assert not (prefiller.wrong or decoder.wrong)
    prefiller.add("last", [1, 2, 3], 2)  # leases end in a step
    prefiller.run(300)
    assert prefiller.faults() == [] and prefiller.side("transfer").held_block_ids() == []
    for engine in (prefiller, decoder):
        engine.close()


def test_an_export_whose_block_is_gone_is_counted_once_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ConnectorConfig(engine="p", epoch=1, port=free_port(), lease_s=30.0)
    engine = SteppedEngine(config, states=True)
    transfer, manager = engine.side("transfer"), engine.scheduler.kv_cache_manager
    blocks_of = manager.get_block_ids
    transfer.bind(
        SimpleNamespace(
            block_pool=manager.block_pool,
            get_block_ids=lambda request: [[NULL] * len(ids) for ids in blocks_of(request)],
        )
    )
    told: Counter[str] = Counter()  # a step takes the counts away
    take = transfer.take_counts
    monkeypatch.setattr(transfer, "take_counts", lambda: told.update(counts := take()) or counts)
    engine.add("r", list(range(94)), 4, params={"do_remote_decode": True, "transfer_id": "t"})
    engine.run(300)
    assert told == {f"refused.{Reason.INTERNAL}": 1}
    assert transfer.held_block_ids() == [] and engine.faults() == []
    engine.close()
