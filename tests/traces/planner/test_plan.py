"""A plan_fleet follows the inequalities at what was measured of the trace, and is checked by simulation."""

import pytest

from benchmarks.paper import a40
from placement.fleet.provisioning import Bound
from traces.format import TraceConversation, TraceTurn
from traces.planner import PlanRequest, capacity_of, measure, plan_fleet

ENGINE = a40.A40().engine(a40.PREFILL_CHUNK)


def agents(count: int = 40, wait: float = 300.0) -> list[TraceConversation]:
    turns = (
        TraceTurn(15_000, 0, 300),
        TraceTurn(400, 15_300, 300, wait),
        TraceTurn(9_000, 10_000, 300, wait),
    )
    return [TraceConversation(f"c{i}", 0.0, turns) for i in range(count)]


def test_means_are_those_of_the_turns() -> None:
    measured = measure(agents(), ENGINE, park_after_s=60.0, large=8_192)
    pinned, parked = measured.pinned, measured.parked
    assert pinned.first_turn_tokens == 15_000
    assert pinned.decoder_tokens == 900 + 400 + 9_000
    assert pinned.peak_kv_tokens == 19_300
    assert pinned.resident_s - parked.resident_s == pytest.approx(2 * (300 - 60))
    assert measured.large_turns == 0.5
    assert measured.broken_tokens == 16_000 - 10_000


def test_capacity_at_the_papers_means_is_the_papers() -> None:
    means = measure([TraceConversation("c", 0.0, (TraceTurn(15_300, 0, 1_000),))], ENGINE, 60, 8_192).pinned
    capacity = capacity_of(ENGINE, ENGINE, means)
    assert capacity.prefill_tokens_per_s == pytest.approx(25_000, rel=0.01)
    assert capacity.decode_tokens_per_s == pytest.approx(1_000, rel=0.02)


def test_idle_conversations_bind_by_memory_until_they_are_parked() -> None:
    request = PlanRequest(rate=0.5, ttft_s=5.0, caps_w=(300.0, 200.0))
    made = plan_fleet(agents(), ENGINE, ENGINE, request)
    assert made.pinned.bound is Bound.MEMORY
    assert made.parked.decoders < made.pinned.decoders
    assert made.check.conversations == 40 and made.check.holds
    full, capped = made.energy
    assert capped.joules_per_conversation < full.joules_per_conversation
