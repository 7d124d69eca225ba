import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.curve import CurveError, PrefillCurve, fit

curves = st.builds(
    PrefillCurve,
    a=st.floats(0, 1),
    b=st.floats(1e-7, 1e-3),
    c=st.one_of(st.just(0.0), st.floats(1e-14, 1e-8)),
)


@given(curves, st.floats(1, 1e6))
def test_inverse_undoes_the_curve(curve: PrefillCurve, tokens: float) -> None:
    # Seconds are rounded near a, so a prompt is only known to the precision that a leaves.
    slack = 1e-12 * (1 + curve.a / (curve.b * tokens))
    assert curve.tokens_in(curve.seconds(tokens)) == pytest.approx(tokens, rel=1e-6 + slack)


@given(curves, st.integers(0, 200_000), st.integers(1, 200_000))
def test_splitting_a_prompt_costs_one_more_constant_and_nothing_else(
    curve: PrefillCurve, first: int, rest: int
) -> None:
    split = curve.seconds(first) + curve.seconds_after(first, rest)
    assert split == pytest.approx(curve.seconds(first + rest) + curve.a, rel=1e-9)


@given(curves)
def test_no_prompt_fits_in_less_than_the_constant(curve: PrefillCurve) -> None:
    assert curve.tokens_in(curve.a * 0.5) == 0


@given(st.floats(0.001, 0.5), st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8))
def test_fit_finds_the_curve_behind_its_samples(a: float, b: float, c: float) -> None:
    truth = PrefillCurve(a, b, c)
    sizes = [128, 512, 2048, 8192, 32768, 131072]
    found = fit([(n, truth.seconds(n)) for n in sizes])
    assert found.worst_error < 1e-6
    assert found.curve.seconds(50_000) == pytest.approx(truth.seconds(50_000), rel=1e-5)


def test_fit_weighs_short_prompts_as_much_as_long_ones() -> None:
    truth = PrefillCurve(0.02, 4e-5, 4e-10)
    samples = [(n, truth.seconds(n)) for n in (256, 1024, 4096, 16384, 65536, 131072)]
    samples[-1] = (131072, truth.seconds(131072) * 1.1)
    assert fit(samples).curve.seconds(256) == pytest.approx(truth.seconds(256), rel=0.1)


@pytest.mark.parametrize("samples", [[], [(10, 1.0), (20, 2.0)], [(10, 1.0), (20, 0.0), (30, 1.0)]])
def test_samples_that_cannot_make_a_curve_are_refused(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(CurveError):
        fit(samples)


@pytest.mark.parametrize("abc", [(-1, 1, 1), (0, 0, 0), (0, float("nan"), 0), (0, 1, float("inf"))])
def test_coefficients_that_cannot_be_a_curve_are_refused(abc: tuple[float, float, float]) -> None:
    with pytest.raises(CurveError):
        PrefillCurve(*abc)
