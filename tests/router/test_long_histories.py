"""A gateway answers in time even if histories are too large or the disk of stored answers fails.

The answer says what to do. One owner's large history does not slow down requests of other owners.
"""

import asyncio
import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

from router.errors import PayloadTooLarge
from router.gateway.config import GatewayLimits
from router.gateway.responses.answer_observer import AnswerObserver
from router.gateway.responses.answer_store import AnswerStore
from router.gateway.responses.stored_answers import Answers, History
from router.requests.body_parser import CHEAP_MARKS, Api, BodyParser
from router.requests.body_spans import cut_items, find_items, write_items
from router.requests.cost_limits import PromptLimit
from router.requests.parser_pool import MAX_WAITING, ParserPool
from router.settings import MIB
from tests.router.test_large_bodies import BOUND_S, Stalls
from tests.router.test_rates import limited
from tests.router.test_stored_answers import ALICE, BOB, PATH, name_of, say, stored
from tests.support.fake_fleet import fleet, get, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow

KEPT = "conserve_stored_answers_total", {"outcome": "kept"}
FAILED = "conserve_stored_answers_total", {"outcome": "failed"}


class Hanging:
    """Disk that hangs at the next call of one method of the store, until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self._go = threading.Event()
        called = getattr(AnswerStore, method)

        def hangs(*arguments: Any) -> Any:
            self._go.wait(60.0)
            return called(*arguments)

        monkeypatch.setattr(AnswerStore, method, hangs)

    def let_go(self) -> None:
        self._go.set()


def junk(size: int) -> list[dict[str, Any]]:
    """Return a history of `size` bytes that compresses well and adds almost nothing to the prompt."""
    return [{**user("hi"), "id": "A" * size}]


async def test_a_history_larger_than_the_limit_on_bodies_is_refused(tmp_path: Path) -> None:
    limits = GatewayLimits(body_mib=40_000 / MIB)
    async with fleet(tmp_path, answers=stored(tmp_path), limits=limits) as made:
        first = await say(made, junk(25_000))
        assert (await say(made, junk(10_000), name_of(first), store=False)).status == 200
        second = await say(made, junk(25_000), conversation="c")
        assert second.status == 200
        for more in ({"previous": name_of(first)}, {"conversation": "c"}):
            refused = await say(made, junk(25_000), **more)
            assert (refused.status, refused.error["code"]) == (413, "history_too_large")
            assert "40000 bytes" in refused.error["message"]
        assert "DELETE /v1/conversations/c " in refused.error["message"]


async def test_a_large_history_is_read_and_stored_without_blocking_the_event_loop_for_long(
    tmp_path: Path,
) -> None:
    answers, parser_pool = Answers(stored(tmp_path)), ParserPool()
    await answers.start()
    asking: dict[str, Any] = {"model": "small", "input": junk(6 * MIB)}
    json = {"content-type": "application/json"}
    asked = BodyParser(PATH, Api.RESPONSES, json, "o", frozenset({"small"}), PromptLimit(10**9), True)
    longest = []
    for number in range(5):
        pieces = tuple(cut(orjson.dumps(asking)))
        stalls = Stalls()
        watching = asyncio.create_task(stalls.watch())
        read = await parser_pool.parse(asked, pieces)
        sent, history = await answers.with_history("o", pieces, read)
        answers.store("o", history, b'{"id": "r%d", "output": []}' % number)
        await answers.response("o", f"r{number}")
        watching.cancel()
        longest.append(stalls.longest_s)
        asking["previous_response_id"] = f"r{number}"
    with pytest.raises(PayloadTooLarge):
        await answers.with_history(
            "o", pieces, await parser_pool.parse(asked, tuple(cut(orjson.dumps(asking))))
        )
    parser_pool.close()
    await answers.close()
    assert sum(map(len, sent)) > 30 * MIB
    assert len(orjson.loads(b"".join(sent))["input"]) == 5
    assert sorted(longest)[2] < BOUND_S, longest


def cut(body: bytes) -> list[bytes]:
    return [body[at : at + MIB] for at in range(0, len(body), MIB)]


async def test_a_request_that_waits_for_its_history_counts_as_a_turn_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key's limit of concurrent turns also limits how many histories are read concurrently."""
    async with limited(tmp_path, {"turns": 1}) as made:
        disk = Hanging(monkeypatch, "history")
        both = [asyncio.create_task(say(made, "x", "resp_1")) for _ in range(2)]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED, timeout=5.0)
            assert [one.result().status for one in done] == [429]
        finally:
            disk.let_go()
            await asyncio.wait(both)


def stream(text: str) -> list[bytes]:
    output = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    events = (
        ("response.output_text.done", {"type": "response.output_text.done", "text": text}),
        ("response.content_part.done", {"type": "response.content_part.done", "part": {"text": text}}),
        ("response.completed", {"response": {"id": "resp_1", "object": "response", "output": output}}),
    )
    return [b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data)) for name, data in events]


@pytest.mark.parametrize(
    "text",
    ["event: response.completed", "event: response.completed\ndata: {}", "\nevent: response.incomplete\n"],
)
@pytest.mark.parametrize("together", [False, True])
def test_an_answer_text_that_looks_like_an_event_is_not_treated_as_one(text: str, together: bool) -> None:
    observer = AnswerObserver(lambda _: None)
    observer.start(200, b"text/event-stream")
    events = stream(text)
    for data in [b"".join(events)] if together else events:
        observer.feed(data)
    assert orjson.loads(observer.response)["response"]["id"] == "resp_1"


async def test_histories_can_be_read_while_the_disk_is_full(tmp_path: Path) -> None:
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        first = name_of(await say(made, "one"))
        second = await say(made, "two", conversation="c")
        assert (await get(f"{made.urls[0]}{PATH}/{name_of(second)}", headers=ALICE))[0] == 200
        files = [tmp_path / f"answers.sqlite{end}" for end in ("", "-wal")]
        full, limits = max(map(os.path.getsize, files)), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
        try:
            before = REGISTRY.get_sample_value(*FAILED) or 0
            assert (await say(made, "three", first)).status == 200
            assert (await say(made, "three", conversation="c")).status == 200
            await until(lambda: (REGISTRY.get_sample_value(*FAILED) or 0) >= before + 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (await say(made, "four", name_of(await say(made, "three", first)))).status == 200


@pytest.mark.parametrize("method", ["put", "history"])
async def test_a_hanging_disk_delays_no_request_and_no_start_or_end_of_a_gateway_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr("router.gateway.responses.stored_answers.LONGEST_S", 0.3)
    disk = None
    try:
        async with fleet(tmp_path, answers=stored(tmp_path)) as made:
            first = name_of(await say(made, "one"))
            url = f"{made.urls[0]}{PATH}/{first}"
            assert (await get(url, headers=ALICE))[0] == 200
            disk = Hanging(monkeypatch, method)
            assert (await say(made, "without a history")).status == 200
            for more in ({"previous": first}, {"conversation": "c"}, {"previous": first}):
                async with asyncio.timeout(5.0):
                    refused = await say(made, "two", **more)
                assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert (await say(made, "without a history")).status == 200
            assert [(await get(url, asked, headers=ALICE))[0] for asked in ("GET", "DELETE")] == [503, 503]
            begun = time.monotonic()
        assert time.monotonic() - begun < 5.0, "the gateway ends"
        disk.let_go()
        disk = Hanging(monkeypatch, "open")
        begun, later = time.monotonic(), Answers(stored(tmp_path))
        await later.start()
        await later.close()
        assert time.monotonic() - begun < 5.0, "and begins"
    finally:
        if disk is not None:
            disk.let_go()


async def test_answers_are_stored_again_once_a_hanging_disk_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway.responses.stored_answers.LONGEST_S", 0.3)
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        disk = Hanging(monkeypatch, "put")
        before = REGISTRY.get_sample_value(*KEPT) or 0
        first = name_of(await say(made, "one"))
        assert (await say(made, "two", first)).status == 503
        disk.let_go()
        await until(lambda: REGISTRY.get_sample_value(*KEPT) == before + 1)
        assert (await say(made, "two", first)).status == 200, "what waited is stored"


async def test_a_history_of_too_many_answers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway.responses.stored_answers.LONGEST_HISTORY", 3)
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        for _ in range(4):
            assert (await say(made, "again", conversation="c")).status == 200
        refused = await say(made, "again", conversation="c")
        assert (refused.status, refused.error["code"]) == (400, "history_too_long")
        assert "more than 3 answers" in refused.error["message"]
        assert (await get(f"{made.urls[0]}/v1/conversations/c", "DELETE", headers=ALICE))[0] == 200
        assert (await say(made, "anew", conversation="c")).status == 200


async def test_no_request_can_continue_from_a_deleted_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        names = [name_of(await say(made, text, conversation="c")) for text in ("one", "two", "three")]
        url = f"{made.urls[0]}{PATH}"
        assert (await get(f"{url}/{names[1]}", "DELETE", headers=BOB))[0] == 404
        assert (await get(f"{url}/{names[1]}", "DELETE", headers=ALICE))[0] == 200
        assert [(await get(f"{url}/{name}", headers=ALICE))[0] for name in names] == [200, 404, 200]
        assert (await get(f"{url}/{names[1]}", "DELETE", headers=ALICE))[0] == 404
        for more in ({"previous": names[2]}, {"previous": names[1]}, {"conversation": "c"}):
            begun = time.monotonic()
            refused = await say(made, "more", **more)
            assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
            assert "was deleted" in refused.error["message"]
            assert time.monotonic() - begun < 0.45, "nobody is about to write it"
        assert (await say(made, "more", names[0])).status == 200


async def test_the_store_of_answers_is_opened_later_if_its_folder_could_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("no folder")
    before = REGISTRY.get_sample_value(*FAILED) or 0
    async with fleet(tmp_path, answers=stored(tmp_path / "folder")) as made:
        first = name_of(await say(made, "one"))
        await until(lambda: REGISTRY.get_sample_value(*FAILED) == before + 2)
        assert (await get(f"{made.urls[0]}{PATH}/{first}", headers=ALICE))[0] == 503
        assert (await say(made, "two", first)).status == 503
        (tmp_path / "folder").unlink()
        first = name_of(await say(made, "one"))
        assert (await say(made, "two", first)).status == 200


async def test_a_body_larger_than_the_parser_pool_takes_gets_a_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.parser_pool.MAX_WAITING_BYTES", 1000)
    asked = BodyParser(PATH, Api.RESPONSES, {}, "o", frozenset(), PromptLimit(0))
    with pytest.raises(PayloadTooLarge, match="1000"):
        await ParserPool().parse_in_process(asked, (b"x" * 1001,))


async def test_a_costly_answer_is_parsed_in_a_process_and_stored(tmp_path: Path) -> None:
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        before = REGISTRY.get_sample_value(*KEPT) or 0
        tools = [{"type": "function", "name": "f", "parameters": {"enum": ["x"] * 100_000}}]
        first = await say(made, "one", tools=tools)
        await until(lambda: REGISTRY.get_sample_value(*KEPT) == before + 1)
        assert (await say(made, "two", name_of(first))).status == 200


async def test_all_costly_answers_that_end_at_the_same_time_are_stored(tmp_path: Path) -> None:
    """The clients already have these answers and cannot send them again."""
    parser_pool = ParserPool()
    answers = Answers(stored(tmp_path), parser_pool=parser_pool)
    await answers.start()
    before = REGISTRY.get_sample_value(*FAILED) or 0
    names = [f"resp_{number}" for number in range(3 * MAX_WAITING)]
    for name in names:
        response = {"id": name, "output": [], "tools": [{}] * (CHEAP_MARKS + 1)}
        answers.store("o", History((), None, None, True), orjson.dumps(response))
    await answers.close()
    parser_pool.close()
    later = Answers(stored(tmp_path))
    found = [await later.response("o", name) is not None for name in names]
    await later.close()
    assert (found, REGISTRY.get_sample_value(*FAILED) or 0) == ([True] * len(names), before)


BODIES = [
    {"input": 'text \u00e9 \\ " ]'},
    {"input": [user("\u00e9\u4e2d"), {"content": [{"input": "inner"}]}], "model": "m"},
    {"model": "m", "tools": [{"input": [1]}], "input": []},
    {"model": "m", "input": None},
    {"model": "m"},
    {"n": 10**30, "input": [user("1e400")], "x": -1.5e300},
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("body", BODIES)
def test_items_are_found_in_a_body_however_its_json_is_written(
    body: dict[str, Any], indent: int | None
) -> None:
    raw = json.dumps(body, indent=indent, ensure_ascii=indent is None).encode()
    pieces = [raw[at : at + 7] for at in range(0, len(raw), 7)]
    given = body.get("input")
    items = [user(given)] if isinstance(given, str) else given or []
    assert json.loads(b"[" + b"".join(cut_items(pieces, find_items(raw))) + b"]") == items
    assert json.loads(b"[" + write_items(given) + b"]") == items


def test_of_two_input_fields_the_last_counts_even_if_its_name_is_escaped() -> None:
    raw = b'{"input":"a", "\\u0069nput" : [ {"role":"user","content":"b"} ] }'
    assert orjson.loads(b"[" + b"".join(cut_items((raw,), find_items(raw))) + b"]") == [user("b")]
