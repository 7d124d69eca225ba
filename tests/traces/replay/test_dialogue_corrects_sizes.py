"""A replay uses the reported usage to correct size estimates that are wrong by a fifth."""

import pytest

from traces.format import TraceConversation, TraceTurn
from traces.replay.client import Calibration, TimedAnswer, ToolStyle
from traces.replay.player import Dialogue

TRUE_RATIO = 4.0
WRONG = Calibration(chars_per_token=5.0, opening_tokens=0, exchange_tokens=0, source="tokenize")


def true_tokens(messages: list[dict[str, object]]) -> int:
    return round(sum(len(str(message["content"])) for message in messages) / TRUE_RATIO)


def answer(prompt_tokens: int) -> TimedAnswer:
    return TimedAnswer(
        0.0, text="x" * 40, finish_reason="length", prompt_tokens=prompt_tokens, completion_tokens=10
    )


def dialogue(*turns: TraceTurn) -> Dialogue:
    return Dialogue(TraceConversation("a", 0.0, turns), WRONG, ToolStyle.TEXT, "0", "a")


def test_the_next_message_compensates_for_one_that_was_too_long() -> None:
    told = dialogue(TraceTurn(1000, 0, 10), TraceTurn(600, 1010, 10))
    first = true_tokens(told.prompt(0))
    assert first == 1250
    told.answered(0, answer(first))
    second = true_tokens(told.prompt(1))
    assert second == pytest.approx(1610, rel=0.06)


def test_the_kept_part_of_a_broken_prefix_is_counted_in_real_tokens() -> None:
    told = dialogue(TraceTurn(1000, 0, 10), TraceTurn(300, 600, 10))
    before = told.prompt(0)[0]["content"]
    told.answered(0, answer(true_tokens(told.prompt(0))))
    after = told.prompt(1)[0]["content"]
    same = next(at for at, (x, y) in enumerate(zip(before, after, strict=False)) if x != y)
    assert same / TRUE_RATIO == pytest.approx(600, rel=0.01)
    assert told.retained_tokens == 600
