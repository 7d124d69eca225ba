"""A policy sees class, age, SLO target, lateness and order of vLLM's requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.policy_registry import make_policy
from workers.engine.coserving.requests import TrackedRequests, queue_weight_of, slo_of

DEFAULT = TurnTargets(2.0, 0.2)


def request(key: str, priority: int = 0, arrival: float = 100.0, **more: Any) -> Any:
    fields = {"num_tokens": 10, "num_computed_tokens": 0, "num_output_tokens": 0, "arguments": {}}
    fields |= {"restore": 0} | more
    return SimpleNamespace(request_id=key, priority=priority, arrival_time=arrival, **fields)


class Clocks:
    now = 50.0

    def requests(self) -> TrackedRequests:
        return TrackedRequests(
            DEFAULT,
            lambda r: r.arguments,
            lambda r: 0,
            lambda r: 0,
            lambda r: r.restore,
            lambda: self.now,
            lambda: self.now + 50,
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, DEFAULT),
        ({"slo_ttft_ms": 500}, TurnTargets(0.5, 0.2)),
        ({"slo_ttft_ms": "500", "slo_tbt_ms": 40.0}, TurnTargets(0.5, 0.04)),
        ({"slo_tbt_ms": "soon"}, DEFAULT),
        ({"slo_tbt_ms": -1}, DEFAULT),
        ({"slo_ttft_ms": [1]}, DEFAULT),
        ({"slo_tbt_ms": "inf"}, DEFAULT),
        ({"slo_tbt_ms": "nan"}, DEFAULT),
        ({"slo_ttft_ms": 10**400}, DEFAULT),
    ],
)
def test_a_request_has_its_own_slo_or_that_of_the_engine(
    arguments: dict[str, Any], expected: TurnTargets
) -> None:
    assert slo_of(arguments, DEFAULT) == expected


@pytest.mark.parametrize(
    ("said", "queue_weight"),
    [(2.5, 2.5), ("3", 3.0), ("soon", 0.0), ([1], 0.0), ("nan", 0.0), (10**400, 0.0)],
)
def test_a_queue_weight_that_is_no_finite_number_counts_as_zero(said: object, queue_weight: float) -> None:
    assert queue_weight_of({"queue_weight": said}) == queue_weight
    assert queue_weight_of({}) == 0.0


def test_the_age_of_a_request_is_right_although_the_two_clocks_differ() -> None:
    clocks = Clocks()
    one = clocks.requests().add(request("a", arrival=97.0))
    assert one.arrival == pytest.approx(47.0)


def test_a_request_with_a_priority_above_zero_is_offline() -> None:
    tracked = Clocks().requests()
    for key, priority in (("a", 0), ("b", 1), ("c", -5), ("d", 9)):
        tracked.add(request(key, priority))
    assert [one.request.request_id for one in tracked.online()] == ["a", "c"]
    assert tracked.offline_count == 2
    tracked.drop("b")
    assert tracked.offline_count == 1


def test_the_oldest_waiting_offline_requests_are_found_behind_running_ones() -> None:
    tracked = Clocks().requests()
    for index in range(5):
        tracked.add(request(f"o{index}", 1))
    waiting = tracked.offline_waiting(3, lambda r: r.request_id not in {"o0", "o1"})
    assert [one.request.request_id for one in waiting] == ["o2", "o3"]


def test_a_first_token_is_judged_by_ttft_and_a_later_token_by_tbt() -> None:
    clocks = Clocks()
    tracked = clocks.requests()
    asked = request("a")
    tracked.add(asked)
    clocks.now += 1.9
    asked.num_output_tokens = 1
    assert not tracked.served([asked], clocks.now)
    asked.num_output_tokens = 2
    assert tracked.served([asked], clocks.now + 0.25)
    assert not tracked.served([asked], clocks.now + 9.0), "no new token, nothing late"


def test_offline_tokens_are_never_late() -> None:
    tracked = Clocks().requests()
    asked = request("a", 1)
    tracked.add(asked)
    asked.num_output_tokens = 1
    assert not tracked.served([asked], 1e6)


@pytest.mark.parametrize(("policy", "expected"), [("bros", ["second", "third", "first"]), ("conserve", [])])
def test_only_bros_starts_offline_requests_by_the_blocks_to_restore(policy: str, expected: list[str]) -> None:
    tracked = Clocks().requests()
    for key, restore in (("first", 30), ("second", 0), ("third", 5), ("runs", 0)):
        tracked.add(request(key, 1, restore=restore))
    order = tracked.start_order(make_policy(ServingSettings(policy)), 10, lambda r: r.request_id != "runs")
    assert [one.request_id for one in order] == expected


def test_slo_targets_of_offline_requests_are_ignored() -> None:
    """A batch job could have any targets in its lines, and turns would wait for them."""
    tracked = Clocks().requests()
    for key, priority, expected in (("turn", 0, TurnTargets(0.5, 0.001)), ("line", 1, DEFAULT)):
        asked = request(key, priority)
        asked.arguments = {"slo_ttft_ms": 500, "slo_tbt_ms": 1}
        assert tracked.add(asked).slo == expected


def test_tokens_recorded_for_a_whole_iteration_equal_tokens_recorded_one_by_one() -> None:
    clocks = Clocks()
    alone, together = clocks.requests(), clocks.requests()
    asked = [request("a"), request("b"), request("off", 1)]
    for one in asked:
        alone.add(one)
        together.add(one)
    now, late = clocks.now, []
    for step, passed in enumerate((1.9, 0.1, 0.25, 0.1, 0.3)):
        now += passed
        for one in asked:
            one.num_output_tokens += 1
        each = sum(alone.served([one], now) for one in asked)
        late.append(each)
        assert each == (together.served(None if step else asked, now, decodes=True))
    assert late == [0, 0, 2, 0, 2]
    assert together.until_due(now) == pytest.approx(0.2)
    together.settle()
    for key, one in alone.by_id.items():
        other = together.by_id[key]
        assert (one.last_token, one.last_served, one.outputs) == (
            other.last_token,
            other.last_served,
            other.outputs,
        )


def test_tokens_of_an_iteration_that_skips_a_request_are_recorded_one_by_one() -> None:
    clocks = Clocks()
    tracked = clocks.requests()
    asked = [request("a"), request("b")]
    for one in asked:
        tracked.add(one)
    asked[0].num_output_tokens = 1
    tracked.served(asked, clocks.now, decodes=True)
    assert not tracked.served_together
