"""Only tokens that a preemption lost are counted when they are recomputed."""

import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from tests.workers.coserving.model_free import ModelFreeEngine

LOST = "coserving_offline_tokens_lost.preemption"


def lost_after_preemption(model: Path, priority: int, forgotten: bool) -> int:
    engine = ModelFreeEngine(model)
    engine.ask("a", [33 + number % 80 for number in range(150)], 4, priority)
    engine.step(abort_share=0.0)  # 150 tokens are computed
    engine.scheduler.preempt(engine.scheduler.requests["a"], time.monotonic())
    if forgotten:
        assert engine.scheduler.reset_prefix_cache()
    engine.step(abort_share=0.0)
    return int(engine.scheduler.connector.scheduler_side("safepoint").counts[LOST])


def test_preempted_tokens_in_neither_cache_nor_host_memory_count_as_lost(small_model: Path) -> None:
    assert lost_after_preemption(small_model, 1, forgotten=True) == 150


def test_preempted_tokens_in_the_prefix_cache_do_not_count_as_lost(small_model: Path) -> None:
    assert lost_after_preemption(small_model, 1, forgotten=False) == 150 - 128


def test_recomputed_tokens_of_online_requests_do_not_count_as_lost(small_model: Path) -> None:
    assert lost_after_preemption(small_model, 0, forgotten=True) == 0
