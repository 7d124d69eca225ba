"""Simulated with a measured profile, single conversations take as long as they were measured."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from traces.replay import Replay, results
from traces.replay.results import MeterReading, Unloaded
from traces.simulator.profiles import ProfileError, find, of_unloaded
from traces.simulator.tiers import prefill_seconds

ALONE = Unloaded(
    fixed_s=0.05,
    per_token_s=2e-4,
    per_product_s=2e-8,
    step_s=0.012,
    per_context_s=4e-7,
    probes=3,
    ttft_error=0.05,
    tbt_error=0.05,
)


def replayed(unloaded: Unloaded | None) -> Replay:
    return Replay("run", "t", "http://x", "small", {}, 1.0, 4.0, "usage", 5.0, unloaded, MeterReading(), ())


def test_simulated_prefill_and_decoding_take_the_measured_time() -> None:
    engine = of_unloaded(ALONE, find("laptop"))
    for context in (500, 8_000):
        step = engine.latency.constant + engine.latency.per_token + engine.latency.per_request
        step += context * (
            engine.latency.per_context + engine.latency.per_attended + engine.latency.per_before
        )
        assert step == pytest.approx(ALONE.step_s + ALONE.per_context_s * context, rel=0.1)
    tokens = engine.chunk_tokens
    measured = ALONE.step_s + ALONE.per_token_s * tokens + ALONE.per_product_s * tokens * tokens / 2
    assert prefill_seconds(engine, tokens) == pytest.approx(measured, rel=0.1)


def test_a_profile_whose_tokens_take_no_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(find("laptop")) | {"kv_bytes_per_token": 0}))
    with pytest.raises(ProfileError, match="kv_bytes_per_token must be above 0"):
        find(str(path))


def test_the_result_of_a_replay_with_probes_is_a_valid_profile(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    results.write(path, replayed(ALONE))
    assert find(str(path)) == of_unloaded(ALONE, find("laptop"))
    results.write(path, replayed(None))
    with pytest.raises(ProfileError, match="without probes"):
        find(str(path))
