"""Sizes of prompts from what was observed: never from a prediction."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router import chains
from router.config import SloClass, SloTargets
from router.directory.cache import Known
from router.hints import Hints
from router.identity import Explicit
from router.reading import Api, Prompt
from router.turn import TokenRatio, Turn

SEED = chains.seed("s", "m")


def turn(size: int, tools: int = 0) -> Turn:
    chain = chains.of_text(SEED, b"x" * size)
    prompt = Prompt(SEED, Explicit(None, None, ""), chain, tools, b"", b"", None, Hints())
    return Turn(Api.CHAT, (b"",), {}, [], "s", prompt, "", SloClass("default", SloTargets()), 0.0)


def test_what_another_engine_generated_is_a_part_of_the_prompt() -> None:
    resumed = replace(turn(1_000), resume={"outputs": [[1, 2], [], [3]]})
    assert TokenRatio(1.0).prompt_tokens(resumed, 0) == 1_003


def known(prompt_bytes: int, completion: int = 0, context: int = 0) -> Known:
    return Known(
        "k", "d0", 1, prompt_bytes=prompt_bytes, completion_tokens=completion, context_tokens=context
    )


@given(st.floats(0.1, 2.0), st.integers(100, 10**6))
def test_the_ratio_follows_what_engines_count(truth: float, size: int) -> None:
    ratio = TokenRatio(0.3)
    for _ in range(30):
        ratio.learn(size, max(1, int(size * truth)))
    assert abs(ratio.tokens(size) - size * truth) <= size * 0.02 + 2


def test_an_estimate_is_never_above_what_an_engine_takes() -> None:
    assert TokenRatio(1.0).prompt_tokens(turn(10_000_000), 32_768) == 32_768


def test_what_the_decoder_has_is_not_counted_as_uncached() -> None:
    ratio = TokenRatio(0.5)
    grown = turn(10_000)
    assert ratio.uncached_tokens(grown, known(8_000, completion=600), 8_000) == 400
    assert ratio.uncached_tokens(grown, known(8_000, completion=2_000), 8_000) == 0


def test_tools_count_once_and_not_again_with_every_turn() -> None:
    ratio = TokenRatio(1.0)
    assert ratio.prompt_tokens(turn(1_000, tools=5_000), 0) == 6_000
    assert ratio.uncached_tokens(turn(1_000, tools=5_000), known(900), 900) == 100


def test_a_prefix_that_broke_is_uncached_as_a_whole() -> None:
    assert TokenRatio(0.5).uncached_tokens(turn(10_000), known(8_000, 600, 5_000), 0) == 5_000


def test_a_gateway_that_has_not_seen_the_conversation_goes_by_the_decoders_count() -> None:
    assert TokenRatio(0.5).uncached_tokens(turn(10_000), known(0, 0, 4_000), 0) == 1_000


def test_token_ids_are_counted_exactly() -> None:
    asked = turn(0)
    exact = replace(asked, prompt=replace(asked.prompt, exact_tokens=77))
    assert TokenRatio(9.0).prompt_tokens(exact, 0) == 77
