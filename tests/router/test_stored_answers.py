"""Stored answers of the Responses API outlive decoders and gateways."""

import asyncio
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from router.errors import GatewayConfigError
from router.gateway.config import AnswersConfig
from router.gateway.responses import stored_answers as answers
from router.gateway.responses.answer_store import (
    VERSION,
    AnswerStore,
    HistoryMissing,
    StoredAnswer,
    fair_share,
)
from router.gateway.responses.stored_answers import Answers, History
from tests.support.fake_fleet import FakeFleet, GatewayAnswer, ask, fleet, get
from tests.support.waiting import until

PATH = "/v1/responses"
ITEMS = b'{"role":"user","content":"hi"}'
REQUEST_ITEMS = (ITEMS,)
ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
PRUNED = "conserve_stored_answers_total", {"outcome": "pruned"}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def stored(folder: Path, **more: Any) -> AnswersConfig:
    return AnswersConfig(str(folder / "answers.sqlite"), **more)


async def say(
    made: FakeFleet, text: str, previous: str | None = None, gateway: int = 0, **more: Any
) -> GatewayAnswer:
    body: dict[str, Any] = {"previous_response_id": previous} if previous else {}
    headers = more.pop("headers", ALICE)
    return await ask(made.urls[gateway], text, path=PATH, headers=headers, **body, **more)


@contextmanager
def slow_writes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    put = AnswerStore.put

    def slowly(*arguments: Any) -> None:
        time.sleep(seconds)
        put(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(AnswerStore, "put", slowly)
        yield


def whole(answer: GatewayAnswer) -> dict[str, Any]:
    last = answer.body.rpartition(b"\ndata: ")[2]  # the last event of a stream, or all of another answer
    read = orjson.loads(last)
    return dict(read.get("response", read))


def name_of(answer: GatewayAnswer) -> str:
    return str(whole(answer)["id"])


def prompt(body: dict[str, Any]) -> list[tuple[str, Any]]:
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [(one.get("role") or one["type"], one.get("content") or one.get("name")) for one in items]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decoder_gets_the_whole_history_of_a_response_after_another_decoder_is_lost(
    tmp_path: Path, stream: bool
) -> None:
    async with fleet(tmp_path, prefillers=0, answers=stored(tmp_path)) as made:
        first = await say(made, "one", tools=[TOOL], stream=stream)
        second = await say(made, "two", name_of(first), stream=stream)
        where = next(engine for engine in made.engines.values() if engine.seen)
        assert len(where.seen) == 2, "a later turn of the same conversation"
        assert second.conversation == first.conversation
        made.engines.pop(where.name)
        await where.stop()
        third = await say(made, "three", name_of(second), stream=stream)
        assert third.status == 200
        (other,) = made.engines.values()
        (seen,) = other.seen
        said = [{"type": "output_text", "text": "w w w w ", "annotations": []}]
        assert prompt(seen.body) == [
            *(("user", "one"), ("assistant", said), ("function_call", "weather")),
            *(("user", "two"), ("assistant", said), ("user", "three")),
        ]
        assert (seen.body["store"], seen.body["previous_response_id"]) == (False, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", ["conv_1", {"id": "conv_1"}])
async def test_a_turn_that_names_a_conversation_gets_its_stored_history(
    tmp_path: Path, stream: bool, named: Any
) -> None:
    async with fleet(tmp_path, gateways=2, answers=stored(tmp_path)) as made:
        first = await say(made, "one", conversation=named, stream=stream)
        second = await say(made, "two", conversation=named, stream=stream)
        assert second.conversation == first.conversation == "conv_1"
        assert whole(second)["conversation"] == {"id": "conv_1"}
        assert (await say(made, "bob", conversation=named, stream=stream, headers=BOB)).status == 200
        url = f"{made.urls[0]}/v1/conversations/conv_1"
        assert (await get(url, "DELETE", headers=ALICE))[0] == 200
        await say(made, "again", conversation=named, stream=stream)
        seen = [prompt(one.body) for one in made.decoder_requests()]
        asked = sorted([content for role, content in one if role == "user"] for one in seen)
        assert asked == [["again"], ["bob"], ["one"], ["one", "two"]]


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_turn_does_not_revive_a_conversation_that_is_deleted_while_the_turn_runs(
    tmp_path: Path, turns: int
) -> None:
    async with fleet(tmp_path, prefillers=0, answers=stored(tmp_path)) as made:
        for number in range(turns - 1):
            await say(made, f"turn {number}", conversation="c")
        for one in made.engines.values():
            one.prefill_s = 1.0
        late = asyncio.create_task(say(made, "late", conversation="c"))
        await until(lambda: len(made.decoder_requests()) == turns)
        url = f"{made.urls[0]}/v1/conversations/c"
        assert (await get(url, "DELETE", headers=ALICE))[0] == 200
        for one in made.engines.values():
            one.prefill_s = 0.0
        assert (await say(made, "anew", conversation="c")).status == 200
        assert (await late).status == 200
        await say(made, "and on", conversation="c")
        seen = prompt(made.decoder_requests()[-1].body)
        assert [content for role, content in seen if role == "user"] == ["anew", "and on"]
        assert (await say(made, "from the late one", name_of(await late))).status == 200


def put(store: AnswerStore, name: str, previous: str | None, conversation: str, end: int = 0) -> None:
    store.put("o", StoredAnswer(name, previous, ITEMS, b"{}", conversation, end))


def test_an_answer_of_an_ended_conversation_does_not_join_a_new_one_of_the_same_name(
    tmp_path: Path,
) -> None:
    store = AnswerStore(stored(tmp_path))
    assert not store.end_conversation("o", "c", live=True)
    newest, end = store.newest("o", "c")
    assert newest is None and end
    put(store, "first", None, "c", end)
    assert store.newest("o", "c")[0] == "first"
    assert store.end_conversation("o", "c", live=False)
    put(store, "late", "first", "c", end)
    assert store.newest("o", "c")[0] is None


def test_the_next_turn_continues_the_one_of_two_concurrent_turns_that_ends_last(tmp_path: Path) -> None:
    store = AnswerStore(stored(tmp_path))
    for name, previous in (("first", None), ("quick", "first"), ("slow", "first")):
        put(store, name, previous, "c")
    assert store.newest("o", "c")[0] == "slow"


async def test_an_answer_names_its_previous_response(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        first = await say(made, "one")
        second = await say(made, "two", name_of(first))
        third = await say(made, "three", name_of(second), stream=True, store=False)
        said = [whole(one)["previous_response_id"] for one in (first, second, third)]
        assert said == [None, name_of(first), name_of(second)]


async def test_a_request_with_two_histories_a_malformed_id_or_offline_service_tier_is_refused(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as made:
        first = await say(made, "one")
        both = await say(made, "two", name_of(first), conversation="c")
        assert (both.status, both.error["param"]) == (400, "conversation")
        assert (await say(made, "two", previous_response_id=["r"])).status == 400
        offline = await say(made, "two", conversation="c", service_tier="flex")
        assert (offline.status, offline.error["param"]) == (400, "conversation")


async def test_answers_are_kept_in_memory_if_no_file_is_configured(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        first = await say(made, "one")
        assert (await say(made, "two", name_of(first))).status == 200
        assert (await get(f"{made.urls[0]}{PATH}/{name_of(first)}", headers=ALICE))[0] == 200


async def test_another_gateway_and_a_restarted_process_find_a_stored_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path, answers=stored(tmp_path), gateways=2) as made:
        first = await say(made, "one")
        assert (await say(made, "two", name_of(first), gateway=1)).status == 200
    async with fleet(tmp_path / "later", answers=stored(tmp_path)) as made:
        assert (await say(made, "two", name_of(first))).status == 200
        assert [role for role, _ in prompt(made.decoder_requests()[0].body)] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("stream", "tokens"), [(False, 4), (False, 100_000), (True, 4)], ids=["whole", "in pieces", "stream"]
)
async def test_an_answer_is_stored_before_its_client_gets_the_end_of_it(
    tmp_path: Path, stream: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway finds the answer as soon as the client has its end, even if storing is slow."""
    with slow_writes(monkeypatch, 0.3):
        engine = {"token_s": 0.0, "kv_tokens": 4_000_000, "max_context": 1_000_000}
        made_with = {"answers": stored(tmp_path), "gateways": 2, "engine": engine}
        async with fleet(tmp_path, **made_with) as made:
            for number, text in enumerate(("one", "two", "three")):
                more = {"conversation": "c", "stream": stream, "max_output_tokens": tokens}
                assert (await say(made, text, gateway=number % 2, **more)).status == 200
            asked = [content for role, content in prompt(made.decoder_requests()[-1].body) if role == "user"]
            assert asked == ["one", "two", "three"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hanging_disk_delays_an_answer_only_briefly(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SHOWN_WITHIN_S", 0.1)
    late = "conserve_stored_answers_total", {"outcome": "late"}
    before = REGISTRY.get_sample_value(*late) or 0
    with slow_writes(monkeypatch, 1.0):
        async with fleet(tmp_path, answers=stored(tmp_path)) as made:
            began = time.monotonic()
            assert whole(await say(made, "one", stream=stream))["status"] == "completed"
            assert time.monotonic() - began < 0.9
            assert REGISTRY.get_sample_value(*late) == before + 1


async def test_only_the_owner_can_get_and_delete_an_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        first = await say(made, "one")
        second = await say(made, "two", name_of(first))
        url = f"{made.urls[0]}{PATH}/{name_of(second)}"
        status, shown = await get(url, headers=ALICE)
        assert (status, shown["id"], shown["previous_response_id"]) == (200, name_of(second), name_of(first))
        assert (await get(url, headers=BOB))[0] == 404
        assert (await get(url, "DELETE", headers=BOB))[0] == 404
        refused = await say(made, "x", name_of(first), headers=BOB)
        assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
        status, gone = await get(f"{made.urls[0]}{PATH}/{name_of(first)}", "DELETE", headers=ALICE)
        assert (status, gone["deleted"]) == (200, True)
        for one in (first, second):  # the history has lost its first answer
            refused = await say(made, "x", name_of(one))
            assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
            assert "was deleted" in refused.error["message"]


async def test_an_answer_with_store_false_is_not_stored(tmp_path: Path) -> None:
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        first = await say(made, "one", store=False)
        assert (await say(made, "two", name_of(first))).status == 404
        assert (await get(f"{made.urls[0]}{PATH}/{name_of(first)}", headers=ALICE))[0] == 404


@pytest.mark.parametrize("bounds", [{"keep_s": 0.0}, {"gib": 1 / (1 << 30)}])
async def test_stored_answers_are_deleted_beyond_the_limits_on_age_and_bytes(
    tmp_path: Path, bounds: dict[str, Any]
) -> None:
    async with fleet(tmp_path, answers=stored(tmp_path, **bounds)) as made:
        before = REGISTRY.get_sample_value(*PRUNED) or 0
        first = await say(made, "one")
        await until(lambda: REGISTRY.get_sample_value(*PRUNED) == before + 1)
        assert (await get(f"{made.urls[0]}{PATH}/{name_of(first)}", headers=ALICE))[0] == 404


def test_one_owner_does_not_evict_stored_answers_of_another(tmp_path: Path) -> None:
    store = AnswerStore(stored(tmp_path, gib=40_000 / (1 << 30)))
    store.put("alice", StoredAnswer("first", None, ITEMS, b"{}"))
    for number in range(40):
        items = b'{"role":"user","content":"%b"}' % os.urandom(1000).hex().encode()
        store.put("bob", StoredAnswer(f"many-{number}", None, items, b"{}"))
    assert store.prune() > 5
    assert store.history("alice", "first", 10, 10_000) == REQUEST_ITEMS
    assert store.history("bob", "many-39", 10, 10_000)
    with pytest.raises(HistoryMissing, match="expired"):
        store.history("bob", "many-0", 10, 10_000)


def test_the_number_of_tombstones_of_answers_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway.responses.answer_store.MOST_TOMBSTONES", 10)
    store = AnswerStore(stored(tmp_path, keep_s=0.0))
    for number in range(40):
        put(store, f"many-{number}", None, f"c-{number}")
    assert store.prune() == 40
    known = [number for number in range(40) if store.newest("o", f"c-{number}")[0]]
    assert known == list(range(30, 40))


async def test_a_turn_of_a_conversation_whose_answers_expired_gets_a_404(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway.responses.answer_store.PRUNE_S", 0.0)
    async with fleet(tmp_path, answers=stored(tmp_path, keep_s=0.0)) as made:
        first = name_of(await say(made, "one", conversation="c"))
        for more in ({"conversation": "c"}, {"previous": first}):
            refused = await say(made, "two", **more)
            assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
        refused = await say(made, "two", conversation="c")
        assert "not stored any more" in refused.error["message"]
        assert "DELETE /v1/conversations/c " in refused.error["message"]
        assert (await get(f"{made.urls[0]}/v1/conversations/c", "DELETE", headers=ALICE))[0] == 200
        assert (await say(made, "anew", conversation="c")).status == 200


@given(st.lists(st.integers(1, 100), max_size=8), st.integers(0, 400))
def test_the_shares_of_owners_together_fill_the_store_and_do_not_exceed_it(
    totals: list[int], most: int
) -> None:
    share = fair_share(totals, most)
    kept = sum(min(total, share) for total in totals)
    assert kept <= most
    if sum(totals) <= most:
        assert kept == sum(totals)
    else:
        assert most - kept < len(totals)


async def test_a_request_for_a_history_in_an_unreadable_store_gets_a_503(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite").write_bytes(b"no database at all" * 100)
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        assert (await say(made, "one")).status == 200
        assert (await say(made, "two", "resp_1")).status == 503


def test_vllm_reads_tool_calls_and_reasoning_from_an_input_with_a_stored_history() -> None:
    """Unlike vLLM's own store, ours keeps tool calls and reasoning."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.responses.protocol", reason="vLLM: make install")
    utils = pytest.importorskip("vllm.entrypoints.openai.responses.utils")
    given = [
        {"role": "user", "content": "one"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hello", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
    ]
    request = protocol.ResponsesRequest.model_validate(
        {"model": "m", "store": False, "previous_response_id": None, "input": given}
    )
    asked, said, result = utils.construct_input_messages(request_input=request.input)
    assert (asked["content"], said["reasoning"], said["content"]) == ("one", "hm", "hello")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["weather"]
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1")


async def test_a_store_of_an_older_version_is_emptied_and_a_newer_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "answers.sqlite"
    with closing(sqlite3.connect(file)) as database:
        database.executescript("CREATE TABLE answers (owner TEXT, id TEXT); PRAGMA user_version = 3;")
    async with fleet(tmp_path, answers=stored(tmp_path)) as made:
        assert (await get(f"{made.urls[0]}{PATH}/r0", headers=ALICE))[0] == 404
        first = await say(made, "one")
        assert (await say(made, "two", name_of(first))).status == 200
    with closing(sqlite3.connect(file)) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    newer = Answers(stored(tmp_path))
    with pytest.raises(GatewayConfigError, match=f"of version {VERSION + 1}, and .* knows {VERSION}"):
        await newer.start()
    await newer.close()


async def test_answers_are_not_stored_if_too_many_bytes_already_wait_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway.responses.stored_answers.MOST_WAITING_BYTES", 1000)
    answers = Answers(stored(tmp_path))
    await answers.start()
    with closing(sqlite3.connect(tmp_path / "answers.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # another process holds the write lock
        for number in range(30):
            answer = b'{"id": "resp_%d", "output": []}' % number
            answers.store("o", History(REQUEST_ITEMS, None, None, True), answer)
        other.execute("ROLLBACK")
    await answers.response("o", "resp_0")
    found = [await answers.response("o", f"resp_{number}") is not None for number in range(30)]
    assert found[0] and 10 < sum(found) < 25
    last = answers.store("o", History(REQUEST_ITEMS, None, None, True), b'{"id": "resp_30", "output": []}')
    assert last is not None
    await last
    assert await answers.response("o", "resp_30")
    await answers.close()
