"""Prompt sizes in tokens are estimated from the token counts of earlier prompts."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.directory.api.cache import Known
from router.gateway.config import SloClass
from router.gateway.turn.token_ratio import TokenRatio
from router.gateway.turn.turn import Turn
from router.identity import prefix_chain as chains
from router.identity.conversation_ids import ExplicitIdentity
from router.requests.body_parser import Api, BodyParser, Prompt, parse_body
from router.requests.cost_limits import PromptLimit
from router.requests.hints import Hints

SEED = chains.seed("s", "m")


def turn(size: int, tools: int = 0) -> Turn:
    chain = chains.of_text(SEED, b"x" * size)
    prompt = Prompt(ExplicitIdentity(None, None), chain, tools, b"", b"", None, Hints())
    return Turn(Api.CHAT, (b"",), {}, [], "s", prompt, "", SloClass("default"), 0.0)


def test_tokens_that_a_lost_engine_generated_count_as_prompt_of_the_resumed_stream() -> None:
    resumed = replace(turn(1_000), resume={"outputs": [[1, 2], [], [3]]})
    assert TokenRatio(1.0).prompt_tokens(resumed, 0) == 1_003


def known(prompt_bytes: int, completion: int = 0, context: int = 0) -> Known:
    return Known(
        "k", "d0", 1, prompt_bytes=prompt_bytes, completion_tokens=completion, context_tokens=context
    )


@given(st.floats(0.05, 1.0), st.integers(100, 10**6))
def test_the_estimated_tokens_per_byte_follow_the_token_counts_of_engines(truth: float, size: int) -> None:
    ratio = TokenRatio(0.3)
    for _ in range(30):
        ratio.learn(turn(size), max(1, int(size * truth)))
    assert abs(ratio.tokens(size) - size * truth) <= size * 0.02 + 2


@pytest.mark.parametrize(("size", "tokens", "expected"), [(100, 10**6, 1_000_000), (10**6, 1, 50_000)])
def test_the_tokens_per_byte_learned_from_one_prompt_are_bounded(
    size: int, tokens: int, expected: int
) -> None:
    ratio = TokenRatio(0.3)
    ratio.learn(turn(size), tokens)
    assert ratio.tokens(1_000_000) == expected


@pytest.mark.parametrize("field", ["documents", "chat_template_kwargs"])
def test_documents_and_chat_template_arguments_count_as_prompt(field: str) -> None:
    text = {"text": "x" * 100_000}
    body = {"model": "m", "messages": [], field: [text] if field == "documents" else text}
    headers, models = {"content-type": "application/json"}, frozenset({"m"})
    parser = BodyParser("/v1/chat/completions", Api.CHAT, headers, "s", models, PromptLimit(100_000))
    prompt = parse_body(parser, (orjson.dumps(body),)).prompt
    assert prompt is not None
    assert replace(turn(0), prompt=prompt).prompt_bytes > 100_000


def test_an_estimate_never_exceeds_the_context_of_an_engine() -> None:
    assert TokenRatio(1.0).prompt_tokens(turn(10_000_000), 32_768) == 32_768


def test_tokens_that_the_decoder_holds_or_generated_count_as_cached() -> None:
    ratio = TokenRatio(0.5)
    grown = turn(10_000)
    assert ratio.uncached_tokens(grown, known(8_000, completion=600), 8_000) == 400
    assert ratio.uncached_tokens(grown, known(8_000, completion=2_000), 8_000) == 0


def test_tools_do_not_count_as_uncached_tokens_of_a_later_turn() -> None:
    ratio = TokenRatio(1.0)
    assert ratio.prompt_tokens(turn(1_000, tools=5_000), 0) == 6_000
    assert ratio.uncached_tokens(turn(1_000, tools=5_000), known(900), 900) == 100


def test_all_tokens_of_a_prompt_count_as_uncached_if_its_prefix_is_broken() -> None:
    assert TokenRatio(0.5).uncached_tokens(turn(10_000), known(8_000, 600, 5_000), 0) == 5_000


def test_a_gateway_that_is_new_to_a_conversation_subtracts_the_decoders_context_as_cached() -> None:
    assert TokenRatio(0.5).uncached_tokens(turn(10_000), known(0, 0, 4_000), 0) == 1_000


def of_ids(count: int) -> Turn:
    asked = turn(0)
    chain = chains.of_prompt(SEED, {"prompt": [7] * count})
    return replace(asked, prompt=replace(asked.prompt, chain=chain, exact_tokens=count))


def test_token_ids_are_counted_exactly_in_prompts_of_later_turns_too() -> None:
    ratio, asked = TokenRatio(9.0), of_ids(100)
    assert ratio.prompt_tokens(asked, 0) == 100
    assert ratio.uncached_tokens(asked, known(1), of_ids(77).prompt.chain.total_bytes) == 23


IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 100_000


def with_items(*items: dict[str, Any]) -> Turn:
    asked = turn(0)
    return replace(asked, prompt=replace(asked.prompt, chain=chains.of_messages(SEED, items)))


def with_parts(*parts: dict[str, Any], text: str = "What is this?") -> Turn:
    return with_items({"role": "user", "content": [{"type": "text", "text": text}, *parts]})


MEDIA = {
    "OpenAI's": {"type": "image_url", "image_url": {"url": IMAGE}},
    "by its URL": {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    "without a type": {"image_url": {"url": IMAGE}},
    "the Responses API's": {"type": "input_image", "image_url": IMAGE},
    "Anthropic's": {"type": "image", "source": {"type": "base64", "data": IMAGE}},
    "a sound": {"type": "input_audio", "input_audio": {"data": IMAGE, "format": "wav"}},
    "a document": {"type": "document", "source": {"type": "base64", "data": IMAGE}},
    "what a tool returns": {"type": "tool_result", "content": [{"type": "image", "source": {"data": IMAGE}}]},
}


@pytest.mark.parametrize("part", MEDIA.values(), ids=MEDIA)
def test_an_image_counts_as_a_fixed_number_of_tokens_and_does_not_change_the_estimate_for_text(
    part: dict[str, Any],
) -> None:
    ratio, asked = TokenRatio(0.3), with_parts(part)
    assert 1_200 <= ratio.prompt_tokens(asked, 0) <= 1_400
    for _ in range(10):
        ratio.learn(asked, 1_500)
    assert ratio.prompt_tokens(turn(100_000), 0) == 30_000


def test_text_beside_an_image_is_estimated_from_its_bytes() -> None:
    ratio, image = TokenRatio(0.3), MEDIA["OpenAI's"]
    document = {"type": "document", "source": {"type": "text", "data": "x" * 100_000}}
    marked = image | {"cache_control": {"type": "x" * 100_000}}  # the engine does not put it into the prompt
    for parts, text in (((image,), "x" * 100_000), ((document,), ""), ((marked,), "x" * 100_000)):
        assert 30_000 <= ratio.prompt_tokens(with_parts(*parts, text=text), 0) <= 31_500


def test_an_image_with_a_long_item_id_counts_as_many_tokens_as_any_image() -> None:
    item = {"type": "image_generation_call", "id": "x" * 100_000, "result": IMAGE}
    assert TokenRatio(0.3).prompt_tokens(with_items(item), 0) >= 1_200


def test_a_prompt_of_token_ids_does_not_change_the_estimated_tokens_per_byte() -> None:
    ratio = TokenRatio(0.3)
    ratio.learn(of_ids(10_000), 10_000)
    assert ratio.prompt_tokens(turn(100_000), 0) == 30_000


@pytest.mark.parametrize("field", ["image", "file", "document", "image_url"])
def test_text_with_an_unknown_field_does_not_count_as_an_image(field: str) -> None:
    parts = [{"type": "text", "text": "x" * 100_000}]
    plain = chains.of_messages(SEED, [{"role": "user", "content": parts}])
    odd = chains.of_messages(SEED, [{"role": "user", "content": parts, field: 1}])
    assert odd.media == plain.media == 0
    assert odd.total_bytes >= plain.total_bytes > 100_000
