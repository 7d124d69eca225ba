"""Limits on a key's requests, tokens and concurrent turns hold for all gateways together."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.auth import rate_limits as rates
from router.auth.keys import DefaultLimits, Key, Limits, hash_secret
from router.auth.rate_limits import Bucket, Meters
from router.directory.api.messages import Spent
from router.errors import RateLimited
from router.gateway.config import ServedModel
from tests.support.fake_fleet import MODEL, FakeFleet, GatewayAnswer, ask, assistant, fleet, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow

BOB = {"authorization": "Bearer bob"}


@asynccontextmanager
async def limited(tmp_path: Path, limits: dict[str, Any], **more: Any) -> AsyncIterator[FakeFleet]:
    file = tmp_path / "keys"
    entries = [
        {"id": "of-alice", "owner": "a", "hash": hash_secret("alice"), "limits": limits},
        {"id": "of-bob", "owner": "b", "hash": hash_secret("bob")},
    ]
    file.write_text(orjson.dumps(entries).decode())
    async with fleet(tmp_path, keys_file=str(file), **more) as made:
        yield made


async def alice(url: str, text: str, **more: Any) -> GatewayAnswer:
    return await ask(
        url, [user(text)], headers={"authorization": "Bearer alice", **more.pop("said", {})}, **more
    )


def left(answer: GatewayAnswer, of: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{of}"])


@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 30), st.floats(0, 150)), max_size=40))
def test_a_bucket_holds_the_amount_of_one_minute_and_refills_within_a_minute(
    most: int, asked: list[tuple[float, float]]
) -> None:
    bucket, now, granted, last = Bucket(most, 0.0), 0.0, 0.0, 0.0
    for pause, amount in asked:
        now += pause
        wait = bucket.wait_s(amount, now)
        assert bucket.wait_s(amount, now + wait + 1e-6) <= 1e-6
        if not wait:
            bucket.take(amount, now)
            granted, last = granted + amount, amount
        # A request may cost more than a bucket holds; the bucket then refills before the next request.
        assert granted <= most + now * most / 60 + max(0, last - most) + 1e-6


async def test_a_key_that_exceeds_its_requests_per_minute_gets_a_429_after_a_delay(tmp_path: Path) -> None:
    async with limited(tmp_path, {"requests_per_minute": 3}) as made:
        url = made.urls[0]
        got = [await alice(url, "hi") for _ in range(3)]
        began = time.monotonic()
        got.append(await alice(url, "hi"))
        assert time.monotonic() - began > 0.9  # time has passed until the refusal
        assert [one.status for one in got] == [200, 200, 200, 429]
        assert [left(one, "requests") for one in got[:3]] == [2, 1, 0]
        refused = got[-1]
        assert refused.error["type"] == "rate_limit_error" and refused.error["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert 1 < float(refused.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        other = await ask(url, [user("hi")], headers=BOB)
        assert other.status == 200 and "x-ratelimit-limit-requests" not in other.headers


async def test_cached_tokens_do_not_count_against_tokens_per_minute(tmp_path: Path) -> None:
    """The fake engine counts one token per byte of the request's JSON, and reports the count."""
    async with limited(tmp_path, {"tokens_per_minute": 2000}, engine={"cached": 300}, prefillers=0) as made:
        url, said, began = made.urls[0], {"x-session-id": "c"}, time.monotonic()
        first = await alice(url, "x" * 500, max_tokens=10, said=said)
        usage = orjson.loads(first.body)["usage"]
        assert first.headers["x-ratelimit-limit-tokens"] == "2000" and left(first, "tokens") < 1600
        messages = [user("x" * 500), assistant("w"), user("y")]
        key = {"authorization": "Bearer alice", **said}
        second = await ask(url, messages, headers=key, max_tokens=10)
        used = usage["prompt_tokens"] - 300 + 10
        reserved = 2000 - used - left(second, "tokens")
        # Only the uncached part of the prompt is charged; the bucket refills meanwhile.
        assert -34 * (time.monotonic() - began) <= reserved < 150
        refused = await alice(url, "z" * 5000)
        assert refused.status == 429 and refused.error["code"] == "rate_limit_exceeded"
        assert len(made.decoder_requests()) == 2  # the refused request reached no engine
        assert (await ask(url, [user("z" * 5000)], headers=BOB)).status == 200


async def test_tokens_that_a_prefiller_computed_count_against_tokens_per_minute(tmp_path: Path) -> None:
    async with limited(tmp_path, {"tokens_per_minute": 9000}, prefillers=1) as made:
        made.engines["d0"].cached = 100_000
        url = made.urls[0]
        for number, stream in enumerate((False, True)):
            said = {"x-session-id": f"long-{number}"}
            assert (await alice(url, "x" * 2500, max_tokens=10, said=said, stream=stream)).status == 200
        assert len([one for one in made.engines["p0"].seen if one.path != "/metrics"]) >= 2
        after = await alice(url, "s", max_tokens=1, said={"x-session-id": "after"})
        assert left(after, "tokens") < 9000 - 2 * 2500 + 600  # what the bucket gains in a few seconds


async def test_tokens_that_a_lost_engine_generated_still_count_after_the_stream_resumes(
    tmp_path: Path,
) -> None:
    """The engine that resumes the stream gets these tokens in its prompt, and may report them as cached."""
    async with limited(
        tmp_path, {"tokens_per_minute": 2000}, engine={"cached": 5000, "token_s": 0.001}, prefillers=0
    ) as made:
        began, said = time.monotonic(), {"x-session-id": "c"}
        await alice(made.urls[0], "x", max_tokens=1000, said=said)
        (broken,) = (one for one in made.engines.values() if one.seen)
        broken.cut_after = 300
        told = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 400}
        await alice(made.urls[0], "x", said=said, **told)
        assert sum("resume" in one.params for one in made.decoder_requests()) == 1
        last = await alice(made.urls[0], "x", max_tokens=1)
        assert left(last, "tokens") < 600 + 34 * (time.monotonic() - began)


async def test_a_stream_that_its_client_cuts_off_costs_the_reserved_tokens(tmp_path: Path) -> None:
    async with limited(tmp_path, {"tokens_per_minute": 2000}, engine={"token_s": 0.2}) as made:
        going = asyncio.create_task(alice(made.urls[0], "x" * 1950, max_tokens=50, stream=True))
        await until(lambda: len(made.decoder_requests()))
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await until(lambda: not any(engine.running for engine in made.engines.values()))
        assert (await alice(made.urls[0], "x" * 1950)).status == 429


async def test_a_refused_request_costs_no_tokens(tmp_path: Path) -> None:
    async with limited(
        tmp_path, {"tokens_per_minute": 9000}, place_wait_s=0.05, engine={"kv_tokens": 500}
    ) as made:
        for _ in range(3):
            refused = await alice(made.urls[0], "x" * 4000)
            assert refused.status in (400, 429) and refused.error["code"] != "rate_limit_exceeded"


@pytest.mark.parametrize("status", [400, 500])
async def test_a_request_that_an_engine_refuses_costs_no_tokens(tmp_path: Path, status: int) -> None:
    fails = {"fail_status": status, "fail_body": '{"error":{"message":"a bad schema"}}'}
    async with limited(tmp_path, {"tokens_per_minute": 9000}, engine=fails) as made:
        got = [await alice(made.urls[0], f"{number}" * 4000) for number in range(3)]
        assert [one.status for one in got] == [status] * 3
        assert [left(one, "tokens") // 1000 for one in got] == [4] * 3  # not one another's tokens


async def test_a_client_that_leaves_while_its_turn_waits_is_charged_no_tokens(tmp_path: Path) -> None:
    kv = {"kv_tokens": 6000}
    async with limited(
        tmp_path, {"tokens_per_minute": 9000}, place_wait_s=9.0, engine=kv, decoders=1, prefillers=0
    ) as made:
        held = await ask(made.urls[0], [user("b" * 3900)], headers={**BOB, "x-session-id": "q"}, max_tokens=1)
        assert held.status == 200
        for number in range(4):
            waiting = asyncio.create_task(alice(made.urls[0], "x" * 3900))
            await until(lambda number=number: made.gateways[0].server.stats.requests == number + 2)
            await until(lambda: made.directory.table.waiting)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: not made.directory.table.waiting)
        assert left(await alice(made.urls[0], "x", max_tokens=1), "tokens") > 8000


async def test_a_key_that_exceeds_its_concurrent_turns_gets_a_429_from_every_gateway(tmp_path: Path) -> None:
    async with limited(tmp_path, {"turns": 2}, engine={"token_s": 0.05}, gateways=2) as made:
        going = [asyncio.create_task(alice(made.urls[0], f"{n}", max_tokens=100)) for n in range(2)]
        await until(lambda: len(made.decoder_requests()) == 2)
        refused = await alice(made.urls[0], "third")
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        await asyncio.sleep(0.6)
        assert (await alice(made.urls[1], "elsewhere")).status == 429  # it knows of the turns at the first
        assert {one.status for one in await asyncio.gather(*going)} == {200}
        assert (await alice(made.urls[0], "third")).status == 200


async def test_each_answer_of_a_request_counts_against_the_limit_on_concurrent_turns(tmp_path: Path) -> None:
    async with limited(tmp_path, {"turns": 4}, engine={"token_s": 0.05}) as made:
        url = made.urls[0]
        going = asyncio.create_task(alice(url, "three", n=3, max_tokens=60))
        await until(lambda: len(made.decoder_requests()) == 1)
        refused = await alice(url, "two more", n=2)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert (await alice(url, "one more", max_tokens=1)).status == 200
        never = await alice(url, "five", n=5)
        assert (never.status, never.error["param"]) == (400, "n") and "4 turns" in never.error["message"]
        assert (await going).status == 200
        several = await alice(url, "", path="/v1/completions", prompt=["a", "b"], n=2)
        assert several.status == 200, "all are counted down again"


async def test_a_request_whose_body_has_not_arrived_does_not_count_as_a_turn(tmp_path: Path) -> None:
    async with limited(tmp_path, {"turns": 1}) as made:
        host, _, port = made.urls[0].removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = "host: x\r\nauthorization: Bearer alice\r\ncontent-length: 100"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
        await until(lambda: made.gateways[0].server.stats.requests == 1)
        assert (await alice(made.urls[0], "hi")).status == 200
        writer.close()


class AddedHeaders:
    def add_header(self, name: bytes, value: bytes) -> None:
        pass


def granted(meters: Meters, key: Key, times: int) -> int:
    count = 0
    for _ in range(times):
        with suppress(RateLimited):
            meters.request(key, AddedHeaders())
            count += 1
    return count


def alices(**limits: Any) -> Key:
    return Key("of-alice", "a", hash_secret("alice"), limits=Limits(**limits))


def test_a_changed_limit_does_not_give_a_key_its_used_requests_back() -> None:
    meters = Meters({}.get, lambda: 0.0)
    assert granted(meters, alices(requests_per_minute=10), 20) == 10
    for turns in range(1, 5):
        assert granted(meters, alices(requests_per_minute=10, turns=turns), 20) == 0
    meters = Meters({}.get, lambda: 0.0)
    assert granted(meters, alices(requests_per_minute=10), 4) == 4
    assert granted(meters, alices(requests_per_minute=100), 200) == 6


def test_running_turns_still_count_after_a_limit_of_their_key_changes() -> None:
    meters = Meters({}.get, lambda: 0.0)
    with meters.turn(alices(turns=1), AddedHeaders()), pytest.raises(RateLimited):
        meters.turn(alices(turns=1, requests_per_minute=5), AddedHeaders()).__enter__()


async def test_requests_after_a_change_of_limits_are_reported_to_the_other_gateways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rates, "SHARE_EVERY_S", 0.001)
    meters, told = Meters({}.get, lambda: 0.0), list[int]()

    async def tell(news: tuple[Spent, ...]) -> bool:
        told.append(sum(one.requests for one in news))
        if len(told) == 1:
            granted(meters, alices(requests_per_minute=700), 2)
        return True

    granted(meters, alices(requests_per_minute=600), 300)
    sharing = asyncio.create_task(meters.share(tell))
    await until(lambda: len(told) >= 2)
    sharing.cancel()
    assert told[:2] == [300, 2]


def test_beyond_10_000_meters_the_one_unused_for_longest_is_dropped() -> None:
    def key(number: int) -> Key:
        return Key(f"k{number}", "o", hash_secret(""), limits=Limits(requests_per_minute=1))

    meters = Meters({}.get, lambda: 0.0)
    assert granted(meters, key(0), 1) == 1
    for number in range(1, 12_000):
        assert granted(meters, key(number), 1) == 1
        assert granted(meters, key(0), 1) == 0  # the meter of an address that returns often stays
    assert len(meters) == 10_000
    assert [granted(meters, key(number), 1) for number in (1, 11_999)] == [1, 0]


async def test_requests_with_unknown_keys_count_against_the_limit_of_their_address(tmp_path: Path) -> None:
    async with fleet(tmp_path, key_limits=DefaultLimits(requests_per_minute=2)) as made:
        said = [{"authorization": f"Bearer {number}"} for number in range(3)]
        got = [await ask(made.urls[0], [user("hi")], headers=one) for one in said]
        assert [one.status for one in got] == [200, 200, 429]


async def test_embeddings_requests_count_against_the_limits_on_turns_and_tokens(tmp_path: Path) -> None:
    models = (ServedModel(MODEL, embeddings=True),)
    limits = {"tokens_per_minute": 3000, "turns": 1}
    async with limited(tmp_path, limits, models=models, engine={"token_s": 0.3}) as made:
        one, other = (asyncio.create_task(embed(made.urls[0], "x" * 1000)) for _ in range(2))
        assert sorted(answer.status for answer in await asyncio.gather(one, other)) == [200, 429]
        began = time.monotonic()
        second = await embed(made.urls[0], "x" * 1500)
        third = await embed(made.urls[0], "x" * 1000)
        assert (second.status, third.status) == (200, 429) and time.monotonic() - began < 8
        assert left(second, "tokens") < 1000


async def test_embeddings_that_fail_cost_no_tokens(tmp_path: Path) -> None:
    models, fails = (ServedModel(MODEL, embeddings=True),), {"fail_status": 400, "fail_body": "{}"}
    async with limited(tmp_path, {"tokens_per_minute": 3000}, models=models, engine=fails) as made:
        assert [(await embed(made.urls[0], "x" * 2000)).status for _ in range(3)] == [400] * 3


async def embed(url: str, text: str) -> GatewayAnswer:
    return await ask(url, text, headers={"authorization": "Bearer alice"}, path="/v1/embeddings")


async def test_a_limit_on_requests_holds_for_all_gateways_together(tmp_path: Path) -> None:
    """Turns are sent to two gateways alternately, with time for the gateways to exchange their counts."""
    async with limited(tmp_path, {"requests_per_minute": 6}, gateways=2) as made:
        began, granted = time.monotonic(), 0
        for number in range(12):
            granted += (await alice(made.urls[number % 2], "hi")).status == 200
            await asyncio.sleep(0.35)
        assert 6 <= granted <= 6 + (time.monotonic() - began) / 10 + 1


async def test_a_key_without_limits_of_its_own_gets_those_of_the_fleet_file(tmp_path: Path) -> None:
    async with limited(tmp_path, {"turns": 5}, key_limits=DefaultLimits(requests_per_minute=1)) as made:
        url = made.urls[0]
        assert [(await alice(url, "hi")).status for _ in range(2)] == [200, 429]
        assert [(await ask(url, [user("hi")], headers=BOB)).status for _ in range(2)] == [200, 429]
