"""A stream whose decoder is lost resumes on another after the client's last token, or ends in an error."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from router.errors import EngineLost
from router.gateway.config import SloClass
from router.gateway.turn.resumption import StreamResumption, why_not_resumable
from router.gateway.turn.turn import Turn
from router.http import RelayEnd, RelayOutcome
from router.identity import prefix_chain as chains
from router.identity.conversation_ids import ExplicitIdentity
from router.requests.body_parser import CHEAP_BYTES, Api, Prompt
from router.requests.hints import Hints
from tests.router.test_failures import engine_process
from tests.support.fake_engine import FakeEngine, prompt_size
from tests.support.fake_fleet import MODEL, FakeFleet, GatewayAnswer, ask, assistant, fleet, get, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SAMPLED = b": resumed on another engine; what follows was sampled there\n\n"


def events(body: bytes) -> list[Any]:
    """Return the events that a client reads, without fields that differ between answers of fake engines."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert all(line == b"" or line.startswith((b"data: ", b"event: ", b": ")) for line in body.split(b"\n"))
    read = [orjson.loads(line) if line != b"[DONE]" else "[DONE]" for line in lines]
    for event in read:
        for one in (event, event.get("response"), event.get("message")) if isinstance(event, dict) else ():
            if isinstance(one, dict):
                one.pop("id", None)
    return read


def contents(read: list[Any]) -> list[str]:
    return [event["choices"][0]["delta"]["content"] for event in read[:-1]]


async def cuts(made: FakeFleet) -> dict[str, float]:
    _, text = await get(f"{made.urls[0]}/metrics")
    lines = [line for line in text.splitlines() if line.startswith("conserve_streams_cut_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def counted(made: FakeFleet, before: dict[str, float]) -> dict[str, float]:
    after = await cuts(made)
    return {what: n - before.get(what, 0) for what, n in after.items() if n != before.get(what, 0)}


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}], ids=["", "usage"])
async def test_the_gateway_counts_a_streams_tokens_even_if_the_client_requests_no_usage(
    tmp_path: Path, path: str, usage: dict[str, Any]
) -> None:
    async with fleet(tmp_path, engine={"token_s": 0.001, "cached": 40}, prefillers=0) as made:
        said = "x" * 3_000 if path == "/v1/completions" else [user("x" * 3_000)]
        answer = await ask(made.urls[0], said, path=path, stream=True, max_tokens=12, **usage)
        assert answer.status == 200 and (b'"usage"' in answer.body) is bool(usage)
        known: dict[str, Any] = {"turns": 0}
        async with asyncio.timeout(10):
            while not known["turns"]:
                (known,) = (await get(f"{made.urls[0]}/v1/conversations"))[1]["data"]
        (request,) = made.decoder_requests()
        assert known["prompt_tokens"] == prompt_size(request.body) and known["completion_tokens"] == 12


def cut_first(made: FakeFleet, after: int) -> None:
    """Make every decoder break off its next stream after `after` tokens."""
    for engine in made.engines.values():
        engine.cut_after = after


async def first_cut(made: FakeFleet, asking: Callable[[], Any]) -> tuple[GatewayAnswer, FakeEngine]:
    """Ask for a stream that only its first decoder breaks off; return the answer and that decoder."""
    task = asyncio.create_task(asking())
    await until(made.decoder_requests)
    (broke,) = (one for name, one in made.engines.items() if name.startswith("d") and one.seen)
    for engine in made.engines.values():
        engine.cut_after = engine.cut_after if engine is broke else 0
    return await task, broke


async def another_decoder(made: FakeFleet, **how: Any) -> FakeEngine:
    """Start one more decoder in a running fleet."""
    other = made.engines["d1"] = FakeEngine("d1", token_s=0.02, **how)
    await other.start()
    made.directory.engine_up(other.info)
    return other


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("after", [1, 5, 29])
@pytest.mark.parametrize("prefillers", [0, 1])
async def test_a_greedy_stream_resumes_without_a_missing_or_repeated_token(
    tmp_path: Path, path: str, after: int, prefillers: int
) -> None:
    async with fleet(tmp_path, prefillers=prefillers, engine={"token_s": 0.005}) as made:
        told: dict[str, Any] = {"temperature": 0, "stream": True, "path": path}
        told["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 30
        prompt: Any = "q" if path == "/v1/completions" else [user("q")]
        undisturbed = await ask(made.urls[0], prompt, headers={"x-session-id": "before"}, **told)
        for engine in made.engines.values():
            engine.seen.clear()
        before = await cuts(made)
        cut_first(made, after)
        answer, broke = await first_cut(
            made, lambda: ask(made.urls[0], prompt, headers={"x-session-id": "s"}, **told)
        )
        assert events(answer.body) == events(undisturbed.body)
        assert b"\n:" not in answer.body and not answer.body.startswith(b":")
        assert "x-stream-pieces" not in answer.headers
        assert await counted(made, before) == {"resumed": 1}
        first, second = (
            made.decoder_requests() if made.engines["d0"] is broke else made.decoder_requests()[::-1]
        )
        assert (first.headers["x-stream-seed"], "resume" in first.params) == (
            second.headers["x-stream-seed"],
            False,
        )
        tokens = [token for output in second.params["resume"]["outputs"] for token in output]
        assert tokens == [1000 + n for n in range(after)]
        legs = [leg.params.get("resume") for leg in made.prefills()]
        assert legs == ([None, second.params["resume"]] if prefillers else [])
        await made.settle()
        _, conversation = await get(f"{made.urls[0]}/v1/conversations/s")
        assert conversation["decoder"] != broke.name
        assert [note["cause"] for note in conversation["placements"]] == ["first_turn", "rebound"]
        assert not [one for one in made.directory.table.conversations if one.running]


async def test_a_comment_in_a_resumed_sampled_stream_says_that_the_rest_was_sampled_anew(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, engine={"token_s": 0.005}) as made:
        cut_first(made, 5)
        answer, _ = await first_cut(made, lambda: ask(made.urls[0], [user("q")], stream=True, max_tokens=20))
        head, comment, _ = answer.body.partition(SAMPLED)
        assert comment and head.count(b"data: ") == 5
        assert contents(events(answer.body)) == [f"w{n} " for n in range(20)]


async def test_all_streams_of_a_killed_decoder_resume(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=0) as made, engine_process("d0", 0.02) as (info, pid):
        made.directory.engine_up(info)
        await made.settle()

        async def stream(number: int) -> bytes:
            got = b""
            body = {"model": MODEL, "messages": [user(f"{number}")], "stream": True, "max_tokens": 50}
            body["temperature"] = 0
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    f"{made.urls[0]}/v1/chat/completions", json={**body, "temperature": 0}
                ) as response,
            ):
                async for piece in response.content.iter_any():
                    got += piece
                    begun.add(number)
            return got

        begun: set[int] = set()
        streams = [asyncio.create_task(stream(number)) for number in range(30)]
        await until(lambda: len(begun) == 30)
        other = FakeEngine("d1")
        await other.start()
        made.engines["d1"] = other
        made.directory.engine_up(other.info)
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        for one in streams:
            seen = events(await asyncio.wait_for(one, 60.0))
            assert [event["choices"][0]["delta"]["content"] for event in seen[:-1]] == [
                f"w{n} " for n in range(50)
            ]
            assert seen[-1] == "[DONE]"
        assert all(request.params["resume"]["outputs"] for request in other.seen)


@pytest.mark.parametrize(
    ("more", "headers", "why"),
    [
        ({}, {"x-conversation-resume": "0"}, "opted_out"),
        ({"n": 2}, {}, "several_answers"),
        ({"logprobs": True}, {}, "logprobs"),
        ({"top_logprobs": 0}, {}, "logprobs"),
        ({"presence_penalty": 0.5}, {}, "counted_output"),
        ({"thinking_token_budget": 5}, {}, "counted_output"),
    ],
)
async def test_a_stream_that_cannot_resume_exactly_ends_in_an_error_and_is_counted_by_cause(
    tmp_path: Path, more: dict[str, Any], headers: dict[str, str], why: str
) -> None:
    async with fleet(tmp_path) as made:
        before = await cuts(made)
        cut_first(made, 3)
        answer = await ask(made.urls[0], [user("q")], stream=True, max_tokens=20, headers=headers, **more)
        assert events(answer.body)[-1]["error"]["code"] == "engine_lost"
        assert await counted(made, before) == {why: 1}
        assert len(made.decoder_requests()) == 1


async def test_a_cut_stream_ends_in_an_error_if_its_engine_reported_no_token_ids(tmp_path: Path) -> None:
    async with fleet(tmp_path, engine={"lines": False}) as made:
        before = await cuts(made)
        cut_first(made, 3)
        answer = await ask(made.urls[0], [user("q")], stream=True, max_tokens=20)
        assert events(answer.body)[-1]["error"]["code"] == "engine_lost"
        assert await counted(made, before) == {"not_lined": 1}


async def test_a_stream_that_crashes_engines_is_not_resumed_a_second_time(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=5) as made:
        cut_first(made, 3)
        for engine in made.engines.values():
            engine.cut_after = 3 if engine.name == "d0" else 5
        before = await cuts(made)
        answer = await ask(made.urls[0], [user("q")], stream=True, max_tokens=20, temperature=0)
        assert events(answer.body)[-1]["error"]["code"] == "request_set_aside"
        assert len(made.decoder_requests()) == 2
        assert (await counted(made, before))["set_aside"] == 1
        await made.settle()
        assert not [one for one in made.directory.table.conversations if one.running]


async def test_two_streams_with_the_same_prompt_both_resume_after_one_crash(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, prefillers=0, engine={"token_s": 0.02}) as made:
        before = await cuts(made)
        cut_first(made, 5)
        told: dict[str, Any] = {"stream": True, "max_tokens": 30, "temperature": 0}
        twins = [
            asyncio.create_task(ask(made.urls[0], [user("q")], headers={"x-session-id": name}, **told))
            for name in ("one", "two")
        ]
        await until(lambda: len(made.decoder_requests()) == 2)
        await another_decoder(made)
        for twin in twins:
            assert events((await twin).body)[-1] == "[DONE]"
        assert await counted(made, before) == {"resumed": 2}
        assert (await ask(made.urls[0], [user("q")], max_tokens=3)).status == 200


async def test_a_stream_ends_in_an_error_if_the_next_engine_cannot_resume_it(tmp_path: Path) -> None:
    """During an upgrade, a fleet may have an older engine that would begin again at the first token."""
    async with fleet(tmp_path, decoders=1, prefillers=0, engine={"token_s": 0.02}) as made:
        before = await cuts(made)
        cut_first(made, 5)
        asked = ask(made.urls[0], [user("q")], stream=True, max_tokens=100_000, temperature=0)
        task = asyncio.create_task(asked)
        await until(made.decoder_requests)
        other = await another_decoder(made, lines=False)
        answer = await asyncio.wait_for(task, 10.0)
        assert events(answer.body)[-1]["error"]["code"] == "engine_error"
        assert await counted(made, before) == {"refused": 1}
        await until(lambda: other.aborted == 1 and other.running == 0)


async def test_a_stream_that_loses_two_engines_is_counted_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2, prefillers=0, engine={"token_s": 0.01}) as made:
        before = await cuts(made)
        for engine in made.engines.values():
            engine.cut_after = 5 if engine.name == "d0" else 9
        answer = await ask(made.urls[0], [user("q")], stream=True, max_tokens=20, temperature=0)
        assert events(answer.body)[-1]["error"]["code"] == "request_set_aside"
        assert await counted(made, before) == {"set_aside": 1}


async def test_a_resumed_later_turn_counts_as_a_later_turn(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2, prefillers=0, engine={"token_s": 0.01}) as made:
        said = {"x-session-id": "s"}
        first = [user("q")]
        await ask(made.urls[0], first, headers=said)
        before = await first_tokens(made)
        for engine in made.engines.values():
            engine.cut_after = 5 if engine.seen else 0
        later = [*first, assistant("w"), user("r")]
        answer = await ask(made.urls[0], later, headers=said, stream=True, max_tokens=20, temperature=0)
        assert events(answer.body)[-1] == "[DONE]"
        await made.settle()
        after = await first_tokens(made)
        assert {turn: after[turn] - before.get(turn, 0) for turn in after} == {"first": 0, "later": 1}


async def first_tokens(made: FakeFleet) -> dict[str, float]:
    _, text = await get(f"{made.urls[0]}/metrics")
    lines = [line for line in text.splitlines() if line.startswith("conserve_ttft_seconds_count{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_on_a_vanished_machine_continue_elsewhere_once_the_directory_reports_the_loss(
    tmp_path: Path, stream: bool
) -> None:
    """The lost engine's socket stays silent, and `idle_timeout` would notice it only after a minute."""
    async with fleet(tmp_path, prefillers=0) as made:
        before = await cuts(made)
        for engine in made.engines.values():
            engine.silent_after, engine.token_s = 5, 0.005 if stream else 60.0
        told: dict[str, Any] = {"stream": stream, "max_tokens": 20, "temperature": 0}
        task = asyncio.create_task(ask(made.urls[0], [user("q")], **told))
        await until(made.decoder_requests)
        await asyncio.sleep(0.2)
        (gone,) = (one for one in made.engines.values() if one.seen)
        made.engines.pop(gone.name)  # it reports no more
        for engine in made.engines.values():
            engine.silent_after, engine.token_s = 0, 0.005
        made.directory.engine_down(gone.name)
        answer = await asyncio.wait_for(task, 10)
        assert answer.status == 200
        if stream:
            assert contents(events(answer.body)) == [f"w{n} " for n in range(20)]
            assert await counted(made, before) == {"resumed": 1}
        await gone.stop()


async def test_a_stream_that_no_other_decoder_can_continue_ends_in_an_error(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, place_wait_s=0.2) as made:
        before = await cuts(made)
        cut_first(made, 3)
        feeding = made.engines.pop("d0")  # it reports no more
        answer = await ask(made.urls[0], [user("q")], stream=True, max_tokens=20, temperature=0)
        assert events(answer.body)[-1]["error"]["type"] in ("rate_limit_error", "server_error")
        assert await counted(made, before) == {"no_place": 1}
        await feeding.stop()


async def test_nothing_waits_or_runs_after_a_client_leaves_during_a_resumption(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, place_wait_s=30.0) as made:
        cut_first(made, 3)
        gone = made.engines.pop("d0")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask(made.urls[0], [user("q")], stream=True, max_tokens=20), 1.0)
        await until(lambda: made.directory.table.waiting == 0)
        await until(lambda: not [one for one in made.directory.table.conversations if one.running])
        await gone.stop()


def a_turn(api: Api, body: dict[str, Any], size: int = 0) -> Turn:
    chain = chains.of_text(chains.seed("s", "m"), b"")
    prompt = Prompt(ExplicitIdentity(None, None), chain, 0, b"", b"", None, Hints())
    body = {"stream": True, **body}
    return Turn(api, (b"x" * size,), body, [], "s", prompt, "", SloClass("default"), 0.0)


@pytest.mark.parametrize(
    ("body", "size", "why"),
    [
        ({"prompt": ["A"]}, 0, None),
        ({"prompt": ["A", "B"]}, 0, "several_answers"),
        ({"bad_words": None}, 0, None),
        ({"bad_words": None}, CHEAP_BYTES + 1, "counted_output"),
        ({"logprob_token_ids": None}, CHEAP_BYTES + 1, "logprobs"),
        ({"n": None, "logprobs": None, "prompt": None}, CHEAP_BYTES + 1, None),
    ],
)
def test_why_not_resumable_names_the_reason_why_a_stream_cannot_resume(
    body: dict[str, Any], size: int, why: str | None
) -> None:
    assert why_not_resumable(a_turn(Api.COMPLETIONS, body, size)) == why


def test_a_stream_can_resume_any_number_of_times_if_each_engine_adds_a_token() -> None:
    now = 0.0
    turn = a_turn(Api.CHAT, {"temperature": 0})
    stream = StreamResumption(turn, lambda: now)
    assert stream.progress is not None
    cut = RelayOutcome(RelayEnd.RESUMABLE, 200, EngineLost("lost"))
    for _ in range(5):
        now += 3600
        stream.progress.lines += b":7;\n"
        assert stream.next_try(turn, cut).resume is not None
    stream.next_try(turn, cut)
    with pytest.raises(EngineLost):
        stream.next_try(turn, cut)
