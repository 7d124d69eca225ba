"""How long offline work makes an iteration beside online rows that decode."""

import math
from dataclasses import replace

import pytest

from placement.latency import BatchWork, LatencyModel
from placement.serving import ServingSettings, make_policy
from placement.serving.online import worth_stretching
from placement.serving.state import Slo
from tests.placement.serving.views import fill, offline, online, view

MODEL = LatencyModel(per_token=0.0, per_attended=0.0, per_context=1e-6, constant=0.010, per_row=0.001)
MODEL_BY_TOKEN = replace(MODEL, per_token=1e-4)
PROMISE_S = 0.1


def rows(count: int, slo: Slo = Slo(1.0, PROMISE_S)) -> list[object]:  # noqa: B008
    return [online(f"a{number}", 1000, 999, slo=slo) for number in range(count)]  # 2 ms each


def stretched(count: int) -> float:
    return worth_stretching(rows(count), MODEL, 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 5, 10])
def test_rows_that_cost_no_more_than_twice_the_constant_have_the_whole_promise(count: int) -> None:
    assert stretched(count) == pytest.approx(PROMISE_S)


def test_rows_that_cost_four_times_the_constant_leave_offline_work_half_of_what_the_promise_leaves() -> None:
    alone = 0.010 + 20 * 0.002
    assert stretched(20) == pytest.approx(alone + (PROMISE_S - alone) / 2)


def test_more_rows_never_have_longer_iterations_until_they_fill_them_themselves() -> None:
    lengths = [stretched(count) for count in range(1, 46)]
    shortest = lengths.index(min(lengths))
    assert lengths[: shortest + 1] == sorted(lengths[: shortest + 1], reverse=True)
    assert all(MODEL.seconds(BatchWork.of([(1, 999)] * n)) <= stretched(n) for n in range(1, 60))


def test_some_of_the_promise_is_offline_work_s_however_long_the_contexts_are() -> None:
    long = [online(f"a{number}", 9000, 8999, slo=Slo(1.0, 0.2)) for number in range(10)]  # 10 ms each
    assert worth_stretching(long, MODEL, 2.0) == pytest.approx(0.11 + (0.2 - 0.11) / 4)
    free = LatencyModel(per_token=0.0, per_attended=0.0, per_context=1e-6, constant=0.0)
    assert worth_stretching(long, free, 2.0) == pytest.approx(0.09 + (0.2 - 0.09) / 4)


def test_the_strictest_promise_counts() -> None:
    mixed = [*rows(2), online("strict", 1000, 999, slo=Slo(1.0, 0.05))]
    assert worth_stretching(mixed, MODEL, 2.0) == pytest.approx(0.05)  # type: ignore[arg-type]


def test_a_promise_that_rows_break_by_themselves_leaves_nothing() -> None:
    assert stretched(100) == pytest.approx(0.010 + 100 * 0.002)


def test_an_operator_may_have_the_whole_promise_always() -> None:
    assert worth_stretching(rows(30), MODEL, math.inf) == pytest.approx(PROMISE_S)  # type: ignore[arg-type]


def test_offline_work_has_less_of_an_iteration_beside_many_rows() -> None:
    def offline_tokens(rows_per_constant: float) -> int:
        policy = make_policy(ServingSettings(rows_per_constant=rows_per_constant))
        return fill(policy, view(*rows(20), offline("off")), MODEL_BY_TOKEN)["off"]  # type: ignore[arg-type]

    assert 0 < offline_tokens(1.0) < offline_tokens(2.0) < offline_tokens(math.inf)
