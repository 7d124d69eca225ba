"""A conversation keeps its decoder until it ends, and decoders get clients' known fields unchanged."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from placement.routing.placer_settings import PlacingPolicy
from router.gateway.config import SloSettings
from router.identity.conversation_ids import namespace
from tests.support.fake_engine import SeenRequest
from tests.support.fake_fleet import FakeFleet, ask, assistant, fleet, get, user
from tests.support.waiting import until


async def test_a_conversation_is_transferred_once_and_stays_on_its_decoder(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        messages: list[dict[str, Any]] = [user("hello " * 20)]
        ids = set()
        for turn in range(6):
            answer = await ask(made.urls[0], messages, stream=True)
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
            ids.add(answer.conversation)
            messages += [assistant(f"answer {turn}"), user(f"tool {turn}")]
        assert len(ids) == 1
        used = [engine for engine in made.engines.values() if engine.seen and engine.name.startswith("d")]
        assert len(used) == 1
        requests = used[0].seen
        assert [bool(seen.params) for seen in requests] == [True] + [False] * 5
        assert len(made.prefills()) == 1
        await made.settle()
        _, told = await get(f"{made.urls[0]}/v1/conversations/{ids.pop()}")
        assert (told["turns"], told["transfers"], told["decoder"]) == (6, 1, used[0].name)
        assert told["placements"][0]["receipt"]["decoder"]["why"] == "least_kv_in_use"


async def test_both_legs_of_a_first_turn_have_the_clients_messages_and_one_transfer_id(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as made:
        # Spacing and number formats that a re-serialisation would change.
        raw = (
            b'{ "model" :"small","messages":[{"role":"user","content":"caf\\u00e9"}],'
            b'"temperature":1.0e0, "stream":true,"n":1}'
        )
        headers = {"content-type": "application/json", "x-session-id": "s", "authorization": "Bearer k"}
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                url = f"{made.urls[0]}/v1/chat/completions"
                async with session.post(url, data=raw, headers=headers) as response:
                    assert response.status == 200
                    await response.read()
        first, second = made.decoder_requests()
        (prefill,) = made.prefills()
        assert second.raw == raw[:-1] + b',"cache_salt":"%b"}' % namespace("k").encode()
        assert first.raw.startswith(raw[:-1])
        assert first.body["messages"] == prefill.body["messages"] == orjson.loads(raw)["messages"]
        assert first.params["do_remote_prefill"] is True
        assert prefill.params == {"do_remote_decode": True, "transfer_id": first.params["transfer_id"]}
        assert first.params["remote_port"] == made.engines["p0"].port
        assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)
        assert first.conversation == second.conversation == prefill.conversation
        assert first.conversation.endswith(":s")
        assert not any("authorization" in map(str.lower, seen.headers) for seen in (first, second, prefill))


async def test_each_of_30_conversations_binds_where_least_kv_is_in_use(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=3, prefillers=2, engine={"token_s": 0.001}) as made:

        async def one(number: int) -> str:
            messages: list[dict[str, Any]] = [user(f"{number} " + "x" * (37 * number % 700))]
            answer = None
            for turn in range(1 + number % 4):
                answer = await ask(made.urls[0], messages, stream=turn % 2 == 0, max_tokens=3 + number % 5)
                assert answer.status == 200
                messages += [assistant(f"{number} {turn}"), user("go on " * (number % 7))]
            assert answer is not None
            return answer.conversation

        ids = await asyncio.gather(*(one(number) for number in range(30)))
        assert len(set(ids)) == 30
        await made.settle()
        for number, conversation in enumerate(ids):
            _, told = await get(f"{made.urls[0]}/v1/conversations/{conversation}")
            assert told["turns"] == 1 + number % 4
            assert told["transfers"] == 1
            choice = told["placements"][0]["receipt"]["decoder"]
            others = [option["kv_in_use"] for option in choice["runners_up"]]
            assert choice["considered"] == 3
            assert len(others) + 1 + choice["without_capacity"] == 3
            assert choice["chosen"]["kv_in_use"] <= min(others)
        transfers = [seen.params["transfer_id"] for seen in made.decoder_requests() if seen.params]
        assert len(transfers) == len(set(transfers)) == 30
        by_conversation: dict[str, set[str]] = {}
        for engine in made.engines.values():
            for seen in engine.seen:
                if engine.name.startswith("d"):
                    by_conversation.setdefault(seen.conversation, set()).add(engine.name)
        assert all(len(engines) == 1 for engines in by_conversation.values())


async def test_a_prefiller_computes_large_appends_and_changed_prompts_for_the_same_decoder(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as made:
        headers = {"x-conversation-id": "c"}
        messages = [user("start " * 100)]
        await ask(made.urls[0], messages, headers=headers)
        messages += [assistant("ok"), user("small")]
        await ask(made.urls[0], messages, headers=headers)
        assert len(made.prefills()) == 1
        await made.settle()  # until the directory hears of the prefill's end, the prefiller counts as busy
        messages += [assistant("ok"), user("pasted file " * 400)]
        await ask(made.urls[0], messages, headers=headers)
        assert len(made.prefills()) == 2
        await made.settle()
        compacted = [user("summary " * 400)]
        await ask(made.urls[0], compacted, headers=headers)
        assert len(made.prefills()) == 3
        assert len({seen.conversation for seen in made.decoder_requests()}) == 1
        await made.settle()
        _, told = await get(f"{made.urls[0]}/v1/conversations/c")
        causes = [note["cause"] for note in told["placements"]]
        assert causes == ["first_turn", "redisaggregated", "redisaggregated"]
        assert len({note["decoder"] for note in told["placements"]}) == 1


async def test_concurrent_equal_turns_and_turns_from_older_points_fork_on_one_decoder(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, engine={"token_s": 0.02}) as made:
        first = [user("the very same question")]
        twins = await asyncio.gather(*(ask(made.urls[0], first, stream=True) for _ in range(3)))
        ids = {answer.conversation for answer in twins}
        assert len(ids) == 3
        assert len([one for one in made.engines.values() if one.name[0] == "d" and one.seen]) == 1
        retry = await ask(made.urls[0], first)
        assert retry.conversation in ids
        left = [*first, assistant("a"), user("left")]
        one = await ask(made.urls[0], left)
        await ask(made.urls[0], [*left, assistant("b"), user("more")])
        older = await ask(made.urls[0], [*left, assistant("b2"), user("other")])
        assert older.conversation != one.conversation
        await made.settle()
        _, told = await get(f"{made.urls[0]}/v1/conversations/{older.conversation}")
        assert told["parent"] == one.conversation
        assert told["placements"][0]["receipt"]["decoder"]["why"] == "preferred"


async def test_a_response_continues_the_conversation_of_its_previous_response(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        path = "/v1/responses"
        first = await ask(made.urls[0], "hello", path=path)
        response_id = orjson.loads(first.body)["id"]
        second = await ask(made.urls[0], "go on", path=path, previous_response_id=response_id, stream=True)
        assert second.conversation == first.conversation
        again = await ask(made.urls[0], "something else", path=path, previous_response_id=response_id)
        assert again.conversation != first.conversation  # a second continuation of the same response
        unknown = await ask(made.urls[0], "hm", path=path, previous_response_id="resp_nope")
        assert (unknown.status, unknown.error["code"]) == (404, "previous_response_not_found")


async def test_plain_completions_that_extend_each_other_are_one_conversation(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        text = "Once upon a time " * 30
        one = await ask(made.urls[0], text, path="/v1/completions")
        two = await ask(made.urls[0], text + "there was", path="/v1/completions", stream=True)
        other = await ask(made.urls[0], text[:-9] + "x", path="/v1/completions")
        assert one.conversation == two.conversation != other.conversation


async def test_a_conversation_ended_by_marker_or_delete_frees_its_kv(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        await ask(
            made.urls[0], [user("a" * 500)], headers={"x-conversation-id": "f", "x-conversation-final": "1"}
        )
        await ask(made.urls[0], [user("b" * 500)], headers={"x-conversation-id": "d"})
        status, _ = await get(f"{made.urls[0]}/v1/conversations/d", "DELETE")
        assert status == 200
        await made.settle()
        assert sum(engine.held.total() for engine in made.engines.values()) == 0
        assert all(made.directory.table.kv_in_use(name) == 0 for name in ("d0", "d1"))
        _, told = await get(f"{made.urls[0]}/v1/conversations/f")
        assert (told["state"], told["cause"]) == ("ended", "final")
        status, _ = await get(f"{made.urls[0]}/v1/conversations/d", "DELETE")
        assert status == 404


async def test_a_conversation_ends_after_it_was_idle_for_its_lifetime(tmp_path: Path) -> None:
    async with fleet(tmp_path, ttl_s=0.4) as made:
        await ask(made.urls[0], [user("a" * 500)], headers={"x-conversation-id": "idle"})
        await until(lambda: not len(made.directory.table.conversations))
        await until(lambda: not any(engine.held.total() for engine in made.engines.values()))
        _, told = await get(f"{made.urls[0]}/v1/conversations/idle")
        assert told["cause"] == "idle"
        await until(lambda: made.gateways[0].directory.cache.get(told["id"]) is None)


async def test_collocation_transfers_no_turn_and_full_disaggregation_every_turn(tmp_path: Path) -> None:
    for policy, prefills in ((PlacingPolicy.COLLOCATED, 0), (PlacingPolicy.FULL_DISAGGREGATION, 3)):
        async with fleet(tmp_path / policy, placing={"policy": policy}, policy=policy) as made:
            messages = [user("hello")]
            for _ in range(3):
                assert (await ask(made.urls[0], messages)).status == 200
                messages += [assistant("a"), user("b")]
            assert sum(bool(seen.params.get("do_remote_prefill")) for seen in _all(made)) == prefills
            assert len({seen.conversation for seen in _all(made)}) == 1


async def test_two_gateways_continue_each_others_conversations(tmp_path: Path) -> None:
    async with fleet(tmp_path, gateways=2) as made:
        messages: list[dict[str, Any]] = [user("hello " * 50)]
        ids = set()
        for turn in range(6):
            answer = await ask(made.urls[turn % 2], messages)
            ids.add(answer.conversation)
            await made.settle()
            messages += [assistant(f"a{turn}"), user(f"u{turn}")]
        assert len(ids) == 1
        assert len(made.prefills()) == 1
        named = {"x-conversation-id": "n"}
        for turn in range(4):
            await ask(made.urls[turn % 2], [user(f"{turn}")], headers=named)
        assert len(made.prefills()) == 2
        # The first gateway has not seen the newest turn, and must still notice that this is a fork.
        one = [user("fork me")]
        here = await ask(made.urls[0], one)
        there = await ask(made.urls[1], [*one, assistant("a"), user("b")])
        await made.settle()
        fork = await ask(made.urls[0], [*one, assistant("x"), user("y")])
        assert here.conversation == there.conversation != fork.conversation


def _all(made: FakeFleet) -> list[SeenRequest]:
    return made.decoder_requests() + made.prefills()


async def test_the_metrics_count_the_turns_of_a_conversation(tmp_path: Path) -> None:
    """All tests of a process share the metrics registry, so the test checks only differences."""
    names = {
        "first": 'conserve_placements_total{cause="first_turn",policy="conserve"}',
        "asked": 'conserve_transfers_asked_total{cause="first_turn"}',
        "continued": 'conserve_turns_identified_total{how="continued"}',
        "complete": 'conserve_turns_total{outcome="complete"}',
        "ttfet": "conserve_ttfet_seconds_count",
        "tbt": "conserve_last_turn_tbt_seconds_count",
        "met": 'conserve_slo_total{met="yes",objective="ttfet",slo_class="default"}',
        "missed": 'conserve_slo_total{met="no",objective="e2e",slo_class="default"}',
        "ended": 'conserve_conversations_ended_total{cause="deleted"}',
    }
    async with fleet(tmp_path, slos={"default": SloSettings(ttfet_s=60.0, e2e_s=1e-6)}) as made:

        async def read() -> dict[str, float]:
            _, text = await get(f"{made.urls[0]}/metrics")
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            return {name: float(values.get(key, 0)) for name, key in names.items()}

        before = await read()
        messages = [user("hello")]
        first = await ask(made.urls[0], messages, stream=True)
        await ask(made.urls[0], [*messages, assistant("a"), user("b")], stream=True)
        await get(f"{made.urls[0]}/v1/conversations/{first.conversation}", "DELETE")
        await made.settle()
        after = await read()
        changed = {name: after[name] - before[name] for name in names}
        twice = {"complete", "ttfet", "tbt", "met", "missed"}
        assert changed == {name: 2.0 if name in twice else 1.0 for name in names}
