"""Rows that sit out iterations of a prompt: vLLM's real scheduler, without a model."""

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


def test_a_row_that_can_wait_has_no_token_until_the_prompt_is_through(small_model: Path) -> None:
    books = started(small_model, tbt_s=100.0)
    counts = []
    while not books.outputs["b"]:
        books.step(abort_share=0.0)
        counts.append(len(books.outputs["a"]))
    assert counts == [1, 1, 1], "400 tokens are three iterations of at most 192"
    finish(books)


def test_a_row_that_cannot_has_one_in_every_iteration_and_the_prompt_goes_on(small_model: Path) -> None:
    books = started(small_model, tbt_s=1e-9)
    for number in range(1, 4):
        books.step(abort_share=0.0)
        assert len(books.outputs["a"]) == 1 + number
        assert 0 < books.scheduler.requests["b"].num_computed_tokens < 400
    finish(books)


def test_rows_sit_out_after_an_abort_as_well(small_model: Path) -> None:
    books = started(small_model, tbt_s=100.0)
    books.ask("c", [50] * 100, 1, priority=1)
    books.step(abort_share=1.0)
    books.step(abort_share=0.0)
    assert len(books.outputs["a"]) == 1
    books.outputs.pop("c")
    finish(books)
