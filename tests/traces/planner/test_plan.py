"""A plan follows the inequalities at the trace's means, and a simulation confirms it."""

from collections import Counter
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest

from placement.sizing.provisioning import Bound, Capacity, Means, provision
from traces import TraceError
from traces.format import TraceConversation, TraceTurn, load
from traces.planner import Candidate, FleetPlanner, PlanRequest, capacity_of, measure, plan_fleet
from traces.simulator.profiles import NAMED

pytestmark = pytest.mark.slow

SAMPLE = Path(__file__).parents[3] / "traces" / "samples" / "laptop.jsonl.gz"
ENGINE = NAMED["a40-qwen3-0.6b"]


def candidate(prefillers: int, decoders: int, first_s: float = 1.0) -> Candidate:
    return Candidate(prefillers, decoders, 300.0, first_s, 1.0, 0.1, 1.0, 0.0, 100.0, 1.0, holds=True)


def agents(count: int = 40, wait: float = 300.0) -> list[TraceConversation]:
    turns = (
        TraceTurn(15_000, 0, 300),
        TraceTurn(400, 15_300, 300, wait),
        TraceTurn(9_000, 10_000, 300, wait),
    )
    return [TraceConversation(f"c{i}", 0.0, turns) for i in range(count)]


def test_the_means_of_a_plan_are_taken_over_all_turns() -> None:
    measured = measure(agents(), ENGINE, park_after_s=60.0, large=8_192)
    pinned, parked = measured.pinned, measured.parked
    assert pinned.first_turn_tokens == 15_000
    assert pinned.decoder_tokens == 900 + 400 + 9_000
    assert pinned.peak_kv_tokens == 19_300
    assert pinned.resident_s - parked.resident_s == pytest.approx(2 * (300 - 60))
    assert measured.large_turns == 0.5


def test_capacity_at_the_papers_means_equals_the_papers_capacity() -> None:
    means = measure([TraceConversation("c", 0.0, (TraceTurn(15_300, 0, 1_000),))], ENGINE, 60, 8_192).pinned
    capacity = capacity_of(ENGINE, ENGINE, means)
    assert capacity.prefill_tokens_per_s == pytest.approx(25_000, rel=0.01)
    assert capacity.decode_tokens_per_s == pytest.approx(1_000, rel=0.02)


def test_a_plan_that_parks_idle_kv_needs_fewer_decoders_than_one_that_keeps_it() -> None:
    request = PlanRequest(rate=0.5, ttft_s=5.0, caps_w=(300.0, 200.0))
    made = plan_fleet(agents(), ENGINE, ENGINE, request)
    assert made.pinned.bound is Bound.MEMORY
    assert made.parked.decoders < made.pinned.decoders
    assert made.conversations == 40 and made.elastic.holds
    full, capped = made.by_cap
    assert full == made.elastic and capped.cap_w == 200
    assert capped.joules_per_conversation < full.joules_per_conversation
    assert made.advised == (capped if capped.holds else full)


def test_the_plan_of_the_shipped_sample_has_no_superfluous_engine() -> None:
    found, profile = load(SAMPLE).conversations, NAMED["laptop"]
    request = PlanRequest(rate=0.5)
    made = plan_fleet(found, profile, profile, request)
    chosen = made.elastic
    assert made.conversations == len(found) == 24 and made.too_large == 0
    assert chosen.holds and chosen.first_ttft_p95_s <= made.ttft_s == request.ttft_s
    engines = [one.prefillers + one.decoders for one in (made.without_prefillers, chosen, made.pinned)]
    assert engines[0] == engines[1] <= engines[2]
    assert not made.prefillers_needed, "prompts leave decoders time enough"
    assert {one.cap_w for one in made.by_cap} == {45, 38, 30} and made.advised.holds


def test_first_turns_that_stall_streams_need_a_prefiller() -> None:
    """Mixed engines would compute 30,000-token prompts next to streams with a limit of 30 ms."""
    turns = (TraceTurn(30_000, 0, 400), TraceTurn(200, 30_400, 400, 0.5))
    found = [TraceConversation(f"c{i}", 0.0, turns) for i in range(80)]
    made = plan_fleet(found, ENGINE, ENGINE, PlanRequest(rate=1.0, ttft_s=4.0, tbt_s=0.03))
    assert made.elastic.prefillers >= 1 and made.elastic.holds
    assert made.prefillers_needed


def test_a_plan_for_single_turns_needs_no_prefiller() -> None:
    """Single turns have no later turns whose TTFT could be compared."""
    found = [TraceConversation(f"c{i}", 0.0, (TraceTurn(15_000, 0, 300),)) for i in range(40)]
    made = plan_fleet(found, ENGINE, ENGINE, PlanRequest(rate=0.2, ttft_s=5.0))
    assert isnan(made.elastic.later_ttft_p95_s) and isnan(made.without_prefillers.later_ttft_p95_s)
    assert made.elastic.holds and not made.prefillers_needed


def test_plans_without_later_turns_are_compared_by_their_other_figures() -> None:
    single = replace(candidate(1, 3), later_ttft_p95_s=nan)
    assert single.does_as_well_as(single)
    assert not replace(single, e2e_p95_s=2.0).does_as_well_as(single)
    assert not single.does_as_well_as(candidate(1, 3)), "one that has served no later turn"


class BestWith(FleetPlanner):
    """Planner without simulations: a fleet with `best` prefillers is the fastest."""

    def __init__(self, best: int) -> None:
        super().__init__([], ENGINE, ENGINE, PlanRequest(rate=1.0))
        self.best = best
        self.played: list[tuple[int, int]] = []

    def play(self, prefillers: int, decoders: int, cap_w: float | None = None) -> Candidate:
        self.played.append((prefillers, decoders))
        return candidate(prefillers, decoders, first_s=1.0 + abs(prefillers - self.best))


@pytest.mark.parametrize("best", [2, 4, 7, 8, 9])
def test_the_planner_also_tries_fewer_prefillers_than_first_turns_need(best: int) -> None:
    planner = BestWith(best)
    bound = provision(Means(15_000, 1_000, 15, 16_000), Capacity(25_000, 1_000, 300_000), 8)
    chosen, without = planner.smallest(bound)
    assert chosen.prefillers == best and without.prefillers == 0
    by_engines = Counter(sum(split) for split in planner.played)
    assert max(by_engines.values()) <= 6
    assert len(set(planner.played)) == len(planner.played), "none is played twice"


def test_a_plan_leaves_out_oversized_conversations_and_raises_unreachable_targets() -> None:
    large = TraceConversation("large", 0.0, (TraceTurn(400_000, 0, 10),))
    made = plan_fleet([*agents(10), large], ENGINE, ENGINE, PlanRequest(rate=0.2, ttft_s=0.1))
    assert (made.conversations, made.too_large) == (10, 1)
    assert made.ttft_s > 0.5 and made.elastic.holds
    with pytest.raises(TraceError, match="none that fits"):
        plan_fleet([large], ENGINE, ENGINE, PlanRequest(rate=0.2))
