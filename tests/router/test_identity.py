"""A request belongs to the conversation that its id names, or else to the one that its prompt continues."""

import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import BadIdentity
from router.identity import prefix_chain as chains
from router.identity.conversation_ids import (
    ID_HEADERS,
    MAX_ID_BYTES,
    clean_id,
    conversation_id,
    conversation_key,
    explicit_identity,
    namespace,
)
from router.identity.node_table import MAX_TIPS, NodeTable, PrefixMatch, Resolution, resolve_prefix
from router.identity.prefix_chain import Chain

SEED = chains.seed("space", "model")


def test_of_several_id_headers_the_one_with_the_highest_precedence_counts() -> None:
    for at, name in enumerate(ID_HEADERS):
        headers = {later: f"id-{later}" for later in ID_HEADERS[at:]}
        assert explicit_identity(headers, {"session_id": "body"}).id == f"id-{name}"


def test_session_ids_in_a_body_name_a_group_but_its_conversation_field_names_one() -> None:
    body = {"session_id": "a", "conversation": {"id": "b"}, "conversation_id": "c"}
    named = explicit_identity({}, body)
    assert named.id == "b"
    body.pop("conversation")
    got = explicit_identity({}, body)
    assert (got.id, got.group, got.hint) == (None, "a\0c", "a")


def test_cache_keys_and_metadata_name_a_group_of_conversations() -> None:
    body = {"prompt_cache_key": "c", "metadata": {"session_id": "d", "user_id": "e"}}
    got = explicit_identity({"x-correlation-id": "f"}, body)
    assert (got.id, got.group, got.hint) == (None, "c\0d\0e", "c")
    alone = explicit_identity({"x-correlation-id": "f"}, {})
    assert (alone.id, alone.group, alone.hint) == (None, "", "f")
    assert alone.new_id().startswith(alone.id_prefix)
    assert len(explicit_identity({"x-correlation-id": "f" * 500}, {}).new_id()) < 100


def test_of_two_matches_the_conversation_named_after_the_correlation_id_is_chosen() -> None:
    said = explicit_identity({"x-correlation-id": "f"}, {})
    table = NodeTable(100)
    for key in ("k:c-1", f"k:{said.new_id()}"):
        table.record(prompt("a").end, key)
    found = table.find(prompt("a", "b"))
    named = resolve_prefix(found, prompt("a", "b").end.digest, frozenset[str]().__contains__, said.id_prefix)
    assert (named.conversation or "").startswith("k:f.")
    assert decide(table, prompt("a", "b")).conversation == "k:c-1"


def test_a_sub_agent_has_a_conversation_of_its_own_with_a_parent() -> None:
    claude = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a2"}
    assert (explicit_identity(claude, {}).id, explicit_identity(claude, {}).parent) == ("s.a2", "s")
    nested = {**claude, "x-claude-code-parent-agent-id": "a1"}
    assert explicit_identity(nested, {}).parent == "s.a1"
    dynamo = {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "top"}
    assert explicit_identity(dynamo, {}).parent == "top"
    assert explicit_identity({"x-parent-conversation-id": "p"}, {}).parent == "p"
    assert explicit_identity({"x-conversation-id": "p", "x-parent-conversation-id": "p"}, {}).parent is None


def test_an_id_that_is_too_long_is_refused() -> None:
    assert clean_id("x" * MAX_ID_BYTES, "h") is not None
    with pytest.raises(BadIdentity, match="512"):
        explicit_identity({"x-session-id": "x" * 10_000}, {})
    with pytest.raises(BadIdentity):
        explicit_identity({}, {"session_id": 7})


def test_a_malformed_hint_is_ignored() -> None:
    of_no_use = {"prompt_cache_key": 7, "metadata": {"session_id": 5, "user_id": None}}
    assert explicit_identity({}, of_no_use) == explicit_identity({}, {})
    long = explicit_identity({"x-correlation-id": "y" * 600}, {"metadata": {"user_id": "x" * 600}})
    assert long.id is None and long.group.startswith("hash-")


def test_ids_with_special_characters_are_replaced_by_their_hash() -> None:
    for wild in (
        "a b",
        "a\r\nx: y",
        "é",
        "\ud800",
        "<img/src=x/onerror=alert(1)>",
        "a'b",
        'a"b',
        "a&b",
        "x" * 129,
    ):
        cleaned = clean_id(wild, "f")
        assert cleaned is not None
        assert cleaned.startswith("hash-")
        assert clean_id(cleaned, "f") == cleaned


def test_equal_ids_under_two_api_keys_have_different_conversation_keys() -> None:
    one, other = (conversation_key(namespace(key), "a:b") for key in ("k1", "k2"))
    assert one != other
    assert conversation_id(one) == conversation_id(other) == "a:b"


def prompt(*words: str) -> Chain:
    return chains.of_messages(SEED, [{"role": "user", "content": word} for word in words])


def decide(table: NodeTable, asked: Chain, running: frozenset[str] = frozenset()) -> Resolution:
    return resolve_prefix(table.find(asked), asked.end.digest, running.__contains__)


def test_a_prompt_without_a_known_prefix_is_a_new_conversation() -> None:
    table = NodeTable(100)
    table.record(prompt("a", "b").end, "one")
    assert decide(table, prompt("a", "c")).match is PrefixMatch.NEW  # only the ends of requests are nodes
    assert decide(table, prompt("a")).match is PrefixMatch.NEW


def test_a_prompt_that_extends_the_newest_one_continues_its_conversation() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    got = decide(table, prompt("a", "b", "c"))
    assert (got.match, got.conversation, got.known_bytes) == (
        PrefixMatch.CONTINUED,
        "one",
        prompt("a").total_bytes,
    )


def test_a_prompt_that_extends_an_older_one_forks_its_conversation() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    table.record(prompt("a", "b", "c").end, "one")
    got = decide(table, prompt("a", "x", "y"))
    assert (got.match, got.conversation, got.parent) == (PrefixMatch.FORKED, None, "one")


def test_a_repeated_prompt_is_a_fork_only_while_its_conversation_runs() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    assert decide(table, prompt("a")) == Resolution(PrefixMatch.RETRIED, "one", None, prompt("a").total_bytes)
    got = decide(table, prompt("a"), frozenset({"one"}))
    assert (got.match, got.parent) == (PrefixMatch.FORKED, "one")


def test_two_conversations_with_the_same_first_prompt_can_both_continue() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    table.record(prompt("a").end, "two")
    first = decide(table, prompt("a", "p", "q"))
    assert first.conversation == "one"
    table.record(prompt("a", "p", "q").end, "one")
    assert decide(table, prompt("a", "r", "s")).conversation == "two"


def test_each_of_many_conversations_with_the_same_first_prompt_can_continue() -> None:
    table, first = NodeTable(1000), prompt("a")
    names = {f"c{number}" for number in range(3 * MAX_TIPS)}
    for name in sorted(names):
        table.record(first.end, name)
    went_on = set()
    for number in range(len(names)):
        asked = prompt("a", str(number))
        found = table.find(asked)
        assert found is not None and len(found.holders) <= MAX_TIPS + 1
        got = decide(table, asked)
        assert got.match is PrefixMatch.CONTINUED and got.conversation is not None
        table.record(asked.end, got.conversation)
        went_on.add(got.conversation)
    assert went_on == names
    assert all(table.known_bytes(first, name) for name in names)
    assert decide(table, prompt("a", "late")).match is PrefixMatch.FORKED


def test_many_named_conversations_with_the_same_first_prompt_stay_separate() -> None:
    """The client runs one task many times in parallel, and names each run by a correlation id."""
    table, first, count = NodeTable(1000), prompt("a"), 3 * MAX_TIPS
    keys = [f"space:session-{number}.{number:012x}" for number in range(count)]
    for key in keys:
        table.record(first.end, key)
    for number, key in enumerate(keys):
        asked = prompt("a", str(number))
        found = table.find(asked, f"session-{number}.")
        assert found is not None and len(found.holders) <= 2 * MAX_TIPS + 1
        got = resolve_prefix(found, asked.end.digest, lambda _: False, f"session-{number}.")
        assert got.conversation == key
        table.record(asked.end, key)


def test_a_conversation_is_found_after_many_with_its_first_prompt_have_continued() -> None:
    table, first = NodeTable(1000), prompt("a")
    table.record(first.end, "quick")
    table.record(first.end, "slow")
    table.record(prompt("a", "quick").end, "quick")
    for number in range(2 * MAX_TIPS):
        table.record(first.end, f"c{number}")
        table.record(prompt("a", str(number)).end, f"c{number}")
    assert decide(table, prompt("a", "b")).conversation == "slow"


def test_plain_prompts_with_a_long_common_prefix_stay_separate_conversations() -> None:
    table = NodeTable(100)
    shared = b"s" * 700
    for number in range(20):
        asked = chains.of_text(SEED, shared + b"question %d?" % number)
        assert decide(table, asked).match is PrefixMatch.NEW
        table.record(asked.end, str(number))
    got = decide(table, chains.of_text(SEED, shared + b"question 7? answer"))
    assert got.conversation == "7"


def test_a_node_table_is_empty_after_all_conversations_are_forgotten() -> None:
    table = NodeTable(capacity=50, per_conversation=10)
    rng = random.Random(1)
    for step in range(2000):
        name = str(rng.randrange(12))
        if rng.random() < 0.05:
            table.forget(name)
        else:
            data = bytes([rng.randrange(3)]) * rng.randrange(600)
            table.record(chains.of_text(SEED, data).end, name)
        assert len(table) <= 50, step
    for number in range(12):
        table.forget(str(number))
    assert len(table) == 0
    assert pickle.dumps(table) == pickle.dumps(NodeTable(capacity=50, per_conversation=10))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=30))
def test_every_branch_of_a_tree_of_prompts_keeps_its_own_conversation(steps: list[tuple[int, int]]) -> None:
    """The branches grow alternately; each stays its own conversation, whatever the other branches do."""
    table = NodeTable(10_000)
    root = ["root"]
    table.record(prompt(*root).end, "c0")
    branches: dict[str, list[str]] = {"c0": root}
    for pick, word in steps:
        name = list(branches)[pick % len(branches)]
        longer = [*branches[name], f"answer-{name}-{len(branches[name])}", f"word-{word}"]
        got = decide(table, prompt(*longer))
        assert (got.match, got.conversation) == (PrefixMatch.CONTINUED, name)
        table.record(prompt(*longer).end, name)
        older: Any = branches[name]
        branches[name] = longer
        fork = [*older, f"other-{len(branches)}", "x"]
        forked = decide(table, prompt(*fork))
        assert forked.match is PrefixMatch.FORKED
        assert forked.parent is not None
        child = f"c{len(branches)}"
        table.record(prompt(*fork).end, child)
        branches[child] = fork
