"""Offline work may lengthen an iteration of decoding online requests by a bounded time."""

import math
from dataclasses import replace

import pytest

from placement.scheduling.interface import TurnTargets
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prompt_budget import stretched_iteration_s, tightest_target
from tests.placement.scheduling.views import fill, offline, online, policy_with, view

MODEL = LatencyModel(per_token=0.0, per_attended=0.0, per_context=1e-6, constant=0.010, per_request=0.001)
MODEL_BY_TOKEN = replace(MODEL, per_token=1e-4)
TBT_S = 0.1


def stretched(count: int) -> float:
    each = BatchWork.of([(1, 999)] * count)  # 2 ms each
    return stretched_iteration_s(each, TBT_S, MODEL, 2.0)


@pytest.mark.parametrize("count", [1, 5, 10])
def test_cheap_decoding_lets_offline_work_use_the_whole_target(count: int) -> None:
    assert stretched(count) == pytest.approx(TBT_S)


def test_offline_work_gets_half_of_the_remaining_target_if_decoding_costs_twice_its_limit() -> None:
    alone = 0.010 + 20 * 0.002
    assert stretched(20) == pytest.approx(alone + (TBT_S - alone) / 2)


def test_more_decoding_requests_shorten_iterations_until_decoding_alone_fills_them() -> None:
    lengths = [stretched(count) for count in range(1, 46)]
    shortest = lengths.index(min(lengths))
    assert lengths[: shortest + 1] == sorted(lengths[: shortest + 1], reverse=True)
    assert all(MODEL.seconds(BatchWork.of([(1, 999)] * n)) <= stretched(n) for n in range(1, 60))


def test_offline_work_gets_a_quarter_of_the_remaining_target_beside_long_contexts() -> None:
    long = BatchWork.of([(1, 8999)] * 10)  # 10 ms each
    assert stretched_iteration_s(long, 0.2, MODEL, 2.0) == pytest.approx(0.11 + (0.2 - 0.11) / 4)
    free = LatencyModel(per_token=0.0, per_attended=0.0, per_context=1e-6, constant=0.0)
    assert stretched_iteration_s(long, 0.2, free, 2.0) == pytest.approx(0.09 + (0.2 - 0.09) / 4)


def test_the_tightest_tbt_target_of_decoding_requests_limits_an_iteration() -> None:
    others = [online(f"a{number}", 1000, 999, slo=TurnTargets(1.0, TBT_S)) for number in range(2)]
    mixed = (*others, online("strict", 1000, 999, slo=TurnTargets(1.0, 0.05)))
    asked = replace(mixed[0], last_token=0.0)
    assert tightest_target((asked, *mixed[1:]), 0.0, MODEL, 0.0, 0.35, 2.0) == pytest.approx(0.05)


def test_a_target_that_decoding_alone_exceeds_leaves_no_offline_time() -> None:
    assert stretched(100) == pytest.approx(0.010 + 100 * 0.002)


def test_without_a_limit_on_decoding_cost_offline_work_uses_the_whole_target() -> None:
    thirty = BatchWork.of([(1, 999)] * 30)
    assert stretched_iteration_s(thirty, TBT_S, MODEL, math.inf) == pytest.approx(TBT_S)


def test_offline_work_has_less_of_an_iteration_beside_many_requests() -> None:
    def offline_tokens(decoding_per_constant: float) -> int:
        policy = policy_with({"decoding_per_constant": decoding_per_constant})
        slo = TurnTargets(1.0, TBT_S)
        twenty = (online(f"a{number}", 1000, 999, slo=slo) for number in range(20))  # 2 ms each
        return fill(policy, view(*twenty, offline("off")), MODEL_BY_TOKEN)["off"]

    assert 0 < offline_tokens(1.0) < offline_tokens(2.0) < offline_tokens(math.inf)
