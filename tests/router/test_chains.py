"""Two prompts have equal chains if and only if they are the same prompt for the model."""

from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import BadIdentity
from router.identity import prefix_chain as chains
from router.identity.prefix_chain import canonical

SEED = chains.seed("space", "model")
TEXT = st.text(max_size=40)
ARGUMENTS = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(-9, 9), max_size=3)


@given(st.sampled_from(["user", "system", "assistant"]), TEXT)
def test_content_as_a_string_and_as_one_text_part_has_the_same_canonical_form(role: str, text: str) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    assert canonical({"role": role, "content": text}) == canonical({"role": role, "content": parts})
    marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    assert canonical({"role": role, "content": marked}) == canonical({"role": role, "content": text})


@given(TEXT)
def test_null_and_empty_fields_do_not_change_the_canonical_form(text: str) -> None:
    plain = {"role": "assistant", "content": text}
    padded = {**plain, "tool_calls": [], "refusal": None, "function_call": None, "annotations": []}
    assert canonical(plain) == canonical(padded)


@given(ARGUMENTS)
def test_the_spacing_of_a_tool_calls_arguments_does_not_change_the_canonical_form(
    arguments: dict[str, int],
) -> None:
    def call(text: str, **more: object) -> dict[str, Any]:
        return {
            "role": "assistant",
            **more,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": text}}],
        }

    spaced = orjson.dumps(arguments, option=orjson.OPT_INDENT_2).decode()
    dense = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()
    assert canonical(call(spaced, content=None)) == canonical(call(dense))
    assert canonical(call(spaced, content="")) == canonical(call(dense))


def test_tool_calls_with_different_arguments_have_different_canonical_forms() -> None:
    def call(arguments: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}

    assert canonical(call('{"a": 1}')) != canonical(call('{"a": 2}'))
    assert canonical(call("not json")) != canonical(call("other"))


def test_ids_and_states_of_response_items_do_not_change_the_canonical_form() -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
    assert canonical(item) == canonical({**item, "id": "fc_1", "status": "completed"})
    plain = {"role": "user", "content": "x"}
    assert canonical({"type": "message", **plain}) == canonical(plain)


def test_a_message_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    with pytest.raises(BadIdentity):
        canonical({"role": "user", "content": [deep]})


MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}), min_size=1, max_size=8)


@given(MESSAGES, MESSAGES)
def test_the_chain_of_a_longer_prompt_contains_the_end_of_its_prefix(
    head: list[Any], more: list[Any]
) -> None:
    short, long = chains.of_messages(SEED, head), chains.of_messages(SEED, head + more)
    assert short.end.link in long.links
    assert long.sizes[long.links.index(short.end.link)] == short.total_bytes


@given(MESSAGES)
def test_prompts_of_different_owners_models_or_users_have_different_chains(messages: list[Any]) -> None:
    ends = {
        chains.of_messages(chains.seed(*who), messages).end.link
        for who in (("a", "m"), ("b", "m"), ("a", "n"), ("a", "m", "u"))
    }
    assert len(ends) == 4


@given(st.binary(max_size=700), st.binary(min_size=1, max_size=300))
def test_a_plain_prompt_matches_every_prefix_that_it_extends(head: bytes, more: bytes) -> None:
    short, long = chains.of_text(SEED, head), chains.of_text(SEED, head + more)
    index = long.links.index(short.end.link)
    assert long.digest_at(index, short.end.tail_bytes) == short.end.digest


@given(st.binary(min_size=1, max_size=600), st.integers(0, 599))
def test_a_plain_prompt_that_differs_in_one_byte_does_not_match(head: bytes, where: int) -> None:
    at = where % len(head)
    other = head[:at] + bytes([head[at] ^ 1]) + head[at + 1 :] + b"more"
    short, long = chains.of_text(SEED, head), chains.of_text(SEED, other)
    digests = {long.digest_at(i, short.end.tail_bytes) for i in range(len(long.links))}
    assert short.end.digest not in digests


def test_a_prompt_of_token_ids_matches_its_prefix_but_no_text_with_the_same_bytes() -> None:
    tokens = list(range(1000))
    short = chains.of_prompt(SEED, {"prompt": tokens[:300]})
    long = chains.of_prompt(SEED, {"prompt": tokens})
    assert short.end.link in long.links
    text = array("q", tokens).tobytes().decode("latin-1")
    assert chains.of_prompt(SEED, {"prompt": text}).end.digest != long.end.digest
