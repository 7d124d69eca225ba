"""Requests that may have another full block are found without examining every request in every step."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.growing_requests import GrowingRequests

BLOCK = 16


@dataclass
class Decoding:
    num_computed_tokens: int
    num_in_flight_tokens: int = 0

    @property
    def full(self) -> int:
        return (self.num_computed_tokens - self.num_in_flight_tokens) // BLOCK


class OverlappedSteps:
    """Random steps; up to `in_flight` steps are scheduled before the first one's result arrives."""

    def __init__(self, in_flight: int) -> None:
        self.requests: dict[str, tuple[Decoding]] = {}
        self._in_flight = in_flight
        self._results: list[dict[str, int]] = []
        self.full: dict[str, int] = {}  # full blocks of each request of the newest step
        self.growing = GrowingRequests(BLOCK)

    def step(self, tokens: dict[str, int], admitted: bool = False) -> list[str]:
        for key, count in tokens.items():
            self.requests[key][0].num_computed_tokens += count
            self.requests[key][0].num_in_flight_tokens += count
        output: Any = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=[0] * admitted,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )
        found = self.growing.of_step(output, self.requests)
        self.full = {key: self.requests[key][0].full for key in tokens}
        self._results.append(tokens)
        while len(self._results) >= self._in_flight:
            for key, count in self._results.pop(0).items():
                if key in self.requests:
                    self.requests[key][0].num_in_flight_tokens -= count
        return found


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_no_full_block_is_missed_in_any_mix_of_steps(seed: int, in_flight: int) -> None:
    rng = random.Random(seed)
    steps = OverlappedSteps(in_flight)
    seen: dict[str, int] = {}
    for number in range(600):
        admitted = rng.random() < 0.03
        if admitted:
            steps.requests[f"r{number}"] = (Decoding(rng.randrange(3 * BLOCK)),)
        if steps.requests and rng.random() < 0.02:
            gone = rng.choice(list(steps.requests))
            del steps.requests[gone]
        scheduled = {key: 1 for key in steps.requests if rng.random() < 0.97 or key == f"r{number}"}
        if admitted or (scheduled and rng.random() < 0.02):
            scheduled[f"r{number}" if admitted else rng.choice(list(scheduled))] = rng.randrange(1, 5 * BLOCK)
        found = steps.step(scheduled, admitted)
        for key in scheduled:
            full = steps.full[key]
            if key in found:
                seen[key] = full
            elif key in seen:
                assert full == seen[key], (number, key)


def test_decoding_steps_examine_each_request_once_per_block() -> None:
    steps = OverlappedSteps(in_flight=2)
    steps.requests = {f"r{n}": (Decoding(40 + n),) for n in range(64)}
    every = dict.fromkeys(steps.requests, 1)
    steps.step(every, admitted=True)
    steps.step(every)
    steps.step(every)
    looks = [len(steps.step(every)) for _ in range(4 * BLOCK)]
    assert sum(looks) <= 64 * 5
    assert max(looks) <= 64 // BLOCK + 4
