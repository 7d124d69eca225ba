"""Ids a request carries: which one counts, what is refused, how they are scoped."""

import pytest

from router.identity.explicit import (
    ID_HEADERS,
    MAX_ID_BYTES,
    BadIdentity,
    clean_id,
    conversation_id,
    conversation_key,
    explicit,
    is_final,
    namespace,
)


def test_headers_count_in_their_documented_order() -> None:
    for at, name in enumerate(ID_HEADERS):
        headers = {later: f"id-{later}" for later in ID_HEADERS[at:]}
        assert explicit(headers, {"session_id": "body"}).source == name


def test_body_fields_count_after_headers_in_their_order() -> None:
    body = {
        "session_id": "a",
        "conversation": {"id": "b"},
        "prompt_cache_key": "c",
        "metadata": {"session_id": "d"},
    }
    for expected in ("session_id", "conversation", "prompt_cache_key", "metadata.session_id"):
        got = explicit({}, body)
        assert got.source == expected
        body.pop(expected.partition(".")[0])
    assert explicit({}, body).id is None


def test_a_previous_response_comes_before_the_cache_key() -> None:
    got = explicit({}, {"previous_response_id": "resp_1", "prompt_cache_key": "c"})
    assert (got.id, got.previous_response) == (None, "resp_1")


def test_sub_agents_are_conversations_below_their_parent() -> None:
    claude = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a2"}
    assert (explicit(claude, {}).id, explicit(claude, {}).parent) == ("s.a2", "s")
    nested = {**claude, "x-claude-code-parent-agent-id": "a1"}
    assert explicit(nested, {}).parent == "s.a1"
    dynamo = {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "top"}
    assert explicit(dynamo, {}).parent == "top"
    assert explicit({"x-parent-conversation-id": "p"}, {}).parent == "p"
    assert explicit({"x-conversation-id": "p", "x-parent-conversation-id": "p"}, {}).parent is None


def test_an_id_that_is_too_long_is_refused() -> None:
    assert clean_id("x" * MAX_ID_BYTES, "h") is not None
    with pytest.raises(BadIdentity, match="512"):
        explicit({"x-session-id": "x" * 10_000}, {})
    with pytest.raises(BadIdentity):
        explicit({}, {"session_id": 7})


def test_ids_that_cannot_stand_in_a_header_are_replaced_by_their_hash() -> None:
    for wild in ("a b", "a\r\nx: y", "é", "\ud800"):
        cleaned = clean_id(wild, "f")
        assert cleaned is not None
        assert cleaned.startswith("hash-")
        assert clean_id(cleaned, "f") == cleaned


def test_keys_are_scoped_by_the_api_key() -> None:
    one, other = (conversation_key(namespace(key), "a:b") for key in ("k1", "k2"))
    assert one != other
    assert conversation_id(one) == conversation_id(other) == "a:b"


def test_the_final_marker() -> None:
    assert is_final({"x-conversation-final": "True"})
    assert not is_final({"x-conversation-final": "0"})
    assert not is_final({})
