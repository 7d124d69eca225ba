"""Replicas stay within their limits and follow the load without oscillating."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from placement.sizing.autoscaling import ScaleLimits, TierScaler
from placement.sizing.capacity import Thresholds, TierLoad

LIMITS = ScaleLimits(1, 4, Thresholds(0.85, 0.7, 0.4), cool_down_s=60, calm_s=300)


def judged(load: float, engines: int, limits: ScaleLimits = LIMITS) -> TierLoad:
    return TierLoad(load, engines, limits.thresholds.enough(load, engines))


def test_a_high_load_adds_engines_once_per_cool_down() -> None:
    scaler = TierScaler(LIMITS)
    first = scaler.decide(judged(1.3, 1), 1, 0.0)
    assert (first.replicas, first.reason) == (2, "130% in use, above 85%")
    assert scaler.decide(judged(1.3, 2), 2, 59.0).replicas == 2, "the new engine has not had time to show"
    assert scaler.decide(judged(1.3, 2), 2, 61.0).replicas == 4
    assert scaler.decide(judged(5.0, 4), 4, 200.0).replicas == 4, "the limit"


def test_one_engine_is_removed_after_each_calm_period() -> None:
    scaler = TierScaler(LIMITS)
    assert scaler.decide(judged(0.1, 3), 3, 0.0).replicas == 3
    assert scaler.decide(judged(0.1, 3), 3, 299.0).replicas == 3
    taken = scaler.decide(judged(0.1, 3), 3, 300.0)
    assert (taken.replicas, taken.reason) == (2, "10% in use, below 40% for 300 s")
    assert scaler.decide(judged(0.1, 2), 2, 301.0).replicas == 2
    assert scaler.decide(judged(0.1, 2), 2, 650.0).replicas == 1
    assert scaler.decide(judged(0.0, 1), 1, 9_000.0).replicas == 1, "the limit"


def test_a_peak_restarts_the_calm_period() -> None:
    scaler = TierScaler(LIMITS)
    scaler.decide(judged(0.1, 2), 2, 0.0)
    scaler.decide(judged(0.6, 2), 2, 200.0)
    assert scaler.decide(judged(0.1, 2), 2, 310.0).replicas == 2
    assert scaler.decide(judged(0.1, 2), 2, 610.0).replicas == 1


def test_no_engine_is_removed_that_the_target_load_needs() -> None:
    limits = ScaleLimits(1, 4, Thresholds(0.85, 0.7, 0.6), 0, 0)
    scaler = TierScaler(limits)
    assert scaler.decide(judged(0.5, 2, limits), 2, 0.0).replicas == 2, "one would be at 100 %"


def test_a_tier_adds_its_share_of_the_engines_that_its_role_lacks() -> None:
    """The tier has two of the six engines of its role, and the role needs nine."""
    assert TierScaler(LIMITS).decide(TierLoad(1.05, 6, 9), 2, 0.0).replicas == 3


def test_replicas_outside_of_changed_limits_are_corrected_immediately() -> None:
    assert TierScaler(LIMITS).decide(judged(0.6, 9), 9, 0.0).replicas == 4
    assert TierScaler(LIMITS).decide(judged(0.6, 0), 0, 0.0).replicas == 1


@given(st.lists(st.floats(0, 6), min_size=1, max_size=400), st.integers(1, 4))
def test_the_scaler_stays_within_limits_and_changes_once_in_a_cool_down(
    work: list[float], replicas: int
) -> None:
    scaler, changes = TierScaler(LIMITS), []
    for step, total in enumerate(work):
        decided = scaler.decide(judged(total / replicas, replicas), replicas, 10.0 * step)
        if decided.replicas != replicas:
            changes.append(10.0 * step)
        assert (decided.reason == "") == (decided.replicas == replicas)
        assert LIMITS.least <= decided.replicas <= LIMITS.most
        replicas = decided.replicas
    assert all(b - a >= LIMITS.cool_down_s for a, b in itertools.pairwise(changes))
