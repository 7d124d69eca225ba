"""An engine reports which idle KV it can evict at no cost, and which conversations left a full host."""

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from kvtransfer.transfer.kv_memory import HostBlockMemory
from placement.engines import EngineState
from tests.kvtransfer.engine.engines import eventually, free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

pytestmark = pytest.mark.slow


def copied(engine: SteppedEngine, host_kv_gib: float) -> EngineState:
    """Step until all blocks have been copied to the host, if there is one; return the engine's state."""
    limit = time.monotonic() + (10 if host_kv_gib else 0)
    while (state := engine.side("report").snapshot()).idle_tokens != state.live_tokens:
        if time.monotonic() > limit:
            break
        time.sleep(0.01)  # the copier rests while steps run
        engine.step()
    return state


def idle_and_live_blocks(host_kv_gib: float, yields: bool = False) -> tuple[int, int, int]:
    """Run a turn of ten blocks beside a conversation that retains ten.

    Returns the idle blocks during the turn, the idle blocks after it, and the live blocks after it.
    """
    config = ConnectorConfig(engine="d", epoch=1, port=free_port(), lease_s=0.3, host_kv_gib=host_kv_gib)
    engine = SteppedEngine(replace(config, idle_kv_evictable=yields), blocks=60)
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


def test_only_retained_kv_with_a_copy_on_the_host_is_evictable() -> None:
    beside, after, live = idle_and_live_blocks(host_kv_gib=0.005)
    assert beside == 10
    assert after == live


def test_without_host_memory_no_idle_kv_is_evictable() -> None:
    assert idle_and_live_blocks(host_kv_gib=0.0)[:2] == (0, 0)


def test_idle_kv_that_may_be_lost_is_evictable_even_without_host_memory() -> None:
    """With `overload: {policy: preempt}` idle KV is treated as plain vLLM's prefix cache treats it."""
    beside, after, live = idle_and_live_blocks(host_kv_gib=0.0, yields=True)
    assert beside == 10
    assert after == live


def test_a_parked_conversation_evicted_from_a_full_host_is_reported() -> None:
    config = ConnectorConfig(engine="d", epoch=1, transfer=False, host_kv_gib=0.0003)
    engine = SteppedEngine(config, blocks=80)
    try:
        assert 10 < engine.kv_state.host.capacity < 22
        for name in ("first", "second"):
            prompt = [(n + len(name)) % 250 for n in range(10 * BLOCK_TOKENS + 5)]
            engine.add(f"{name}-turn", prompt, 2, session=name)
            engine.run(2000)
            if name == "first":
                copied(engine, 0.0003)
                assert engine.kv_state.park("first")
                assert set(engine.side("report").snapshot().parked) == {"first"}
        state = engine.side("report").snapshot()
        assert set(state.unparked) == {"first"} and not state.parked
    finally:
        engine.close()


def test_a_renewed_lease_is_not_ended_by_the_steps_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An otherwise idle engine sends the KV of a prompt, which takes longer than three leases."""
    at_once = HostBlockMemory.outgoing

    def slowly(*asked: Any) -> AbstractContextManager[list[memoryview]]:
        time.sleep(0.05)
        return at_once(*asked)

    monkeypatch.setattr(HostBlockMemory, "outgoing", slowly)
    monkeypatch.setattr(HostBlockMemory, "piece_blocks", lambda memory, layer, piece_bytes: 1)
    lease_s, port = 0.6, free_port()
    prefiller = SteppedEngine(ConnectorConfig(engine="p", epoch=1, port=port, lease_s=lease_s))
    decoder = SteppedEngine(ConnectorConfig(engine="d"))

    def live_tokens() -> int:
        prefiller.run()
        return int(prefiller.side("report").snapshot().live_tokens)

    try:
        prompt = [n % 250 for n in range(20 * BLOCK_TOKENS)]
        prefiller.add("prefill", prompt, 1, params={"do_remote_decode": True, "transfer_id": "t"})
        prefiller.run()
        source = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1"}
        decoder.add("turn", prompt, 2, params={**source, "remote_port": port, "remote_epoch": 1})
        begun, least = time.monotonic(), live_tokens()
        while "turn" not in decoder.answers:
            decoder.step()
            least = min(least, live_tokens())
            time.sleep(0.01)
        assert time.monotonic() - begun > 3 * lease_s
        assert decoder.computed_prompt_tokens <= 1 and least == 20 * BLOCK_TOKENS
        assert eventually(lambda: live_tokens() == 0, 10 * lease_s)
    finally:
        prefiller.close()
        decoder.close()


@pytest.mark.parametrize("beside", [{}, {"window": 3 * BLOCK_TOKENS + 7}, {"states": True}], ids=str)
def test_the_reported_kv_per_conversation_matches_what_conversations_occupy(beside: dict[str, Any]) -> None:
    engine = SteppedEngine(ConnectorConfig(engine="d", transfer=False), **beside)
    try:
        for tokens in (BLOCK_TOKENS - 4, 8 * BLOCK_TOKENS + 3, 20 * BLOCK_TOKENS + 1):
            engine.add("turn", [n % 250 for n in range(tokens)], 6, session="a")
            while len(engine.scheduler.requests["turn"].output_token_ids) < 3:  # the last step had one token
                engine.step()
            state = engine.side("report").snapshot()
            assert tokens <= state.live_tokens <= state.takes(tokens + BLOCK_TOKENS)
            engine.run()
            engine.kv_state.release("a")
        assert state.takes(tokens) - state.live_tokens <= 2 * BLOCK_TOKENS
        assert bool(state.kv_per_conversation) == bool(beside)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("where", "lacks"), [("kept", 40), ("may be lost", 360), ("on the host too", 360), ("parked", 360)]
)
def test_a_waiting_turn_lacks_the_kv_of_its_history_if_that_is_parked_or_evictable(
    where: str, lacks: int
) -> None:
    host_kv_gib = 0.0 if where in ("kept", "may be lost") else 0.005
    config = ConnectorConfig(engine="d", epoch=1, port=free_port(), host_kv_gib=host_kv_gib)
    engine = SteppedEngine(replace(config, idle_kv_evictable=where == "may be lost"), blocks=60)
    try:
        prompt = [n % 250 for n in range(10 * BLOCK_TOKENS)]
        engine.add("first", prompt, 2, session="s")
        engine.run(2000)
        copied(engine, host_kv_gib)
        if where == "parked":
            assert engine.kv_state.park("s")
        engine.add("back", prompt + [9] * 40, 2, session="s")
        state = engine.side("report").snapshot()
        assert (state.waiting_kv_tokens, state.waiting_prompt_tokens) == (lacks, 40)
        engine.run(2000)
        assert engine.side("report").snapshot().waiting_kv_tokens == 0
    finally:
        engine.close()
