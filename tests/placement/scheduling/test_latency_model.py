"""The latency model predicts iterations, and a fit recovers it from samples."""

import math
import random
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.scheduling.latency_model import (
    BatchWork,
    LatencyModel,
    Sample,
    SelfCorrecting,
    error_by_region,
    fit,
)

TRUE = LatencyModel(2e-4, 4e-8, 3e-7, 8e-3, per_before=2e-8, per_request=1e-4)

rows = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 32768)), max_size=20)
coefficient = st.floats(0, 1e-2)
small = st.floats(0, 1e-6)
models = st.builds(
    LatencyModel, coefficient, small, st.floats(0, 1e-5), st.floats(0, 0.1), small, coefficient
)


def measured(count: int, noise: float, seed: int = 0, largest: int = 2048) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        new = [
            (rng.choice((1, 1, 64, largest)), rng.choice((0, 500, 8000))) for _ in range(rng.randint(1, 8))
        ]
        work = BatchWork.of(new)
        samples.append(Sample(work, TRUE.seconds(work) * rng.lognormvariate(0, noise)))
    return samples


def test_work_is_summed_over_requests() -> None:
    assert BatchWork.of([(10, 0), (10, 90)]) == BatchWork(20, 10 * 10 + 10 * 100, 110, 900, 2)
    assert BatchWork.of([(20, 0)]).attended > BatchWork.of([(10, 0), (10, 0)]).attended


@given(models, rows, st.integers(0, 32768), st.integers(0, 4096), st.floats(0, 2))
def test_one_token_more_than_max_tokens_misses_the_target(
    model: LatencyModel, batch: list[tuple[int, int]], context: int, want: int, target: float
) -> None:
    work = BatchWork.of(batch)
    tokens = model.max_tokens(work, context, want, target)
    assert 0 <= tokens <= want
    if tokens:
        assert model.seconds(work.plus(tokens, context)) <= target + 1e-9
    if tokens < want:
        assert model.seconds(work.plus(tokens + 1, context)) > target - 1e-9


def test_all_tokens_fit_into_an_iteration_without_a_time_limit() -> None:
    for per_attended in (0.0, 1e-7):
        model = LatencyModel(1e-6, per_attended, 0, 0.03)
        assert model.max_tokens(BatchWork(), 100, 50, math.inf) == 50


def test_fewer_tokens_of_a_request_with_a_longer_context_fit() -> None:
    fitting = [TRUE.max_tokens(BatchWork(), context, 10_000, 0.2) for context in (0, 10_000, 40_000)]
    assert fitting[0] > fitting[1] > fitting[2] > 0


def test_a_fit_recovers_the_model_it_was_sampled_from() -> None:
    found = fit(measured(300, noise=0.0))
    for name, (got, true) in zip("tacxbra", zip(astuple(found), astuple(TRUE), strict=True), strict=True):
        assert got == pytest.approx(true, rel=1e-3), name


def test_the_error_on_noisy_samples_stays_near_the_noise() -> None:
    samples = measured(400, noise=0.04)
    overall = error_by_region(fit(samples), samples)[0]
    assert overall.region == "all"
    assert overall.samples == 400
    assert overall.median < 0.04
    assert overall.p90 < 0.10


def test_errors_are_reported_for_each_range_of_tokens_and_context() -> None:
    samples = measured(200, noise=0.05)
    regions = error_by_region(TRUE, samples)
    assert sum(region.samples for region in regions[1:]) == 200
    assert len(regions) > 3


def test_no_coefficient_of_a_fit_is_negative_on_pure_noise() -> None:
    rng = random.Random(3)
    samples = [Sample(BatchWork.of([(rng.randint(1, 500), 0)]), rng.random()) for _ in range(50)]
    assert min(astuple(fit(samples))) >= 0


def test_a_coefficient_without_samples_keeps_the_priors_value() -> None:
    decode_only = [Sample(BatchWork.of([(1, c)] * 4), 0.01) for c in range(100, 1000, 100)]
    long_prefill = BatchWork.of([(4096, 0)])
    assert fit(decode_only, TRUE).seconds(long_prefill) == pytest.approx(TRUE.seconds(long_prefill), rel=0.5)
    assert fit(decode_only).seconds(long_prefill) > 5 * TRUE.seconds(long_prefill)


def test_a_coefficient_that_is_zero_in_the_prior_stays_zero() -> None:
    paper = LatencyModel(per_token=2e-4, per_attended=4e-8, per_context=3e-7, constant=8e-3)
    found = fit(measured(300, noise=0.02), paper)
    assert (found.per_before, found.per_request) == (0, 0)


def test_negative_coefficients_are_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        LatencyModel(-1e-6, 0, 0, 0)


def test_the_time_that_arming_adds_to_an_iteration_is_learned_separately() -> None:
    base = LatencyModel(per_token=1e-5, per_attended=0, per_context=1e-7, constant=5e-3, armed=5e-4)
    corrected = SelfCorrecting(base)
    decodes = [BatchWork.of([(1, 500 + at)] * 8) for at in range(200)]
    for number, work in enumerate(decodes):
        armed = replace(work, armed=number % 2)
        corrected.observe(armed, base.seconds(work) + 1.2e-3 * armed.armed)
    plain, armed = decodes[-1], replace(decodes[-1], armed=1)
    assert corrected.fitted.seconds(plain) == pytest.approx(base.seconds(plain), rel=0.03)
    assert corrected.fitted.seconds(armed) == pytest.approx(base.seconds(plain) + 1.2e-3, rel=0.03)


def test_armed_work_stays_armed_when_requests_are_added() -> None:
    armed = replace(BatchWork.of([(10, 5)]), armed=1)
    assert armed.plus(1, 4).armed == (BatchWork.of([(3, 3)]) + armed).armed == (armed + armed).armed == 1
