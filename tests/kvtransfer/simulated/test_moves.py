"""A conversation's next turn runs on another decoder, which gets the KV from the former one."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from kvtransfer.control.control_socket import EngineCommand
from kvtransfer.retention.retained_conversations import RetentionPhase
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

FIRST = [n % 250 for n in range(10 * BLOCK_TOKENS + 5)]
APPENDED = [7] * 40
LAYOUTS: dict[str, dict[str, Any]] = {
    "attention": {},
    "a window": {"window": 100},
    "states": {"states": True},
}


class TwoDecoders:
    """Two decoders as a fleet starts them, and a conversation whose first turn ran on the first decoder."""

    def __init__(self, host_kv_gib: float, **layout: Any) -> None:
        self.port = free_port()
        source = ConnectorConfig(
            engine="old",
            epoch=1,
            port=self.port,
            layer_hooks=False,
            host_kv_gib=host_kv_gib,
            park_after_s=0.01,
        )
        target = ConnectorConfig(engine="new", epoch=1, layer_hooks=False, timeout_s=1.0)
        self.old, self.new = SteppedEngine(source, **layout), SteppedEngine(target, **layout)
        self.old.add("first", FIRST, 30, session="c")
        self.old.run(2000)
        self.prompt = [*FIRST, *self.old.answers["first"], *APPENDED]

    def close(self) -> None:
        self.old.close()
        self.new.close()

    def send(self) -> None:
        self.old.add("leg", self.prompt, 1, params={"do_remote_decode": True, "transfer_id": "t"})
        self.old.run(2000)

    def fetch(self) -> None:
        params = {
            "do_remote_prefill": True,
            "transfer_id": "t",
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "remote_epoch": 1,
            "cached_tokens": len(FIRST),
        }
        self.new.add("second", self.prompt, 5, session="c", params=params)
        self.new.run(5000)


@pytest.fixture(params=LAYOUTS)
def decoders(request: pytest.FixtureRequest) -> Iterator[TwoDecoders]:
    made = TwoDecoders(host_kv_gib=0.0, **LAYOUTS[request.param])
    yield made
    made.close()


def test_a_moved_context_is_not_recomputed(decoders: TwoDecoders) -> None:
    old, new = decoders.old, decoders.new
    computed = old.computed_prompt_tokens
    decoders.send()
    assert old.computed_prompt_tokens - computed <= len(APPENDED) + 2 * BLOCK_TOKENS
    decoders.fetch()
    assert new.computed_prompt_tokens <= BLOCK_TOKENS, "states are sent at the ends of blocks"
    assert old.wrong == [] and new.wrong == []
    assert old.kv_state.release("c")
    old.run(100)
    conversation = new.kv_state.conversations.get("c")
    assert conversation is not None and conversation.phase is RetentionPhase.RETAINED
    assert old.faults() == [] and new.faults() == []


def test_a_move_from_a_lost_decoder_costs_only_a_recomputation(decoders: TwoDecoders) -> None:
    decoders.old.worker.shutdown()
    decoders.fetch()
    assert decoders.new.computed_prompt_tokens >= len(decoders.prompt)
    assert len(decoders.new.answers["second"]) == 5
    assert decoders.new.wrong == [] and decoders.new.faults() == []


def test_a_parked_conversation_moves_from_the_host() -> None:
    decoders = TwoDecoders(host_kv_gib=0.005)
    old = decoders.old
    try:
        for number in range(3):  # other prompts take the blocks
            old.add(f"other{number}", [number + 3] * 40 * BLOCK_TOKENS, 2)
            old.run(3000)
        conversation = old.kv_state.conversations.get("c")
        assert conversation is not None and conversation.phase is RetentionPhase.PARKED
        computed = old.computed_prompt_tokens
        decoders.send()
        assert old.computed_prompt_tokens - computed <= len(APPENDED) + 2 * BLOCK_TOKENS
        decoders.fetch()
        assert decoders.new.computed_prompt_tokens <= 1
        assert old.wrong == [] and decoders.new.wrong == []
    finally:
        decoders.close()


def test_an_engine_tells_its_keeper_the_tokens_of_idle_conversations_only() -> None:
    decoders = TwoDecoders(host_kv_gib=0.0)
    old = decoders.old
    try:
        ask = old.side("retention").tokens_of
        reply = ask(EngineCommand("tokens", "c"))
        assert reply.done and list(reply.tokens) == [*FIRST, *old.answers["first"]]
        assert not ask(EngineCommand("tokens", "nobody")).done
        old.add("second", decoders.prompt, 20, session="c")
        old.step()
        assert not ask(EngineCommand("tokens", "c")).done
    finally:
        decoders.close()


def test_the_kv_of_an_idle_conversation_can_be_sent_without_a_turn() -> None:
    decoders = TwoDecoders(host_kv_gib=0.0)
    old, new = decoders.old, decoders.new
    try:
        computed = old.computed_prompt_tokens
        decoders.prompt = list(old.side("retention").tokens_of(EngineCommand("tokens", "c")).tokens)
        decoders.send()
        assert old.computed_prompt_tokens - computed <= BLOCK_TOKENS
        decoders.fetch()
        assert new.computed_prompt_tokens <= 1
        new.add("third", [*decoders.prompt, *APPENDED], 3, session="c")
        new.run(2000)
        assert new.computed_prompt_tokens <= 1 + len(APPENDED) + BLOCK_TOKENS
        assert old.wrong == [] and new.wrong == []
    finally:
        decoders.close()
