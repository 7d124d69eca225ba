"""Answers in the storm of aborts (`storm.py`) are compared exactly, but logprobs within a tolerance."""

from types import SimpleNamespace
from typing import Any

from tests.workers.coserving.storm import StormAnswer


def answer(
    tokens: list[int], logprobs: list[dict[int, float]], prompt: list[dict[int, float]]
) -> StormAnswer:
    def entries(positions: list[dict[int, float]]) -> list[dict[int, Any]]:
        return [{token: SimpleNamespace(logprob=value) for token, value in one.items()} for one in positions]

    choice = SimpleNamespace(
        index=0, token_ids=tokens, text="text", finish_reason="length", logprobs=entries(logprobs)
    )
    return StormAnswer.of(SimpleNamespace(outputs=[choice], prompt_logprobs=[None, *entries(prompt)]))


RIGHT = answer([5], [{5: -0.25}], [{7: -1.005}])


def test_logprobs_that_differ_less_than_the_tolerance_count_as_equal() -> None:
    """Logprobs are not rounded before the comparison, because values 2e-6 apart could then differ by 0.01."""
    assert answer([5], [{5: -0.250002}], [{7: -1.005002}]).difference(RIGHT) == ""


def test_answers_with_different_tokens_differ_whatever_their_logprobs() -> None:
    assert answer([6], [{5: -0.25}], [{7: -1.005}]).difference(RIGHT).startswith("choices ")


def test_logprobs_that_differ_by_more_than_the_tolerance_count_as_different() -> None:
    assert "at position 0" in answer([5], [{5: -0.252}], [{7: -1.005}]).difference(RIGHT)
    assert "at position 1" in answer([5], [{5: -0.25}], [{7: -1.007}]).difference(RIGHT)
    assert "at position 1" in answer([5], [{5: -0.25}], [{8: -1.005}]).difference(RIGHT)
    assert "1 positions" in answer([5], [{5: -0.25}], []).difference(RIGHT)
