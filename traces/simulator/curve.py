"""What a prompt costs a simulated prefiller."""

from placement.curve import PrefillCurve, curve_of, prompt_seconds
from traces.simulator.profile import EngineProfile


def prefill_seconds(profile: EngineProfile, prompt: int, cached: int = 0) -> float:
    return prompt_seconds(profile.latency, profile.chunk_tokens, prompt, cached)


def prefill_curve(profile: EngineProfile) -> PrefillCurve:
    return curve_of(profile.latency, profile.chunk_tokens)
