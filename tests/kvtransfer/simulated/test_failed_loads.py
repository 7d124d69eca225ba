"""A request whose load failed does not block requests behind it in the queue, which hold blocks."""

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine, next_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

WINDOW = 3 * BLOCK_TOKENS + 7
BIG, SMALL = 40 * BLOCK_TOKENS, 7 * BLOCK_TOKENS
BLOCKS = 57  # both prompts fit if they are loaded; the small one, computed, does not fit beside the big one
LIMIT_S = 20.0


def test_a_request_with_a_failed_load_that_does_not_fit_does_not_block_others() -> None:
    """After its load has failed, the small prompt needs more blocks than are free.

    With windows, a computed prompt needs more blocks than a loaded one. The load of the big prompt holds all
    other blocks, and ends later.
    """
    port = free_port()
    prefiller = SteppedEngine(
        ConnectorConfig(engine="p", epoch=1, port=port, lease_s=30.0, timeout_s=5.0),
        blocks=120,
        window=WINDOW,
    )
    decoder = SteppedEngine(ConnectorConfig(engine="d", timeout_s=5.0), blocks=BLOCKS, window=WINDOW)
    source = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
    small, big = ([n % 250 for n in range(first, first + size)] for first, size in ((1, SMALL), (7, BIG)))
    decoder.add("small", small, 1, params={**source, "transfer_id": "none", "remote_epoch": 0})  # refused
    decoder.add("big", big, 1, params={**source, "transfer_id": "big", "remote_epoch": 1})
    report = decoder.side("report")
    assert report.snapshot().waiting_prompt_tokens <= 2, "all but the last tokens come from elsewhere"
    end = time.monotonic() + LIMIT_S
    try:
        lost = "WAITING 0/224 tokens, 0 blocks", "1280/1280 tokens, 40 blocks"  # the big prompt loads
        while not all(one in (state := decoder.under_way()) for one in lost):
            assert time.monotonic() < end, state
            decoder.step()
            time.sleep(0.001)
        assert SMALL <= report.snapshot().waiting_prompt_tokens < SMALL + 2, "what did not come is computed"
        prefiller.add("p", big, 1, params={"do_remote_decode": True, "transfer_id": "big"})
        while len(decoder.answers) < 2:
            assert time.monotonic() < end, decoder.under_way()
            for engine in (prefiller, decoder):
                if engine.busy():
                    engine.step()
            time.sleep(0.0005)
        assert decoder.answers == {"small": [next_token(small)], "big": [next_token(big)]}
        assert decoder.wrong == []
    finally:
        decoder.close()
        prefiller.close()
