"""Scaling changes only the named quantity, and the result is valid."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from traces import TraceError
from traces.format import TraceConversation, TraceTurn, check, load
from traces.generators import Scale, fit, paper, rebased, scale

AGENTS = load(Path(traces.__file__).parent / "samples" / "agents.jsonl.gz").conversations


def test_scaling_the_rate_keeps_the_pattern_of_arrivals() -> None:
    faster = list(scale(AGENTS, Scale(rate=4.0)))
    for before, after in zip(AGENTS, faster, strict=True):
        assert after.arrival_s == pytest.approx(before.arrival_s / 4.0, abs=1e-6)
        assert after.turns == before.turns


def test_scaling_by_one_changes_nothing() -> None:
    assert tuple(scale(AGENTS, Scale())) == AGENTS


@settings(max_examples=40, deadline=None)
@given(st.floats(0.001, 3.0), st.floats(0.0, 10.0), st.floats(0.1, 10.0), st.floats(0.0, 100.0))
def test_scaled_real_conversations_are_always_valid(
    lengths: float, waits: float, rate: float, cap: float
) -> None:
    for before, after in zip(AGENTS, scale(AGENTS, Scale(rate, lengths, waits, cap)), strict=True):
        check(after)
        assert [turn.ending for turn in after.turns] == [turn.ending for turn in before.turns]
        assert all(turn.wait_s <= cap + 1e-6 for turn in after.turns)


def test_halving_lengths_halves_tokens() -> None:
    for before, after in zip(AGENTS, scale(AGENTS, Scale(lengths=0.5)), strict=True):
        assert after.output_tokens == pytest.approx(before.output_tokens / 2, abs=len(before.turns))
        assert after.turns[-1].prompt_tokens == pytest.approx(
            before.turns[-1].prompt_tokens / 2, rel=0.01, abs=64
        )


def test_scaling_lengths_keeps_a_fully_cached_turn_fully_cached() -> None:
    for conversation in scale(paper(50, 1.0).conversations, Scale(lengths=0.013)):
        for before, turn in pairwise(conversation.turns):
            assert turn.cached_tokens == before.context_tokens


def test_rounding_scaled_lengths_never_caches_more_than_the_context() -> None:
    grows = [TraceTurn(5, context, 5) for context in (0, 10, 20)]
    almost_all = TraceTurn(100, 29, 5)
    (scaled,) = scale([TraceConversation("a", 0.0, (*grows, almost_all))], Scale(lengths=0.25))
    assert scaled.turns[2].context_tokens == 6
    assert scaled.turns[3].cached_tokens == 6


def test_fitting_a_trace_cuts_a_conversation_at_its_first_turn_that_is_too_large() -> None:
    fitted = list(fit(AGENTS, max_context=60_000, max_turns=5))
    assert 0 < len(fitted) < len(AGENTS)
    known = {conversation.id: conversation for conversation in AGENTS}
    for conversation in fitted:
        whole = known[conversation.id].turns
        assert conversation.turns == whole[: len(conversation.turns)]
        assert conversation.peak_context_tokens <= 60_000
        cut = len(conversation.turns)
        assert cut == min(5, len(whole)) or whole[cut].context_tokens > 60_000


def test_a_rebased_trace_starts_at_zero_and_keeps_its_gaps() -> None:
    based = list(rebased(AGENTS))
    assert based[0].arrival_s == 0.0
    assert based[-1].arrival_s == pytest.approx(AGENTS[-1].arrival_s - AGENTS[0].arrival_s)


@pytest.mark.parametrize("by", [Scale(rate=0.0), Scale(lengths=-1.0), Scale(waits=-0.1)])
def test_an_invalid_scale_is_refused(by: Scale) -> None:
    with pytest.raises(TraceError):
        list(scale(AGENTS, by))
