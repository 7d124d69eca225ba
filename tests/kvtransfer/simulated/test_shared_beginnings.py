"""Prefixes shared by several conversations are evicted last, on vLLM's own scheduler and block pool."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

BEGINNING = [n * 7 % 250 for n in range(10 * BLOCK_TOKENS)]


def of_its_own(number: int, blocks: int) -> list[int]:
    return [(n * 13 + number * 31) % 250 for n in range(blocks * BLOCK_TOKENS)]


def computed(engine: SteppedEngine, name: str, prompt: list[int]) -> int:
    before = engine.computed_prompt_tokens
    engine.add(name, prompt, 2, session=name)
    engine.run(2000)
    return engine.computed_prompt_tokens - before


def test_a_prefix_that_two_conversations_share_outlasts_newer_conversations() -> None:
    engine = SteppedEngine(ConnectorConfig(engine="d", epoch=1, port=free_port()), blocks=60)
    try:
        for name, number in (("a", 1), ("b", 2)):
            computed(engine, name, [*BEGINNING, *of_its_own(number, 2)])
        for number in range(3, 12):  # 99 blocks, of 60
            computed(engine, f"own{number}", of_its_own(number, 11))
        assert computed(engine, "c", [*BEGINNING, *of_its_own(20, 1)]) <= 2 * BLOCK_TOKENS
        assert computed(engine, "a", [*BEGINNING, *of_its_own(1, 3)]) >= 2 * BLOCK_TOKENS, "a's own is gone"
        assert engine.wrong == []
        assert engine.faults() == []
    finally:
        engine.close()


def test_a_prefix_that_only_one_conversation_has_is_evicted_by_age() -> None:
    engine = SteppedEngine(ConnectorConfig(engine="d", epoch=1, port=free_port()), blocks=60)
    try:
        computed(engine, "a", [*BEGINNING, *of_its_own(1, 2)])
        for number in range(3, 12):
            computed(engine, f"own{number}", of_its_own(number, 11))
        assert computed(engine, "c", [*BEGINNING, *of_its_own(20, 1)]) > 10 * BLOCK_TOKENS
    finally:
        engine.close()
