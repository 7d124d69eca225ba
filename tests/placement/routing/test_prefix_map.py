"""A prompt goes where its first token comes first, what an engine has of it already not counted."""

from collections import OrderedDict
from dataclasses import replace

import pytest

from placement.engines import Role, SplitState
from placement.overload.drop_plan import EngineShape
from placement.routing.placer import FirstTurn, Placement, Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.routing.prefix_map import MOST_ENGINES, MOST_HEADS, REMEMBERED_S, Head, SharedPrefixes
from placement.routing.receipts import Why
from tests.placement.conftest import CURVE, engine, state

SHAPE = EngineShape(8, 3e6, 20_000, 8192, 1024, 1e9, None)
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
    shared.given("a", (SYSTEM,), "p0", 8_500, 0.0)
    shared.given("b", (SYSTEM, long), "p1", 9_500, 0.0)
    assert shared.on((SYSTEM, long), 1.0) == {"p0": 8_000, "p1": 9_000}
    for number in range(MOST_HEADS):
        shared.given(f"c{number}", (Head(str(number).encode(), 1),), "p2", 1, 2.0)
    assert shared.on((SYSTEM, long), 3.0) == {}


def test_engines_that_leave_leave_nothing_behind() -> None:
    """Also where a beginning is taken for none at all, as a short one is after many images."""
    shared = SharedPrefixes()
    nothing = Head(b"short", 0)
    shared.given("a", (nothing, SYSTEM), "p", 8_500, 0.0)
    assert shared.on((nothing, SYSTEM), 1.0) == {"p": 8_000}
    shared.forget("p")
    for number in range(2 * MOST_HEADS):
        shared.given(f"c{number}", (Head(str(number).encode(), 1),), "q", 1, 2.0)
    assert shared.on((nothing, SYSTEM), 3.0) == {}


def beginning(number: int) -> Head:
    return Head(f"framework {number}".encode(), 8_000)


def test_what_an_engine_is_thought_to_have_fits_into_its_kv() -> None:
    """As in vLLM's cache what was used last stays, and of a prompt its beginning."""
    shared = SharedPrefixes()
    shared.holds("p", 20_000)
    for number in (0, 1):
        heads = beginning(number), Head(b"more of %d" % number, 8_200)
        shared.given(f"c{number}", heads, "p", 8_300, float(number))
    assert shared.on((beginning(0), Head(b"more of 0", 8_200)), 2.0) == {"p": 8_200}
    shared.given("again", (beginning(0),), "p", 8_300, 2.0)
    shared.given("alone", (Head(b"alone", 3_500),), "p", 3_600, 3.0)
    assert [shared.on((beginning(number),), 4.0) for number in range(2)] == [{"p": 8_000}] * 2, "tails went"
    shared.given("third", (Head(b"third", 3_000),), "p", 3_100, 5.0)
    assert shared.on((beginning(0),), 6.0) == {"p": 8_000}
    assert 0 < shared.on((beginning(1),), 6.0).get("p", 0) < 8_000, "its end gives way, as far as it has to"


def test_sizes_are_estimates_that_get_better() -> None:
    """The same messages, of which it is learned meanwhile how many tokens they are."""
    shared = SharedPrefixes()
    shared.given("a", (Head(b"system", 12_000), Head(b"example", 15_000)), "p", 15_500, 0.0)
    better = Head(b"system", 8_000), Head(b"example", 10_000)
    shared.given("b", better, "q", 10_500, 1.0)
    assert shared.on(better, 2.0)["q"] == 10_000
    shared.given("c", better, "p", 10_500, 3.0)
    assert shared.on(better, 4.0) == {"p": 10_000, "q": 10_000}


def test_an_image_that_is_many_bytes_takes_no_more_than_the_prompt() -> None:
    shared, image = SharedPrefixes(), Head(b"image", 250_000)
    shared.holds("p", 20_000)
    shared.given("a", (beginning(0),), "p", 8_300, 0.0)
    shared.given("b", (image,), "p", 1_200, 1.0)
    assert shared.on((beginning(0),), 2.0) == {"p": 8_000} and shared.on((image,), 2.0) == {"p": 1_200}


def begins(shared: SharedPrefixes, key: str, number: int, engine: str, now: float) -> None:
    shared.given(key, (beginning(number),), engine, 8_300, now)
    shared.began(key, (beginning(number),), new=True)


def test_what_gives_way_counts_where_several_conversations_have_it() -> None:
    shared, other = SharedPrefixes(), (beginning(2),)
    shared.holds("p", 20_000)
    begins(shared, "a", 0, "p", 0.0)
    begins(shared, "b", 1, "p", 1.0)
    assert shared.displaced("p", other, 3_000, 2.0) == 0, "there is capacity"
    assert shared.displaced("p", other, 8_300, 2.0) == 0, "nobody has asked for it again"
    begins(shared, "c", 0, "q", 2.0)
    assert shared.displaced("p", other, 8_300, 3.0) == 4_600, "so much of it has to go, behind a tail of 300"
    assert shared.displaced("p", (beginning(0),), 8_300, 3.0) == 0, "its own beginning stays"
    assert shared.displaced("q", other, 8_300, 3.0) == 0, "nothing is known of its capacity"
    assert shared.displaced("p", other, 8_300, 3.0 + REMEMBERED_S) == 0


@pytest.mark.parametrize("failed", [True, False])
def test_a_first_turn_that_failed_and_is_asked_again_began_once(failed: bool) -> None:
    shared = SharedPrefixes()
    shared.holds("p", 20_000)
    begins(shared, "a", 0, "p", 0.0)
    if not failed:
        shared.grew("a", "p", 8_500, 0.5)
    shared.ended("a")
    begins(shared, "again", 0, "p", 1.0)
    begins(shared, "b", 1, "p", 2.0)
    assert (shared.displaced("p", (beginning(2),), 8_300, 3.0) == 0) is failed


def test_turns_that_follow_take_room_too() -> None:
    shared = SharedPrefixes()
    shared.holds("p", 20_000)
    begins(shared, "a", 0, "p", 0.0)
    begins(shared, "b", 1, "p", 1.0)
    shared.grew("b", "p", 14_000, 2.0)
    assert shared.on((beginning(1),), 3.0) == {"p": 8_000} and shared.on((beginning(0),), 3.0) == {"p": 6_000}
    shared.ended("b")
    assert shared.on((beginning(0),), 3.0) == {"p": 6_000}, "what it had is there until it gives way"


def test_who_brings_the_beginning_anew_is_not_withdrawn_with_another() -> None:
    shared = SharedPrefixes()
    shared.holds("p", 100_000)
    shared.computing("a", "p", (SYSTEM,), 8_500, 0, 0.0)
    shared.computing("b", "p", (SYSTEM,), 8_500, 8_000, 1.0)
    shared.not_computed("a")
    assert shared.on((SYSTEM,), 2.0) == {"p": 8_000}


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
    placer.engine_down("p1")
    place(placer, "first", 0.0)
    placer.prefill_done("first", 1.0, 8_500, cached=0)
    expected = []
    for number in range(5):
        chosen = place(placer, f"c{number}", 2.0 + number).receipt.prefiller.chosen
        assert chosen is not None
        expected.append(chosen.cached_tokens)
        placer.prefill_done(f"c{number}", 2.5 + number, 8_500, cached=0)
    assert expected[0] == 8_000 and expected[-1] < 3_000, "less fits than was thought, each time"
    assert expected == sorted(expected, reverse=True)


def test_what_was_never_computed_is_on_no_prefiller() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0)
    placer.release("first", 0.1)
    chosen = place(placer, "second", 0.2).receipt.prefiller.chosen
    assert first.prefiller is not None and chosen is not None and chosen.cached_tokens == 0


@pytest.mark.parametrize(("per_token", "split_tokens", "known"), [(1, 0, 2), (2, 0, 1), (2, 48_000, 2)])
def test_room_is_in_tokens_of_prompts(per_token: int, split_tokens: int, known: int) -> None:
    """A model with two groups of blocks holds half as many, and an engine that shares its layers more."""
    placer = Placer(PlacerSettings(), {"decode": CURVE})
    placer.engine_up(engine("d", kv_tokens=24_000))
    split = SplitState("d:1", SHAPE, 1, split_tokens) if split_tokens else None
    placer.observe(replace(state("d", 0, 1), kv_per_token=per_token, split=split), 0.0)
    for number in range(2):
        placed = place(placer, f"c{number}", float(number), (beginning(number),))
        computed(placer, f"c{number}", placed, 0, number + 0.5)
    left = [placer.to_compute(8_500, (beginning(number),), 3.0) for number in range(2)]
    assert left.count(500) == known


def computed(placer: Placer, key: str, placed: Placement, cached: int, now: float) -> None:
    """Its first turn, by whom it was placed on, and then the conversation ends."""
    if placed.prefiller is not None:
        placer.prefill_done(key, now, 8_500, cached)
    placer.turn_ended(key, placed.decoder, 8_600, now + 0.1, None if placed.prefiller else cached)
    placer.release(key, now + 0.2)


class PrefixCaches:
    """What engines really have: the least recently used gives way."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._has: dict[str, OrderedDict[int, int]] = {}
        self.computed = 0

    def compute(self, engine: str, number: int, tokens: int) -> int:
        """Tokens that were cached."""
        has = self._has.setdefault(engine, OrderedDict())
        cached = 8_000 if has.pop(number, 0) else 0
        has[number] = tokens
        while sum(has.values()) > self._capacity:
            has.popitem(last=False)
        self.computed += tokens - cached
        return cached


@pytest.mark.parametrize("first", FirstTurns)
def test_three_frameworks_stay_where_they_are_although_two_would_fit(first: FirstTurns) -> None:
    """On an idle fleet one engine would be the first of all each time, and compute each of them again."""
    placer = Placer(PlacerSettings(first_turns=first), {"prefill": CURVE, "decode": CURVE})
    for name in ("p0", "p1"):
        placer.engine_up(engine(name, Role.PREFILL, kv_tokens=20_000))
    for name in ("d0", "d1"):
        placer.engine_up(engine(name, kv_tokens=20_000))
    caches = PrefixCaches(20_000)
    for turn in range(60):
        now, number = 20.0 * turn, turn % 3
        placed = place(placer, f"c{turn}", now, (beginning(number),))
        cached = caches.compute(placed.prefiller or placed.decoder, number, 8_500)
        computed(placer, f"c{turn}", placed, cached, now + 5.0)
    assert caches.computed < 60 * 500 + 7 * 8_000


def test_a_decoder_that_did_not_have_it_is_found_out() -> None:
    """It computed the prompt itself, and its cache has other things in it than what was given it here."""
    placer = Placer(PlacerSettings(), {"decode": CURVE})
    placer.engine_up(engine("d", kv_tokens=20_000))
    for number, cached in enumerate((0, 8_000, 0)):
        placed = place(placer, f"c{number}", float(number))
        computed(placer, f"c{number}", placed, cached, number + 0.5)
        left = placer.to_compute(8_500, (SYSTEM,), number + 0.9)
        assert left > 2_000 if number == 2 else left == 500


def test_a_prefiller_that_has_what_others_begin_with_is_spared() -> None:
    placer = Placer(PlacerSettings(first_turns=FirstTurns.PREFILLER), {"prefill": CURVE, "decode": CURVE})
    for name in ("p0", "p1"):
        placer.engine_up(engine(name, Role.PREFILL, kv_tokens=20_000))
    placer.engine_up(engine("d", kv_tokens=10**7))
    placer.observe(state("p1", 0, 1, draining=True), 0.0)
    for turn, (took_s, cached) in enumerate([(0.36, 0), (0.36, 0), (0.03, 8_000), (0.03, 8_000)]):
        assert place(placer, f"c{turn}", 30.0 * turn, (beginning(turn % 2),)).prefiller == "p0"
        placer.prefill_done(f"c{turn}", 30.0 * turn + took_s, 8_500, cached=cached)  # faster than p1's curve
    placer.observe(state("p1", 0, 2), 119.0)
    placed = place(placer, "new", 120.0, (beginning(2),))
    assert (placed.prefiller, placed.receipt.prefiller.why) == ("p1", Why.KEEPS_BEGINNINGS)
    short = placer.place(FirstTurn("short", 1_200, heads=(Head(b"of nobody else", 1_000),)), 121.0)
    assert isinstance(short, Placement) and short.prefiller == "p0", (
        "it takes the place of what nobody shares"
    )


@pytest.mark.parametrize(("shared", "spared"), [(0, False), (1, True)])
def test_what_others_will_begin_with_is_spared_before_they_come(shared: int, spared: bool) -> None:
    placer = Placer(PlacerSettings(first_turns=FirstTurns.PREFILLER), {"prefill": CURVE, "decode": CURVE})
    for name in ("p0", "p1"):
        placer.engine_up(engine(name, Role.PREFILL, kv_tokens=10_000))
    placer.engine_up(engine("d", kv_tokens=10**7))
    first = placer.place(FirstTurn("a", 8_500, heads=(beginning(0),), shared=shared), 0.0)
    assert isinstance(first, Placement) and first.prefiller is not None
    placer.prefill_done("a", 0.3, 8_500, 0)
    other = place(placer, "b", 30.0, (beginning(1),))
    assert (other.prefiller != first.prefiller) is spared


def test_what_only_this_conversation_says_is_not_taken_to_be_shared() -> None:
    shared = SharedPrefixes()
    shared.holds("p", 20_000)
    heads = Head(b"framework", 4_000), Head(b"and the user's first message", 16_000)
    shared.given("a", heads, "p", 16_000, 0.0)
    shared.began("a", heads, new=True, shared=1)
    assert shared.displaced("p", (beginning(1),), 20_000, 1.0) == 4_000


def test_of_very_many_engines_the_latest_are_remembered() -> None:
    shared = SharedPrefixes()
    for number in range(MOST_ENGINES + 10):
        shared.given(f"c{number}", (SYSTEM,), f"e{number}", 8_500, float(number))
    shared.given("again", (SYSTEM,), "e10", 8_500, 500.0)
    shared.given("new", (SYSTEM,), "new", 8_500, 500.0)
    known = shared.on((SYSTEM,), 501.0)
    assert len(known) == MOST_ENGINES and {"e10", "new"} <= set(known) and "e11" not in known


def test_short_beginnings_that_are_missed_do_not_end_sharing() -> None:
    """One system prompt of a line, less than a block: no engine ever has it."""
    shared, short = SharedPrefixes(), Head(b"you are helpful", 10)
    shared.holds("e", 400_000)
    for number in range(20):
        key = f"chat {number}"
        shared.computing(key, "e", (short,), 300, shared.on((short,), 0.0).get("e", 0), 0.0)
        shared.computed(key, 0)
    shared.computing("agent", "e", (SYSTEM,), 8_500, 0, 0.0)
    shared.computed("agent", 0)
    assert shared.on((SYSTEM,), 0.0) == {"e": 8_000}


def test_what_is_found_though_nobody_expected_it_fits() -> None:
    shared = SharedPrefixes()
    shared.holds("e", 400_000)
    shared.computing("first", "e", (SYSTEM,), 8_500, 0, 0.0)
    shared.computed("first", 0)
    shared.computing("missed", "e", (SYSTEM,), 8_500, 8_000, 0.0)
    shared.computed("missed", 0)
    assert shared.on((SYSTEM,), 0.0).get("e", 0) < 8_000
    for number in range(3):
        shared.computing(f"found {number}", "e", (SYSTEM,), 8_500, 0, 0.0)
        shared.computed(f"found {number}", 8_000)
    assert shared.on((SYSTEM,), 0.0) == {"e": 8_000}
