"""Rows that decode beside an urgent prompt: vLLM's real scheduler, without a model."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from placement.serving.state import Slo
from tests.workers.coserving.books import Bookkeeping, expected

ASKED = {"a": ([40, 41, 42], 5), "b": ([33 + number % 80 for number in range(400)], 2)}


def started(model: Path, tbt_s: float) -> Bookkeeping:
    """`a` has its first token; `b` waits, and every prompt is urgent."""
    books = Bookkeeping(model, None, 0)
    books.scheduler._rows.default_slo = Slo(1e-6, tbt_s)
    books.ask("a", *ASKED["a"], priority=0)
    books.step(abort_share=0.0)
    books.ask("b", *ASKED["b"], priority=0)
    return books


def finish(books: Bookkeeping) -> None:
    for _ in range(300):
        if not books.scheduler.requests:
            break
        books.step(abort_share=0.0)
    assert books.lies == []
    assert books.outputs == {key: expected(*asked) for key, asked in ASKED.items()}


def test_a_late_row_has_a_token_in_every_iteration_and_the_prompt_goes_on(small_model: Path) -> None:
    books = started(small_model, tbt_s=1e-9)
    for number in range(1, 4):
        books.step(abort_share=0.0)
        assert len(books.outputs["a"]) == 1 + number
        assert 0 < books.scheduler.requests["b"].num_computed_tokens < 400
    finish(books)
