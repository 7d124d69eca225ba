"""An arrival aborts the running iteration or not, judged by the record that the scheduler publishes."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from placement.scheduling.interface import (
    RequestView,
    RunningBatch,
    ServingSettings,
    TurnTargets,
)
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.policy_registry import make_policy
from workers.engine.coserving.arrivals import ArrivalWatch
from workers.engine.coserving.iterations import PendingIteration
from workers.engine.coserving.safepoint import RAISED, Flag

MODEL = LatencyModel(per_token=1e-4, per_attended=0.0, per_context=0.0, constant=5e-3)
OFFLINE = BatchWork.of([(1900, 0)])  # 0.2 s long
EPOCH = 7


@pytest.fixture
def flag() -> Iterator[Flag]:
    made = Flag(f"conserve-test-{uuid.uuid4().hex[:8]}")
    yield made
    made.close()
    made.remove()


def iteration(**more: Any) -> PendingIteration:
    batch = RunningBatch(OFFLINE, BatchWork(), 1, 0, 0.195, 0.0, None)
    return PendingIteration(10.0, batch, EPOCH, (), 0, **more)


def raised(flag: Flag, running: PendingIteration, at: float, *arrivals: RequestView) -> bool:
    policy = make_policy(ServingSettings())
    views = {view.key: view for view in arrivals}
    watch = ArrivalWatch(
        lambda: policy, flag, lambda: MODEL, lambda request, now: views[request.request_id], lambda: at
    )
    watch.in_flight = running
    for view in arrivals:
        watch.on_arrival(SimpleNamespace(request_id=view.key, priority=0))
    assert watch.counts["coserving_unjudged"] == 0
    return flag.fields[RAISED] == EPOCH


PATIENT = RequestView("patient", False, 10.1, 300, 0, slo=TurnTargets(1.0, 0.1))
URGENT = replace(PATIENT, key="urgent", slo=TurnTargets(0.3, 0.1))


def test_an_arrival_raises_the_flag_if_it_would_wait_for_too_much_of_its_ttft(flag: Flag) -> None:
    assert not raised(flag, iteration(), 10.05, PATIENT)
    assert raised(flag, iteration(), 10.05, URGENT)


def test_queued_prompts_add_to_the_wait_of_an_arrival(flag: Flag) -> None:
    much = BatchWork.of([(9_000, 0)])
    assert raised(flag, iteration(queued=much), 10.05, PATIENT)


def test_earlier_arrivals_add_to_the_wait_of_an_arrival(flag: Flag) -> None:
    never = replace(PATIENT, key="never", tokens=9_000, slo=TurnTargets(1e6, 0.1))
    assert raised(flag, iteration(), 10.05, never, PATIENT)
