"""An engine reports which of its live KV gives way at no cost: idle, and on the host as well."""

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from placement.engines import EngineState
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SimulatedEngine


def copied(engine: SimulatedEngine, host_kv_gib: float) -> EngineState:
    """The state once everything that waits is on the host too, if there is one."""
    limit = time.monotonic() + (10 if host_kv_gib else 0)
    while (state := engine.side("report").snapshot()).idle_tokens != state.live_tokens:
        if time.monotonic() > limit:
            break
        time.sleep(0.01)  # the copier rests beside steps
        engine.step()
    return state


def idle_and_live_blocks(host_kv_gib: float) -> tuple[int, int, int]:
    """While a turn of ten blocks runs beside a conversation that keeps ten, and after it ended."""
    engine = SimulatedEngine(
        ConnectorConfig(engine="d", epoch=1, port=free_port(), lease_s=0.3, host_kv_gib=host_kv_gib),
        blocks=60,
    )
    try:
        for name, output in (("first", 2), ("second", 20)):
            prompt = [(n + len(name)) % 250 for n in range(10 * BLOCK_TOKENS + 5)]
            engine.add(f"{name}-turn", prompt, output, session=name)
            if name == "first":
                engine.run(2000)
                copied(engine, host_kv_gib)
        for _ in range(4):
            engine.step()
        beside = engine.side("report").snapshot()
        engine.run(2000)
        after = copied(engine, host_kv_gib)
        assert beside.live_tokens >= 20 * BLOCK_TOKENS <= after.live_tokens
        return tuple(
            tokens // BLOCK_TOKENS for tokens in (beside.idle_tokens, after.idle_tokens, after.live_tokens)
        )
    finally:
        engine.close()


def test_what_waits_on_the_host_too_is_idle_and_what_runs_is_not() -> None:
    beside, after, live = idle_and_live_blocks(host_kv_gib=0.005)
    assert beside == 10
    assert after == live


def test_without_a_host_store_nothing_gives_way_at_no_cost() -> None:
    assert idle_and_live_blocks(host_kv_gib=0.0)[:2] == (0, 0)
