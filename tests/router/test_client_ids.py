"""The turns of each known client, sent as it sends them, form one conversation on one decoder.

The conversation has one transfer. The client's sub-agents are conversations of their own, with the client's
as their parent. Values that only look like an id neither join conversations nor split one.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_fleet import FakeFleet, GatewayAnswer, ask, assistant, fleet, get, user
from tests.support.waiting import until

Headers = dict[str, str]
SYSTEM = {"role": "system", "content": "You are a coding agent. " * 20}


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    async with fleet(tmp_path, decoders=3) as one:
        yield one


def calls(number: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return messages with parallel calls of the tools `names`, and their results."""
    ids = [f"call-{number}-{name}" for name in names]
    asked = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for one, name in zip(ids, names, strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": one, "content": f"result {one}"} for one in ids]
    return [{"role": "assistant", "content": None, "tool_calls": asked}, *results]


async def tool_loop(
    made: FakeFleet, begins: str, headers: Headers | None = None, turns: int = 4, **body: Any
) -> list[GatewayAnswer]:
    """Run an agent through a question, turns with parallel tool calls, and an answer."""
    messages = [SYSTEM, user(begins)]
    answers = []
    for number in range(turns):
        answers.append(await ask(made.urls[0], messages, headers=headers, stream=True, **body))
        messages += calls(number, ("read", "grep"))
    return answers


def ids(answers: list[GatewayAnswer]) -> set[str]:
    assert all(answer.status == 200 for answer in answers)
    return {answer.conversation for answer in answers}


async def told(made: FakeFleet, conversation: str) -> dict[str, Any]:
    await made.settle()
    status, found = await get(f"{made.urls[0]}/v1/conversations/{conversation}")
    assert status == 200, found
    return dict(found)


async def retried_and_compacted(made: FakeFleet, headers: Headers) -> set[str]:
    """Send a turn, the same turn as after a timeout, and a turn whose history is replaced by a summary."""
    before = [SYSTEM, user("long work"), assistant("done"), user("and more")]
    given_up = asyncio.create_task(ask(made.urls[0], before, headers=headers, max_tokens=2000, stream=True))
    await until(lambda: any(one.running for one in made.engines.values()))
    given_up.cancel()
    await asyncio.wait([given_up])
    again = await ask(made.urls[0], before, headers=headers)
    compacted = await ask(made.urls[0], [SYSTEM, user("summary of the work " * 20)], headers=headers)
    return ids([again, compacted])


async def one_conversation_and_its_sub_agent(made: FakeFleet, main: Headers, sub: Headers) -> tuple[str, str]:
    (top,) = ids(await tool_loop(made, "build it", main))
    children = await asyncio.gather(tool_loop(made, "explore", sub, 2), tool_loop(made, "explore", main, 1))
    (child,) = ids(children[0])
    assert await retried_and_compacted(made, main) == {top}
    shown, below = await told(made, top), await told(made, child)
    assert (shown["parent"], below["parent"]) == (None, top)
    assert below["decoder"] == shown["decoder"]
    assert len({seen.conversation for seen in made.decoder_requests()}) == 2
    return top, child


async def test_turns_and_sub_agents_of_opencode_are_told_apart_by_session_id(made: FakeFleet) -> None:
    main = {"x-session-id": "ses_1"}
    sub = {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}
    assert await one_conversation_and_its_sub_agent(made, main, sub) == ("ses_1", "ses_2")


async def test_turns_and_sub_agents_of_claude_code_are_told_apart_by_session_and_agent_id(
    made: FakeFleet,
) -> None:
    main = {"x-claude-code-session-id": "s"}
    sub = {**main, "x-claude-code-agent-id": "a1"}
    assert await one_conversation_and_its_sub_agent(made, main, sub) == ("s", "s.a1")
    nested = {**main, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}
    (deeper,) = ids(await tool_loop(made, "deeper", nested, 2))
    assert (await told(made, deeper))["parent"] == "s.a1"


async def test_turns_and_sub_agents_of_codex_are_told_apart_by_thread_id(made: FakeFleet) -> None:
    main = {"session-id": "t1", "thread-id": "t1"}
    sub = {"session-id": "t1", "thread-id": "t2", "x-codex-parent-thread-id": "t1"}
    assert await one_conversation_and_its_sub_agent(made, main, sub) == ("t1", "t2")


async def test_a_dynamo_session_with_its_final_marker_ends_and_its_sub_agent_does_not(
    made: FakeFleet,
) -> None:
    main = {"x-dynamo-session-id": "d1"}
    sub = {"x-dynamo-session-id": "d2", "x-dynamo-parent-session-id": "d1"}
    assert await one_conversation_and_its_sub_agent(made, main, sub) == ("d1", "d2")
    await ask(made.urls[0], [user("bye")], headers={**main, "x-dynamo-session-final": "true"})
    await until(lambda: any(name.endswith(":d1") for one in made.engines.values() for name in one.released))
    shown = await told(made, "d1")
    assert (shown["state"], shown["cause"]) == ("ended", "final")
    assert not any(name.endswith(":d1") for one in made.engines.values() for name in one.held)
    assert (await told(made, "d2"))["state"] == "idle"


@pytest.mark.parametrize("header", ["x-smg-routing-key", "x-session-affinity"])
async def test_a_routing_key_names_a_conversation(made: FakeFleet, header: str) -> None:
    assert ids(await tool_loop(made, "build it", {header: "r1"})) == {"r1"}
    assert ids(await tool_loop(made, "build it", {header: "r2"})) == {"r2"}
    assert await retried_and_compacted(made, {header: "r1"}) == {"r1"}


async def test_a_session_token_that_a_client_sends_back_names_its_conversation(made: FakeFleet) -> None:
    for named_after in ({}, {"prompt_cache_key": "my-app"}):
        first = await ask(made.urls[0], [user("one")], **named_after)
        token = {"x-session-token": first.headers["x-session-token"]}
        assert await retried_and_compacted(made, token) == {first.conversation}


async def test_a_session_token_that_names_an_engine_does_not_join_conversations(made: FakeFleet) -> None:
    """A router in front of this gateway may send the name of one engine as the token of each session."""
    token = {"x-session-token": "ZGVmYXVsdC9jb25zZXJ2ZS0w"}
    loops = await asyncio.gather(*(tool_loop(made, f"task {number}", token) for number in range(3)))
    assert [len(ids(answers)) for answers in loops] == [1, 1, 1]
    assert len(set().union(*map(ids, loops))) == 3


async def test_a_session_in_anthropics_user_id_separates_conversations(made: FakeFleet) -> None:
    """The field `user_id` names the session; a side request in it is not part of its conversation."""
    path = "/v1/messages"

    async def turn(session: str, *messages: dict[str, Any]) -> str:
        who = {"user_id": f"user_7_account_8_session_{session}"}
        answer = await ask(made.urls[0], list(messages), path=path, metadata=who, max_tokens=3)
        assert answer.status == 200, answer.body
        return answer.conversation

    begin, title = user("fix it"), user("a title for: fix it")
    later = [begin, assistant("look"), user("result")]
    one, other = await turn("s1", begin), await turn("s2", begin)
    assert one != other
    assert await turn("s1", title) not in (one, other)
    # Both run in lockstep with equal answers; each continues its own conversation, also at a retry.
    for messages in (later, later, [*later, assistant("more"), user("result 2")]):
        assert [await turn("s1", *messages), await turn("s2", *messages)] == [one, other]
    fork = await turn("s1", begin, assistant("otherwise"), user("x"))
    assert (await told(made, fork))["parent"] == one


@pytest.mark.parametrize("field", ["prompt_cache_key", "session_id", "conversation_id"])
async def test_a_cache_key_of_a_whole_application_does_not_join_conversations(
    made: FakeFleet, field: str
) -> None:
    """Conversations with a common cache key are placed separately, even if they arrive together."""
    loops = await asyncio.gather(*(tool_loop(made, f"task {n}", **{field: "my-app"}) for n in range(6)))
    assert [len(ids(answers)) for answers in loops] == [1] * 6
    conversations = set().union(*map(ids, loops))
    assert len(conversations) == 6
    assert all(name.startswith("my-app.") for name in conversations)
    decoders = [(await told(made, name))["decoder"] for name in sorted(conversations)]
    assert sorted(map(decoders.count, set(decoders))) == [2, 2, 2]
    assert len(made.prefills()) == 6


@pytest.mark.parametrize("field", ["prompt_cache_key", "session_id", "conversation_id"])
async def test_equal_prompts_with_different_cache_keys_are_different_conversations(
    made: FakeFleet, field: str
) -> None:
    messages = [user("the very same")]
    names: list[set[str]] = [set(), set()]
    for number in range(3):
        for key in (0, 1):
            answer = await ask(made.urls[0], messages, **{field: f"k{key}"})
            names[key].add(answer.conversation)
        messages += [assistant(f"w{number}"), user("go on")]
    assert [len(one) for one in names] == [1, 1]
    assert names[0] != names[1]


async def test_requests_with_different_correlation_ids_stay_one_conversation(made: FakeFleet) -> None:
    messages = [SYSTEM, user("build it")]
    answers = []
    for number in range(4):
        stamp = {"x-correlation-id": f"req-{number}"}
        answers.append(await ask(made.urls[0], messages, headers=stamp))
        if number == 1:  # the retry has another correlation id
            answers.append(await ask(made.urls[0], messages, headers={"x-correlation-id": "req-1b"}))
        messages += calls(number, ("read", "grep"))
    assert len(ids(answers)) == 1
    assert len(made.prefills()) == 1
    assert len({seen.conversation for seen in made.decoder_requests()}) == 1


async def test_a_session_header_has_precedence_over_a_correlation_id(made: FakeFleet) -> None:
    stamped = {"x-claude-code-session-id": "s", "x-correlation-id": "req-1"}
    assert ids([await ask(made.urls[0], [user("x")], headers=stamped)]) == {"s"}


@pytest.mark.parametrize("header", [True, False])
async def test_turns_of_vllms_multi_turn_benchmark_are_one_conversation(
    made: FakeFleet, header: bool
) -> None:
    """With `--send-conversation-id` the client names its conversation; without it the messages decide."""
    name = "CONV_ID_1"
    headers = {"x-session-id": name} if header else {}
    told_usage = {"include_usage": False}
    loop = tool_loop(made, "x", headers, conversation_id=name, max_tokens=12, stream_options=told_usage)
    (found,) = ids(await loop)
    assert found == name if header else found.startswith(f"{name}.")
    assert len(made.prefills()) == 1


async def test_a_request_id_that_changes_with_each_turn_does_not_split_an_aiperf_session(
    made: FakeFleet,
) -> None:
    messages = [user("begin")]
    for number in range(3):
        said = {"x-session-affinity": "s", "x-correlation-id": "s", "x-request-id": f"r{number}"}
        usage = {"include_usage": True}
        answer = await ask(made.urls[0], messages, headers=said, stream=True, stream_options=usage)
        assert ids([answer]) == {"s"}
        messages += [assistant("w0 w1"), user("go on")]
    assert len(made.prefills()) == 1


async def test_completions_of_inference_perf_that_extend_a_text_are_one_conversation(made: FakeFleet) -> None:
    """A conversation of this client is a prompt of `/v1/completions` that grows by each answer and more
    text."""
    text, answers = "a system prompt " * 20, []
    for number in range(4):
        text += f" question {number}"
        usage = {"continuous_usage_stats": True, "include_usage": True}  # guidellm's case is the first
        answers.append(
            await ask(
                made.urls[0],
                text,
                path="/v1/completions",
                stream=True,
                stream_options=usage,
                ignore_eos=True,
                max_tokens=4,
            )
        )
        text += " w0 w1 w2 w3"
    assert len(ids(answers)) == 1
    assert len(made.prefills()) == 1
