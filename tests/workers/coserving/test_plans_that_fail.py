"""If our planning of an iteration fails, vLLM schedules that iteration by itself."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import BatchWork, LatencyModel, SelfCorrecting
from placement.scheduling.policy_registry import make_policy
from tests.workers.coserving.model_free import EASY, ModelFreeEngine

UNPLANNED = "iteration not planned"


class Endless(LatencyModel):
    """Model that makes its policy raise, as an infinite target once did, which ended engines."""

    def max_tokens(self, work: BatchWork, context: int, want: int, target_s: float) -> int:
        return int(float("inf"))


class Mute(LatencyModel):
    def seconds(self, work: BatchWork) -> float:
        raise ZeroDivisionError("no seconds today")


def served(engine: ModelFreeEngine) -> bool:
    """Return whether an online and an offline request get full-length answers from correct KV."""
    engine.ask("turn", [33 + number % 80 for number in range(70)], 4, 0)
    engine.ask("offline", [40 + number % 70 for number in range(150)], 4, 1)
    for _ in range(40):
        engine.step(abort_share=0.0)  # an iteration without a plan is never aborted
        if len(engine.outputs["turn"]) == len(engine.outputs["offline"]) == 4:
            return not engine.lies
    return False


@pytest.mark.parametrize("kind", [Endless, Mute])
def test_requests_are_answered_when_a_plan_fails(
    small_model: Path, kind: type[LatencyModel], caplog: pytest.LogCaptureFixture
) -> None:
    engine = ModelFreeEngine(small_model, slo=EASY)
    engine.scheduler.policy = make_policy(ServingSettings("conserve", TurnTargets(2.0, 0.2)))
    engine.scheduler.latency = SelfCorrecting(kind(1e-6, 0, 0, 1e-6))
    assert served(engine)
    assert UNPLANNED in caplog.text


def test_valid_plans_are_not_changed(small_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ModelFreeEngine(small_model)
    assert served(engine)
    assert UNPLANNED not in caplog.text
