"""Prompts of a replay grow by the answers, wait for tools, and have the sizes that the trace says."""

from itertools import pairwise

import pytest

from tests.traces.replay.engine import CHARS_PER_TOKEN, PlayedEngine, render, shared
from tests.traces.replay.workload import CountingObserver, agent
from traces.format import TraceConversation, TraceTurn, TurnEnding
from traces.replay import Dialect, ReplayOptions, ToolStyle, replay


async def served(engine: PlayedEngine, *conversations: TraceConversation, **options: object) -> None:
    chosen = ReplayOptions(url=engine.url, **{"probes": 0, "time_limit_s": 20.0, **options})  # type: ignore[arg-type]
    run = await replay(conversations, chosen, CountingObserver())
    assert all(result.outcome == "done" for result in run.conversations), run.conversations


async def test_each_prompt_extends_the_previous_prompt_and_answer() -> None:
    async with PlayedEngine().running() as engine:
        await served(engine, agent("a"))
    for before, after in pairwise(engine.seen):
        old, new = before.body["messages"], after.body["messages"]
        assert new[: len(old)] == old
        answer, following = new[len(old) :]
        assert answer["role"] == "assistant"
        assert answer["content"].startswith("000 001 ")
        assert following["content"]


async def test_tool_turns_are_sent_as_calls_and_results_or_as_plain_text() -> None:
    async with PlayedEngine().running() as engine:
        await served(engine, agent("a", turns=2))
        await served(engine, agent("b", turns=2), tools=ToolStyle.TEXT)
    _, with_tools, _, as_text = engine.seen
    _, answer, result = with_tools.body["messages"]
    assert result["role"] == "tool"
    assert answer["tool_calls"][0]["id"] == result["tool_call_id"]
    assert [message["role"] for message in as_text.body["messages"]] == ["user", "assistant", "user"]


async def test_a_user_message_follows_an_answer_to_the_user() -> None:
    said = TraceTurn(100, 0, 4, ending=TurnEnding.END_OF_TURN)
    conversation = TraceConversation("a", 0.0, (said, TraceTurn(20, 104, 4)))
    async with PlayedEngine().running() as engine:
        await served(engine, conversation)
    assert [m["role"] for m in engine.seen[1].body["messages"]] == ["user", "assistant", "user"]


async def test_a_turn_is_sent_when_its_tool_would_end_after_the_previous_answer() -> None:
    async with PlayedEngine().running() as engine:
        await served(engine, agent("a", wait=0.12))
    for before, after in pairwise(engine.seen):
        assert 0.12 <= after.at - before.last_at < 0.2


async def test_conversations_start_at_the_arrival_times_of_the_trace() -> None:
    async with PlayedEngine().running() as engine:
        await served(engine, *(agent(str(n), arrival=0.15 * n, turns=1) for n in range(4)))
    start = engine.seen[0].at
    assert [seen.at - start for seen in engine.seen] == pytest.approx([0.0, 0.15, 0.3, 0.45], abs=0.03)


@pytest.mark.parametrize("tokenize", [True, False])
async def test_prompts_have_the_traces_sizes_with_and_without_a_tokenize_endpoint(tokenize: bool) -> None:
    conversation = agent("a", turns=6, first=3000, append=300, wait=0.0)
    async with PlayedEngine(tokenize=tokenize).running() as engine:
        await served(engine, conversation)
    for turn, seen in zip(conversation.turns, engine.seen[-6:], strict=True):
        assert seen.prompt_tokens == pytest.approx(turn.prompt_tokens, rel=0.01, abs=4)


async def test_a_broken_prefix_keeps_exactly_what_the_trace_says_is_cached() -> None:
    turns = (
        TraceTurn(1000, 0, 8, ending=TurnEnding.TOOL_USE),
        TraceTurn(200, 1008, 8, ending=TurnEnding.TOOL_USE),
        TraceTurn(500, 600, 8),
    )
    async with PlayedEngine().running() as engine:
        await served(engine, TraceConversation("a", 0.0, turns))
    broken = engine.seen[2]
    assert broken.prompt_tokens == pytest.approx(1100, rel=0.02)
    assert broken.new_tokens == pytest.approx(500, rel=0.05)
    same = shared(render(broken.body["messages"]), render(engine.seen[0].body["messages"]))
    assert same / CHARS_PER_TOKEN == pytest.approx(600, rel=0.1)


async def test_a_child_conversation_shares_the_prefix_of_its_parent() -> None:
    parent = agent("p", turns=1, first=800)
    child = TraceConversation("c", 0.3, (TraceTurn(200, 600, 4),), parent="p")
    async with PlayedEngine().running() as engine:
        await served(engine, parent, child)
    assert engine.seen[1].new_tokens == pytest.approx(200, rel=0.1)


async def test_equal_salts_give_equal_prompts_and_different_salts_share_no_prefix() -> None:
    async with PlayedEngine().running() as engine:
        for salt in ("1", "1", "2"):
            await served(engine, agent("a", turns=1), salt=salt)
    one, again, other = (render(seen.body["messages"]) for seen in engine.seen)
    assert one == again
    assert one[:40] != other[:40]


async def test_only_the_vllm_dialect_asks_for_answers_of_an_exact_length() -> None:
    async with PlayedEngine().running() as engine:
        await served(engine, agent("a", turns=1))
        await served(engine, agent("b", turns=1), dialect=Dialect.OPENAI)
    exact, standard = (seen.body for seen in engine.seen)
    assert exact["ignore_eos"] is True
    assert exact["min_tokens"] == exact["max_tokens"] == 6
    assert not {"ignore_eos", "min_tokens"} & set(standard)


async def test_a_conversation_id_is_sent_only_if_asked_for() -> None:
    async with PlayedEngine().running() as engine:
        await served(engine, agent("a", turns=1))
        await served(engine, agent("b", turns=1), conversation_header="X-Session-ID", api_key="k")
    plain, named = (seen.headers for seen in engine.seen)
    assert not any("session" in name.lower() for name in plain)
    assert named["X-Session-ID"] == "b"
    assert named["Authorization"] == "Bearer k"
