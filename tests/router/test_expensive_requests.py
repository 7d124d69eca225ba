"""Requests that cost more than their size suggests are refused or reduced before an engine sees them."""

import re
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from router.auth.keys import inline_keys
from router.batch.routes import canonical_target
from router.errors import BadRequest, ContextTooLong, NotFound, Unavailable
from router.gateway.config import BatchAddress, ServedModel
from router.requests.body_parser import Api, BodyParser, parse_body
from router.requests.cost_limits import MAX_BYTES_PER_TOKEN, UNKNOWN_CONTEXT, PromptLimit
from router.requests.fields import MAX_OTHER_BYTES
from tests.support.fake_fleet import MODEL, FakeFleet, ask, fleet, get, user


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    async with fleet(tmp_path) as one:
        yield one


SHORT = {
    "x-request-id": "r-1",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1, other=2",
}
LONG = {"x-request-id": "R" * 129, "traceparent": "0" * 129, "tracestate": "a=" + "1" * 511}


async def test_id_and_trace_headers_are_forwarded_only_if_short_and_printable(made: FakeFleet) -> None:
    """A long id would be costly, because vLLM writes `X-Request-Id` into every event of a stream."""
    unprintable = {"x-request-id": "two words", "traceparent": "\xe9", "tracestate": "\xe9=1"}
    for headers, passed in ((SHORT, SHORT), (LONG, {}), (unprintable, {})):
        prompt = [user(f"a new conversation {headers}")]  # a first turn has both legs
        assert (await ask(made.urls[0], prompt, headers=headers)).status == 200
        for leg in (made.prefills()[-1], made.decoder_requests()[-1]):
            seen = {name.lower(): value for name, value in leg.headers.items()}
            assert {name: seen[name] for name in SHORT if name in seen} == passed


@pytest.mark.parametrize("tier", [{}, {"service_tier": "flex"}])
async def test_beam_search_is_refused_with_an_explanation(made: FakeFleet, tier: dict[str, str]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = await ask(made.urls[0], [user("x")], path=path, use_beam_search=True, n=8, **tier)
        assert (answer.status, answer.error["param"]) == (400, "use_beam_search")
        assert "sampled answers" in answer.error["message"]
    assert not made.decoder_requests()
    assert (await ask(made.urls[0], [user("x")], use_beam_search=False)).status == 200


@pytest.mark.parametrize("limit", ["%C2%B2", "%D9%A3", "9" * 4400, "0", "-1"])
async def test_a_token_limit_that_is_not_a_number_is_refused(made: FakeFleet, limit: str) -> None:
    status, answer = await get(f"{made.urls[0]}/v1/conversations?limit={limit}")
    assert (status, answer["error"]["param"]) == (400, "limit")


async def test_an_id_with_markup_is_replaced_by_its_hash(made: FakeFleet) -> None:
    markup = {"x-conversation-id": "<img/src=x/onerror=alert(1)>"}
    answer = await ask(made.urls[0], [user("x")], headers=markup)
    assert answer.conversation.startswith("hash-")


CONTROL = ["/v1/batches%0A", "/v1/batches%0D", "/v1/batches%00", "/v1/batches%7F", "/v1/files%0A"]
UNKNOWN = ["/v1/batches/", "/v1/batchesX", "/v1/files/a%2F..%2F..%2Fb", "/v1/files/%3F/more"]


@pytest.fixture
async def restricted(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    """Start a fleet of two models, with a key that permits only one of them and no batches."""
    models = (ServedModel(MODEL), ServedModel("another"))
    some = replace(inline_keys(("some",), ())[0], models=("another",))
    async with fleet(tmp_path, models=models, keys=(some,), batch=BatchAddress("127.0.0.1:9")) as one:
        yield one


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/batches", 403), *((path, 400) for path in CONTROL), *((path, 404) for path in UNKNOWN)],
)
async def test_only_known_paths_reach_the_batch_process(
    restricted: FakeFleet, path: str, status: int
) -> None:
    """The gateway must check the path in the form in which the batch process reads it."""
    key = {"authorization": "Bearer some"}
    async with httpx.AsyncClient(base_url=restricted.urls[0], headers=key) as http:
        assert (await http.post(path, json={})).status_code == status
        assert (await http.get("/v1/batches/batch_1")).status_code == 503  # forwarded, but nothing listens


def test_the_gateway_itself_encodes_each_path_for_the_batch_process() -> None:
    assert canonical_target("/v1/files/a b?%\u20ac/content") == b"/v1/files/a%20b%3F%25%E2%82%AC/content"
    for path in ("/v1/batches\n", "/v1/files/a/b", "/v1/files//content"):
        with pytest.raises(NotFound):
            canonical_target(path)


CONTEXT = 1000
JSON = {"content-type": "application/json"}
API = {api.target.decode(): api for api in Api}
BOUND = CONTEXT * MAX_BYTES_PER_TOKEN
WORDS = "word " * (BOUND // 5)  # with its JSON brackets longer than the context allows
ARGUMENTS = {"id": "c", "type": "function", "function": {"name": "f", "arguments": WORDS}}
TOOL = {"type": "function", "function": {"name": "f", "description": WORDS}}


def said(**message: Any) -> list[dict[str, Any]]:
    return [user("x"), {"role": "assistant", "content": "", **message}]


def image(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", **fields}]}]


ONE_TOKEN: dict[str, Any] = {"max_tokens": 1}
TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "content": ("/v1/chat/completions", {"messages": [user(WORDS)]}),
    "content that is to be cut": (
        "/v1/chat/completions",
        {"messages": [user(WORDS)], "truncate_prompt_tokens": 10},
    ),
    "arguments of a tool call": ("/v1/chat/completions", {"messages": said(tool_calls=[ARGUMENTS])}),
    "reasoning": ("/v1/chat/completions", {"messages": said(reasoning_content=WORDS)}),
    "a name": ("/v1/chat/completions", {"messages": said(name=WORDS)}),
    "a field of a message that nobody knows": ("/v1/chat/completions", {"messages": said(index=WORDS)}),
    "a message that says it is an image": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "type": "image_url", "content": WORDS}]},
    ),
    "text of an image": ("/v1/chat/completions", {"messages": image(image_url={"url": "x"}, text=WORDS)}),
    "an image of empty lists": ("/v1/chat/completions", {"messages": image(image_url=[[]] * BOUND)}),
    "tools": ("/v1/chat/completions", {"messages": [user("x")], "tools": [TOOL]}),
    "documents": ("/v1/chat/completions", {"messages": [user("x")], "documents": [{"text": WORDS}]}),
    "arguments of the template": (
        "/v1/chat/completions",
        {"messages": [user("x")], "chat_template_kwargs": {"more": WORDS}},
    ),
    **{
        f"{field} that look like media": ("/v1/chat/completions", {"messages": [user("x")], field: value})
        for field, value in (
            ("tools", [{"file": "", **TOOL, "type": None}, {"image": "", "function": WORDS}]),
            ("documents", [{"image": "", "body": WORDS}]),
            ("chat_template_kwargs", {"type": "image", "x": WORDS}),
        )
    },
    "a tool of Anthropic's that looks like an image": (
        "/v1/messages/count_tokens",
        {"messages": [user("x")], "tools": [{"image": "", "input_schema": {}, "description": WORDS}]},
    ),
    "a system prompt that looks like an image": (
        "/v1/messages",
        {"messages": [user("x")], "system": [{"type": "image", "source": WORDS}], **ONE_TOKEN},
    ),
    "what is embedded and looks like an image": ("/v1/embeddings", {"input": [{"image": WORDS}]}),
    "a plain prompt": ("/v1/completions", {"prompt": WORDS}),
    "one of several prompts": ("/v1/completions", {"prompt": ["x", WORDS]}),
    "several prompts": ("/v1/completions", {"prompt": [WORDS[:-100]] * 200}),
    "token ids": ("/v1/completions", {"prompt": [1] * (CONTEXT + 1)}),
    "token ids that are to be cut": (
        "/v1/completions",
        {"prompt": [1] * (CONTEXT + 1), "truncate_prompt_tokens": 10},
    ),
    "token ids that are none": ("/v1/completions", {"prompt": [1, WORDS]}),
    "a suffix": ("/v1/completions", {"prompt": "x", "suffix": WORDS}),
    "instructions": ("/v1/responses", {"input": "x", "instructions": WORDS}),
    "a tool's output": (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "c", "output": WORDS}]},
    ),
    "a system prompt": ("/v1/messages", {"messages": [user("x")], "system": WORDS, **ONE_TOKEN}),
    "a tool's input": (
        "/v1/messages",
        {
            "messages": said(content=[{"type": "tool_use", "id": "t", "name": "f", "input": {"a": WORDS}}]),
            **ONE_TOKEN,
        },
    ),
    "what is only counted": ("/v1/messages/count_tokens", {"messages": [user(WORDS)]}),
    "what is only tokenised": ("/tokenize", {"prompt": WORDS}),
    "messages that are only tokenised": ("/tokenize", {"messages": [user(WORDS)]}),
    "what is only detokenised": ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}),
    "what is embedded": ("/v1/embeddings", {"input": WORDS}),
    "what is embedded and cut": ("/v1/embeddings", {"input": [WORDS], "truncate_prompt_tokens": -1}),
}


@pytest.mark.parametrize("name", list(TOO_LONG))
def test_a_prompt_too_long_for_every_context_is_refused_before_tokenisation(name: str) -> None:
    path, body = TOO_LONG[name]
    asked = BodyParser(path, API.get(path), JSON, "s", frozenset({MODEL}), PromptLimit(CONTEXT))
    with pytest.raises(ContextTooLong) as refused:
        parse_body(asked, (orjson.dumps({"model": MODEL, **body}),))
    assert ("Cut it before" in refused.value.message) == ("truncate_prompt_tokens" in body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user(WORDS[:-100])]}),
        ("/v1/chat/completions", {"messages": [user(WORDS[:-100])], "truncate_prompt_tokens": 10}),
        ("/v1/chat/completions", {"messages": image(image_url={"url": "data:" + "A" * 1_000_000})}),
        ("/v1/completions", {"prompt": [WORDS[:-100]] * 8}),
        ("/v1/completions", {"prompt": [1] * CONTEXT}),
        ("/v1/embeddings", {"input": ["word " * 100] * 2000}),
    ],
)
def test_a_prompt_that_may_fit_the_largest_context_is_not_refused(path: str, body: dict[str, Any]) -> None:
    asked = BodyParser(path, API.get(path), JSON, "s", frozenset({MODEL}), PromptLimit(CONTEXT))
    parse_body(asked, (orjson.dumps({"model": MODEL, **body}),))


def test_without_a_known_engine_a_long_prompt_gets_a_503() -> None:
    for size, error in ((UNKNOWN_CONTEXT * MAX_BYTES_PER_TOKEN - 10, None), (2_000_000, Unavailable)):
        with pytest.raises(error) if error else nullcontext():
            PromptLimit(0).check("/v1/completions", {"prompt": "x" * size})


@pytest.mark.parametrize(
    "beside",
    [
        {"metadata": {"a": ["x" * 70_000]}},
        {"metadata": {"a": [[]] * 30_000}},
        {"user": "x" * 70_000},
        {"stop": ["x" * 4096] * 16, "user": "x" * 10_000},
        {"bad_words": ["x" * 1000] * 100},
        {"allowed_token_ids": list(range(100_000))},
        {"logit_bias": {str(token): 1.0 for token in range(1000)}, "user": "x" * 60_000},
        {"kv_hints": {"actions": [{"action_type": "another's", "payload": "x" * 70_000}]}},
        {"tool_choice": {"type": "function", "function": {"name": "x" * 70_000}}},
        {"prompt_cache_key": "x" * 70_000},
    ],
)
async def test_the_fields_besides_the_prompt_share_one_size_limit(
    made: FakeFleet, beside: dict[str, Any]
) -> None:
    answer = await ask(made.urls[0], [user("x")], **beside)
    assert (answer.status, answer.error["param"] in beside) == (400, True), answer.error
    assert str(MAX_OTHER_BYTES) in answer.error["message"]
    assert not made.decoder_requests() and not made.prefills()


A_LIMIT = PromptLimit(100_000)


def checked(path: str, limit: PromptLimit = A_LIMIT, **body: Any) -> int:
    """Return the number of answers that a turn asks for, as the gateway counts them."""
    asked = BodyParser(path, API[path], JSON, "s", frozenset({MODEL}), limit)
    prompt = parse_body(asked, (orjson.dumps({"model": MODEL, **body}),)).prompt
    assert prompt is not None
    return prompt.answers


CHATTING = {"path": "/v1/chat/completions", "messages": [user("x")]}
COMPLETING = {"path": "/v1/completions", "prompt": "x"}
WORDS_OF_A_PAGE = [user("word " * 1000)]


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({**CHATTING}, 1),
        ({**CHATTING, "n": None}, 1),
        ({**CHATTING, "n": 8, "bad_words": ["x"] * 16}, 8),
        ({**CHATTING, "n": 8.0, "logprobs": True, "top_logprobs": 15}, 8),
        ({**CHATTING, "n": 6, "logprobs": True, "top_logprobs": 20}, 6),
        ({**CHATTING, "logprobs": True, "logprob_token_ids": [7] * 127}, 1),
        ({**CHATTING, "messages": WORDS_OF_A_PAGE, "prompt_logprobs": 10}, 1),
        ({**COMPLETING, "prompt": ["x"] * 4, "n": 2}, 8),
        ({**COMPLETING, "prompt": [1] * 4000, "logprobs": 20}, 1),
        ({**COMPLETING, "prompt": [1] * 4000, "logprobs": 4, "echo": True}, 1),
        ({**COMPLETING, "prompt": [1] * 50_000, "echo": True}, 1),
        ({"path": "/v1/responses", "input": "x", "n": 100}, 1),  # `n` is unknown there and is dropped
    ],
)
def test_a_request_within_the_limits_counts_n_answers_for_each_prompt(
    body: dict[str, Any], answers: int
) -> None:
    assert checked(**body) == answers


@pytest.mark.parametrize(
    ("body", "param", "bound"),
    [
        ({**CHATTING, "n": 9}, "n", "8"),
        ({**CHATTING, "n": 128, "service_tier": "flex"}, "n", "8"),
        ({**COMPLETING, "prompt": ["x"] * 9}, "prompt", "8"),
        ({**COMPLETING, "prompt": [[1]] * 3, "n": 3}, "n", "8"),
        ({**CHATTING, "bad_words": ["x"] * 129}, "bad_words", "128"),
        ({**CHATTING, "n": 8, "bad_words": ["x"] * 17}, "bad_words", "128"),
        ({**CHATTING, "n": 8, "logprobs": True, "top_logprobs": 16}, "top_logprobs", "128"),
        ({**COMPLETING, "prompt": ["x"] * 8, "logprobs": 16}, "logprobs", "128"),
        ({**COMPLETING, "logprobs": -1}, "logprobs", "128"),
        ({**CHATTING, "n": 2, "logprobs": True, "logprob_token_ids": [7] * 64}, "logprob_token_ids", "128"),
        ({**CHATTING, "messages": WORDS_OF_A_PAGE, "prompt_logprobs": 20}, "prompt_logprobs", "20000"),
        ({**CHATTING, "messages": WORDS_OF_A_PAGE, "prompt_logprobs": 9, "n": 2}, "prompt_logprobs", "20000"),
        ({**CHATTING, "prompt_logprobs": -1}, "prompt_logprobs", "20000"),
        ({**CHATTING, "messages": [user("word " * 20_000)], "echo": True}, "echo", "20000"),
        ({**COMPLETING, "prompt": [1] * 4001, "logprobs": 4, "echo": True}, "echo", "20000"),
    ],
)
def test_too_many_answers_log_probabilities_or_bad_words_are_refused(
    body: dict[str, Any], param: str, bound: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        checked(**body)
    assert refused.value.param == param
    assert re.search(rf"it may (ask for|have) {bound}\b", refused.value.message)


def test_a_fleet_with_a_higher_limit_accepts_more_answers() -> None:
    limit = PromptLimit(100_000, max_answers=16)
    assert checked(**CHATTING, n=16, limit=limit) == 16
    with pytest.raises(BadRequest, match="it may ask for 16"):
        checked(**CHATTING, n=17, limit=limit)


OTHERS_IMAGE = {"type": "image_url", "image_url": None}
DISGUISED = {"type": "text", "text": "x", "image_url": None}  # with a uuid, vLLM takes this part for an image


@pytest.mark.parametrize("part", [OTHERS_IMAGE, DISGUISED])
@pytest.mark.parametrize(
    ("path", "field", "content"),
    [
        ("/v1/chat/completions", "messages", "content"),
        ("/v1/responses", "input", "content"),
        ("/v1/responses", "input", "output"),
        ("/v1/embeddings", "messages", "content"),
    ],
)
def test_a_message_part_that_has_a_uuid_is_refused(
    path: str, field: str, content: str, part: dict[str, Any]
) -> None:
    asked = BodyParser(path, API.get(path), JSON, "s", frozenset({MODEL}), PromptLimit(CONTEXT))

    def body(uuid: str | None) -> bytes:
        message = {"role": "user", content: [{**part, "uuid": uuid}]}
        return orjson.dumps({"model": MODEL, field: [message]})

    with pytest.raises(BadRequest, match="not have a uuid"):
        parse_body(asked, (body("of another"),))
    parse_body(asked, (body(None),))


async def test_kv_is_reserved_for_each_answer_of_a_request(made: FakeFleet) -> None:
    beside = dict[int, int]()
    url = made.urls[0]
    for number in (1, 3):
        named = {"x-conversation-id": f"answers-{number}"}
        assert (await ask(url, [user("x")], headers=named, n=number)).status == 200
        _, told = await get(f"{url}/v1/conversations/answers-{number}", headers=named)
        receipt = told["placements"][0]["receipt"]
        beside[number] = receipt["reserved_tokens"] - receipt["prompt_tokens"]
    assert beside[3] == 3 * beside[1] > 0
