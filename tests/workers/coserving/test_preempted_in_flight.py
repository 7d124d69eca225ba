"""A request that is preempted while its iteration is in flight gets the token of that iteration."""

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from placement.scheduling.latency_model import LatencyModel, SelfCorrecting
from tests.workers.coserving.model_free import StepRequest
from tests.workers.coserving.overlapped import OverlappedEngine

TOKENS = 8
QUICK = LatencyModel(1e-6, 0, 0, 1e-3)  # no step is worth aborting, so steps overlap


class SampleCount(OverlappedEngine):
    """Counter of sampled tokens, because each draw advances the generator of a request with a seed."""

    drawn = 0

    def forward(self, rows: list[StepRequest], aborted: bool = False) -> list[list[int]]:
        sampled = super().forward(rows, aborted)
        self.drawn += sum(map(len, sampled))
        return sampled


def test_a_request_preempted_in_flight_keeps_its_sampled_token(small_model: Path) -> None:
    engine = SampleCount(small_model, latency=QUICK)
    engine.scheduler.latency = SelfCorrecting(
        QUICK, bound=1.0
    )  # bound=1.0: steps without a model must not correct it
    engine.ask("a", [33 + number % 80 for number in range(100)], TOKENS, priority=1)
    while len(engine.outputs["a"]) < 2:
        engine.step(abort_share=0.0)
    request = engine.scheduler.requests["a"]
    assert request.num_in_flight_tokens, "no step is in flight"
    engine.scheduler.preempt(request, time.monotonic())
    limit = time.monotonic() + 30
    while engine.scheduler.has_requests():
        assert time.monotonic() < limit
        engine.step(abort_share=0.0)
    assert len(engine.outputs["a"]) == engine.drawn == TOKENS
    assert not engine.lies


@pytest.mark.parametrize("delivers_kv", [False, True])
def test_a_request_preempted_at_its_last_token_is_computed_again_only_if_its_kv_must_be_delivered(
    small_model: Path, delivers_kv: bool
) -> None:
    engine = SampleCount(small_model, latency=QUICK)
    engine.scheduler.requires_kv_delivery = delivers_kv  # as with NIXL's connector
    engine.ask("a", [33 + number % 80 for number in range(100)], 1, priority=1)
    request = engine.scheduler.requests["a"]
    while not request.num_in_flight_tokens:
        engine.step(abort_share=0.0)
    engine.scheduler.preempt(request, time.monotonic())
    limit = time.monotonic() + 30
    while engine.scheduler.has_requests():
        assert time.monotonic() < limit
        engine.step(abort_share=0.0)
    assert len(engine.outputs["a"]) == 1
    assert engine.drawn == (2 if delivers_kv else 1), "after a preemption its blocks are gone"


def test_the_worker_gets_all_tokens_of_a_request_that_one_iteration_preempts_and_resumes(
    small_model: Path,
) -> None:
    """A worker that does not get the tokens of a resumed request ends the engine."""
    engine = SampleCount(small_model, latency=QUICK)
    engine.ask("a", [33 + number % 80 for number in range(100)], TOKENS, priority=1)
    while len(engine.outputs["a"]) < 2:
        engine.step(abort_share=0.0)
    scheduler, steps = engine.scheduler, list[Any]()
    request, schedule = scheduler.requests["a"], scheduler.schedule
    scheduler.schedule = lambda *asked: steps.append(schedule(*asked)) or steps[-1]
    with scheduler.only_result():
        while engine.core.batch_queue:
            engine.core.step_with_batch_queue()
    assert not request.num_in_flight_tokens, "vLLM resumes it after the result of its step"
    scheduler.preempt(request, time.monotonic())
    limit = time.monotonic() + 30
    while scheduler.has_requests():
        assert time.monotonic() < limit
        engine.step(abort_share=0.0)
    resumed = [step.scheduled_cached_reqs for step in steps if step.scheduled_cached_reqs.resumed_req_ids]
    assert len(resumed) == 1 and resumed[0].all_token_ids.keys() == {request.request_id}
