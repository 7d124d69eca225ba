"""The prefix map knows which engines have a prompt's prefix, and estimates leave out cached tokens."""

from dataclasses import replace

import pytest

from placement.engines import Role, SplitState
from placement.overload.drop_plan import EngineShape
from placement.routing.least_kv import FirstTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.routing.prefix_map import MOST_ENGINES, MOST_PREFIXES, REMEMBERED_S, PrefixMap, PromptPrefix
from placement.routing.receipts import Placement
from tests.placement.conftest import CURVE, engine, state

SHAPE = EngineShape(8, 3e6, 20_000, 8192, 1024, 1e9, None)
SYSTEM = PromptPrefix(b"system and tools", 8_000)


def a_placer(first: FirstTurns = FirstTurns.PREFILLER) -> Placer:
    settings = PlacerSettings(max_prefill_wait_s=1e9, first_turns=first)
    placer = Placer(settings, {"prefill": CURVE, "decode": CURVE})
    for name in ("p0", "p1"):
        placer.engine_up(engine(name, Role.PREFILL))
    for name in ("d0", "d1"):
        placer.engine_up(engine(name, kv_tokens=10**7))
    return placer


def place(placer: Placer, key: str, now: float, prefixes: tuple[PromptPrefix, ...] = (SYSTEM,)) -> Placement:
    placed = placer.place(FirstTurn(key, 8_500, prefixes=prefixes), now)
    assert isinstance(placed, Placement)
    return placed


def test_the_prefiller_with_the_prefix_is_chosen_until_its_queue_is_too_long() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0).prefiller
    placed = [place(placer, f"c{number}", 0.0) for number in range(40)]
    assert placed[0].prefiller == first, "waiting there is sooner than computing the prefix elsewhere"
    chosen = placed[0].receipt.prefiller.chosen
    assert chosen is not None and chosen.cached_tokens == 8_000
    saved = CURVE.seconds(8_500) - chosen.prefill_s
    assert saved == pytest.approx(CURVE.seconds(8_000) - CURVE.a)
    assert {one.prefiller for one in placed} == {"p0", "p1"}, (
        "a long queue is worth computing the prefix twice"
    )


def test_prompts_without_a_shared_prefix_alternate_between_prefillers() -> None:
    placer = a_placer()
    placed = [place(placer, f"c{number}", 0.0, (framework(number),)) for number in range(4)]
    assert [one.prefiller for one in placed] == ["p0", "p1", "p0", "p1"]


def test_cached_tokens_of_a_prompt_do_not_lengthen_the_queue() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0).prefiller
    assert first is not None
    before = placer.prefill_wait_s(first, 0.0)
    place(placer, "second", 0.0)
    assert placer.prefill_wait_s(first, 0.0) - before < CURVE.seconds(8_500) / 2


def test_a_restarted_engine_has_no_prefixes() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0).prefiller
    assert first is not None
    placer.engine_up(engine(first, Role.PREFILL))
    chosen = place(placer, "second", 1.0).receipt.prefiller.chosen
    assert chosen is not None and chosen.cached_tokens == 0


def test_a_prefix_that_is_not_used_for_long_is_forgotten() -> None:
    placer = a_placer()
    place(placer, "first", 0.0)
    chosen = place(placer, "second", REMEMBERED_S + 1).receipt.prefiller.chosen
    assert chosen is not None and chosen.cached_tokens == 0


def test_the_estimate_of_a_decoder_leaves_out_the_prefix_that_it_has() -> None:
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


def test_a_prompt_with_a_cached_prefix_does_not_make_its_prefiller_look_faster() -> None:
    """A prompt with a cached prefix takes less time, but the prefiller has not become faster."""
    placer = a_placer()
    now = 0.0
    for number in range(30):
        placed = place(placer, f"c{number}", now, ())
        assert placed.prefiller is not None
        now += CURVE.seconds(8_500) - (CURVE.seconds(8_000) - CURVE.a)
        placer.prefill_done(f"c{number}", now, 8_500, cached=8_000)
    chosen = place(placer, "last", now, ()).receipt.prefiller.chosen
    assert chosen is not None and chosen.prefill_s == pytest.approx(CURVE.seconds(8_500), rel=0.05)


def test_the_longest_cached_prefix_counts_until_too_many_newer_prefixes_displace_it() -> None:
    prefixes, long = PrefixMap(), PromptPrefix(b"and an example", 9_000)
    prefixes.record("a", (SYSTEM,), "p0", 8_500, 0.0)
    prefixes.record("b", (SYSTEM, long), "p1", 9_500, 0.0)
    assert prefixes.cached_tokens((SYSTEM, long), 1.0) == {"p0": 8_000, "p1": 9_000}
    for number in range(MOST_PREFIXES):
        prefixes.record(f"c{number}", (PromptPrefix(str(number).encode(), 1),), "p2", 1, 2.0)
    assert prefixes.cached_tokens((SYSTEM, long), 3.0) == {}


def test_an_engine_that_leaves_is_forgotten_with_its_prefixes() -> None:
    """A prefix may have an estimated size of zero, for example a short prefix after many images."""
    prefixes = PrefixMap()
    nothing = PromptPrefix(b"short", 0)
    prefixes.record("a", (nothing, SYSTEM), "p", 8_500, 0.0)
    assert prefixes.cached_tokens((nothing, SYSTEM), 1.0) == {"p": 8_000}
    prefixes.forget_engine("p")
    for number in range(2 * MOST_PREFIXES):
        prefixes.record(f"c{number}", (PromptPrefix(str(number).encode(), 1),), "q", 1, 2.0)
    assert prefixes.cached_tokens((nothing, SYSTEM), 3.0) == {}


def framework(number: int) -> PromptPrefix:
    return PromptPrefix(f"framework {number}".encode(), 8_000)


def test_assumed_prefixes_fit_into_the_engines_kv() -> None:
    """The least recently used prefix is evicted first, and a prompt's end before its start, as in vLLM."""
    prefixes = PrefixMap()
    prefixes.set_kv_tokens("p", 20_000)
    for number in (0, 1):
        shared = framework(number), PromptPrefix(b"more of %d" % number, 8_200)
        prefixes.record(f"c{number}", shared, "p", 8_300, float(number))
    assert prefixes.cached_tokens((framework(0), PromptPrefix(b"more of 0", 8_200)), 2.0) == {"p": 8_200}
    prefixes.record("again", (framework(0),), "p", 8_300, 2.0)
    prefixes.record("alone", (PromptPrefix(b"alone", 3_500),), "p", 3_600, 3.0)
    for number in (0, 1):
        assert prefixes.cached_tokens((framework(number),), 4.0) == {"p": 8_000}, "only tails are evicted"
    prefixes.record("third", (PromptPrefix(b"third", 3_000),), "p", 3_100, 5.0)
    assert prefixes.cached_tokens((framework(0),), 6.0) == {"p": 8_000}
    left = prefixes.cached_tokens((framework(1),), 6.0)["p"]
    assert 0 < left < 8_000, "only as much of its end is evicted as necessary"


def test_a_better_size_estimate_replaces_the_former_one() -> None:
    prefixes = PrefixMap()
    first = PromptPrefix(b"system", 12_000), PromptPrefix(b"example", 15_000)
    prefixes.record("a", first, "p", 15_500, 0.0)
    better = PromptPrefix(b"system", 8_000), PromptPrefix(b"example", 10_000)
    prefixes.record("b", better, "q", 10_500, 1.0)
    assert prefixes.cached_tokens(better, 2.0)["q"] == 10_000
    prefixes.record("c", better, "p", 10_500, 3.0)
    assert prefixes.cached_tokens(better, 4.0) == {"p": 10_000, "q": 10_000}


def test_a_prefix_takes_no_more_space_than_its_prompt() -> None:
    prefixes, image = PrefixMap(), PromptPrefix(b"image", 250_000)
    prefixes.set_kv_tokens("p", 20_000)
    prefixes.record("a", (framework(0),), "p", 8_300, 0.0)
    prefixes.record("b", (image,), "p", 1_200, 1.0)
    assert prefixes.cached_tokens((framework(0),), 2.0) == {"p": 8_000}
    assert prefixes.cached_tokens((image,), 2.0) == {"p": 1_200}


def test_later_turns_take_space_in_the_assumed_cache_too() -> None:
    prefixes = PrefixMap()
    prefixes.set_kv_tokens("p", 20_000)
    for number, key in enumerate("ab"):
        prefixes.prompt_placed(key, "p", (framework(number),), 8_300, 0, float(number))
    prefixes.conversation_grew("b", "p", 14_000, 2.0)
    assert prefixes.cached_tokens((framework(1),), 3.0) == {"p": 8_000}
    assert prefixes.cached_tokens((framework(0),), 3.0) == {"p": 6_000}
    prefixes.prompt_computed("b", 0)
    prefixes.conversation_ended("b")
    assert prefixes.cached_tokens((framework(0),), 3.0) == {"p": 6_000}, "its KV stays until it is evicted"


def test_a_prompt_that_failed_does_not_remove_a_prefix_that_another_prompt_computed() -> None:
    prefixes = PrefixMap()
    prefixes.set_kv_tokens("p", 100_000)
    prefixes.prompt_placed("a", "p", (SYSTEM,), 8_500, 0, 0.0)
    prefixes.prompt_placed("b", "p", (SYSTEM,), 8_500, 8_000, 1.0)
    prefixes.prompt_not_computed("a")
    assert prefixes.cached_tokens((SYSTEM,), 2.0) == {"p": 8_000}


def test_the_estimate_of_cached_tokens_is_less_than_the_prompt() -> None:
    """An estimate from bytes may be too large: an image has many bytes and few tokens."""
    placer = a_placer(FirstTurns.ELASTIC)
    image = (PromptPrefix(b"image", 60_000),)
    place(placer, "first", 0.0, image)
    again = place(placer, "second", 0.0, image)
    chosen, estimates = again.receipt.prefiller.chosen, again.receipt.estimates
    assert estimates is not None and estimates.local_s > 0
    assert chosen is None or chosen.cached_tokens < 8_500


@pytest.mark.parametrize("constant", [0.0, 0.02])
def test_an_identical_prompt_can_be_placed_again(constant: float) -> None:
    curve = replace(CURVE, a=constant)
    placer = Placer(PlacerSettings(), {"prefill": curve, "decode": curve})
    placer.engine_up(engine("d", kv_tokens=10**7))
    whole = (PromptPrefix(b"whole", 8_500),)
    for number in range(4):
        place(placer, f"c{number}", 0.0, whole if number % 2 else (PromptPrefix(b"other", 8_500),))


def test_repeated_misses_shrink_the_assumed_capacity() -> None:
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
    assert expected[0] == 8_000 and expected[-1] < 3_000, "each miss lowers what is expected"
    assert expected == sorted(expected, reverse=True)


def test_a_prompt_that_was_never_computed_leaves_no_prefix() -> None:
    placer = a_placer()
    first = place(placer, "first", 0.0)
    placer.release("first", 0.1)
    chosen = place(placer, "second", 0.2).receipt.prefiller.chosen
    assert first.prefiller is not None and chosen is not None and chosen.cached_tokens == 0


@pytest.mark.parametrize(("per_token", "split_tokens", "known"), [(1, 0, 2), (2, 0, 1), (2, 48_000, 2)])
def test_cache_capacity_is_counted_in_prompt_tokens(per_token: int, split_tokens: int, known: int) -> None:
    """With two KV groups half as many tokens fit; with shared layers more fit."""
    placer = Placer(PlacerSettings(), {"decode": CURVE})
    placer.engine_up(engine("d", kv_tokens=24_000))
    split = SplitState("d:1", SHAPE, 1, split_tokens) if split_tokens else None
    placer.observe(replace(state("d", 0, 1), kv_per_token=per_token, split=split), 0.0)
    for number in range(2):
        placed = place(placer, f"c{number}", float(number), (framework(number),))
        computed(placer, f"c{number}", placed, 0, number + 0.5)
    left = [placer.uncached_tokens(8_500, (framework(number),), 3.0) for number in range(2)]
    assert left.count(500) == known


def computed(placer: Placer, key: str, placed: Placement, cached: int, now: float) -> None:
    """Report the first turn of a conversation as computed, and end the conversation."""
    if placed.prefiller is not None:
        placer.prefill_done(key, now, 8_500, cached)
    placer.turn_ended(key, placed.decoder, 8_600, now + 0.1, None if placed.prefiller else cached)
    placer.release(key, now + 0.2)


def test_a_miss_on_a_decoder_shrinks_its_assumed_capacity() -> None:
    placer = Placer(PlacerSettings(), {"decode": CURVE})
    placer.engine_up(engine("d", kv_tokens=20_000))
    for number, cached in enumerate((0, 8_000, 0)):
        placed = place(placer, f"c{number}", float(number))
        computed(placer, f"c{number}", placed, cached, number + 0.5)
        left = placer.uncached_tokens(8_500, (SYSTEM,), number + 0.9)
        assert left > 2_000 if number == 2 else left == 500


def test_only_the_latest_engines_of_a_prefix_are_remembered() -> None:
    prefixes = PrefixMap()
    for number in range(MOST_ENGINES + 10):
        prefixes.record(f"c{number}", (SYSTEM,), f"e{number}", 8_500, float(number))
    prefixes.record("again", (SYSTEM,), "e10", 8_500, 500.0)
    prefixes.record("new", (SYSTEM,), "new", 8_500, 500.0)
    known = prefixes.cached_tokens((SYSTEM,), 501.0)
    assert len(known) == MOST_ENGINES and {"e10", "new"} <= set(known) and "e11" not in known


def test_missing_a_prefix_shorter_than_a_block_keeps_the_assumed_capacity() -> None:
    """A prefix of less than a block is never cached, so a miss shows nothing."""
    prefixes, short = PrefixMap(), PromptPrefix(b"you are helpful", 10)
    prefixes.set_kv_tokens("e", 400_000)
    for number in range(20):
        key = f"chat {number}"
        expected = prefixes.cached_tokens((short,), 0.0).get("e", 0)
        prefixes.prompt_placed(key, "e", (short,), 300, expected, 0.0)
        prefixes.prompt_computed(key, 0)
    prefixes.prompt_placed("agent", "e", (SYSTEM,), 8_500, 0, 0.0)
    prefixes.prompt_computed("agent", 0)
    assert prefixes.cached_tokens((SYSTEM,), 0.0) == {"e": 8_000}


def test_unexpected_hits_grow_the_assumed_capacity() -> None:
    prefixes = PrefixMap()
    prefixes.set_kv_tokens("e", 400_000)
    prefixes.prompt_placed("first", "e", (SYSTEM,), 8_500, 0, 0.0)
    prefixes.prompt_computed("first", 0)
    prefixes.prompt_placed("missed", "e", (SYSTEM,), 8_500, 8_000, 0.0)
    prefixes.prompt_computed("missed", 0)
    assert prefixes.cached_tokens((SYSTEM,), 0.0).get("e", 0) < 8_000
    for number in range(3):
        prefixes.prompt_placed(f"found {number}", "e", (SYSTEM,), 8_500, 0, 0.0)
        prefixes.prompt_computed(f"found {number}", 8_000)
    assert prefixes.cached_tokens((SYSTEM,), 0.0) == {"e": 8_000}
