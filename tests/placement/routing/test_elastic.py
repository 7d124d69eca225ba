"""A first turn is computed where its first token comes clearly sooner; the receipt has the estimates."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.engines import EngineInfo, Role
from placement.routing.elastic import why_local
from placement.routing.least_kv import FirstTurn, LaterTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.routing.receipts import Estimates, Placement, Refusal, RefusalReason, Why
from placement.scheduling.interface import DEFAULT_TARGETS
from tests.placement.conftest import CURVE, engine, state

TTFT_S = DEFAULT_TARGETS.ttft_s


def a_placer(decoders: int = 2, kv_tokens: int = 1_000_000, first: FirstTurns = FirstTurns.ELASTIC) -> Placer:
    settings = PlacerSettings(fill=1.0, headroom_tokens=0, max_prefill_wait_s=1e9, first_turns=first)
    placer = Placer(settings, {"prefill": CURVE, "decode": CURVE})
    placer.engine_up(engine("p0", Role.PREFILL, kv_tokens))
    for number in range(decoders):
        placer.engine_up(engine(f"d{number}", kv_tokens=kv_tokens))
    return placer


def place(placer: Placer, key: str, tokens: int = 10_000, now: float = 0.0) -> Placement:
    answer = placer.place(FirstTurn(key, tokens), now)
    assert isinstance(answer, Placement)
    return answer


@given(
    queued=st.lists(st.integers(1_000, 40_000), max_size=6),
    waiting=st.integers(0, 60_000),
    rate=st.floats(0.0, 40_000),
    share=st.floats(0.1, 1.0),
    tokens=st.integers(500, 40_000),
)
def test_the_estimates_on_the_receipt_decide_which_engine_computes_the_prompt(
    queued: list[int], waiting: int, rate: float, share: float, tokens: int
) -> None:
    placer = a_placer(decoders=1)
    placer.observe(state("d0", 0, 1, prompt_share=0.01), 0.0)
    for number, prompt in enumerate(queued):
        place(placer, f"q{number}", prompt)
    report = state("d0", 0, 2, waiting_prompt_tokens=waiting, prompt_tokens_per_s=rate, prompt_share=share)
    assert placer.observe(report, 1e-6)
    wait_s = placer.prefill_wait_s("p0", 1e-6)
    answer = place(placer, "new", tokens, now=1e-6)
    estimates = answer.receipt.estimates
    assert estimates is not None and estimates.remote_s is not None
    assert estimates.remote_s == pytest.approx(wait_s + CURVE.seconds(tokens))
    assert estimates.local_s >= CURVE.seconds(tokens) / share
    if rate and waiting:
        assert estimates.local_s >= waiting / rate
    why = why_local(estimates, TTFT_S)
    assert (answer.prefiller is None) == (why is not None)
    assert why is None or answer.receipt.prefiller.why is why
    assert answer.receipt.to_json()["estimates"]["remote_s"] == estimates.remote_s


@pytest.mark.parametrize(
    ("local_s", "remote_s", "why"),
    [
        (0.5, 0.9, None),  # the decoder is sooner, but not clearly
        (0.45, 0.9, Why.SOONER_ON_DECODER),
        (1.0, 1.3, Why.TTFT_AT_RISK),  # the prefiller would take more than 0.6 of the target of 2 s
        (1.1, 1.3, None),  # the decoder is not clearly sooner
        (5.0, None, Why.SOONER_ON_DECODER),
        (inf, 9.0, None),
    ],
)
def test_a_decoder_computes_a_prompt_if_clearly_sooner_or_if_the_target_is_at_risk(
    local_s: float, remote_s: float | None, why: Why | None
) -> None:
    assert why_local(Estimates(local_s, remote_s), TTFT_S) is why


def test_while_kv_is_short_any_sooner_decoder_computes_a_prompt_whose_ttft_is_at_risk() -> None:
    assert why_local(Estimates(1.2, 1.3), TTFT_S, kv_short=True) is Why.TTFT_AT_RISK
    assert why_local(Estimates(1.3, 1.3), TTFT_S, kv_short=True) is None


def test_a_decoder_computes_the_prompt_only_if_the_prefillers_queue_is_long() -> None:
    placer = a_placer()
    placer.observe(state("d0", 0, 1), 0.0)
    placer.observe(state("d1", 0, 1), 0.0)
    first, second = place(placer, "a", 30_000), place(placer, "b")
    assert first.prefiller == "p0"
    assert second.prefiller is None and second.receipt.prefiller.why is Why.SOONER_ON_DECODER
    assert second.receipt.prefiller.runners_up[0].engine == "p0"
    assert second.decoder == "d1", "the binding is that of the decoder with the least KV in use"


def waits_on(placer: Placer, decoder: str, prompt_tokens: int, live_tokens: int = 0) -> None:
    report = state(decoder, live_tokens, 1, waiting_prompt_tokens=prompt_tokens, prompt_tokens_per_s=20_000.0)
    assert placer.observe(report, 0.0)


def test_a_decoder_that_is_clearly_sooner_is_chosen_although_it_holds_more_kv() -> None:
    placer = a_placer()
    place(placer, "queued", 100_000)
    waits_on(placer, "d0", 0, live_tokens=50_000)
    waits_on(placer, "d1", 30_000)
    found = place(placer, "a")
    assert (found.prefiller, found.decoder) == (None, "d0"), "d1 holds less, and computes another's prompt"
    assert found.receipt.decoder.why is Why.SOONER_WITH_CAPACITY
    assert [one.engine for one in found.receipt.decoder.runners_up] == ["d1"]
    assert found.receipt.estimates is not None and why_local(found.receipt.estimates, TTFT_S)


@pytest.mark.parametrize(("live", "prefiller"), [(0, "p0"), (995_000, None)])
def test_kv_is_short_while_many_decoders_are_full(live: int, prefiller: str | None) -> None:
    """The decoder is a tenth sooner, which is enough only where KV is short."""
    placer = a_placer()
    waits_on(placer, "d0", 0)
    waits_on(placer, "d1", 0, live_tokens=live)
    place(placer, "queued", 3_000)
    answer = place(placer, "a", 40_000)
    local_s, remote_s = answer.receipt.estimates or (0.0, None)
    assert remote_s is not None and 0.8 * remote_s < local_s < 0.95 * remote_s
    assert answer.prefiller == prefiller


@pytest.mark.parametrize(
    ("queued", "waiting", "live", "preferred"),
    [
        (0, 30_000, 50_000, None),  # the prefiller is sooner than any decoder
        (100_000, 500, 50_000, None),  # d0 is not clearly sooner
        (100_000, 30_000, 995_000, None),  # d0 has no capacity
        (100_000, 30_000, 50_000, "d1"),  # d1 is the decoder of the fork's parent
    ],
)
def test_the_decoder_with_the_least_kv_is_kept_unless_another_is_clearly_sooner(
    queued: int, waiting: int, live: int, preferred: str | None
) -> None:
    placer = a_placer()
    if queued:
        place(placer, "queued", queued)
    waits_on(placer, "d0", 0, live_tokens=live)
    waits_on(placer, "d1", waiting)
    found = placer.place(FirstTurn("a", 10_000, preferred), 0.0)
    assert isinstance(found, Placement) and found.decoder == "d1"
    assert found.receipt.decoder.why is (Why.PREFERRED if preferred else Why.LEAST_KV_IN_USE)


@pytest.mark.parametrize(("full", "chosen"), [(1, "d0"), (2, "d1")])
def test_the_decoder_with_the_least_kv_is_chosen_when_many_decoders_are_full(full: int, chosen: str) -> None:
    placer = a_placer(decoders=5)
    place(placer, "queued", 100_000)
    waits_on(placer, "d0", 0, live_tokens=50_000)
    waits_on(placer, "d1", 30_000)
    for number in range(2, 5):
        waits_on(placer, f"d{number}", 30_000, live_tokens=995_000 if number < 2 + full else 60_000)
    assert place(placer, "a").decoder == chosen


def test_the_decoder_with_the_least_kv_is_chosen_if_the_speed_of_decoders_is_unknown() -> None:
    placer = Placer(PlacerSettings(fill=1.0, headroom_tokens=0), {"prefill": CURVE})
    for number in range(2):
        placer.engine_up(engine(f"d{number}", kv_tokens=1_000_000))
    placer.observe(state("d0", 10_000, 1), 0.0)
    assert place(placer, "a").decoder == "d1"


def test_the_rule_of_the_paper_makes_no_estimates() -> None:
    assert PlacerSettings().first_turns is FirstTurns.ELASTIC
    placer = a_placer(first=FirstTurns.PREFILLER)
    answers = [place(placer, str(number)) for number in range(8)]
    assert all(answer.prefiller == "p0" and answer.receipt.estimates is None for answer in answers)


def test_a_placed_prompt_counts_as_waiting_until_its_decoder_reports_it() -> None:
    placer = a_placer(decoders=1)
    placer.observe(state("d0", 0, 1), 0.0)
    for number in range(20):
        place(placer, f"a{number}")
    local = sum(place(placer, f"b{number}").prefiller is None for number in range(20))
    assert 7 <= local <= 13, "a burst without a report is divided, not sent to one side"


def test_a_decoder_of_unknown_speed_computes_no_first_prompt() -> None:
    """A decoder that has reported neither a curve nor a rate might be slow, so the prefiller is chosen."""
    settings = PlacerSettings(fill=1.0, headroom_tokens=0, first_turns=FirstTurns.ELASTIC)
    placer = Placer(settings, {"prefill": CURVE})
    placer.engine_up(engine("p0", Role.PREFILL))
    placer.engine_up(engine("d0", kv_tokens=10_000_000))
    assert all(place(placer, str(number)).prefiller == "p0" for number in range(5))
    placer.observe(state("d0", 0, 1, prompt_tokens_per_s=50_000.0), 0.0)
    assert place(placer, "new").prefiller is None


def test_the_estimate_includes_the_measured_transfer_time_after_the_prefill() -> None:
    placer = a_placer(decoders=1)
    placer.observe(state("d0", 0, 1, prompt_share=0.8), 0.0)
    assert place(placer, "a").prefiller == "p0"
    placer.prefill_done("a", 0.0)
    placer.transferred(10_000, 2.0)
    assert place(placer, "b").prefiller is None


def test_the_cost_of_one_slow_transfer_fades() -> None:
    placer = a_placer(decoders=1)
    now = 0.0
    for number in range(8):  # transfers after pauses, each at least as quick as estimated
        now += 2_000.0
        placer.observe(state("d0", 0, number + 1, prompt_share=0.9), now)
        placer.transferred(10_000, 0.001 / (number + 1))
    placer.transferred(10_000, 10.0)
    assert place(placer, "at once", now=now).prefiller is None
    placer.release("at once", now)
    placer.observe(state("d0", 0, 10, prompt_share=0.9), now + 200.0)
    assert place(placer, "later", now=now + 200.0).prefiller == "p0"


def test_a_large_later_turn_is_computed_where_it_ends_sooner() -> None:
    placer = a_placer(decoders=1)
    placer.observe(state("d0", 0, 1, prompt_share=0.7), 0.0)
    place(placer, "a")
    placer.prefill_done("a", 0.0)
    small = placer.place_later(LaterTurn("a", "d0", 12_000, 2_000), 0.0)
    assert small.prefiller is None and small.receipt.estimates is None, "below the bounds nothing is compared"
    again = placer.place_later(LaterTurn("a", "d0", 20_000, 20_000), 0.0)
    assert again.prefiller == "p0"
    placer.prefill_done("a", 0.0)
    mostly_cached = placer.place_later(LaterTurn("a", "d0", 40_000, 20_000), 0.0)
    assert mostly_cached.prefiller is None, "the prefiller would compute twice as much"
    placer.release("a", 0.0)
    cached_there = placer.place_later(LaterTurn("a", "d0", 40_000, 20_000, "p0", 20_000), 0.0)
    assert cached_there.prefiller == "p0", "what the prefiller has cached does not count"


def test_a_prefiller_holds_a_conversation_that_fits_on_no_decoder() -> None:
    placer = a_placer(decoders=1, kv_tokens=100_000)
    for engine_name in ("d0", "p0"):
        placer.observe(state(engine_name, 0, 1), 0.0)
    place(placer, "a", 90_000)
    held = place(placer, "b", 30_000)
    assert (held.decoder, held.prefiller) == ("p0", None)
    assert held.receipt.decoder.why is Why.LAST_RESORT
    later = placer.place_later(LaterTurn("b", "p0", 31_000, 31_000), 1.0)
    assert (later.decoder, later.prefiller) == ("p0", None), "it stays there for life"
    full = placer.place(FirstTurn("c", 50_000), 1.0)
    assert isinstance(full, Refusal) and full.reason is RefusalReason.NO_CAPACITY
    placer.release("b", 2.0)
    assert place(placer, "c", 50_000, now=2.0).decoder == "p0"
    assert set(placer.engine_down("p0")) == {"a", "c"}, "one queued there, the other held"


def test_an_engine_that_left_gets_no_prompts_and_returns_with_an_empty_queue() -> None:
    placer = a_placer(decoders=2)
    for key in "abcd":
        place(placer, key)
    placer.engine_down("d0")
    placer.engine_down("p0")
    assert place(placer, "e").prefiller is None
    fresh: EngineInfo = replace(engine("p0", Role.PREFILL), epoch=2)
    placer.engine_up(fresh)
    for key in "abcde":
        placer.release(key, 1.0)
    assert placer.prefill_wait_s("p0", 1.0) == 0.0


def test_capacity_signals_include_the_time_that_turns_on_decoders_leave_for_prompts() -> None:
    placer = a_placer()
    placer.observe(state("d0", 0, 1, prompt_share=0.5), 0.0)
    placer.observe(state("d1", 0, 1, prompt_share=0.25), 0.0)
    placer.prompt_arrived(10_000, 0.0)
    seen = placer.signals(0, 0.0)
    assert seen.lent == pytest.approx(0.75)
    assert seen.prompts_s == pytest.approx(seen.prefill_load) and seen.prompts_s > 0
    assert a_placer(first=FirstTurns.PREFILLER).signals(0, 0.0).lent is None


def test_a_prefillers_curve_follows_the_measured_times_of_its_prompts() -> None:
    placer = a_placer(first=FirstTurns.PREFILLER)
    now, slower = 0.0, 3.0
    for number in range(40):
        for key in (f"{number}-a", f"{number}-b"):  # the second one waits for the first
            place(placer, key, 10_000, now)
        for key in (f"{number}-a", f"{number}-b"):
            now += slower * CURVE.seconds(10_000)
            placer.prefill_done(key, now, tokens=10_000)
        now += 100.0  # time without prompts must not count as time of a prompt
    found = place(placer, "new", 20_000, now).receipt.prefiller.chosen
    assert found is not None and found.prefill_s == pytest.approx(slower * CURVE.seconds(20_000), rel=0.02)
    placer.prefill_done("new", now + 1000.0)
    again = place(placer, "failed", 20_000, now + 1000.0).receipt.prefiller.chosen
    assert again == found, "a prefill that came to nothing teaches nothing"
    placer.engine_up(replace(engine("p0", Role.PREFILL), epoch=2))
    again = place(placer, "restarted", 20_000, now + 1000.0).receipt.prefiller.chosen
    assert again == found, "an engine that restarts is as fast as it was"


def saturated(decoders: int) -> Placer:
    """Return a placer whose only prefiller has a full queue and whose decoders are of unknown speed."""
    settings = PlacerSettings(fill=1.0, headroom_tokens=0, max_prefill_wait_s=1.0)
    placer = Placer(settings, {"prefill": CURVE})
    placer.engine_up(engine("p0", Role.PREFILL))
    for number in range(decoders):
        placer.engine_up(engine(f"d{number}", kv_tokens=1_000_000))
    for number in range(3):
        assert place(placer, f"queued-{number}").prefiller == "p0"
    return placer


def test_a_decoder_with_time_for_a_prompt_takes_it_when_prefillers_are_saturated() -> None:
    placer = saturated(decoders=8)
    for number in range(7):
        placer.observe(state(f"d{number}", 0, 1, waiting_prompt_tokens=50_000), 0.0)
    placer.observe(state("d7", 500_000, 1), 0.0)
    spared = place(placer, "new")
    assert (spared.prefiller, spared.decoder) == (None, "d7"), "it has more KV in use than seven others"
    options = [spared.receipt.decoder.chosen, *spared.receipt.decoder.runners_up]
    assert [one.engine for one in options].count("d7") == 1


def test_a_turn_is_refused_only_when_no_engine_has_time_for_its_prompt() -> None:
    placer = saturated(decoders=2)
    placer.observe(state("d1", 0, 1, waiting_prompt_tokens=50_000), 0.0)
    spared = place(placer, "new")
    assert (spared.prefiller, spared.decoder) == (None, "d0"), "d1 holds less, and has no time"
    assert spared.receipt.prefiller.why is Why.PREFILLERS_SATURATED
    refused = placer.place(FirstTurn("more", 10_000), 0.0)
    assert isinstance(refused, Refusal) and refused.reason is RefusalReason.SATURATED


def test_a_fork_stays_on_its_parents_decoder_if_that_decoder_has_time_for_its_prompt() -> None:
    """A fork's prefix is on its parent's decoder, although other decoders hold less KV."""
    placer = saturated(decoders=3)
    placer.observe(state("d2", 500_000, 1), 0.0)
    fork = placer.place(FirstTurn("fork", 10_000, preferred_decoder="d2"), 0.0)
    assert isinstance(fork, Placement) and (fork.prefiller, fork.decoder) == (None, "d2")
    assert fork.receipt.decoder.why is Why.PREFERRED
    placer.observe(state("d2", 500_000, 2, waiting_prompt_tokens=50_000), 0.1)
    other = placer.place(FirstTurn("other", 10_000, preferred_decoder="d2"), 0.1)
    assert isinstance(other, Placement) and other.decoder != "d2"
    assert other.receipt.decoder.why is Why.HAS_TIME
