import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prefill_curve import CurveError, PrefillCurve, curve_of, fit_curve, prompt_seconds

MODEL = LatencyModel(per_token=2e-5, per_attended=9e-10, per_context=4e-8, constant=7e-3, per_before=3e-10)


@given(st.integers(1, 100_000), st.integers(0, 100_000))
def test_only_the_uncached_tokens_of_a_prompt_are_prefilled_chunk_by_chunk(
    appended: int, cached: int
) -> None:
    prompt = cached + appended
    whole = prompt_seconds(MODEL, prompt, prompt, cached)
    assert whole == pytest.approx(MODEL.seconds(BatchWork().plus(appended, cached)))
    last = cached + (appended - 1) // 512 * 512  # where the last chunk begins
    split = prompt_seconds(MODEL, 512, last, cached) + MODEL.seconds(BatchWork().plus(prompt - last, last))
    assert prompt_seconds(MODEL, 512, prompt, cached) == pytest.approx(split)


@pytest.mark.parametrize("chunk", [2_048, 8_192])
def test_a_curve_is_within_a_tenth_of_the_summed_times_of_the_chunks(chunk: int) -> None:
    curve = curve_of(MODEL, chunk)
    for prompt in (chunk, 3 * chunk, 100_000):
        assert curve.seconds(prompt) == pytest.approx(prompt_seconds(MODEL, chunk, prompt), rel=0.1)


@given(st.floats(0.001, 0.5), st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8))
def test_a_fit_recovers_the_curve_that_made_its_samples(a: float, b: float, c: float) -> None:
    truth = PrefillCurve(a, b, c)
    sizes = [128, 512, 2048, 8192, 32768, 131072]
    found = fit_curve([(n, truth.seconds(n)) for n in sizes])
    for tokens in sizes:
        assert found.seconds(tokens) == pytest.approx(truth.seconds(tokens), rel=1e-6)
    assert found.seconds(50_000) == pytest.approx(truth.seconds(50_000), rel=1e-5)


def test_a_fit_weighs_short_prompts_as_much_as_long_ones() -> None:
    truth = PrefillCurve(0.02, 4e-5, 4e-10)
    samples = [(n, truth.seconds(n)) for n in (256, 1024, 4096, 16384, 65536, 131072)]
    samples[-1] = (131072, truth.seconds(131072) * 1.1)
    assert fit_curve(samples).seconds(256) == pytest.approx(truth.seconds(256), rel=0.1)


@pytest.mark.parametrize("samples", [[], [(10, 1.0), (20, 2.0)], [(10, 1.0), (20, 0.0), (30, 1.0)]])
def test_unusable_samples_are_refused(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(CurveError):
        fit_curve(samples)


@pytest.mark.parametrize("abc", [(-1, 1, 1), (0, 0, 0), (0, float("nan"), 0), (0, 1, float("inf"))])
def test_unusable_coefficients_are_refused(abc: tuple[float, float, float]) -> None:
    with pytest.raises(CurveError):
        PrefillCurve(*abc)
