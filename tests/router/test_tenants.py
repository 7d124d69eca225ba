"""Owners cannot reach ids, cached prefixes or responses of other owners."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

from router.auth.keys import inline_keys
from router.gateway.config import GatewayLimits
from router.identity.conversation_ids import namespace
from router.identity.prefix_groups import EVERYBODY, PrefixGroups
from tests.support.fake_fleet import FakeFleet, ask, assistant, fleet, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    async with fleet(tmp_path) as one:
        yield one


def prompt(path: str) -> Any:
    return [user("hi")] if path.endswith("chat/completions") else "hi"


@pytest.mark.parametrize("path", PATHS)
async def test_engines_get_only_conversation_ids_that_begin_with_the_owner(
    made: FakeFleet, path: str
) -> None:
    named = set()
    for name, key in (("alice", ALICE), ("bob", BOB)):
        answer = await ask(made.urls[0], prompt(path), headers=key, path=path, session_id="same")
        assert answer.conversation.startswith("same.")
        named.add(f"{namespace(name)}:{answer.conversation}")
    seen = [*made.decoder_requests(), *made.prefills()]
    assert {one.conversation for one in seen} == named
    assert [one.body["session_id"] for one in seen] == [None] * len(seen)  # it would override the header


@pytest.mark.parametrize("path", PATHS)
async def test_owners_do_not_share_cached_prefixes_by_default(made: FakeFleet, path: str) -> None:
    for key in (ALICE, BOB):
        for own in ({}, {"cache_salt": "mine"}, {"cache_salt": namespace("alice")}):
            answer = await ask(
                made.urls[0], prompt(path), headers={**key, "x-session-id": "s"}, path=path, **own
            )
            assert answer.status == 200
    salts = [one.body["cache_salt"] for one in made.decoder_requests()]
    assert len(set(salts)) == 6 and namespace("bob") in salts
    # Both legs of a turn have the same salt, so that they find the same blocks.
    assert {one.body["cache_salt"] for one in made.prefills()} <= set(salts)


def test_owners_share_prefixes_if_the_fleet_allows_it() -> None:
    alice, bob, carol = (namespace(key) for key in ("alice", "bob", "carol"))
    some = PrefixGroups((alice, bob))
    assert some.fields(alice, {}) == some.fields(bob, {}) != some.fields(carol, {}) == {"cache_salt": carol}
    assert PrefixGroups((EVERYBODY,)).fields(alice, {}) == {}
    apart = [groups.fields(alice, {"cache_salt": "x"})["cache_salt"] for groups in (some, PrefixGroups())]
    assert len({*apart, "x"}) == 3


@pytest.mark.parametrize("headers", [{}, {"x-conversation-id": "c"}])
async def test_a_request_cannot_refer_to_a_response_of_another_owner(
    made: FakeFleet, headers: dict[str, str]
) -> None:
    path = "/v1/responses"
    first = await ask(made.urls[0], "hello", headers={**ALICE, **headers}, path=path)
    name = orjson.loads(first.body)["id"]
    before = len(made.decoder_requests())
    stolen = await ask(
        made.urls[0], "go on", headers={**BOB, **headers}, path=path, previous_response_id=name
    )
    assert (stolen.status, stolen.error["code"]) == (404, "previous_response_not_found")
    assert len(made.decoder_requests()) == before
    own = await ask(made.urls[0], "go on", headers={**ALICE, **headers}, path=path, previous_response_id=name)
    assert (own.status, own.conversation) == (200, first.conversation)


async def test_offline_work_cannot_refer_to_a_response(made: FakeFleet) -> None:
    answer = await ask(
        made.urls[0], "x", headers=ALICE, path="/v1/responses", previous_response_id="r", service_tier="flex"
    )
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")


async def test_a_later_turn_has_the_same_cache_salt_as_the_first(made: FakeFleet) -> None:
    """With another salt, the engine would not find the KV of the conversation."""
    await ask(made.urls[0], [user("hi")], headers=ALICE)
    await ask(made.urls[0], [user("hi"), assistant("w"), user("go on")], headers=ALICE)
    salts = [one.body["cache_salt"] for one in made.decoder_requests()]
    assert salts == [namespace("alice")] * 2


async def test_running_requests_of_one_owner_take_no_more_than_its_share_of_connections(
    tmp_path: Path,
) -> None:
    limits = GatewayLimits(connections=20, owner_share=0.2)
    keys = inline_keys(["alice", "bob"], [])
    async with fleet(tmp_path, limits=limits, keys=keys) as made:
        host, _, port = made.urls[0].removeprefix("http://").partition(":")
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n"
        )
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        for _, writer in slow:  # bodies that never arrive
            writer.write(head)
        await until(lambda: made.gateways[0].server.stats.requests == 4)
        refused = await ask(made.urls[0], [user("hi")], headers=ALICE)
        assert refused.status == 429 and refused.error["code"] == "too_many_at_once"
        assert (await ask(made.urls[0], [user("hi")], headers=BOB)).status == 200
        for _, writer in slow:
            writer.close()
        await until(lambda: made.gateways[0].server.stats.connections == 0)
        assert (await ask(made.urls[0], [user("hi")], headers=ALICE)).status == 200


def refusals() -> float:
    return REGISTRY.get_sample_value("conserve_key_limits_total", {"limit": "bytes_at_once"}) or 0.0


async def slow_body(url: str, key: str, length: int, sent: int) -> asyncio.StreamWriter:
    host, _, port = url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    writer.write(head.encode() + b" " * sent)
    await writer.drain()
    return writer


async def test_request_bodies_of_one_owner_take_at_most_as_much_memory_as_they_leave_to_others(
    tmp_path: Path,
) -> None:
    """Bytes of a body count from their arrival, even if the rest of the body arrives slowly."""
    mib = 1 << 20
    limits, keys = GatewayLimits(body_mib=1, bodies_mib=2), inline_keys(["alice", "bob", "carol"], [])
    async with fleet(tmp_path, limits=limits, keys=keys) as made:
        url, served, before = made.urls[0], made.gateways[0].server.stats, refusals()
        slow = [await slow_body(url, "alice", mib, mib // 2 - 100) for _ in range(2)]  # together 1 of 2 MiB
        kept = [user("x" * (mib // 8))]
        await until(lambda: served.requests == 2)
        await asyncio.sleep(0.2)  # until the gateway has read the pieces
        refused = await ask(url, kept, headers=ALICE)
        assert (refused.status, refused.error["code"]) == (429, "too_many_bytes_at_once")
        slow += [await slow_body(url, "bob", mib, mib // 2 - 100)]  # as much of the other half as is left
        await until(lambda: served.requests == 4)
        await asyncio.sleep(0.2)
        assert (await ask(url, kept, headers=BOB)).error["code"] == "too_many_bytes_at_once"
        assert (await ask(url, kept, headers={"authorization": "Bearer carol"})).status != 429
        assert refusals() == before + 2
        for writer in slow:
            writer.close()
        await until(lambda: served.connections == 0)
        for who in (ALICE, BOB) * 3:  # the same share as at first, each time
            assert (await ask(url, [user("x" * (mib - mib // 8))], headers=who)).status != 429


async def test_a_stored_history_counts_against_its_owners_share_of_body_memory(tmp_path: Path) -> None:
    """A request body of a hundred bytes may refer to a stored history of megabytes."""
    kib, slow = 1 << 10, {"kv_tokens": 1_000_000, "token_s": 1.0}
    limits = GatewayLimits(body_mib=1 / 16, bodies_mib=1 / 8)
    async with fleet(tmp_path, decoders=1, engine=slow, limits=limits) as made:
        first = await ask(made.urls[0], "x" * 45 * kib, headers=ALICE, path="/v1/responses")
        assert first.status == 200, first.body
        named = {"path": "/v1/responses", "previous_response_id": orjson.loads(first.body)["id"]}
        running = [
            asyncio.create_task(ask(made.urls[0], "go on", headers=ALICE, max_output_tokens=3, **named))
            for _ in range(3)
        ]
        answers = await asyncio.gather(*running)
        assert sorted(one.status for one in answers) == [200, 429, 429]
