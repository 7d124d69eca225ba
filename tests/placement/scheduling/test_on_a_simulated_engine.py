"""The simulated co-serving engine loses nothing, is reproducible, and shows differences between policies."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from placement.scheduling.baselines.bros import Bros
from placement.scheduling.interface import ServingPolicy, ServingSettings, TurnTargets
from placement.scheduling.latency_model import LatencyModel
from placement.scheduling.policy_registry import POLICIES, make_policy
from tests.placement.scheduling.simulated_engine import (
    Served,
    SimulatedCoServing,
    SimulatedRequest,
    SimulatedShape,
)

TRUTH = LatencyModel(per_token=2e-5, per_attended=9e-10, per_context=4e-8, constant=7e-3)
SHAPE = SimulatedShape(blocks=2_000, max_tokens=1024)
SLO = TurnTargets(0.055, 0.03)


def endless() -> Callable[[float], SimulatedRequest]:
    count = itertools.count()
    return lambda now: SimulatedRequest(f"off{next(count)}", now, 2000, 60, offline=True)


def varied() -> Callable[[float], SimulatedRequest]:
    """Return a load of six requests at a time, some short and some long."""
    count = itertools.count()
    given: list[SimulatedRequest] = []

    def offline(now: float) -> SimulatedRequest | None:
        given[:] = [job for job in given if not job.done]
        if len(given) >= 6:
            return None
        number = next(count)
        given.append(SimulatedRequest(f"off{number}", now, 500 + 700 * (number % 4), 60, offline=True))
        return given[-1]

    return offline  # type: ignore[return-value]


def run(name: str, shape: SimulatedShape = SHAPE, **settings: bool) -> Served:
    policy = make_policy(ServingSettings(name, SLO, **settings))  # type: ignore[arg-type]
    arrivals = [SimulatedRequest(f"on{i}", 0.3 * i + 0.01 * (i % 7), 1500, 40, slo=SLO) for i in range(40)]
    offline = endless() if name != "online_only" else lambda now: None
    return SimulatedCoServing(policy, shape, TRUTH).run(arrivals, 20.0, offline)


def worst_ttft(served: Served) -> float:
    return max(job.tokens_at[0] - job.arrival for job in served.online())


@pytest.mark.parametrize("name", POLICIES)
def test_every_online_request_gets_all_its_tokens_in_order(name: str) -> None:
    served = run(name)
    assert len(served.online()) == 40
    for job in served.finished:
        assert len(job.tokens_at) == job.output
        assert job.tokens_at == sorted(job.tokens_at)
        assert job.tokens_at[0] > job.arrival


@pytest.mark.parametrize("name", POLICIES)
def test_all_blocks_are_free_when_all_requests_have_ended(name: str) -> None:
    policy = make_policy(ServingSettings(name, SLO))
    engine = SimulatedCoServing(policy, SHAPE, TRUTH)
    engine.run(
        [SimulatedRequest(f"on{i}", 0.1 * i, 900, 10, slo=SLO) for i in range(20)], 30.0, lambda now: None
    )
    assert engine.free_blocks == SHAPE.blocks


def test_a_repeated_run_gives_the_same_result() -> None:
    first, second = run("conserve"), run("conserve")
    assert first.offline_tokens == second.offline_tokens
    assert [job.tokens_at for job in first.finished] == [job.tokens_at for job in second.finished]


def test_conserve_has_nearly_the_latency_of_online_only_and_nearly_the_most_offline_throughput() -> None:
    alone, most, ours = run("online_only"), run("non_preemptive"), run("conserve")
    assert worst_ttft(ours) < 1.3 * worst_ttft(alone)
    assert worst_ttft(most) > 1.5 * worst_ttft(alone)
    assert ours.offline_tokens > 0.75 * most.offline_tokens


def test_safepoints_shorten_the_time_to_the_first_token() -> None:
    with_them, without = run("conserve"), run("conserve", safepoints=False)
    assert with_them.aborts > 0
    assert without.aborts == 0
    assert worst_ttft(with_them) < worst_ttft(without)


def test_bros_starts_waiting_offline_requests_by_blocks_to_restore() -> None:
    """A load restores fewer blocks if its requests start by swap-in cost instead of by arrival."""
    tight = SimulatedShape(blocks=420, max_tokens=1024)
    by_arrival = type("ByArrival", (Bros,), {"start_order": ServingPolicy.start_order})
    settings = ServingSettings("bros", SLO)
    arrivals = [SimulatedRequest(f"on{i}", 0.3 * i + 0.01 * (i % 7), 1500, 40, slo=SLO) for i in range(40)]
    orders = []
    for policy in (Bros(settings), by_arrival(settings)):
        engine = SimulatedCoServing(policy, tight, TRUTH)
        served = engine.run([replace(job, tokens_at=[]) for job in arrivals], 20.0, varied())
        assert served.preemptions > 0
        orders.append([job.key for job in served.finished if job.offline])
    assert orders[0] != orders[1]


def test_a_checkpoint_saves_recomputation_after_preemptions() -> None:
    tight = SimulatedShape(blocks=420, max_tokens=1024)
    without = SimulatedShape(blocks=420, max_tokens=1024, checkpoint=False)
    assert run("conserve", tight).preemptions > 0
    assert run("conserve", tight).offline_tokens > run("conserve", without).offline_tokens
