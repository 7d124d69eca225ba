import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.sizing.power_curve import PowerCurve, PowerCurveError

A40 = PowerCurve(limit_w=300, idle_w=75, decode_w=288, prefill_w=300)


@given(st.floats(76, 400), st.floats(76, 400))
def test_a_lower_cap_is_never_faster_and_never_draws_more(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert A40.compute_speed(low) <= A40.compute_speed(high) <= 1
    assert A40.capped(low).joules(1, 1, 1) <= A40.capped(high).joules(1, 1, 1)


def test_power_falls_faster_than_speed() -> None:
    """A cap saves energy on compute-bound work only because power falls faster than speed."""
    speed = A40.compute_speed(200)
    assert 200 * (1 / speed) < 300
    assert speed == pytest.approx(((200 - 75) / (300 - 75)) ** (1 / 3))


@pytest.mark.parametrize("watts", [0, 75])
def test_a_cap_at_or_below_idle_is_refused(watts: float) -> None:
    with pytest.raises(PowerCurveError):
        A40.capped(watts)


def test_a_power_curve_whose_levels_are_out_of_order_is_refused() -> None:
    with pytest.raises(PowerCurveError):
        PowerCurve(limit_w=300, idle_w=100, decode_w=90, prefill_w=300)
