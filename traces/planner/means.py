"""What the inequalities need to know of a workload, read off a trace and a profile."""

from collections.abc import Sequence
from dataclasses import dataclass

from placement.latency import LatencyModel
from placement.provisioning import Capacity, Means
from traces.format import Conversation, TraceError
from traces.simulator.curve import prefill_seconds
from traces.simulator.profile import EngineProfile


@dataclass(frozen=True, slots=True)
class Measured:
    pinned: Means  # resident from the first turn to the last: the paper's W
    parked: Means  # resident while a turn runs, and `park_after` after it
    large_turns: float  # share of later turns that append more than the threshold
    broken_tokens: float  # of a conversation: prompt tokens that were there before and are not any more


def measure(
    found: Sequence[Conversation], decoder: EngineProfile, park_after_s: float, large: int
) -> Measured:
    """Means over conversations, with service times of an unloaded engine of this profile."""
    if not found:
        raise TraceError("the trace has no conversations to plan for")
    first = decoder_tokens = lifetime = active = peak = broken = 0.0
    later = large_turns = 0
    for conversation in found:
        context = 0
        for index, turn in enumerate(conversation.turns):
            served = _seconds(
                decoder, turn.prompt_tokens, turn.appended_tokens if index else 1, turn.output_tokens
            )
            lifetime += served + (turn.wait_s if index else 0.0)
            active += served + (min(turn.wait_s, park_after_s) if index else 0.0)
            decoder_tokens += turn.output_tokens + (turn.appended_tokens if index else 0)
            broken += max(0, context - turn.cached_tokens) if index else 0
            later += index > 0
            large_turns += index > 0 and turn.appended_tokens > large
            context = turn.context_tokens
        first += conversation.turns[0].prompt_tokens
        peak += conversation.peak_context_tokens
    count = len(found)
    pinned = Means(first / count, max(1.0, decoder_tokens / count), lifetime / count, peak / count)
    parked = Means(pinned.first_turn_tokens, pinned.decoder_tokens, active / count, pinned.peak_kv_tokens)
    return Measured(pinned, parked, large_turns / later if later else 0.0, broken / count)


def _seconds(engine: EngineProfile, prompt: int, uncached: int, output: int) -> float:
    """A turn alone: what it appends, then a token an iteration."""
    model = engine.latency
    decode = output * (
        model.constant + model.per_token + model.per_row + _per_read(model) * (prompt + output / 2)
    )
    return prefill_seconds(engine, prompt, cached=max(0, prompt - uncached)) + decode


def _per_read(model: LatencyModel) -> float:
    """Of a token of context, by a decoding row."""
    return model.per_attended + model.per_context + model.per_before


def capacity_of(prefiller: EngineProfile, decoder: EngineProfile, means: Means) -> Capacity:
    """T_p at the mean prompt; T_d with the decoder's KV full of conversations at their peak."""
    prompt = max(1, round(means.first_turn_tokens))
    model = decoder.latency
    slots = max(1.0, decoder.kv_tokens / means.peak_kv_tokens)
    iteration = model.constant + slots * (model.per_token + model.per_row)
    iteration += _per_read(model) * decoder.kv_tokens
    return Capacity(prompt / prefill_seconds(prefiller, prompt), slots / iteration, decoder.kv_tokens)
