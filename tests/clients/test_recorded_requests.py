"""The gateway, and vLLM behind it, accept requests that real coding agents sent."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from deploy.agents import AGENTS
from tests.clients.recorded import FOLDER, requests_of
from tests.support.fake_fleet import MODEL, FakeFleet, fleet, get

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


def headers_of(name: str) -> dict[str, str]:
    headers: dict[str, str] = requests_of(name)[0]["headers"]
    return {key: value for key, value in headers.items() if key != "content-type"}


async def test_claude_code_gets_the_ids_and_display_names_of_the_models(made: FakeFleet) -> None:
    """Claude Code asks with CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY=1; `conserve run` does not set it."""
    headers = headers_of("claude")
    assert headers["anthropic-version"]
    status, models = await get(f"{made.urls[0]}/v1/models?limit=1000", headers=headers)
    assert (status, models["has_more"]) == (200, False)
    assert [(one["type"], one["id"], one["display_name"]) for one in models["data"]] == [
        ("model", MODEL, MODEL)
    ]


async def test_codex_gets_a_list_of_models_that_it_can_decode(made: FakeFleet) -> None:
    """Codex logs an error unless `models` is a list. With a key from `env_key` it does not ask at all."""
    url = f"{made.urls[0]}/v1/models"
    status, models = await get(f"{url}?client_version=0.171.0", headers=headers_of("codex"))
    assert (status, models["models"]) == (200, [])
    assert "models" not in (await get(url))[1]  # other clients read `data`


async def test_the_openai_and_anthropic_sdks_can_list_the_models(made: FakeFleet) -> None:
    base = made.urls[0]
    async with anthropic.AsyncAnthropic(base_url=base, api_key="k", max_retries=0) as one:
        listed = [model async for model in one.models.list(limit=1)]
        assert [(model.id, model.display_name, model.type) for model in listed] == [(MODEL, MODEL, "model")]
        assert (await one.models.retrieve(MODEL)).created_at.tzinfo is not None
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as other:
        assert [(model.id, model.object) async for model in other.models.list()] == [(MODEL, "model")]


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
async def test_vllm_accepts_the_bodies_that_the_gateway_makes_of_agents_requests(
    made: FakeFleet,
) -> None:
    for name in DROPPED:
        await played(made, name)
    for request in made.decoder_requests():
        taken_by_vllm(request.path, request.body)
