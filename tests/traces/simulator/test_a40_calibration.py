"""The profile `a40-qwen3-0.6b` reproduces the conversation paper's figures of its accelerators."""

import pytest

from benchmarks.paper import a40
from placement.scheduling.prefill_curve import curve_of
from traces.simulator.tiers import prefill_seconds

ENGINE = a40.ENGINE
MODEL = ENGINE.latency
CONTEXT_S = MODEL.per_attended + MODEL.per_context  # of a token of context
FLOPS_PER_TOKEN = 2 * 0.44e9  # Qwen3-0.6B's parameters without embeddings


def test_a_mean_prompt_is_prefilled_at_25k_tokens_a_second() -> None:
    seconds = prefill_seconds(ENGINE, round(a40.INPUT_TOKENS))
    assert a40.INPUT_TOKENS / seconds == pytest.approx(25_000, rel=1e-3)
    assert 1 / seconds == pytest.approx(a40.SATURATED_RATE, rel=1e-3)


def test_a_full_decoder_gives_1k_tokens_a_second() -> None:
    assert ENGINE.kv_tokens == 300_000
    slots = ENGINE.kv_tokens / (a40.INPUT_TOKENS + a40.OUTPUT_TOKENS)
    iteration = MODEL.constant + CONTEXT_S * ENGINE.kv_tokens
    assert slots / iteration == pytest.approx(1_000, rel=1e-6)


def test_an_iteration_with_a_collocated_chunk_just_meets_the_slo() -> None:
    chunk = a40.COLLOCATED_CHUNK
    baseline = MODEL.constant + CONTEXT_S * (a40.INPUT_TOKENS + a40.OUTPUT_TOKENS / 2)
    iteration = MODEL.constant + chunk * (MODEL.per_token + MODEL.per_attended * chunk)
    assert iteration == pytest.approx(a40.SLO_FACTOR * baseline, rel=1e-6)


def test_prefill_stays_below_the_gpus_peak_rate() -> None:
    """The GPU has 149.7 TFLOPS of dense bf16; a higher result would be an arithmetic error."""
    assert 0.2 < FLOPS_PER_TOKEN / MODEL.per_token / 149.7e12 < 1


def test_the_fitted_prefill_curve_agrees_with_prompts_computed_in_chunks() -> None:
    curve = curve_of(ENGINE.latency, ENGINE.chunk_tokens)
    for tokens in (500, 5_000, 15_000, 60_000):
        assert curve.seconds(tokens) == pytest.approx(prefill_seconds(ENGINE, tokens), rel=0.25)


def test_a_power_cap_slows_prefill_but_not_decoding() -> None:
    capped = ENGINE.capped(a40.CAP_W)
    assert prefill_seconds(capped, 15_000) > 1.15 * prefill_seconds(ENGINE, 15_000)
    one = prefill_seconds(capped, 15_001, cached=15_000)
    assert one < 1.01 * prefill_seconds(ENGINE, 15_001, cached=15_000)
