"""A stream that an engine cannot resume, or that ends early, never looks complete."""

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from transformers import AutoTokenizer
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from deploy.small_model import write_tokenizer
from workers.engine.compat.grammar_advance import grammar_start
from workers.engine.compat.stream_replay import ReplayedOutputs
from workers.engine.resume.token_lines import TokenLines, TokenLinesMiddleware

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
END = {"type": "http.response.body", "body": b"", "more_body": False}
ROLE, TEXT = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n', b'data: {"choices":[]}\n\n'
DONE = b"data: [DONE]\n\n"
ERRORS = (
    b'data: {"error":{"message":"Internal server error"}}\n\n',
    b'event: error\ndata: {"type":"error","error":{}}\n\n',
    b'event: response.failed\ndata: {"type":"response.failed"}\n\n',
)


def body(piece: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": piece, "more_body": True}


async def sent(had: int, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        told.append(message)

    lines = TokenLines(send, had, "seed", b"")
    for message in messages:
        await lines.send(dict(message))
    return told


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("before", [[], [ROLE], [ROLE, TEXT]])
async def test_an_error_before_or_at_the_resume_position_makes_the_status_500(
    error: bytes, before: list[bytes]
) -> None:
    told = await sent(2, HEAD, body(b": ping\n\n"), *map(body, [*before, error, DONE]), END)
    assert [message.get("status") for message in told] == [500, None]
    assert b"DONE" not in told[1]["body"]


async def test_an_answer_that_ends_before_the_resume_position_has_the_status_500() -> None:
    told = await sent(3, HEAD, body(ROLE), body(DONE), END)
    assert [message.get("status") for message in told] == [500, None]


async def test_only_events_after_the_resume_position_are_sent() -> None:
    told = await sent(2, HEAD, body(ROLE), body(TEXT), body(TEXT), body(DONE), END)
    assert [message.get("status") for message in told] == [200, None, None, None]
    assert [message["body"] for message in told[1:]] == [b":\n" + TEXT, b":\n" + DONE, b""]
    told = await sent(2, HEAD, body(ROLE), body(DONE), END)  # the end alone was lost
    assert [message.get("status") for message in told] == [200, None]


@pytest.mark.parametrize("had", [0, 2])
async def test_a_stream_that_its_engine_aborts_gets_no_end_message(had: int) -> None:
    told: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def outputs() -> AsyncGenerator[Any, None]:
        for reason in (None, None, "abort"):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], finish_reason=reason)])

    lines = TokenLines(send, had, "seed", b"")
    await lines.send(dict(HEAD))
    async for _ in lines.follow(outputs()):
        await lines.send(body(TEXT))
    await lines.send(body(DONE))
    await lines.send(dict(END))
    assert [message["type"] for message in told] == [HEAD["type"], *[END["type"]] * (2 - had)]
    assert all(message.get("more_body", True) for message in told)


@pytest.mark.parametrize("pieces", [b"-1", b"x", b"", b"9" * 5000])
async def test_a_request_with_an_invalid_stream_pieces_header_gets_no_token_lines(pieces: bytes) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(send)

    async def send(message: Any) -> None: ...

    middleware = TokenLinesMiddleware(app)
    said = [(b"x-stream-pieces", pieces), (b"x-stream-seed", b"s")]
    for headers in (said, [(b"x-stream-pieces", b"1")]):
        await middleware({"type": "http", "headers": headers}, None, send)  # type: ignore[arg-type]
    assert seen == [send, send]


def replaying(
    directory: Path, outputs: list[list[int]], **more: Any
) -> tuple[ReplayedOutputs, RequestOutputCollector]:
    write_tokenizer(directory, 4096)
    processor = OutputProcessor(AutoTokenizer.from_pretrained(directory), **more)

    async def add_request_async(request: Any) -> None: ...

    llm = SimpleNamespace(
        output_processor=processor,
        engine_core=SimpleNamespace(add_request_async=add_request_async),
        model_config=SimpleNamespace(max_model_len=4096),
    )
    delta = RequestOutputKind.DELTA
    most = sum(map(len, outputs))
    request = EngineCoreRequest(
        "r", [1, 2, 3], None, SamplingParams(max_tokens=most, output_kind=delta), None, 0.0, None, None, None
    )
    request.external_req_id = "r"
    queue = RequestOutputCollector(delta, "r")
    processor.add_request(request, None, None, 0, queue)
    return ReplayedOutputs(llm, request, outputs), queue


async def test_an_answer_that_lacks_only_its_end_is_completed(tmp_path: Path) -> None:
    replay, queue = replaying(tmp_path, [[65], [66], [67]], log_stats=True, tracing_enabled=True)
    finished = []
    for _ in range(3):
        await replay.go_on()
        output = queue.get_nowait()
        assert output is not None and not isinstance(output, Exception)
        finished.append(output.finished)
    assert finished == [False, False, True]


async def test_other_streams_continue_while_outputs_are_replayed(tmp_path: Path) -> None:
    replay, queue = replaying(tmp_path, [[65]] * 3200, log_stats=False)
    turns = 0

    async def another() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(another())
    while replay.left:
        await replay.go_on()
        assert queue.get_nowait() is not None
    task.cancel()
    assert turns >= 100


class Thinking(BaseThinkingReasoningParser):
    start_token = "<tool_call>"
    end_token = "</tool_call>"
    looked_at = 0

    def is_reasoning_end_streaming(self, input_ids: Any, delta_ids: Any) -> bool:
        self.looked_at += len(list(delta_ids))
        return super().is_reasoning_end_streaming(input_ids, delta_ids)


def test_the_end_of_reasoning_where_a_grammar_begins_is_found_fast(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 4096)
    reasoner = Thinking(AutoTokenizer.from_pretrained(tmp_path))
    manager = SimpleNamespace(enable_in_reasoning=False)
    rng = random.Random(1)
    for length in (1, 2, 3, 50, 20_000):
        for ends in [None, *(rng.randrange(length) for _ in range(4))]:
            tokens = [rng.randrange(200) for _ in range(length)]
            if ends is not None:
                tokens[ends] = reasoner.end_token_id
            asked = SimpleNamespace(reasoning_ended=False, reasoner=reasoner)
            request: Any = SimpleNamespace(
                prompt_token_ids=[1, 2, *tokens],
                all_token_ids=[1, 2, *tokens],
                structured_output_request=asked,
            )
            reasoner.looked_at = 0
            start = grammar_start(manager, request, reasoner, tokens)
            assert start == (length + 1 if ends is None else ends + 1)
            assert reasoner.looked_at <= 40 * length
