"""Set-ups of the KunServe paper agree with its numbers, and dropping helps where the KV is the bottleneck."""

from dataclasses import replace

import numpy as np
import pytest

from placement.overload.drop_plan import DropLimits
from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.latency_model import BatchWork
from tests.traces.simulator.overload_set_ups import (
    A800,
    H800,
    LONG_BENCH,
    QWEN_14B,
    QWEN_72B,
    Arrivals,
    p99_ttft,
)
from traces.simulator.dropping import DroppingSettings
from traces.simulator.kv import Pressure

pytestmark = pytest.mark.slow


def test_memory_sizes_agree_with_those_of_the_paper() -> None:
    assert QWEN_14B.kv_bytes_per_token == 192 * 1024
    assert A800.profile().kv_tokens == pytest.approx(243_000, rel=0.15)  # 45 GB of a GPU
    for cluster, model in ((A800, QWEN_14B), (H800, QWEN_72B)):
        layers = model.layer_bytes * model.layers / 2**30
        assert 0.85 * model.weights_gib < layers < model.weights_gib
        assert cluster.profile().shape is not None


def test_iterations_on_full_kv_take_the_papers_measured_time() -> None:
    """The paper measured 221 ms with a prompt and 60 ms without, on KV that dropping enlarged by a third."""
    engine = A800.profile()
    assert engine.shape is not None
    tokens = engine.shape.kv_each(2)
    rows = round(tokens / (LONG_BENCH.prompt + LONG_BENCH.output / 2))
    decoding = BatchWork(rows, tokens, tokens, tokens, rows)
    assert engine.latency.seconds(decoding) == pytest.approx(0.060, rel=0.15)
    with_prompt = decoding.plus(engine.chunk_tokens, int(LONG_BENCH.prompt / 2))
    assert engine.latency.seconds(with_prompt) == pytest.approx(0.221, rel=0.15)


def test_with_long_answers_dropping_halves_the_p99_ttft() -> None:
    """The arrival rates are such that the larger burst needs 1.25 times the KV."""
    arrivals, tbt_s = Arrivals(8.05), 0.25
    never = DroppingSettings(DropLimits(tbt_s, most_engines=1), 1.0)
    preempt = p99_ttft(Pressure.DROP, never, 1e6, arrivals)
    drop = p99_ttft(Pressure.PARK, DroppingSettings(DropLimits(tbt_s), 1.0), PlacerSettings().fill, arrivals)
    assert preempt > 2 * drop


def test_arrivals_double_in_bursts_and_repeat_exactly() -> None:
    arrivals = Arrivals(20.0)
    trace = arrivals.of(LONG_BENCH)
    at = np.asarray([one.arrival_s for one in trace])
    inside = ((at > 45) & (at < 105)) | ((at > 440) & (at < 500))
    assert inside.sum() / 120 == pytest.approx(2 * (~inside).sum() / 520, rel=0.1)
    assert at.max() < 640 and trace == arrivals.of(LONG_BENCH)
    assert replace(arrivals, seed=1).of(LONG_BENCH) != trace
