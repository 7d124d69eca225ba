"""The latency model follows its engine quickly, and within bounds."""

import random
from dataclasses import astuple

import pytest

from placement.scheduling.latency_model import (
    CONSERVATIVE,
    BatchWork,
    LatencyModel,
    SelfCorrecting,
    SpeedFactor,
    error_by_region,
)
from tests.placement.scheduling.test_latency_model import TRUE, measured

DECODE = BatchWork.of([(1, 500)] * 4)
GPU = LatencyModel(27e-6, 0, 0, constant=5e-3)


def test_an_engine_without_a_profile_learns_its_own_speed() -> None:
    learning = SelfCorrecting(CONSERVATIVE)
    for sample in measured(320, noise=0.05):
        learning.observe(sample.work, sample.seconds)
    after = error_by_region(learning.fitted, measured(200, noise=0.0, seed=9))[0]
    before = error_by_region(CONSERVATIVE, measured(200, noise=0.0, seed=9))[0]
    assert before.median > 0.5
    assert after.median < 0.1


def test_an_engine_that_only_prefills_is_predicted_well_after_a_few_prompts() -> None:
    learning = SelfCorrecting(CONSERVATIVE)
    wanted = BatchWork.of([(1_500, 0)])
    assert learning.fitted.seconds(wanted) > 2 * TRUE.seconds(wanted)
    for tokens in (512, 2_048, 1_024):  # lengths of a keeper's warm-up prompts
        prompt = BatchWork.of([(tokens, 0)])
        learning.observe(prompt, TRUE.seconds(prompt))
    assert learning.fitted.seconds(wanted) == pytest.approx(TRUE.seconds(wanted), rel=0.1)


def test_a_long_period_of_decoding_does_not_make_the_model_forget_prefills() -> None:
    learning = SelfCorrecting(CONSERVATIVE)
    for sample in measured(320, noise=0.02):
        learning.observe(sample.work, sample.seconds)
    decode = BatchWork.of([(1, 500)] * 4)
    for _ in range(2000):
        learning.observe(decode, TRUE.seconds(decode))
    prefill = BatchWork.of([(2048, 0)])
    assert learning.model.seconds(prefill) == pytest.approx(TRUE.seconds(prefill), rel=0.15)


def test_the_model_does_not_learn_from_disturbed_iterations() -> None:
    learning = SelfCorrecting(TRUE)
    rng = random.Random(5)
    for sample in measured(640, noise=0.02):
        disturbance = rng.choice((1.0, 1.0, 1.0, 2.5))
        learning.observe(sample.work, sample.seconds * disturbance)
    after = error_by_region(learning.fitted, measured(200, noise=0.0, seed=9))[0]
    assert after.p90 < 0.05


def test_a_result_that_the_host_took_late_does_not_spoil_the_model() -> None:
    """With asynchronous scheduling, a late result makes its iteration look long and the next one short."""
    learning = SelfCorrecting(GPU)
    decode, prompt = BatchWork.of([(1, 100)]), BatchWork.of([(1, 100), (1_200, 500)])
    chunk = BatchWork.of([(1, 100), (900, 500)])
    for number in range(80):
        if number % 3 == 0:
            learning.observe(decode, GPU.seconds(decode))
        if number in (6, 7, 30):
            late_s = GPU.seconds(chunk) - 0.002
            learning.observe(decode, GPU.seconds(decode) + late_s)
            learning.observe(chunk, 0.002)
        learning.observe(prompt, GPU.seconds(prompt))
        assert learning.fitted.seconds(prompt) == pytest.approx(GPU.seconds(prompt), rel=0.15), number
        assert learning.fitted.seconds(chunk) == pytest.approx(GPU.seconds(chunk), rel=0.15), number


def test_samples_that_contradict_an_early_bad_fit_are_kept() -> None:
    learning = SelfCorrecting(GPU)
    decode, prompt = BatchWork.of([(1, 100)]), BatchWork.of([(1, 100), (1_200, 500)])
    for _ in range(40):  # at first the engine computes prompts in a fifth of its later time
        learning.observe(decode, GPU.seconds(decode))
        learning.observe(prompt, GPU.seconds(prompt) / 5)
    for _ in range(40):
        learning.observe(decode, GPU.seconds(decode))
        learning.observe(prompt, GPU.seconds(prompt))
    assert learning.fitted.seconds(prompt) == pytest.approx(GPU.seconds(prompt), rel=0.05)


def test_the_model_follows_an_engine_that_became_slower() -> None:
    learning = SelfCorrecting(TRUE)
    for sample in measured(640, noise=0.02):
        learning.observe(sample.work, 2 * sample.seconds)
    decode = BatchWork.of([(1, 500)] * 4)
    assert learning.model.seconds(decode) == pytest.approx(2 * TRUE.seconds(decode), rel=0.05)


def test_a_corrected_coefficient_stays_within_its_bound() -> None:
    learning = SelfCorrecting(TRUE, bound=3.0)
    for _ in range(200):
        learning.observe(BatchWork.of([(64, 0)]), 60.0)
    for now, base in zip(astuple(learning.fitted), astuple(TRUE), strict=True):
        assert base / 3 * 0.999 <= now <= base * 3 * 1.001


def test_the_model_follows_a_temporary_slowdown_within_a_second() -> None:
    learning = SelfCorrecting(TRUE)
    prefill = BatchWork.of([(256, 1000)])
    second = int(1 / TRUE.seconds(prefill))
    for slower in (1.3, 0.85, 1.2):
        for _ in range(2 * second):
            learning.observe(prefill, slower * TRUE.seconds(prefill))
        assert learning.model.seconds(prefill) == pytest.approx(slower * TRUE.seconds(prefill), rel=0.03)


def test_slow_prefills_also_raise_the_estimate_of_decoding() -> None:
    learning = SelfCorrecting(TRUE, every=10_000)
    prefill = BatchWork.of([(256, 1000)])
    for _ in range(200):
        learning.observe(prefill, 1.3 * TRUE.seconds(prefill))
    assert learning.fitted == TRUE
    assert learning.model.seconds(DECODE) == pytest.approx(1.3 * TRUE.seconds(DECODE), rel=0.01)


def test_one_disturbed_iteration_does_not_change_the_speed() -> None:
    speed = SpeedFactor()
    speed.observe(0.1, 1.0)
    assert speed.factor < 1.15
    for _ in range(10):
        speed.observe(0.1, 0.1)
    assert speed.factor == pytest.approx(1.0, abs=0.02)


def test_the_speed_factor_stays_within_its_bounds() -> None:
    for seconds, bound in ((60.0, 1.5), (1e-6, 1 / 1.5)):
        speed = SpeedFactor(memory_s=1e-6)
        for _ in range(1000):
            speed.observe(0.1, seconds)
        assert speed.factor == pytest.approx(bound)


def test_a_new_fit_does_not_change_the_prediction_for_the_latest_work() -> None:
    learning = SelfCorrecting(TRUE, every=64)
    prefill = BatchWork.of([(256, 1000)])
    said = []
    for _ in range(65):
        learning.observe(prefill, 1.3 * TRUE.seconds(prefill))
        said.append(learning.model.seconds(prefill))
    assert learning.fitted != TRUE
    assert max(said[40:]) / min(said[40:]) < 1.02
