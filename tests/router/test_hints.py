"""Clients' hints park, prefetch or end a conversation, and are accepted in several spellings."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from placement.prefetch_rules import PrefetchRules
from router.errors import BadRequest
from router.requests.hints import Hints, parse_hints
from tests.support.fake_engine import FakeEngine
from tests.support.fake_fleet import FakeFleet, ask, assistant, fleet, get, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NAMED = {"x-session-id": "s"}
RESTORES = "conserve_restores_ahead_total"
LIVES = ("long", "604800"), ("short", "0.5")


def envelope(**actions: Any) -> dict[str, Any]:
    """Return a request body that holds `actions` as hints in vLLM's `KvHintsEnvelope`."""
    listed = [
        {
            "action_id": name,
            "action_type": f"conversation.{name}",
            "action_version": "1",
            "payload": {"value": value},
        }
        for name, value in actions.items()
    ]
    foreign = {"action_id": "x", "action_type": "kvcr.pin", "action_version": "1", "payload": {"value": {}}}
    return {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": [*listed, foreign]}}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_unknown_actions_of_kv_hints_are_ignored() -> None:
    deep = {"kv_hints": {"actions": [{"action_type": nested(2000)}, {"action_type": "conversation.final"}]}}
    assert parse_hints({}, deep) == Hints(final=True)
    assert parse_hints({}, envelope(final=nested(2000))) == Hints(final=False)


def test_hints_in_headers_and_in_bodies_are_parsed_alike() -> None:
    headers = {
        "x-conversation-away": "30",
        "x-conversation-keep": "5.5",
        "x-conversation-ttl": "600",
        "x-conversation-priority": "3",
        "x-conversation-final": "1",
    }
    want = Hints(True, 30.0, 5.5, 600.0, 3)
    assert parse_hints(headers, {}) == want
    assert parse_hints({}, envelope(away=30, keep=5.5, ttl=600, priority=3, final=True)) == want
    assert parse_hints({"x-dynamo-session-final": "true"}, {}) == Hints(final=True)
    assert parse_hints({}, {"nvext": {"agent_hints": {"priority": 99, "osl": 4}}}) == Hints(priority=10)
    assert parse_hints({"x-conversation-priority": "1"}, envelope(priority=2)).priority == 1
    assert parse_hints({}, {"nvext": {"greed_sampling": True}}) == Hints()
    assert parse_hints({"x-conversation-final": "0"}, {}) == Hints()


@pytest.mark.parametrize(
    ("said", "priority"),
    [
        ({"priority": 5, "strict_priority": 0}, 5),
        ({"priority": 5, "strict_priority": 1}, 10),
        ({"priority": -99, "strict_priority": 7}, 10),
        ({"strict_priority": 0}, 0),
    ],
)
def test_a_strict_priority_above_0_counts_as_the_highest_priority(
    said: dict[str, int], priority: int
) -> None:
    """A `strict_priority` of 0 has the same effect as none."""
    assert parse_hints({}, {"nvext": {"agent_hints": said}}).priority == priority


def test_vllm_can_read_the_envelope_of_hints() -> None:
    protocol = pytest.importorskip("vllm.v1.kv_hints.protocol", reason="vLLM is not installed: make install")
    import msgspec

    read = msgspec.convert(envelope(away=3)["kv_hints"], protocol.KvHintsEnvelope)
    assert read.actions[0].payload == {"value": 3}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-conversation-away": "soon"}, {}),
        ({"x-conversation-away": "0"}, {}),
        ({"x-conversation-ttl": "nan"}, {}),
        ({"x-conversation-ttl": "1e30"}, {}),
        ({"x-conversation-priority": "1.5"}, {}),
        ({"x-conversation-priority": "11"}, {}),
        ({}, {"kv_hints": []}),
        ({}, {"kv_hints": {"actions": [{}] * 17}}),
        ({}, {"kv_hints": {"actions": ["x"]}}),
        ({}, envelope(away={})),
        ({}, envelope(away=nested(2000))),
        ({}, envelope(away=True)),
        ({}, {"nvext": {"agent_hints": {"priority": "high"}}}),
        ({}, {"nvext": {"agent_hints": {"strict_priority": -1}}}),
        ({}, {"nvext": {"agent_hints": {"strict_priority": True}}}),
    ],
)
def test_malformed_hints_are_refused(headers: dict[str, str], body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        parse_hints(headers, body)


async def test_only_hints_about_kv_are_forwarded_to_engines(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        body = {**envelope(keep=7), "nvext": {"agent_hints": {"priority": 1}}}
        for messages in ([user("a")], [user("a"), assistant("b"), user("c")]):
            answer = await ask(made.urls[0], messages, headers=NAMED, **body)
            assert answer.status == 200
        first, later = made.decoder_requests()
        assert later.params == {"conversation": {"park_after_s": 7.0}}
        assert first.params["conversation"] == later.params["conversation"]
        assert first.params["do_remote_prefill"]
        assert (later.body["kv_hints"], later.body["nvext"]) == (None, None)


async def test_an_answer_names_its_engines_if_the_request_asks_for_the_placement(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        asked = {**NAMED, "x-conversation-placement": "1"}
        first = await ask(made.urls[0], [user("a")], headers=asked, stream=True)
        later = await ask(made.urls[0], [user("a"), assistant("b"), user("c")], headers=asked)
        silent = await ask(made.urls[0], [user("d")])
        (prefill,) = (one for one in made.prefills() if one.body["messages"] == [user("a")])
        decoder = decoder_of_session(made)
    assert prefill
    assert first.headers["x-conversation-placement"] == f"cause=first_turn; decoder={decoder}; prefiller=p0"
    assert later.headers["x-conversation-placement"] == f"cause=bound; decoder={decoder}"
    assert "x-conversation-placement" not in silent.headers


def decoder_of_session(made: FakeFleet) -> str:
    """Return the name of the decoder that received the prompt "a"."""
    (name,) = (
        name
        for name, one in made.engines.items()
        if name.startswith("d") and any(seen.body["messages"] == [user("a")] for seen in one.seen)
    )
    return name


def decoder_of(made: FakeFleet) -> FakeEngine:
    (decoder,) = (one for one in made.engines.values() if one.name.startswith("d") and one.seen)
    return decoder


def prefetches(made: FakeFleet) -> int:
    return sum(len(engine.prefetched) for engine in made.engines.values())


async def state(made: FakeFleet) -> str:
    _, told = await get(f"{made.urls[0]}/v1/conversations/s")
    return str(told["state"])


async def away(made: FakeFleet, seconds: float) -> None:
    headers = {**NAMED, "x-conversation-away": str(seconds)}
    answer = await ask(made.urls[0], [user("x" * 500)], headers=headers)
    assert answer.status == 200


async def test_a_conversation_is_prefetched_before_its_announced_tool_call_ends(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        began = time.monotonic()
        await away(made, 4.0)
        await made.settle()
        assert await state(made) == "parked"
        assert prefetches(made) == 0
        await until(lambda: prefetches(made))
        assert 1.9 < time.monotonic() - began < 4.0
        key = decoder_of(made).seen[0].conversation
        assert decoder_of(made).prefetched == [(key, 2.0)]
        assert len(decoder_of(made).seen) == 1  # a prefetch is not a request to the decoder


async def test_a_turn_that_arrives_early_cancels_the_prefetch_of_its_conversation(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        await away(made, 0.6)
        await ask(made.urls[0], [user("x" * 500), assistant("a"), user("b")], headers=NAMED)
        await asyncio.sleep(0.6)
        assert prefetches(made) == 0


@pytest.mark.parametrize(("has_kv", "outcome"), [(True, "restored"), (False, "gone")])
async def test_prefetches_are_counted_by_outcome(tmp_path: Path, has_kv: bool, outcome: str) -> None:
    async with fleet(tmp_path, engine={"has_kv": has_kv}) as made:
        before = REGISTRY.get_sample_value(RESTORES, {"outcome": outcome}) or 0
        await away(made, 0.4)
        await until(lambda: REGISTRY.get_sample_value(RESTORES, {"outcome": outcome}) == before + 1)


async def test_a_prefetch_waits_while_turns_wait_at_its_engine(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefetch=PrefetchRules(patience_s=20.0)) as made:
        for engine in made.engines.values():
            engine.waiting = 1
        await made.settle()
        await away(made, 0.4)
        await asyncio.sleep(0.8)
        assert prefetches(made) == 0
        decoder_of(made).waiting = 0
        await until(lambda: prefetches(made))


async def test_a_conversation_that_is_not_parked_is_not_prefetched(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        await away(made, 0.6)
        decoder_of(made).parked.clear()
        await ask(made.urls[0], [user("x" * 500)], headers={**NAMED, "x-conversation-away": "0.4"})
        made.directory.table.conversations.engine_gone(decoder_of(made).name)
        decoder_of(made).parked.clear()
        await asyncio.sleep(0.8)
        assert prefetches(made) == 0


async def test_earlier_tool_waits_of_a_conversation_start_a_prefetch_without_a_hint(tmp_path: Path) -> None:
    rules = PrefetchRules(park_after_s=0.2, lead_s=0.2)
    async with fleet(tmp_path, prefetch=rules, engine={"calls_tools": True}) as made:
        messages = [user("x" * 300)]
        for number in range(4):
            await ask(made.urls[0], messages, headers=NAMED, stream=True)
            assert prefetches(made) == 0
            if number < 3:
                await asyncio.sleep(0.5)
                messages += [assistant("call"), user("result")]
        decoder = decoder_of(made)  # idle for longer than `park_after_s`
        decoder.parked[decoder.seen[-1].conversation] = decoder.reports + 1
        await until(lambda: prefetches(made))


async def test_a_conversation_ends_after_the_lifetime_that_its_client_asked_for(tmp_path: Path) -> None:
    async with fleet(tmp_path, ttl_s=0.5) as made:
        short = {"x-session-id": "short", "x-conversation-ttl": "0.1"}
        long = {"x-session-id": "long", "x-conversation-ttl": "600"}
        await asyncio.gather(*(ask(made.urls[0], [user("hi")], headers=one) for one in (short, long)))
        ended = lambda: {name.partition(":")[2] for one in made.engines.values() for name in one.released}  # noqa: E731
        await until(ended)
        assert ended() == {"short"}
        await asyncio.sleep(0.8)
        assert ended() == {"short"}
        assert sorted(life for one in made.engines.values() for life in one.lives.values()) == [0.1, 600.0]


async def test_a_client_learns_that_the_fleet_capped_the_lifetime_it_asked_for(tmp_path: Path) -> None:
    async with fleet(tmp_path, ttl_s=0.3, longest_ttl_s=0.6) as made:
        long, short = ({"x-session-id": name, "x-conversation-ttl": ttl} for name, ttl in LIVES)
        answers = [await ask(made.urls[0], [user("hi")], headers=one) for one in (long, short)]
        assert [one.headers["x-conversation-ttl"] for one in answers] == ["0.6", "0.5"]
        assert "x-conversation-ttl" not in (await ask(made.urls[0], [user("hi")])).headers
        assert sorted(life for one in made.engines.values() for life in one.lives.values()) == [0.5, 0.6]
        ended = lambda: {name.partition(":")[2] for one in made.engines.values() for name in one.released}  # noqa: E731
        await until(lambda: {"long", "short"} <= ended())


async def test_the_final_marker_ends_a_conversation_in_every_spelling(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        await ask(made.urls[0], [user("bye")], headers=NAMED, **envelope(final=True))
        await until(lambda: any(one.released for one in made.engines.values()))
        assert await state(made) == "ended"
