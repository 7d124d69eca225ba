"""What a preemption cost is counted when the work is done again, and only what really is."""

import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from tests.workers.coserving.books import Bookkeeping
from workers.coserving import vllm_contact as contact

LOST = "coserving_offline_tokens_lost.preemption"


def lost_after_preemption(model: Path, priority: int, forgotten: bool) -> int:
    books = Bookkeeping(model, None, 0)
    books.ask("a", [33 + number % 80 for number in range(150)], 4, priority)
    books.step(abort_share=0.0)  # 150 tokens are computed
    contact.preempt(books.scheduler, books.scheduler.requests["a"], time.monotonic())
    if forgotten:
        assert books.scheduler.reset_prefix_cache()
    books.step(abort_share=0.0)
    return int(books.scheduler.connector.scheduler_half("safepoint").counts[LOST])


def test_what_neither_cache_nor_host_held_is_lost(small_model: Path) -> None:
    assert lost_after_preemption(small_model, 1, forgotten=True) == 150


def test_what_the_prefix_cache_still_holds_is_not(small_model: Path) -> None:
    assert lost_after_preemption(small_model, 1, forgotten=False) == 150 - 128


def test_online_rows_do_not_count(small_model: Path) -> None:
    assert lost_after_preemption(small_model, 0, forgotten=True) == 0
