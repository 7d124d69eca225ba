"""Fixtures: workers that can share their layers, created for each test."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.workers.overload.workers_here import LIMITS, Group, WorkerHere


@pytest.fixture
def four() -> Iterator[Group]:
    made = tuple(WorkerHere() for _ in range(4))
    for worker in made:
        worker.split.limits = replace(LIMITS, order_s=10.0)
        worker.model.take_report()
    yield made
    for worker in made:
        worker.model.close()
