"""Thirty concurrent conversations each bind to the decoder with the least KV and are transferred once."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fleet.talk import client, get, opening, text_turn, tool_turn
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

CONVERSATIONS = 30


def talk(fleet: RunningFleet, seed: int, words: int) -> None:
    # A saturated prefiller is a 429 with Retry-After, which the SDK heeds, as any agent's would.
    sdk = client(fleet.url, "thirty").with_options(max_retries=10)
    messages = opening(1000 + seed, words)
    tool_turn(sdk, fleet.model, messages)
    text_turn(sdk, fleet.model, messages)


def test_each_conversation_is_bound_to_the_decoder_with_least_kv_and_transferred_once(
    laptop_fleet: RunningFleet,
) -> None:
    fleet = laptop_fleet
    words = [random.Random(7).choice((20, 50, 100, 250)) for _ in range(CONVERSATIONS)]
    with ThreadPoolExecutor(CONVERSATIONS) as threads:
        list(threads.map(lambda seed: talk(fleet, seed, words[seed]), range(CONVERSATIONS)))

    def listed() -> list[dict[str, Any]]:
        return list(get(fleet.url, "/v1/conversations?limit=200", "thirty")["data"])

    fleet.until(lambda: {one["turns"] for one in listed()} == {2}, 60, "the reports of the last turns")
    found = listed()
    assert len(found) == CONVERSATIONS
    # On a busy machine the prefiller may seem to be down for a moment. Its receipt says so.
    local = [one for one in found if one["transfers"] == 0]
    choices = [one["placements"][0]["receipt"]["prefiller"] for one in local]
    assert all(choice["why"] == "no_prefiller_up" for choice in choices) and len(local) <= 2, choices
    assert {one["transfers"] for one in found if one not in local} == {1}
    for one in found:
        (placement,) = one["placements"]
        choice = placement["receipt"]["decoder"]
        assert choice["why"] == "least_kv_in_use"
        assert choice["chosen"]["engine"] == one["decoder"]
        others = [option["kv_in_use"] for option in choice["runners_up"]]
        assert all(choice["chosen"]["kv_in_use"] <= other for other in others), choice
        # Both decoders were looked at, unless one had no capacity.
        assert 1 + len(others) + choice["without_capacity"] == choice["considered"] == 2
    assert len({one["decoder"] for one in found}) == 2
