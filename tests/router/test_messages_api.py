"""The gateway serves Anthropic's Messages API to Anthropic's own SDK, errors included."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from router.auth.keys import inline_keys
from tests.router.test_failures import engine_process
from tests.support.fake_fleet import MODEL, FakeFleet, fleet, get

SYSTEM = "You are a careful assistant. " * 8
CACHED = {"cache_control": {"type": "ephemeral"}}


@asynccontextmanager
async def client(made: FakeFleet, key: str = "k") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=made.urls[0], api_key=key, max_retries=0) as one:
        yield one


def asked(turn: int) -> dict[str, Any]:
    """Return the request of a turn, whose cache marker and billing block differ from the turn before."""
    texts = [f"{who} says {number}" for number in range(turn + 1) for who in ("user", "assistant")][:-1]
    messages: list[dict[str, Any]] = [
        {"role": "assistant" if number % 2 else "user", "content": [{"type": "text", "text": text}]}
        for number, text in enumerate(texts)
    ]
    messages[-1]["content"][-1].update(CACHED)
    billing = {"type": "text", "text": f"x-anthropic-billing-header: {turn}"}
    system = [billing, {"type": "text", "text": SYSTEM, **CACHED}]
    return {"model": MODEL, "max_tokens": 5, "system": system, "messages": messages}


async def answers(made: FakeFleet) -> float:
    _, page = await get(f"{made.urls[0]}/metrics")
    (line,) = (line for line in page.splitlines() if line.startswith("conserve_ttfet_seconds_count"))
    return float(line.split()[-1])


async def test_a_conversation_without_an_id_is_recognised_and_transferred_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made, client(made) as claude:
        before = await answers(made)
        for turn in range(4):
            async with claude.messages.stream(**asked(turn)) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            assert text == "w0 w1 w2 w3 w4 "
        await made.settle()
        assert len(made.prefills()) == 1
        assert [bool(seen.params) for seen in made.decoder_requests()] == [True] + [False] * 3
        _, listed = await get(f"{made.urls[0]}/v1/conversations", headers={"x-api-key": "k"})
        (one,) = listed["data"]
        assert (one["turns"], one["transfers"]) == (4, 1)
        assert await answers(made) == before + 4  # by its stop reason, each turn answers the user


async def test_a_request_with_another_system_prompt_is_another_conversation(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made, client(made) as claude:
        await claude.messages.create(**asked(1))
        await claude.messages.create(**{**asked(1), "system": "Another one."})
        _, listed = await get(f"{made.urls[0]}/v1/conversations", headers={"x-api-key": "k"})
        assert len(listed["data"]) == 2


async def test_errors_of_the_messages_api_have_anthropics_shape(tmp_path: Path) -> None:
    async with fleet(tmp_path, keys=inline_keys(("k",), ())) as made:
        async with client(made, "wrong") as claude:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await claude.messages.create(**asked(0))
            assert unknown.value.body == {
                "type": "error",
                "error": {
                    "type": "authentication_error",
                    "message": "the API key is not known to this fleet",
                },
            }
        async with client(made) as claude:
            with pytest.raises(anthropic.NotFoundError):
                await claude.messages.create(**{**asked(0), "model": "other"})
            with pytest.raises(anthropic.BadRequestError, match="belongs to the fleet"):
                await claude.messages.create(**asked(0), extra_body={"kv_transfer_params": {}})


async def test_a_messages_stream_ends_in_an_error_event_when_its_decoder_is_killed(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=0) as made, engine_process("d0", 0.05) as (info, pid):
        made.directory.engine_up(info)
        async with client(made) as claude:
            seen: list[str] = []
            with pytest.raises(anthropic.APIStatusError, match="engine"):
                async with asyncio.timeout(60.0):
                    async with claude.messages.stream(**{**asked(0), "max_tokens": 200}) as stream:
                        async for piece in stream.text_stream:
                            seen.append(piece)
                            if len(seen) == 3:
                                os.kill(pid, signal.SIGKILL)
            assert 3 <= len(seen) < 200
