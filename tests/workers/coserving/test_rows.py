"""What a policy is told of vLLM's requests: class, age, promise, lateness."""

from types import SimpleNamespace
from typing import Any

import pytest

from placement.serving.state import Slo
from workers.coserving.rows import Rows, slo_of

DEFAULT = Slo(2.0, 0.2)


def request(key: str, priority: int = 0, arrival: float = 100.0, **more: Any) -> Any:
    fields = {"num_tokens": 10, "num_computed_tokens": 0, "num_output_tokens": 0, "arguments": {}} | more
    return SimpleNamespace(request_id=key, priority=priority, arrival_time=arrival, **fields)


class Clocks:
    now = 50.0

    def rows(self) -> Rows:
        return Rows(
            DEFAULT, lambda r: r.arguments, lambda r: 0, lambda r: 0, lambda: self.now, lambda: self.now + 50
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, DEFAULT),
        ({"slo_ttft_ms": 500}, Slo(0.5, 0.2)),
        ({"slo_ttft_ms": "500", "slo_tbt_ms": 40.0}, Slo(0.5, 0.04)),
        ({"slo_tbt_ms": "soon"}, DEFAULT),
        ({"slo_tbt_ms": -1}, DEFAULT),
        ({"slo_ttft_ms": [1]}, DEFAULT),
    ],
)
def test_a_request_brings_its_promise_or_gets_the_engines(arguments: dict[str, Any], expected: Slo) -> None:
    assert slo_of(arguments, DEFAULT) == expected


def test_age_is_kept_across_clocks() -> None:
    clocks = Clocks()
    track = clocks.rows().add(request("a", arrival=97.0))
    assert track.arrival == pytest.approx(47.0)


def test_priority_above_zero_is_offline() -> None:
    rows = Clocks().rows()
    for key, priority in (("a", 0), ("b", 1), ("c", -5), ("d", 9)):
        rows.add(request(key, priority))
    assert [track.request.request_id for track in rows.online()] == ["a", "c"]
    assert rows.offline_count == 2
    rows.drop("b")
    assert rows.offline_count == 1


def test_the_oldest_waiting_offline_request_is_found_past_running_ones() -> None:
    rows = Clocks().rows()
    for index in range(5):
        rows.add(request(f"o{index}", 1))
    head = rows.offline_head(3, lambda r: r.request_id not in {"o0", "o1"})
    assert head is not None
    assert head.request.request_id == "o2"


def test_a_first_token_is_late_by_ttft_and_a_later_one_by_tbt() -> None:
    clocks = Clocks()
    rows = clocks.rows()
    asked = request("a")
    rows.add(asked)
    clocks.now += 1.9
    asked.num_output_tokens = 1
    assert not rows.served(asked, clocks.now)
    asked.num_output_tokens = 2
    assert rows.served(asked, clocks.now + 0.25)
    assert not rows.served(asked, clocks.now + 9.0), "no new token, nothing late"


def test_offline_tokens_are_never_late() -> None:
    rows = Clocks().rows()
    asked = request("a", 1)
    rows.add(asked)
    asked.num_output_tokens = 1
    assert not rows.served(asked, 1e6)
