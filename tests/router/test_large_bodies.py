"""A hostile body blocks the event loop only while its bytes arrive; a parser process does the parsing."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from prometheus_client import REGISTRY

from router.errors import ApiError
from router.requests.body_parser import Api, BodyParser, is_cheap, parse_body
from router.requests.cost_limits import PromptLimit
from router.requests.parser_pool import MAX_WAITING, ParserPool
from tests.support.fake_fleet import MODEL, FakeFleet, ask, fleet, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PARSER = "router.requests.parser_pool"
MIB = 1 << 20
BOUND_S = 0.02
START = b'{"model": "small", "max_tokens": 2, '
CLIENT = """
import http.client, sys
body, path, host = sys.stdin.buffer.read(), sys.argv[1], sys.argv[2]
asking = http.client.HTTPConnection(host, timeout=60)
asking.request("POST", path, body, {"content-type": "application/json", "authorization": "Bearer hostile"})
answer = asking.getresponse()
print(answer.status, answer.read().decode())
"""


def many(one: bytes, size: int) -> bytes:
    return b",".join([one] * (size // (len(one) + 1)))


HOSTILE = {
    "empty messages": ("chat/completions", START + b'"messages": [' + many(b"{}", 2 * MIB) + b"]}"),
    "parts": (
        "chat/completions",
        START + b'"messages": [{"role": "user", "content": [' + many(b"{}", 2 * MIB) + b"]}]}",
    ),
    "text": ("completions", START + b'"prompt": "' + b"x" * (31 * MIB) + b'"}'),
    "numbers": ("completions", START + b'"prompt": [' + many(b"1", 31 * MIB) + b"]}"),
    "lists": ("completions", START + b'"prompt": [' + many(b"[]", 31 * MIB) + b"]}"),
    "spaces": ("completions", START + b'"priority": 7' + b" " * (31 * MIB) + b"}"),
}


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    async with fleet(tmp_path) as one:
        yield one


async def hostile_request(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a request from another process, which does not block the measured event loop."""
    host = url.removeprefix("http://")
    pipe = asyncio.subprocess.PIPE
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, f"/v1/{path}", host), stdin=pipe, stdout=pipe
    )
    said, _ = await sender.communicate(body)
    status, _, text = said.partition(b" ")
    return int(status), text


class Stalls:
    """Measures how long the event loop was blocked at most, in processor time as the machine is shared."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.longest_s, last = max(self.longest_s, now - last), now


@pytest.mark.parametrize("name", list(HOSTILE))
async def test_a_hostile_body_is_refused_without_delaying_other_requests(made: FakeFleet, name: str) -> None:
    path, body = HOSTILE[name]
    longest: list[float] = []
    for _ in range(3):
        stalls = Stalls()
        watching = asyncio.create_task(stalls.watch())
        status, text = await hostile_request(made.urls[0], path, body)
        watching.cancel()
        assert status == 400, text[:300]
        longest.append(stalls.longest_s)
        if longest[-1] < BOUND_S:
            break
    print(f"{name}: {min(longest) * 1000:.1f} ms")
    assert min(longest) < BOUND_S, longest
    assert (await ask(made.urls[0], [user("an honest turn")])).status == 200


async def test_only_time_in_which_the_event_loop_itself_is_blocked_is_counted(
    made: FakeFleet,
) -> None:
    def looks(longest: str) -> float:
        return REGISTRY.get_sample_value("conserve_loop_held_seconds_bucket", {"le": longest}) or 0.0

    def longer() -> float:
        return looks("+Inf") - looks("0.1")

    def work(seconds: float) -> None:
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            pass

    before = longer()
    time.sleep(0.3)  # noqa: ASYNC251 - as a process that is not given the processor
    await asyncio.sleep(0.1)
    assert longer() == before
    work(0.3)
    await until(lambda: longer() > before)


async def test_a_parser_process_returns_the_same_result_as_the_gateway() -> None:
    parser_pool = ParserPool()
    body = {
        "model": MODEL,
        "messages": [user("x" * 300_000), user("y")],
        "tools": [{"type": "function", "function": {"name": "f", "description": "z" * 30_000}}],
        "session_id": "mine",
        "n": 2,
    }
    pieces = (raw := orjson.dumps(body))[:100_000], raw[100_000:]
    asked = replace(CHAT, limit=PromptLimit(100_000))
    assert not is_cheap(pieces)
    try:
        there, here = await parser_pool.parse(asked, pieces), parse_body(asked, pieces)
        assert there == here
        assert there.prompt is not None and there.prompt.identity.group == "mine"
        assert there.fields["n"] == 2 and there.fields["messages"] is None
        with pytest.raises(ApiError, match="not JSON"):
            await parser_pool.parse(asked, (raw[:-1],))
        assert await parser_pool.parse(asked, pieces) == here  # a refused body does not end the process
    finally:
        parser_pool.close()


async def test_a_parser_process_over_its_time_limit_is_killed_and_its_request_refused() -> None:
    parser_pool = ParserPool(max_parse_s=0.01)
    asked = BodyParser("/v1/chat/completions", Api.CHAT, {}, "s", frozenset({MODEL}), PromptLimit(100_000))
    with pytest.raises(ApiError, match="too much time"):
        await parser_pool.parse(asked, (b" " * MIB,))
    parser_pool.close()


@pytest.mark.parametrize("prompt", ["x" * 20_000_000, [1] * 600_000, ["x" * 20_000_000]])
async def test_a_prompt_beyond_every_context_is_refused_before_it_is_hashed(
    made: FakeFleet, monkeypatch: pytest.MonkeyPatch, prompt: object
) -> None:
    context = made.gateways[0].directory.engines.max_context
    monkeypatch.setattr("router.identity.prefix_chain.of_prompt", lambda *_: pytest.fail("hashed"))
    body = orjson.dumps({"model": MODEL, "prompt": prompt})
    assert context
    with pytest.raises(ApiError) as refused:
        parse_body(replace(COMPLETIONS, limit=PromptLimit(context)), (body,))
    assert refused.value.code == "context_length_exceeded"


JSON = {"content-type": "application/json"}
CHAT = BodyParser("/v1/chat/completions", Api.CHAT, JSON, "s", frozenset({MODEL}), PromptLimit(4096))
COMPLETIONS = replace(CHAT, path="/v1/completions", api=Api.COMPLETIONS)
MESSAGES = replace(CHAT, path="/v1/messages", api=Api.MESSAGES)


@pytest.mark.parametrize(
    "beside",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * (4097 * 16)}}]},
        {"documents": [{"title": "d", "text": "x" * (4097 * 16)}]},
    ],
    ids=["tools", "documents"],
)
def test_tokens_added_by_the_template_count_towards_the_context(beside: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(CHAT, (orjson.dumps({"model": MODEL, "messages": [user("hi")], **beside}),))
    assert refused.value.code == "context_length_exceeded"


def test_a_detokenize_request_beyond_the_largest_context_is_refused() -> None:
    asked = replace(CHAT, path="/detokenize", api=None)
    parse_body(asked, (orjson.dumps({"model": MODEL, "tokens": [1] * 4096}),))
    with pytest.raises(ApiError) as refused:
        parse_body(asked, (orjson.dumps({"model": MODEL, "tokens": [1] * 4097}),))
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "tokens")


COSTLY = orjson.dumps({"model": MODEL, "messages": [user("x" * 300_000)]})


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        (CHAT, {"messages": [user("hello")], "tools": [{}] * 10_001}),
        (COMPLETIONS, {"prompt": ["x"] * 10_001}),
        (MESSAGES, {"messages": [user("x")], "system": [{}] * 10_001}),
        (replace(CHAT, path="/tokenize", api=None), {"messages": [user("x")] * 10_001}),
    ],
)
def test_a_body_with_too_many_items_in_a_list_is_refused(asked: BodyParser, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="it may have"):
        parse_body(asked, (orjson.dumps({"model": MODEL, **body}),))


def test_the_context_limit_applies_to_each_of_several_prompts() -> None:
    several = {"model": MODEL, "prompt": ["x" * 10_000] * 8}
    assert parse_body(COMPLETIONS, (orjson.dumps(several),)).prompt


@pytest.mark.parametrize("depth", [500, 1_000, 1_020])
def test_a_deeply_nested_body_is_refused(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for body in (f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": {nested}}}]}}', nested):
        with pytest.raises(ApiError) as refused:
            parse_body(CHAT, (body.encode(),))
        assert refused.value.status == 400


async def test_no_request_fails_after_an_idle_parser_process_was_killed() -> None:
    parser_pool = ParserPool(processes=1)
    asked = replace(CHAT, limit=PromptLimit(100_000))
    try:
        assert (await parser_pool.parse(asked, (COSTLY,))).prompt
        (reader,) = (one for one in psutil.Process().children() if PARSER in one.cmdline())
        reader.kill()
        await until(lambda: not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE)
        await asyncio.sleep(0.2)  # until the event loop has noticed the kill
        assert (await parser_pool.parse(asked, (COSTLY,))).prompt
    finally:
        parser_pool.close()


async def test_an_owner_with_too_many_waiting_costly_bodies_gets_a_429() -> None:
    parser_pool, asked = ParserPool(), replace(CHAT, limit=PromptLimit(100_000))
    try:
        mine = [parser_pool.parse(asked, (COSTLY,)) for _ in range(MAX_WAITING + 3)]
        theirs = parser_pool.parse(replace(asked, space="other"), (COSTLY,))
        *came, other = await asyncio.gather(*mine, theirs, return_exceptions=True)
        refused = [one for one in came if isinstance(one, ApiError)]
        assert [one.status for one in refused] == [429] * 3
        assert not isinstance(other, BaseException)
        assert (await parser_pool.parse(asked, (COSTLY,))).prompt  # later bodies are parsed again
    finally:
        parser_pool.close()


async def test_a_body_that_waits_too_long_for_a_parser_process_gets_a_429() -> None:
    parser_pool, asked = ParserPool(processes=1, max_wait_s=0.005), replace(CHAT, limit=PromptLimit(100_000))
    try:
        first = asyncio.create_task(parser_pool.parse(asked, (COSTLY,)))  # holds the only process for longer
        await asyncio.sleep(0)
        for space in (asked.space, "other"):
            with pytest.raises(ApiError, match="wait to be read") as refused:
                await parser_pool.parse(replace(asked, space=space), (COSTLY,))
            assert refused.value.status == 429
        assert (await first).prompt
        assert (await parser_pool.parse(asked, (COSTLY,))).prompt
    finally:
        parser_pool.close()


async def test_without_a_parser_process_large_bodies_get_a_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parser_pool, asked = ParserPool(processes=1), replace(CHAT, limit=PromptLimit(100_000))
    try:
        with monkeypatch.context() as patched, pytest.raises(ApiError, match="cannot be read now") as refused:
            patched.setattr(sys, "executable", "/nowhere")
            await parser_pool.parse(asked, (COSTLY,))
        assert refused.value.status == 503
        assert (await parser_pool.parse(asked, (COSTLY,))).prompt
    finally:
        parser_pool.close()


async def test_a_large_turn_reaches_its_engine_unchanged(made: FakeFleet) -> None:
    raw = orjson.dumps({"model": MODEL, "messages": [user("hello")], "max_tokens": 2})
    status, text = await hostile_request(made.urls[0], "chat/completions", raw[:-1] + b" " * MIB + b"}")
    assert status == 200, text
    seen = made.decoder_requests()[-1]
    assert seen.body["messages"] == [user("hello")] and len(seen.raw) > MIB
