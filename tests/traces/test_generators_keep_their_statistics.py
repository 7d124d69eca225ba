"""Generated workloads have the means, burstiness and saturation asked for, and only the seed matters."""

import statistics
from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import TraceError
from traces.format import TraceConversation, TurnEnding, check
from traces.generators import (
    RateStep,
    RequestLengths,
    SweBench,
    bursts,
    paper,
    parse,
    saturating,
    step_bursts,
)

COUNT = 6000


def gaps(conversations: tuple[TraceConversation, ...]) -> list[float]:
    return [b.arrival_s - a.arrival_s for a, b in pairwise(conversations)]


def test_the_papers_mix_has_the_papers_means_and_answers_the_user_only_in_the_last_turn() -> None:
    found = paper(COUNT, rate=1.0).conversations
    assert statistics.mean(c.turns[0].appended_tokens for c in found) == pytest.approx(15_300, rel=0.02)
    assert statistics.mean(c.output_tokens for c in found) == pytest.approx(1_000, rel=0.06)
    assert statistics.mean(len(c.turns) for c in found) == pytest.approx(10 / 3, rel=0.05)
    later = [turn for c in found for turn in c.turns[1:]]
    assert statistics.mean(turn.appended_tokens for turn in later) == pytest.approx(250, rel=0.05)
    for conversation in found[:200]:
        check(conversation)
        assert [t.ending for t in conversation.turns[:-1]] == [TurnEnding.TOOL_USE] * (
            len(conversation.turns) - 1
        )
        assert conversation.turns[-1].ending is TurnEnding.END_OF_TURN
        for before, turn in pairwise(conversation.turns):
            assert turn.cached_tokens == before.context_tokens


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_given_rate_and_coefficient_of_variation(cv: float) -> None:
    measured = gaps(bursts(20_000, rate=2.0, cv=cv).conversations)
    assert statistics.mean(measured) == pytest.approx(0.5, rel=0.08)
    assert statistics.pstdev(measured) / statistics.mean(measured) == pytest.approx(cv, rel=0.08)


def test_request_lengths_have_the_given_mean_and_spread() -> None:
    fixed = bursts(50, 1.0, 1.0).conversations
    assert {(c.turns[0].appended_tokens, c.turns[0].output_tokens) for c in fixed} == {(4096, 256)}
    spread = bursts(COUNT, 1.0, 1.0, lengths=RequestLengths(600, 1.2, 250, 0.8)).conversations
    prompts = [c.turns[0].appended_tokens for c in spread]
    assert statistics.mean(prompts) == pytest.approx(600, rel=0.06)
    assert statistics.pstdev(prompts) / statistics.mean(prompts) == pytest.approx(1.2, rel=0.15)


def test_saturating_arrivals_keep_the_prefiller_busy_without_a_queue() -> None:
    def cost(tokens: int) -> float:
        return 0.01 + tokens / 25_000 + 1e-10 * tokens * tokens

    found = saturating(500, cost).conversations
    free_at = 0.0
    for conversation in found:
        assert conversation.arrival_s == pytest.approx(free_at, abs=1e-3)
        free_at = conversation.arrival_s + cost(conversation.turns[0].appended_tokens)


def test_saturating_arrivals_at_the_papers_speed_have_the_papers_rate() -> None:
    found = saturating(COUNT, lambda tokens: tokens / 25_000).conversations
    assert len(found) / found[-1].arrival_s == pytest.approx(1.634, rel=0.02)


def test_rate_steps_take_effect_at_their_times() -> None:
    pattern = (RateStep(1.0, 60.0), RateStep(6.0, 20.0), RateStep(0.0, 10.0))
    found = step_bursts(5000, pattern).conversations
    cycles = int(found[-1].arrival_s // 90.0)
    inside = [c.arrival_s % 90.0 for c in found if c.arrival_s < cycles * 90.0]
    calm = sum(at < 60.0 for at in inside) / (60.0 * cycles)
    burst = sum(60.0 <= at < 80.0 for at in inside) / (20.0 * cycles)
    assert calm == pytest.approx(1.0, rel=0.08)
    assert burst == pytest.approx(6.0, rel=0.08)
    assert not any(at >= 80.0 for at in inside)


def test_the_same_seed_gives_the_same_trace_and_other_lengths_change_no_arrival() -> None:
    assert paper(100, 1.0, seed=7) == paper(100, 1.0, seed=7)
    assert paper(100, 1.0, seed=7).conversations != paper(100, 1.0, seed=8).conversations
    other = paper(100, 1.0, seed=7, mix=SweBench(turns=1.0))
    assert gaps(other.conversations) == gaps(paper(100, 1.0, seed=7).conversations)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        SweBench,
        first_turn_tokens=st.floats(1, 1e5),
        turns=st.floats(1, 30),
        appended_tokens=st.floats(1, 1e4),
        output_tokens=st.floats(1, 1e4),
        tool_s=st.floats(0.001, 100),
        tool_cv=st.floats(0, 3),
    ),
    st.integers(0, 2**32),
)
def test_conversations_of_every_mix_are_valid(mix: SweBench, seed: int) -> None:
    for conversation in paper(5, 1.0, seed, mix).conversations:
        check(conversation)


def test_arrival_patterns_are_read_from_text() -> None:
    for text in ("poisson:2", "gamma:2:3", "steps:2*10,5*1"):
        times = list(islice(parse(text, Random(1)), 50))
        assert times == sorted(times)
        assert times == list(islice(parse(text, Random(1)), 50))


@pytest.mark.parametrize(
    "text", ["", "poisson:", "poisson:0", "gamma:1", "steps:0*5", "steps:1*0", "weekly:3"]
)
def test_an_invalid_arrival_pattern_is_refused(text: str) -> None:
    with pytest.raises(TraceError):
        next(parse(text, Random(1)))
