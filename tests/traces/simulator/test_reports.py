"""Simulated engines report what changed, so that a large fleet costs no more per turn than a small one."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from placement.engines import EngineState
from placement.routing.placer import Placer
from traces.format import TraceConversation, TraceTurn
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

from .conftest import fleet

TURNS = (TraceTurn(2_000, 0, 20), *[TraceTurn(100, 2_020 + 120 * n, 20, 1.0) for n in range(9)])


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Return the engines that reported, with the times of their reports, in order."""
    found: list[tuple[str, float]] = []
    observe = Placer.observe

    def noted(self: Placer, report: EngineState, now: float) -> Any:
        found.append((report.engine, now))
        return observe(self, report, now)

    monkeypatch.setattr(Placer, "observe", noted)
    return found


def play(decoders: int) -> None:
    """Play 20 conversations of ten turns, which takes about twenty simulated seconds."""
    settings = SimulationSettings(SystemSettings(System.ELASTIC))
    arrivals = [TraceConversation(f"c{n}", n * 0.5, TURNS) for n in range(20)]
    Simulation(fleet(decoders=decoders), settings).run(arrivals)


def test_an_engine_sends_fewer_than_two_reports_a_second_on_average_and_not_one_a_turn(
    reports: list[tuple[str, float]],
) -> None:
    play(decoders=100)
    seconds, engines, looks = reports[-1][1], 101, 20 * len(TURNS)
    assert len(reports) < 2 * seconds * engines < looks * engines / 4


def test_an_engine_that_never_changes_reports_once_a_second(reports: list[tuple[str, float]]) -> None:
    play(decoders=30)
    counts = Counter(engine for engine, _ in reports)
    quiet = min(counts, key=counts.__getitem__)
    times = [at for engine, at in reports if engine == quiet]
    assert len(times) > 10 and max(b - a for a, b in pairwise(times)) < 1.5


def test_an_engine_that_has_changed_reports_before_a_second_has_passed(
    reports: list[tuple[str, float]],
) -> None:
    play(decoders=1)
    times = [at for engine, at in reports if engine == "prefill-0"]
    assert min(b - a for a, b in pairwise(times)) < 0.5
