"""An overload is declared when turns need more KV than eviction can free, and ends when demand is low."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.overload.signal import WINDOW_S, KvDemand, OverloadReason, OverloadWatch

CALM = KvDemand(capacity=1_000, held=300, evictable=0, waiting=0)
FULL = KvDemand(capacity=1_000, held=950, evictable=0, waiting=500)
demands = st.builds(
    KvDemand,
    st.just(1_000.0),
    *(st.floats(0, 1_000) for _ in range(2)),
    *(st.floats(0, 3_000) for _ in range(2)),
)


def after(*phases: tuple[KvDemand, float], every: float = 0.25) -> OverloadWatch:
    watch, now = OverloadWatch(), 0.0
    for demand, seconds in phases:
        for _ in range(int(seconds / every)):
            watch.observe(demand, now)
            now += every
    return watch


@given(demands, demands, st.floats(0.05, 5))
def test_constant_demand_changes_the_state_at_most_once(
    before: KvDemand, constant: KvDemand, every: float
) -> None:
    watch, changes = after((before, 20)), 0
    for look in range(200):
        was = watch.state.overloaded
        changes += watch.observe(constant, 20 + look * every).overloaded != was
    assert changes <= 1


@given(demands, st.floats(0, 1e6))
def test_evictable_kv_does_not_change_whether_there_is_an_overload(
    demand: KvDemand, evictable: float
) -> None:
    without, much = after((demand, 10)).state, after((replace(demand, evictable=evictable), 10)).state
    assert without.overloaded == much.overloaded and without.asked == much.asked


def test_an_overload_is_declared_with_its_reason_and_the_lacking_tokens() -> None:
    state = after((CALM, 10), (FULL, 20)).state
    assert (state.overloaded, state.reason, state.lacking_tokens) == (True, OverloadReason.KV_SHORT, 450)
    assert 10 < state.since < 20 and 1.4 < state.asked < 1.46


def test_one_long_waiting_prompt_is_not_an_overload() -> None:
    state = after((CALM, 10), (FULL, 0.25)).state
    assert (state.overloaded, state.reason) == (False, OverloadReason.BRIEF)


def test_turns_that_wait_although_kv_is_free_are_reported_as_short_of_compute() -> None:
    busy = KvDemand(capacity=1_000, held=400, evictable=0, waiting=2_000)
    assert after((busy, 20)).state.reason is OverloadReason.COMPUTE
    assert after((replace(busy, waiting=1_500, refused=500), 20)).state.reason is OverloadReason.COMPUTE


def test_large_conversations_that_fit_on_no_decoder_are_an_overload_although_kv_is_free() -> None:
    large = KvDemand(capacity=1_000, held=600, evictable=0, waiting=0, refused=900)
    assert after((large, 20)).state.reason is OverloadReason.KV_SHORT


def test_idle_and_offline_kv_is_evicted_before_an_overload_is_declared() -> None:
    state = after((KvDemand(capacity=1_000, held=600, evictable=400, waiting=300), 20)).state
    assert (state.overloaded, state.reason) == (False, OverloadReason.EVICTABLE)


def test_an_overload_ends_when_demand_falls_below_half_of_the_kv() -> None:
    less = KvDemand(capacity=1_000, held=700, evictable=0, waiting=0)
    watch = after((FULL, 20), (less, 20))
    assert (watch.state.overloaded, watch.state.reason) == (True, OverloadReason.NOT_OVER)
    watch = after((FULL, 20), (less, 20), (CALM, 20))
    assert not watch.state.overloaded and watch.state.since > 40


def test_an_overload_ends_when_no_decoder_accepts_conversations() -> None:
    watch = after((FULL, 20))
    assert watch.state.overloaded
    state = watch.observe(KvDemand(0, 0, 0, 0), 20.0)
    assert (state.overloaded, state.reason, state.asked, state.since) == (
        False,
        OverloadReason.NO_DECODER,
        0,
        20.0,
    )
    assert watch.observe(FULL, 21.0).reason is OverloadReason.BRIEF  # averages begin anew


@given(demands, st.floats(0, 1e9))
def test_a_single_observation_is_not_an_overload(demand: KvDemand, now: float) -> None:
    watch = OverloadWatch()
    state = watch.observe(demand, now)
    assert not state.overloaded and state.asked * 1_000 == pytest.approx(demand.asked)
    for look in range(1, 20):
        assert not watch.observe(CALM, now + look).overloaded


def test_an_overload_is_declared_after_a_window_of_observations() -> None:
    window = WINDOW_S
    assert not after((FULL, window), every=0.5).state.overloaded
    assert after((FULL, window + 0.5), every=0.5).state.reason is OverloadReason.KV_SHORT


def test_the_demand_of_refused_turns_is_averaged_like_that_of_waiting_turns() -> None:
    """A single sample with fewer waiting turns does not show that demand has fallen."""
    computing = KvDemand(capacity=1_000, held=100, evictable=0, waiting=1_500, refused=500)
    glimpse = replace(computing, waiting=400)
    assert after((computing, 20), (glimpse, 0.25)).state.reason is OverloadReason.COMPUTE
