"""The gateway, and vLLM behind it, accept requests that real coding agents sent."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.agents import AGENTS
from tests.clients.recorded import FOLDER, requests_of
from tests.support.fake_fleet import FakeFleet, fleet

# Fields and tools that the gateway drops from an agent's requests. Judge a new name before you list it.
DROPPED = {
    "codex": {"client_metadata", "tools.web_search"},
    "claude": {"context_management"},
    "opencode": set[str](),
    "qwen": set[str](),
    "codex-compaction": {"client_metadata", "tools.web_search"},
    "claude-web-search": {"context_management", "tools.web_search_20250305", "tool_choice"},
    "claude-count-tokens": {"context_management"},
    "aider": set[str](),
    "cline": set[str](),
    "code-puppy": set[str](),
    "continue": set[str](),
    "copilot": set[str](),
    "deepagents-code": set[str](),
    "grok": {"search_parameters"},
    "nanocoder": set[str](),
    "pi": {"store"},
    "vibe": set[str](),
}
# Agents that `conserve run` does not start; docs/coding-agents.md says how to configure them.
OTHERS = ("cline", "code-puppy", "continue", "copilot", "deepagents-code", "grok", "nanocoder", "pi", "vibe")


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    context = {"max_context": 1_000_000, "kv_tokens": 2_000_000}
    async with fleet(tmp_path, decoders=1, engine=context) as running:
        yield running


async def played(made: FakeFleet, name: str) -> tuple[set[str], set[str]]:
    """Send an agent's requests; return their conversations, and the fields that were dropped."""
    conversations, dropped = set(), set[str]()
    async with aiohttp.ClientSession(made.urls[0]) as session:
        for one in requests_of(name):
            if one["body"] and "max_tokens" in one["body"]:
                one["body"]["max_tokens"] = 8  # a fake engine generates as many tokens as it may
            async with session.request(
                one["method"], one["target"], json=one["body"], headers=one["headers"]
            ) as answer:
                assert answer.status == 200, (one["target"], await answer.text())
                await answer.read()
                if "x-conversation-id" in answer.headers:
                    conversations.add(answer.headers["x-conversation-id"])
                dropped |= set(filter(None, answer.headers.get("x-conserve-ignored-fields", "").split(", ")))
    return conversations, dropped


@pytest.mark.parametrize("name", DROPPED)
async def test_the_recorded_requests_of_an_agent_are_served_as_one_conversation(
    made: FakeFleet, name: str
) -> None:
    conversations, dropped = await played(made, name)
    assert len(conversations) == 1  # requests that only count tokens belong to no conversation
    assert dropped == DROPPED[name]
    if name in (*AGENTS, *OTHERS):
        assert len(made.prefills()) == 1  # one transfer
        assert len(made.decoder_requests()) >= 3


def test_every_agent_of_conserve_run_has_recorded_requests() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == DROPPED.keys() >= AGENTS.keys()


def taken_by_vllm(target: str, body: dict[str, Any]) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    kinds = {
        "/v1/messages": AnthropicMessagesRequest,
        "/v1/messages/count_tokens": AnthropicCountTokensRequest,
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/responses": ResponsesRequest,
    }
    kinds[target.partition("?")[0]].model_validate(body)


@pytest.mark.slow
async def test_vllm_accepts_the_bodies_that_engines_get_for_requests_of_agents(made: FakeFleet) -> None:
    for name in DROPPED:
        await played(made, name)
    for request in made.decoder_requests():
        taken_by_vllm(request.path, request.body)
