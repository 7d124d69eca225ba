"""Capacity signals are averages over a window, so that a short peak hardly changes them."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.engines import Role
from placement.routing.least_kv import FirstTurn
from placement.sizing.capacity import CapacityWatch, Signals
from tests.support.engines import info, placer, state


def signals(watch: CapacityWatch, prefillers: int, now: float) -> Signals:
    return watch.signals(prefillers, 0.0, 1, 0.0, now)


@given(st.floats(0.1, 3), st.floats(0.05, 2))
def test_the_measured_load_equals_a_steady_demand(load: float, gap: float) -> None:
    watch, now = CapacityWatch(window_s=20), 0.0
    while now < 200:
        now += gap
        watch.arrived(load * gap, now)
    assert signals(watch, 1, now).prefill_load == pytest.approx(load, rel=gap / 20 + 0.01)
    assert signals(watch, 2, now).prefill_load == pytest.approx(load / 2, rel=gap / 20 + 0.01)


def test_the_prefill_load_fades_when_no_prompts_arrive() -> None:
    watch = CapacityWatch(window_s=10)
    watch.arrived(1_000, 0.0)
    assert signals(watch, 1, 0.0).prefill_load == pytest.approx(100)
    assert signals(watch, 1, 200.0).prefill_load < 0.001


def test_the_load_of_arriving_prompts_without_a_prefiller_is_infinite() -> None:
    watch = CapacityWatch(window_s=60)
    assert signals(watch, 0, 0.0).prefill_load == 0
    watch.arrived(0.1, 0.0)
    assert signals(watch, 0, 0.0).prefill_load == inf


def test_one_second_of_full_load_hardly_changes_the_mean_of_the_window() -> None:
    watch = CapacityWatch(window_s=60)
    watch.observed(0.2, 0.0)
    watch.observed(1.0, 1.0)
    assert signals(watch, 1, 1.0).decoder_pressure == pytest.approx(0.2, abs=0.03)
    watch.observed(1.0, 301.0)
    assert signals(watch, 1, 301.0).decoder_pressure == pytest.approx(1.0, abs=0.01)
    assert signals(watch, 1, 301.0).observed_s == 301


@pytest.mark.parametrize(
    ("load", "wait_s", "expected"), [(0.5, 3.0, inf), (1.5, 4.0, 12.0), (3.0, 10.0, 0.0), (0.1, 11.0, 0.0)]
)
def test_prefillers_are_predicted_to_saturate_when_the_shortest_queue_reaches_its_limit(
    load: float, wait_s: float, expected: float
) -> None:
    assert Signals(2, load, wait_s, 2, 0.5, 0.0, 60.0).saturates_in_s(10.0) == expected


def test_the_placers_signals_include_demand_that_was_never_placed() -> None:
    made = placer(capacity_window_s=10.0)
    made.engine_up(info("p0", Role.PREFILL))
    for decoder in ("d0", "d1"):
        made.engine_up(info(decoder, kv_tokens=10_000))
    for second in range(100):
        made.prompt_arrived(300_000, float(second))  # three seconds of prompt a second, none placed
        made.observe_overload(float(second))
    seen = made.signals(0, 99.0)
    assert seen.prefill_load == pytest.approx(3.0, rel=0.1)
    assert (seen.prefillers, seen.decoders, seen.decoder_pressure) == (1, 2, 0.0)

    made.place(FirstTurn("c", 4650), 99.0)  # with 100 of headroom, a quarter of 2 x 9,500
    made.observe_overload(1_000.0)
    assert made.signals(0, 1_000.0).decoder_pressure == pytest.approx(0.25, abs=0.001)
    made.observe(state("d1", 1, draining=True), 1_000.0)
    made.observe_overload(2_000.0)
    seen = made.signals(0, 2_000.0)
    assert (seen.decoders, seen.decoder_pressure) == (1, pytest.approx(0.5, abs=0.001))
