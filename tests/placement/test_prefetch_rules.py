"""Parked KV is prefetched ahead of a turn that is announced or expected, and never while turns wait."""

from dataclasses import replace

import pytest

from placement.engines import EngineState, SplitState
from placement.overload.drop_plan import EngineShape
from placement.prefetch_rules import PrefetchRules, PrefetchTime, may_prefetch

RULES = PrefetchRules(park_after_s=60.0, lead_s=2.0)
IDLE = EngineState("d", 1, 1, 0, 0, 0, free_tokens=1000, running=3, waiting=0)


def test_an_announced_wait_overrides_observed_waits() -> None:
    assert RULES.prefetch(30.0, (500.0,) * 8) == PrefetchTime(28.0, 2.0)
    assert RULES.prefetch(1.0, ()) == PrefetchTime(0.5, 0.5)


def test_observed_waits_decide_when_no_wait_is_announced() -> None:
    assert RULES.prefetch(None, (100.0, 300.0)) is None  # too few waits
    # A quarter of the waits is shorter than 200 s.
    assert RULES.prefetch(None, (400.0, 100.0, 300.0, 200.0)) == PrefetchTime(198.0, 2.0)
    assert RULES.prefetch(None, (10.0, 10.0, 10.0, 1000.0)) is None  # its KV is not parked by then


@pytest.mark.parametrize(
    "busy", [{"waiting": 1}, {"waiting_prompt_tokens": 9}, {"draining": True}, {"free_tokens": 499}]
)
def test_nothing_is_prefetched_while_a_turn_waits_or_space_is_missing(busy: dict[str, int]) -> None:
    assert may_prefetch(IDLE, 500)
    assert not may_prefetch(replace(IDLE, **busy), 500)  # type: ignore[arg-type]


def test_nothing_is_prefetched_while_layers_are_shared() -> None:
    """An engine that shares its layers loads nothing from the host, so there is nothing to prefetch."""
    shape = EngineShape(8, 3e6, 1000, 8192, 1024, 1e9, None)
    whole = SplitState("d:1", shape, 0, 1000, newest=7)
    assert may_prefetch(replace(IDLE, split=whole), 500)
    assert not may_prefetch(replace(IDLE, split=replace(whole, epoch=8, partners=("e:1",))), 500)
