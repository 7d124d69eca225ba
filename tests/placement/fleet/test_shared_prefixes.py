"""A prompt goes where its first token comes first, what an engine has of it already not counted."""

from dataclasses import replace

import pytest

from placement.engines import Role
from placement.fleet.elastic import FirstTurns
from placement.fleet.placer import FirstTurn, Placement, Placer, PlacerSettings
from placement.fleet.prefixes import MOST_HEADS, REMEMBERED_S, Head, SharedPrefixes
from tests.placement.conftest import CURVE, engine, state

SYSTEM = Head(b"system and tools", 8_000)


def a_placer(first: FirstTurns = FirstTurns.PREFILLER) -> Placer:
    settings = PlacerSettings(max_prefill_wait_s=1e9, first_turns=first)
    placer = Placer(settings, {"prefill": CURVE, "decode": CURVE})
    for name in ("p0", "p1"):
        placer.engine_up(engine(name, Role.PREFILL))
    for name in ("d0", "d1"):
        placer.engine_up(engine(name, kv_tokens=10**7))
    return placer


def place(placer: Placer, key: str, now: float, heads: tuple[Head, ...] = (SYSTEM,)) -> Placement:
    placed = placer.place(FirstTurn(key, 8_500, heads=heads), now)
    assert isinstance(placed, Placement)
    return placed


def test_who_has_the_beginning_computes_the_rest_until_its_queue_is_longer() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0).prefiller
    placed = [place(placer, f"c{number}", 0.0) for number in range(40)]
    assert placed[0].prefiller == first, "behind the first one, and sooner than anew elsewhere"
    chosen = placed[0].receipt.prefiller.chosen
    assert chosen is not None and chosen.cached_tokens == 8_000
    saved = CURVE.seconds(8_500) - chosen.prefill_s
    assert saved == pytest.approx(CURVE.seconds(8_000) - CURVE.a)
    assert {one.prefiller for one in placed} == {"p0", "p1"}, "a queue is worth computing it a second time"


def test_without_a_beginning_in_common_both_take_turns() -> None:
    placer = a_placer()
    placed = [place(placer, f"c{number}", 0.0, (Head(f"{number}".encode(), 8_000),)) for number in range(4)]
    assert [one.prefiller for one in placed] == ["p0", "p1", "p0", "p1"]


def test_a_queue_is_as_long_as_what_will_be_computed() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0).prefiller
    assert first is not None
    before = placer.prefill_wait_s(first, 0.0)
    place(placer, "second", 0.0)
    assert placer.prefill_wait_s(first, 0.0) - before < CURVE.seconds(8_500) / 2


def test_an_engine_that_started_anew_has_nothing() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0).prefiller
    assert first is not None
    placer.engine_up(engine(first, Role.PREFILL))
    chosen = place(placer, "second", 1.0).receipt.prefiller.chosen
    assert chosen is not None and chosen.cached_tokens == 0


def test_what_nobody_used_for_long_is_forgotten() -> None:
    placer = a_placer()
    place(placer, "first", 0.0)
    chosen = place(placer, "second", REMEMBERED_S + 1).receipt.prefiller.chosen
    assert chosen is not None and chosen.cached_tokens == 0


def test_a_decoder_that_has_the_beginning_computes_the_rest_itself_sooner() -> None:
    placer = a_placer(FirstTurns.ELASTIC)
    for name in ("d0", "d1"):
        placer.observe(state(name, 0, 1, prompt_share=0.5), 0.0)
    cold = place(placer, "first", 0.0)
    assert cold.prefiller is not None
    placer.release("first", 1.0)
    again = place(placer, "second", 100.0)
    assert again.receipt.estimates is not None and cold.receipt.estimates is not None
    assert again.decoder == cold.decoder
    assert again.receipt.estimates.local_s < cold.receipt.estimates.local_s / 2


def test_a_curve_learns_from_what_was_computed() -> None:
    """Half a prompt that was cached, in half the time: the prefiller is as fast as before."""
    placer = a_placer()
    now = 0.0
    for number in range(30):
        placed = place(placer, f"c{number}", now, ())
        assert placed.prefiller is not None
        now += CURVE.seconds(8_500) - (CURVE.seconds(8_000) - CURVE.a)
        placer.prefill_done(f"c{number}", now, 8_500, cached=8_000)
    chosen = place(placer, "last", now, ()).receipt.prefiller.chosen
    assert chosen is not None and chosen.prefill_s == pytest.approx(CURVE.seconds(8_500), rel=0.05)


def test_the_longest_beginning_counts_and_memory_is_bounded() -> None:
    shared, long = SharedPrefixes(), Head(b"and an example", 9_000)
    shared.given((SYSTEM,), "p0", 0.0)
    shared.given((SYSTEM, long), "p1", 0.0)
    assert shared.on((SYSTEM, long), 1.0) == {"p0": 8_000, "p1": 9_000}
    for number in range(MOST_HEADS):
        shared.given((Head(str(number).encode(), 1),), "p0", 2.0)
    assert shared.on((SYSTEM, long), 3.0) == {}


def test_a_beginning_is_never_longer_than_the_prompt() -> None:
    """An estimate from bytes may be: an image is many bytes and few tokens."""
    placer = a_placer(FirstTurns.ELASTIC)
    image = (Head(b"image", 60_000),)
    place(placer, "first", 0.0, image)
    again = place(placer, "second", 0.0, image)
    chosen, estimates = again.receipt.prefiller.chosen, again.receipt.estimates
    assert estimates is not None and estimates.local_s > 0
    assert chosen is None or chosen.cached_tokens < 8_500


@pytest.mark.parametrize("constant", [0.0, 0.02])
def test_the_very_same_prompt_again(constant: float) -> None:
    curve = replace(CURVE, a=constant)
    placer = Placer(PlacerSettings(), {"prefill": curve, "decode": curve})
    placer.engine_up(engine("d", kv_tokens=10**7))
    whole = (Head(b"whole", 8_500),)
    for number in range(4):
        place(placer, f"c{number}", 0.0, whole if number % 2 else (Head(b"other", 8_500),))


def test_a_cache_that_keeps_nothing_is_found_out() -> None:
    placer = a_placer()
    place(placer, "first", 0.0)
    placer.prefill_done("first", 1.0, 8_500)
    expected = []
    for number in range(4):
        chosen = place(placer, f"c{number}", 2.0 + number).receipt.prefiller.chosen
        assert chosen is not None
        expected.append(chosen.cached_tokens)
        placer.prefill_done(f"c{number}", 2.5 + number, 8_500, cached=0)
    assert expected == [8_000, 0, 8_000, 0], "of what was computed something may be left"


def test_what_was_never_computed_is_on_no_prefiller() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0)
    placer.release("first", 0.1)
    chosen = place(placer, "second", 0.2).receipt.prefiller.chosen
    assert first.prefiller is not None and chosen is not None and chosen.cached_tokens == 0
