"""A prompt goes to the prefiller that finishes it first, or is refused if the shortest queue is too long."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.engines import Role
from placement.routing.least_kv import FirstTurn, LaterTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.routing.receipts import Placement, Refusal, RefusalReason, Why
from placement.scheduling.prefill_curve import PrefillCurve
from tests.placement.conftest import CURVE, MakeFleet, engine, state

FAST, SLOW = PrefillCurve(0.01, 2e-5, 1e-10), PrefillCurve(0.01, 8e-5, 4e-10)


def two_speeds() -> Placer:
    placer = Placer(
        PlacerSettings(max_prefill_wait_s=1e9, first_turns=FirstTurns.PREFILLER),
        {"prefill": FAST, "decode": SLOW},
    )
    placer.engine_up(engine("fast", Role.PREFILL))
    placer.engine_up(engine("d", kv_tokens=10**9))
    placer.engine_up(replace(engine("slow", Role.PREFILL), tier="decode"))
    return placer


@given(st.lists(st.tuples(st.integers(1, 50_000), st.floats(0, 2)), max_size=40))
def test_each_prompt_goes_to_the_prefiller_that_finishes_it_first(arrivals: list[tuple[int, float]]) -> None:
    placer = two_speeds()
    free_at = {"fast": 0.0, "slow": 0.0}
    curve = {"fast": FAST, "slow": SLOW}
    running: list[tuple[float, str]] = []
    now = 0.0
    for i, (tokens, gap) in enumerate(arrivals):
        now += gap
        for end, key in sorted(running):
            if end <= now:
                placer.prefill_done(key, end)
                running.remove((end, key))
        placed = placer.place(FirstTurn(str(i), tokens), now)
        assert isinstance(placed, Placement) and placed.prefiller
        ends = {name: max(free_at[name], now) + curve[name].seconds(tokens) for name in curve}
        assert ends[placed.prefiller] <= min(ends.values()) + 1e-6
        free_at[placed.prefiller] = ends[placed.prefiller]
        running.append((ends[placed.prefiller], str(i)))
        chosen = placed.receipt.prefiller.chosen
        assert chosen and now + chosen.wait_s + chosen.prefill_s == pytest.approx(ends[placed.prefiller])


def test_a_refusal_by_saturated_prefillers_has_the_excess_wait_as_retry_time(fleet: MakeFleet) -> None:
    placer = fleet(kv_tokens=10**9, max_prefill_wait_s=1.0)
    each = CURVE.seconds(20_000)
    accepted = 0
    while isinstance(answer := placer.place(FirstTurn(f"c{accepted}", 20_000), 0.0), Placement):
        accepted += 1
    assert isinstance(answer, Refusal) and answer.reason is RefusalReason.SATURATED
    assert answer.retry_after_s == pytest.approx(accepted * each - 1.0)
    assert isinstance(placer.place(FirstTurn("late", 20_000), answer.retry_after_s), Placement)


def test_a_prompt_that_ends_early_or_late_changes_the_wait_of_the_queue(fleet: MakeFleet) -> None:
    placer = fleet(kv_tokens=10**9)
    each = CURVE.seconds(10_000)
    for key in "abc":
        placer.place(FirstTurn(key, 10_000), 0.0)
    placer.prefill_done("a", each / 2)
    assert placer.prefill_wait_s("p0", each / 2) == pytest.approx(2 * each)
    overdue = 10 * each
    assert placer.prefill_wait_s("p0", overdue) == pytest.approx(each), "c waits at least for itself"
    placer.prefill_done("b", overdue)
    placer.prefill_done("c", overdue)
    assert placer.prefill_wait_s("p0", overdue) == 0


def test_old_prompts_leave_the_queue_of_a_prefiller_that_reports_no_work(fleet: MakeFleet) -> None:
    placer = fleet()
    placer.place(FirstTurn("lost", 50_000), 0.0)
    placer.observe(state("p0", 0, 1, running=0), 4.0)
    before = placer.prefill_wait_s("p0", 0.1)
    placer.observe(state("p0", 0, 2, running=0), 6.0)
    assert before > 0 and placer.prefill_wait_s("p0", 0.1) <= 6.0 and placer.prefill_wait_s("p0", 6.0) == 0


def test_a_draining_prefiller_gets_no_prompts(fleet: MakeFleet) -> None:
    placer = fleet(prefillers=2)
    placer.observe(state("p0", 0, 1, draining=True), 0.0)
    placed = [placer.place(FirstTurn(str(i), 100), 0.0) for i in range(3)]
    assert [p.prefiller for p in placed if isinstance(p, Placement)] == ["p1"] * 3


def test_without_a_prefiller_the_decoder_computes_the_prompt(fleet: MakeFleet) -> None:
    placed = fleet(prefillers=0).place(FirstTurn("a", 100), 0.0)
    assert isinstance(placed, Placement) and placed.prefiller is None
    assert placed.receipt.prefiller.why is Why.NO_PREFILLER_UP


def test_a_large_later_turn_goes_through_the_prefiller_to_its_own_decoder(fleet: MakeFleet) -> None:
    placer = fleet(kv_tokens=10**6)
    placer.observe(state("d2", 900_000, 1), 0.0)
    large = placer.place_later(LaterTurn("c", "d2", 30_000, 20_000), 0.0)
    assert (large.prefiller, large.decoder) == ("p0", "d2"), "the fullest decoder, because it is bound there"
    small = placer.place_later(LaterTurn("c", "d2", 30_000, 500), 0.0)
    assert (small.prefiller, small.decoder, small.receipt.reserved_tokens) == (None, "d2", 0)
    for i in range(200):
        placer.place(FirstTurn(f"f{i}", 3_000), 0.0)
    busy = placer.place_later(LaterTurn("c", "d2", 3_000_000, 2_900_000), 0.0)
    assert busy.decoder == "d2"


def prefill_s(placer: Placer, tokens: int) -> float:
    answer = placer.place(FirstTurn(f"asked for {tokens}", tokens), 0.0)
    assert isinstance(answer, Placement) and answer.receipt.prefiller.chosen
    placer.release(f"asked for {tokens}", 0.0)
    return answer.receipt.prefiller.chosen.prefill_s


def test_a_reported_curve_replaces_the_initial_one(fleet: MakeFleet) -> None:
    placer = fleet(kv_tokens=10**9)
    assert prefill_s(placer, 20_000) == pytest.approx(CURVE.seconds(20_000))
    placer.observe(state("p0", 0, 1, prefill_curve=(0.01, 2e-5, 1e-10)), 0.0)
    assert prefill_s(placer, 20_000) == pytest.approx(FAST.seconds(20_000))
    placer.observe(state("p0", 0, 2), 0.0)  # a report without a curve changes nothing
    assert prefill_s(placer, 20_000) == pytest.approx(FAST.seconds(20_000))
    placer.engine_up(engine("p0", Role.PREFILL, epoch=2))
    assert prefill_s(placer, 20_000) == pytest.approx(FAST.seconds(20_000)), "as fast as it was"


def test_a_correction_is_rescaled_when_the_curve_changes(fleet: MakeFleet) -> None:
    """Prompts take a tenth of the estimate, and then the engine reports a curve that agrees with them."""
    placer, now = fleet(kv_tokens=10**9), 0.0
    took = CURVE.seconds(8192) / 10
    for number in range(60):
        assert isinstance(placer.place(FirstTurn(f"c{number}", 8192), now), Placement)
        now += took
        placer.prefill_done(f"c{number}", now, tokens=8192)
    assert prefill_s(placer, 8192) == pytest.approx(took, rel=0.05)
    tenth = (CURVE.a / 10, CURVE.b / 10, CURVE.c / 10)
    placer.observe(state("p0", 0, 1, prefill_curve=tenth), now)
    assert prefill_s(placer, 8192) == pytest.approx(took, rel=0.05)


def test_a_decoders_curve_is_used_only_after_the_decoder_has_computed_prompts() -> None:
    settings = PlacerSettings(fill=1.0, first_turns=FirstTurns.ELASTIC)
    placer = Placer(settings, {"prefill": SLOW})
    placer.engine_up(engine("p0", Role.PREFILL, kv_tokens=10**9))
    placer.engine_up(engine("d0", kv_tokens=10**9))
    sooner = (0.0, 1e-6, 0.0)
    placer.observe(state("d0", 0, 1, prefill_curve=sooner), 0.0)
    first = placer.place(FirstTurn("a", 20_000), 0.0)
    assert isinstance(first, Placement) and first.prefiller == "p0"
    placer.observe(state("d0", 0, 2, prefill_curve=sooner, prompt_tokens_per_s=1000.0, prompts=1), 0.0)
    second = placer.place(FirstTurn("b", 20_000), 0.0)
    assert isinstance(second, Placement) and second.prefiller is None


def waits(placer: Placer, key: str, queue_weight: float, now: float = 0.0) -> float:
    placed = placer.place(FirstTurn(key, 20_000, queue_weight=queue_weight), now)
    assert isinstance(placed, Placement) and placed.receipt.prefiller.chosen
    return placed.receipt.prefiller.chosen.wait_s


def test_a_prompt_does_not_wait_for_prompts_of_lower_classes(fleet: MakeFleet) -> None:
    """Engines compute prompts of a higher class first, so prompts of lower classes do not make it wait."""
    placer = fleet(prefillers=2, kv_tokens=10**9, max_prefill_wait_s=1.0)
    each, queued = CURVE.seconds(20_000), 0
    while isinstance(placer.place(FirstTurn(f"c{queued}", 20_000), 0.0), Placement):
        queued += 1
    assert [waits(placer, f"gold{n}", 8.0) for n in range(2)] == [0.0, 0.0]
    refused = placer.place(FirstTurn("late", 20_000), 0.0)
    assert isinstance(refused, Refusal), "to others all that is queued counts"
    assert refused.retry_after_s == pytest.approx((queued + 2) / 2 * each - 1.0)
    assert waits(placer, "between", 4.0) == pytest.approx(each), "behind the better one's, before others"


def test_prompts_of_a_higher_class_end_before_earlier_prompts_of_lower_classes(fleet: MakeFleet) -> None:
    placer = fleet(kv_tokens=10**9, max_prefill_wait_s=1e9)
    each = CURVE.seconds(20_000)
    for key, queue_weight in (("a", 0.0), ("b", 0.0), ("gold", 8.0)):
        placer.place(FirstTurn(key, 20_000, queue_weight=queue_weight), 0.0)
    placer.prefill_done("gold", each)
    assert placer.prefill_wait_s("p0", each) == pytest.approx(2 * each)
    assert waits(placer, "next", 8.0, each) == 0.0
    for key in ("next", "a", "b"):
        placer.prefill_done(key, each)
    assert placer.prefill_wait_s("p0", each) == 0.0
    assert waits(placer, "plain", 0.0, each) == 0.0
    assert waits(placer, "last", 8.0, each) == 0.0, "nothing is left of those that have ended"


def test_the_wait_behind_an_overdue_prompt_is_that_of_the_two_prompts_it_overtook(fleet: MakeFleet) -> None:
    placer = fleet(kv_tokens=10**9, max_prefill_wait_s=1e9)
    each = CURVE.seconds(20_000)
    for key, queue_weight in (("a", 0.0), ("b", 0.0), ("gold", 8.0)):
        placer.place(FirstTurn(key, 20_000, queue_weight=queue_weight), 0.0)
    assert placer.prefill_wait_s("p0", 4 * each) == pytest.approx(2 * each)


def test_the_queue_of_a_lost_prefiller_is_forgotten(fleet: MakeFleet) -> None:
    placer = fleet(prefillers=2, kv_tokens=10**9, max_prefill_wait_s=1e9)
    for number in range(4):
        placer.place(FirstTurn(f"c{number}", 20_000), 0.0)
    placer.engine_down("p1")
    assert waits(placer, "gold", 8.0) == 0.0
    placer.release("gold", 0.0)
    assert waits(placer, "plain", 0.0) == pytest.approx(2 * CURVE.seconds(20_000))
