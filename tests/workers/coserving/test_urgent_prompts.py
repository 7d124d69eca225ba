"""Requests decode during an urgent prompt, on vLLM's real scheduler without a model."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from placement.scheduling.interface import TurnTargets
from placement.scheduling.latency_model import LatencyModel
from tests.workers.coserving.model_free import ModelFreeEngine, expected

ASKED = {"a": ([40, 41, 42], 5), "b": ([33 + number % 80 for number in range(400)], 2)}


def started(model: Path, tbt_s: float) -> ModelFreeEngine:
    """Return an engine where request `a` has its first token, `b` waits, and every prompt is urgent."""
    engine = ModelFreeEngine(model, slo=TurnTargets(1e-6, tbt_s), latency=LatencyModel(1e-6, 0, 0, 1e-6))
    engine.ask("a", *ASKED["a"], priority=0)
    engine.step(abort_share=0.0)
    engine.ask("b", *ASKED["b"], priority=0)
    return engine


def finish(engine: ModelFreeEngine) -> None:
    for _ in range(300):
        if not engine.scheduler.requests:
            break
        engine.step(abort_share=0.0)
    assert engine.lies == []
    assert engine.outputs == {key: expected(*asked) for key, asked in ASKED.items()}


def test_a_late_request_gets_a_token_in_every_iteration_and_the_prompt_continues(small_model: Path) -> None:
    engine = started(small_model, tbt_s=1e-9)
    for number in range(1, 4):
        engine.step(abort_share=0.0)
        assert len(engine.outputs["a"]) == 1 + number
        assert 0 < engine.scheduler.requests["b"].num_computed_tokens < 400
    finish(engine)
