"""After any aborts no row reads KV that was not computed for it: vLLM's real scheduler, without a model."""

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from tests.workers.coserving.books import Bookkeeping, expected
from workers.coserving import rollback
from workers.coserving import vllm_contact as contact


def storm(model: Path, left_out: rollback.Step | None, seed: int, rounds: int = 400) -> Bookkeeping:
    rng = random.Random(seed)
    books = Bookkeeping(model, left_out, seed)
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(rounds):
        if number % 8 == 0 and number < rounds - 60:
            prefix = [rng.randint(32, 120) for _ in range(rng.choice((40, 70, 150)))]
            for index in range(rng.randint(1, 4)):  # siblings are admitted together, and share blocks
                key, prompt = (
                    f"{number}-{index}",
                    prefix + [rng.randint(32, 120) for _ in range(rng.randint(1, 40))],
                )
                asked[key] = prompt, rng.randint(1, 6)
                books.ask(key, *asked[key], priority=rng.randint(0, 1))
        books.step(abort_share=0.5 if number < rounds - 60 else 0.0, hang_up_share=0.02)
    for _ in range(400):
        if not books.scheduler.requests:
            break
        books.step(0.0)
    for key, got in books.outputs.items():
        if got != expected(*asked[key]):
            books.lies.append(f"{key} answered {got}, not {expected(*asked[key])}")
    return books


@pytest.mark.parametrize("seed", range(3))
def test_no_row_reads_what_was_not_computed_for_it(small_model: Path, seed: int) -> None:
    books = storm(small_model, None, seed)
    assert books.aborts > 50
    assert books.hung_up > 0
    assert books.lies == []
    assert not books.scheduler.requests


@pytest.mark.parametrize("left_out", [rollback.rewind_computed, rollback.evict_written])
def test_without_one_step_some_row_does(small_model: Path, left_out: rollback.Step) -> None:
    assert any(_lied(small_model, left_out, seed) for seed in range(3))


def _lied(model: Path, left_out: rollback.Step, seed: int) -> bool:
    try:
        return bool(storm(model, left_out, seed).lies)
    except AssertionError:  # vLLM's own checks stop it first
        return True


def lies_after_the_owner_left(model: Path, left_out: rollback.Step | None) -> list[str]:
    """Two rows admitted in the aborted step; the one whose blocks the other adopted hangs up after it."""
    from vllm.v1.request import RequestStatus

    books = Bookkeeping(model, left_out, 0)
    prefix = [33 + number % 80 for number in range(128)]
    books.ask("owner", prefix + [40] * 3, 2, priority=1)
    books.ask("sharer", prefix + [41] * 5, 2, priority=1)
    books.step(abort_share=1.0)
    assert books.aborts == 1
    books.scheduler.finish_requests("owner", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        books.step(abort_share=0.0)
    return books.lies


def test_a_row_that_adopted_blocks_of_an_aborted_step_computes_them_itself(small_model: Path) -> None:
    assert lies_after_the_owner_left(small_model, None) == []
    assert lies_after_the_owner_left(small_model, rollback.truncate_sharers) != []


def hits_after_an_abort(model: Path, left_out: rollback.Step | None) -> int:
    """Tokens of a prompt found in the prefix cache, after it was computed at the second attempt."""
    books = Bookkeeping(model, left_out, 0)
    prompt = [33 + number % 80 for number in range(150)]
    books.ask("first", prompt, 2, priority=1)
    books.step(abort_share=1.0)
    assert books.aborts == 1
    for _ in range(3):
        books.step(abort_share=0.0)
    books.ask("second", prompt, 1, priority=1)
    return contact.cached_tokens(books.scheduler, books.scheduler.requests["second"])


def test_blocks_computed_at_the_second_attempt_are_found_again(small_model: Path) -> None:
    assert hits_after_an_abort(small_model, None) == 128
    assert hits_after_an_abort(small_model, rollback.rewind_registered) < 128


@pytest.mark.parametrize("left_out", [None, rollback.restore_prefill_marks])
def test_a_prompt_whose_last_chunk_was_aborted_counts_as_prefilling(
    small_model: Path, left_out: rollback.Step | None
) -> None:
    books = Bookkeeping(small_model, left_out, 0)
    books.ask("a", [40] * 100, 2, priority=1)
    books.step(abort_share=1.0)
    request = books.scheduler.requests["a"]
    kept = request in books.scheduler._inflight_prefills and request.is_prefill_chunk
    assert kept == (left_out is None)
