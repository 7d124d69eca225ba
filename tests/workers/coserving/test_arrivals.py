"""Which arrivals raise the flag of the iteration in the model, as the scheduler has published it."""

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
    YieldingPrompts,
)
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.policy_registry import make_policy
from workers.coserving.iterations import PendingIteration
from workers.coserving.requests import ArrivalWatch
from workers.coserving.safepoint import RAISED, Flag

MODEL = LatencyModel(per_token=1e-4, per_attended=0.0, per_context=0.0, constant=5e-3)
PROMPT = BatchWork.of([(1900, 0)])  # of a class that is worth nothing, 0.2 s long
EPOCH = 7


@pytest.fixture
def flag() -> Iterator[Flag]:
    made = Flag(f"conserve-test-{uuid.uuid4().hex[:8]}")
    yield made
    made.close()
    made.remove()


def iteration(**more: Any) -> PendingIteration:
    batch = RunningBatch(PROMPT, BatchWork(), 0, 1, 0.195, 0.0, None, (YieldingPrompts(0.0, PROMPT, 60.0),))
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


BETTER = RequestView("better", False, 10.1, 300, 0, slo=TurnTargets(1.0, 0.1), queue_weight=8.0)
LESSER = replace(BETTER, key="lesser", queue_weight=0.0)


def test_one_of_a_better_class_does_and_one_of_the_same_does_not(flag: Flag) -> None:
    assert not raised(flag, iteration(), 10.05, LESSER)
    assert raised(flag, iteration(), 10.05, BETTER)


def test_what_waits_of_lesser_classes_is_not_before_it(flag: Flag) -> None:
    """Late in an iteration it is worth an abort only where the target is at stake."""
    late, much = 10.15, BatchWork.of([(20_000, 0)])
    assert not raised(flag, iteration(queued={0.0: much}), late, BETTER)
    assert not raised(flag, iteration(), late, replace(LESSER, tokens=20_000), BETTER)
    assert raised(flag, iteration(queued={8.0: much}), late, BETTER)
