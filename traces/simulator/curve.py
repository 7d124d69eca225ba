"""The prefill curve that a profile implies: what `conserve profile` would measure on such an engine."""

from math import ceil

from placement.curve import PrefillCurve, fit
from placement.latency import BatchWork
from traces.simulator.profile import EngineProfile

PROMPTS = (256, 1024, 4096, 8192, 16384, 32768, 65536, 131072)


def prefill_seconds(profile: EngineProfile, prompt: int, cached: int = 0) -> float:
    """A prompt alone on an idle engine, chunk by chunk."""
    model, chunk = profile.latency, profile.chunk_tokens
    seconds, context = 0.0, cached
    for _ in range(ceil((prompt - cached) / chunk)):
        tokens = min(chunk, prompt - context)
        seconds += model.seconds(BatchWork().plus(tokens, context))
        context += tokens
    return seconds


def prefill_curve(profile: EngineProfile) -> PrefillCurve:
    return fit([(tokens, prefill_seconds(profile, tokens)) for tokens in PROMPTS]).curve
