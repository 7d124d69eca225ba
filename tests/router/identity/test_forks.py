"""Continue, retry, fork: decided by where a prompt's longest known prefix ends."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.identity import chain
from router.identity.chain import Chain
from router.identity.nodes import NodeTable
from router.identity.resolve import How, Resolved, resolve

SEED = chain.seed("space", "model")


def prompt(*words: str) -> Chain:
    return chain.of_messages(SEED, [{"role": "user", "content": word} for word in words])


def decide(table: NodeTable, asked: Chain, running: frozenset[str] = frozenset()) -> Resolved:
    return resolve(table.find(asked), asked.end.digest, running.__contains__)


def test_what_is_unknown_is_new() -> None:
    table = NodeTable(100)
    table.record(prompt("a", "b").end, "one")
    assert decide(table, prompt("a", "c")).how is How.NEW  # nodes are only where a request ended
    assert decide(table, prompt("a")).how is How.NEW


def test_going_on_from_the_tip_continues() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    got = decide(table, prompt("a", "b", "c"))
    assert (got.how, got.conversation, got.known_bytes) == (How.CONTINUED, "one", prompt("a").total_bytes)


def test_going_on_from_an_older_point_forks_with_that_parent() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    table.record(prompt("a", "b", "c").end, "one")
    got = decide(table, prompt("a", "x", "y"))
    assert (got.how, got.conversation, got.parent) == (How.FORKED, None, "one")


def test_a_repeat_is_a_retry_when_idle_and_a_fork_while_running() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    assert decide(table, prompt("a")) == Resolved(How.RETRIED, "one", None, prompt("a").total_bytes)
    got = decide(table, prompt("a"), frozenset({"one"}))
    assert (got.how, got.parent) == (How.FORKED, "one")


def test_two_conversations_with_one_first_request_each_go_on() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    table.record(prompt("a").end, "two")
    first = decide(table, prompt("a", "p", "q"))
    assert first.conversation == "one"
    table.record(prompt("a", "p", "q").end, "one")
    assert decide(table, prompt("a", "r", "s")).conversation == "two"


def test_a_request_is_known_by_its_prompt_and_by_its_answers_id() -> None:
    table = NodeTable(100)
    table.record(prompt("a").end, "one")
    table.record(chain.response_end(SEED, "resp_1"), "one", alias=True)
    by_id = chain.of_pointer(SEED, "resp_1", prompt("b"))
    assert decide(table, prompt("a", "x", "b")).conversation == "one"
    assert decide(table, by_id).conversation == "one"
    table.record(by_id.end, "one")
    assert decide(table, by_id).how is How.RETRIED
    assert decide(table, chain.of_pointer(SEED, "resp_1", prompt("c"))).how is How.FORKED
    assert decide(table, prompt("b")).how is How.NEW  # what follows a pointer is no prompt of its own


def test_plain_prompts_that_share_whole_blocks_are_not_confused() -> None:
    table = NodeTable(100)
    shared = b"s" * 700
    for number in range(20):
        asked = chain.of_text(SEED, shared + b"question %d?" % number)
        assert decide(table, asked).how is How.NEW
        table.record(asked.end, str(number))
    got = decide(table, chain.of_text(SEED, shared + b"question 7? answer"))
    assert got.conversation == "7"


def test_forgetting_and_eviction_leave_nothing_behind() -> None:
    table = NodeTable(capacity=50, per_conversation=10)
    rng = random.Random(1)
    for step in range(2000):
        name = str(rng.randrange(12))
        if rng.random() < 0.05:
            table.forget(name)
        else:
            data = bytes([rng.randrange(3)]) * rng.randrange(600)
            table.record(chain.of_text(SEED, data).end, name)
        assert len(table) <= 50, step
    for number in range(12):
        table.forget(str(number))
    assert len(table) == 0
    assert (table._tails, table._tips, table._of) == ({}, {}, {})


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=30))
def test_every_branch_of_a_tree_of_prompts_keeps_its_own_conversation(steps: list[tuple[int, int]]) -> None:
    """Branches grow one after the other; each must be found as itself, whatever the others did."""
    table = NodeTable(10_000)
    root = ["root"]
    table.record(prompt(*root).end, "c0")
    branches: dict[str, list[str]] = {"c0": root}
    for pick, word in steps:
        name = list(branches)[pick % len(branches)]
        longer = [*branches[name], f"answer-{name}-{len(branches[name])}", f"word-{word}"]
        got = decide(table, prompt(*longer))
        assert (got.how, got.conversation) == (How.CONTINUED, name)
        table.record(prompt(*longer).end, name)
        older: Any = branches[name]
        branches[name] = longer
        fork = [*older, f"other-{len(branches)}", "x"]
        forked = decide(table, prompt(*fork))
        assert forked.how is How.FORKED
        assert forked.parent is not None
        child = f"c{len(branches)}"
        table.record(prompt(*fork).end, child)
        branches[child] = fork
