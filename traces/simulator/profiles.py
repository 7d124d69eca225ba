"""Finds profiles of simulated engines: by name, from a JSON file, or from the latencies of a replay."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from placement.scheduling.latency_model import BatchWork, LatencyModel, Sample, fit
from placement.sizing.power_curve import PowerCurve
from traces import TraceError
from traces.replay import results
from traces.replay.results import Unloaded
from traces.simulator.tiers import EngineProfile


class ProfileError(TraceError):
    """The profile is unknown or cannot be read."""


NAMED = {
    # The conversation paper's accelerator and model, by two of its statements: benchmarks/paper/a40.py.
    "a40-qwen3-0.6b": EngineProfile(
        latency=LatencyModel(
            per_token=9.606759808555602e-06,
            per_attended=2.5040456111900564e-09,
            per_context=1.8579778728076143e-08,
            constant=0.012079898879792569,
        ),
        power=PowerCurve(limit_w=300.0, idle_w=75.0, decode_w=288.0, prefill_w=300.0),
        chunk_tokens=8_192,
        kv_tokens=300_000,
        kv_bytes_per_token=114_688.0,
        network_bytes_per_s=25e9,
        host_bytes_per_s=25e9,
        layers=28,
        layer_bytes=2 * 0.44e9 / 28,  # parameters without embeddings, bf16
        activation_bytes=2.0 * 1_024,
    ),
    # The small model on one core of a desktop processor, as `conserve profile configs/laptop.yaml decode`
    # measured it.
    "laptop": EngineProfile(
        latency=LatencyModel(per_token=6.3e-5, per_attended=4.6e-8, per_context=6e-7, constant=5.5e-3),
        power=PowerCurve(limit_w=45, idle_w=8, decode_w=35, prefill_w=45),
        chunk_tokens=512,
        kv_tokens=32_768,
        kv_bytes_per_token=8 * 2 * 2 * 32 * 4,  # 8 layers, 2 KV heads of 32, K and V, float32
        network_bytes_per_s=1e9,
        host_bytes_per_s=5e9,
        layers=8,
        layer_bytes=4.0 * 256 * (2 * 256 + 2 * 128 + 3 * 768),  # deploy/small_model.py, float32
        activation_bytes=4.0 * 256,
    ),
}


def find(name: str) -> EngineProfile:
    if name in NAMED:
        return NAMED[name]
    path = Path(name)
    if not path.is_file():
        raise ProfileError(
            f"no profile {name!r}: give one of {', '.join(NAMED)}, a JSON file or a result of `replay`"
        )
    try:
        row = json.loads(path.read_text())
        return _of_replay(path) if row.get("format") == results.FORMAT else from_json(row)
    except (json.JSONDecodeError, TypeError, KeyError, ValueError, TraceError) as wrong:
        raise ProfileError(
            f"{path}: not an engine profile ({wrong}); see traces/simulator/README.md"
        ) from wrong


def _of_replay(path: Path) -> EngineProfile:
    run = results.read(path)
    if run.unloaded is None:
        raise ProfileError(f"{path}: replayed without probes, so nothing was measured alone")
    return of_unloaded(run.unloaded, NAMED["laptop"])


def of_unloaded(alone: Unloaded, base: EngineProfile) -> EngineProfile:
    """Return `base` with a latency model fitted to conversations that were played alone."""
    chunk = base.chunk_tokens
    contexts = (0, chunk // 4, chunk, 2 * chunk)
    samples = [
        Sample(BatchWork().plus(1, context), alone.step_s + alone.per_context_s * context)
        for context in contexts
    ]
    for tokens in (chunk // 16, chunk // 4, chunk):
        for context in contexts:
            computing = alone.per_token_s + alone.per_product_s * (context + tokens / 2.0)
            samples.append(Sample(BatchWork().plus(tokens, context), alone.step_s + tokens * computing))
    return replace(base, latency=fit(samples))


def from_json(row: dict[str, Any]) -> EngineProfile:
    rest = {name: value for name, value in row.items() if name not in ("latency", "power")}
    return EngineProfile(LatencyModel(**row["latency"]), PowerCurve(**row["power"]), **rest)
