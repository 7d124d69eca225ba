"""A stream of a real engine resumes where it was cut, at every position and with every API and parser."""

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from tests.fleet.talk import CITY_TOOL, FORCED
from tests.kvtransfer.engine.engines import EngineProcess, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MIDDLEWARE = "workers.engine.resume.token_lines.TokenLinesMiddleware"
ARGUMENTS = (
    *("--middleware", MIDDLEWARE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-prompt-tokens-details",
)
QUESTION = [{"role": "user", "content": "Compare the weather of the two cities."}]
CITY = CITY_TOOL["function"]["parameters"]
RESPONSES_TOOL = {"type": "function", **CITY_TOOL["function"]}
MESSAGES_TOOL = {"name": "weather", "description": "Weather.", "input_schema": CITY}
GREEDY = {"model": "m", "temperature": 0, "stream": True, "ignore_eos": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COUNTS = re.compile(rb"=([0-9]+)/([0-9]+)=")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with running(EngineProcess(ConnectorConfig(), arguments=ARGUMENTS)) as (one,):
        yield one


def stream(
    engine: EngineProcess, path: str, body: dict[str, Any], had: list[bytes], created: str = ""
) -> list[tuple[bytes, bytes]]:
    """Return pairs of token line and piece of an answer, starting after the pieces that the client has."""
    only_tokens = COUNTS.sub(b"", b"".join(had))
    outputs = [[int(t) for t in one.split(b",") if t] for one in only_tokens.split(b";")[:-1]]
    if outputs:
        body = {**body, "kv_transfer_params": {"resume": {"outputs": outputs}}}
    headers = {"Content-Type": "application/json", "X-Stream-Pieces": str(len(had)), "X-Stream-Seed": "5eed"}
    headers["X-Stream-Counts"] = "1"
    headers |= {"X-Stream-Created": created} if created else {}
    connection = http.client.HTTPConnection("127.0.0.1", engine.http, timeout=240)
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    read = answer.read()
    assert answer.status == 200, read
    assert answer.getheader("X-Stream-Pieces") == str(len(had))
    lines = re.split(rb"^:(.*)\n", read, flags=re.MULTILINE)
    assert lines[0] == b""
    return list(zip(lines[1::2], lines[2::2], strict=True))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (CHAT, {"messages": QUESTION, "max_tokens": 24, "stream_options": {"include_usage": True}}),
    "forced_tool": (
        CHAT,
        {"messages": QUESTION, "tools": [CITY_TOOL], "tool_choice": FORCED, "max_tokens": 64},
    ),
    "required_tool": (
        CHAT,
        {"messages": QUESTION, "tools": [CITY_TOOL], "tool_choice": "required", "max_tokens": 64},
    ),
    "schema": (CHAT, {"messages": QUESTION, "response_format": SCHEMA, "max_tokens": 64}),
    "regex": (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "[abc]{20}"}, "max_tokens": 64}),
    "completion": (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 24, "echo": True}),
    "usage": (
        COMPLETIONS,
        {
            "prompt": "A",
            "max_tokens": 9,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "responses": ("/v1/responses", {"input": QUESTION, "max_output_tokens": 24}),
    "responses_tool": (
        "/v1/responses",
        {"input": QUESTION, "tools": [RESPONSES_TOOL], "tool_choice": "required", "max_output_tokens": 64},
    ),
    "messages": ("/v1/messages", {"messages": QUESTION, "max_tokens": 24}),
    "messages_tool": (
        "/v1/messages",
        {"messages": QUESTION, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 64},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_cut_anywhere_resumes_with_the_same_tokens(engine: EngineProcess, case: str) -> None:
    path, asked = CASES[case]
    body = {**GREEDY, **asked}
    whole = stream(engine, path, body, [])
    last = len(whole) - 1
    assert last > 5
    for cut in sorted({1, 2, *range(3, last, 5), last - 1, last}):
        rest = stream(engine, path, body, [line for line, _ in whole[:cut]], date_of(whole))
        assert folded(whole[:cut] + rest) == folded(whole), cut
        assert tokens([*whole[:cut], *rest]) == tokens(whole), cut


def date_of(pieces: list[tuple[bytes, bytes]]) -> str:
    found = re.search(rb'"created(?:_at)?":([0-9.]+)', b"".join(piece for _, piece in pieces))
    return found[1].decode() if found else ""


def tokens(pieces: list[tuple[bytes, bytes]]) -> list[bytes]:
    return [one for one in re.split(b"[;,]", COUNTS.sub(b"", b"".join(line for line, _ in pieces))) if one]


VOLATILE = {
    "sequence_number",
    "completed_at",
    "cached_tokens",
    "prompt_tokens_details",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "cache_write_tokens",
    "signature",
    "system_fingerprint",
}
TEXTS = {"content", "reasoning", "arguments", "text", "thinking", "partial_json"}


def folded(pieces: list[tuple[bytes, bytes]]) -> list[list[Any]]:
    """Join consecutive events that only add text, because vLLM may send one token at a time or two.

    An end that is a separate event is joined as well.
    """
    found: list[list[Any]] = []

    def add(shape: Any, text: str) -> None:
        if found and found[-1][0] == shape:
            found[-1][1] += text
        else:
            found.append([shape, text])

    for _, piece in pieces:
        for data in re.findall(rb"^data: (.*)$", piece, re.MULTILINE):
            event = json.loads(data) if data != b"[DONE]" else {}
            if event.get("choices"):
                event.pop("usage", None)  # so far
            added: list[str] = []
            shape = without_text(event, added, event.get("type", "").endswith("delta"))
            text, choices = "".join(added), shape.get("choices")
            if choices and (text or not choices[0].get("finish_reason")):
                add({**shape, "choices": [not_ended(one) for one in choices]}, text)
            if not choices:
                add(shape, text)
            elif choices[0].get("finish_reason"):  # alone, or beside the last text
                add({**shape, "choices": [only_ended(one) for one in choices]}, "")
    return found


def not_ended(choice: dict[str, Any]) -> dict[str, Any]:
    """Return an event without its end, which Chat and Completions send with the last text."""
    return {name: one for name, one in choice.items() if name not in ("finish_reason", "stop_reason")}


def only_ended(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in choice.items() if name not in ("delta", "text")}


def without_text(value: Any, added: list[str], adds: bool = False) -> Any:
    if isinstance(value, list):
        return [without_text(one, added, adds) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, one in value.items():
        if name in VOLATILE:
            continue
        if isinstance(one, str) and (name in TEXTS or (adds and name == "delta")):
            added.append(one)
        else:
            kept[name] = without_text(one, added)
    if isinstance(kept.get("input_tokens"), int):  # Messages counts cached tokens separately
        cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
        kept["input_tokens"] += sum(value.get(name) or 0 for name in cached)
    return kept


@pytest.mark.parametrize("case", ["text", "messages", "responses", "usage"])
def test_the_first_token_line_has_the_length_of_the_prompt(engine: EngineProcess, case: str) -> None:
    """The counts of `usage` are sent once in token lines, because few clients request `usage`."""
    path, asked = CASES[case]
    pieces = stream(engine, path, {**GREEDY, **asked}, [])
    text = b"".join(piece for _, piece in pieces)
    said = int(re.findall(rb'"(?:prompt|input)_tokens": ?([0-9]+)', text)[-1])
    if case == "messages":  # which counts cached tokens separately
        said += sum(map(int, re.findall(rb'"cache_(?:read|creation)_input_tokens": ?([0-9]+)', text)[-2:]))
    ((prompt, cached),) = COUNTS.findall(b"\n".join(line for line, _ in pieces))
    assert any(COUNTS.match(line) for line, _ in pieces) and int(prompt) == said > int(cached)


def test_a_stop_string_across_the_cut_of_a_stream_ends_the_resumed_stream(engine: EngineProcess) -> None:
    body = {**GREEDY, "prompt": "Stop here", "max_tokens": 40}
    free = stream(engine, COMPLETIONS, body, [])
    text = "".join(json.loads(piece[6:])["choices"][0]["text"] for _, piece in free[:-1])
    stop = text[12:18]
    body["stop"] = stop
    whole = stream(engine, COMPLETIONS, body, [])
    assert len(tokens(whole)) < len(tokens(free))  # a busy engine may send several tokens in a line
    for cut in range(1, len(whole)):
        rest = stream(engine, COMPLETIONS, body, [line for line, _ in whole[:cut]], date_of(whole))
        assert tokens([*whole[:cut], *rest]) == tokens(whole), cut
        assert folded(whole[:cut] + rest) == folded(whole), cut


def test_a_sampled_stream_continues_after_the_tokens_that_were_sent(engine: EngineProcess) -> None:
    body = {**GREEDY, "temperature": 1.0, "messages": QUESTION, "max_tokens": 30}
    body["stream_options"] = {"include_usage": True}
    whole = stream(engine, CHAT, body, [])
    some = whole[: len(whole) * 2 // 5]
    rest = stream(engine, CHAT, body, [line for line, _ in some])
    assert len(tokens([*some, *rest])) == 30
    usage = next(json.loads(p[6:])["usage"] for _, p in rest if b'"usage"' in p)
    assert usage["completion_tokens"] == 30


def test_tokens_of_the_first_engine_do_not_count_as_cached_prompt(engine: EngineProcess) -> None:
    body = {**GREEDY, "prompt": "Long enough. " * 12, "max_tokens": 120}
    body["stream_options"] = {"include_usage": True}
    whole = stream(engine, COMPLETIONS, body, [])
    most = whole[: len(whole) * 9 // 10]  # several tokens may be in one line, on a busy machine
    rest = stream(engine, COMPLETIONS, body, [line for line, _ in most], date_of(whole))
    usage = next(json.loads(p[6:])["usage"] for _, p in rest if b'"usage":{' in p)
    cached = (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
    assert 0 <= cached <= usage["prompt_tokens"]


def test_a_request_with_several_prompts_cannot_be_resumed(engine: EngineProcess) -> None:
    body = {**GREEDY, "prompt": ["A", "B"], "max_tokens": 4}
    assert b"-" in b"".join(line for line, _ in stream(engine, COMPLETIONS, body, []))


def test_tokens_that_do_not_follow_the_grammar_are_refused(engine: EngineProcess) -> None:
    path, asked = CASES["regex"]
    resume = {"kv_transfer_params": {"resume": {"outputs": [[ord("z")], [ord("z")]]}}}
    headers = {"Content-Type": "application/json", "X-Stream-Pieces": "2", "X-Stream-Seed": "5eed"}
    connection = http.client.HTTPConnection("127.0.0.1", engine.http, timeout=240)
    connection.request("POST", path, json.dumps({**GREEDY, **asked, **resume}), headers)
    answer = connection.getresponse()
    assert answer.status == 500 and b"cannot go on" in answer.read()
