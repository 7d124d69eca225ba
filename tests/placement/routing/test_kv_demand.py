"""Demand for KV on decoders: KV that can be evicted does not count, KV of a draining decoder does."""

from dataclasses import replace

import pytest

from placement.overload.signal import OverloadReason, OverloadState
from placement.routing.least_kv import FirstTurn
from placement.routing.placer import Placer
from placement.routing.receipts import Placement, Refusal, RefusalReason
from tests.support.engines import info, placer, state


def looked(made: Placer, refused: list[int]) -> OverloadState:
    """Observe for long enough to declare an overload, and return the overload state."""
    for second in range(4):
        seen = made.observe_overload(float(second), refused)
    return seen


def test_kv_that_can_be_evicted_causes_no_overload() -> None:
    idle = placer()
    idle.engine_up(info("d0"))
    idle.observe(replace(state("d0", seq=1, live=9_000), idle_tokens=6_000), 0.0)
    seen = looked(idle, [4_000])
    assert (seen.overloaded, seen.reason) == (False, OverloadReason.EVICTABLE)

    running = placer()
    running.engine_up(info("d0"))
    running.observe(state("d0", seq=1, live=9_000), 0.0)
    assert looked(running, [4_000]).overloaded


def test_waiting_turns_are_counted_in_kv_tokens_of_their_engine() -> None:
    """With four full-attention groups, a token of a prompt takes four tokens of KV, placed or waiting."""
    made = placer()
    made.engine_up(info("d0", kv_tokens=40_000))
    report = replace(state("d0", seq=1), kv_per_token=4, kv_per_conversation=500)
    made.observe(replace(report, waiting=2, waiting_prompt_tokens=50, waiting_kv_tokens=21_000), 0.0)
    assert looked(made, []).asked == pytest.approx(21_000 / 38_000)  # as the engine counts it

    made.observe(replace(report, seq=2), 0.0)
    needs = [9_000, 3_000]
    assert isinstance(made.place(FirstTurn("a", needs[0]), 0.0), Placement)  # takes 4 * 9_100 + 500
    refused = made.place(FirstTurn("b", needs[1]), 0.0)
    assert isinstance(refused, Refusal)
    made.release("a", 0.0)
    seen = made.observe_overload(100.0, refused=needs)
    assert seen.asked == pytest.approx((4 * 9_100 + 500 + 4 * 3_100 + 500) / 38_000)


def test_a_decoder_that_drops_layers_takes_more_conversations_but_no_larger_ones() -> None:
    made = placer()
    made.engine_up(info("d0"))
    made.observe(state("d0", seq=1, live=8_000), 0.0)
    assert isinstance(made.place(FirstTurn("a", 3_000), 0.0), Refusal)
    made.resize("d0", 14_000)
    assert isinstance(made.place(FirstTurn("a", 3_000), 0.0), Placement)
    large = made.place(FirstTurn("b", 12_000), 0.0)
    assert isinstance(large, Refusal) and large.reason is RefusalReason.TOO_LARGE
    made.release("a", 0.0)
    made.resize("d0", 10_000)
    assert isinstance(made.place(FirstTurn("c", 3_000), 0.0), Refusal)


def test_kv_on_a_draining_decoder_counts_as_demand_on_the_other_decoders() -> None:
    made = placer()
    for name in ("d0", "d1"):
        made.engine_up(info(name))
    made.observe(state("d0", seq=1, live=5_000), 0.0)
    made.observe(replace(state("d1", seq=1, live=8_000, draining=True), idle_tokens=2_000), 0.0)
    assert looked(made, []).asked == pytest.approx((5_000 + 6_000) / 9_500)


def test_a_draining_decoder_stays_closed_when_it_is_resized() -> None:
    made = placer()
    made.engine_up(info("d0"))
    made.observe(state("d0", seq=1, draining=True), 0.0)
    made.resize("d0", 20_000)
    assert isinstance(made.place(FirstTurn("a", 100), 0.0), Refusal)
