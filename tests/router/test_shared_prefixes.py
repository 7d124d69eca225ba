"""Conversations with a shared prefix go to the prefiller that has it cached, if their owners share it."""

from pathlib import Path
from typing import Any

import pytest

from placement.routing.placer_settings import FirstTurns
from tests.support.engines import CURVES
from tests.support.fake_fleet import FakeFleet, ask, fleet, get, user

SYSTEM = {"role": "system", "content": "You are an agent of this framework. " * 300}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


async def cached(made: FakeFleet, question: str, key: str = "k", **body: Any) -> int:
    """Start a conversation; return how many prompt tokens its prefiller was expected to have cached."""
    headers = {"authorization": f"Bearer {key}"}
    answer = await ask(made.urls[0], [SYSTEM, user(question)], headers=headers, **body)
    assert answer.status == 200
    await made.settle()
    _, told = await get(f"{made.urls[0]}/v1/conversations/{answer.conversation}", headers=headers)
    return int(told["placements"][0]["receipt"]["prefiller"]["chosen"]["cached_tokens"])


async def test_a_second_conversation_with_the_same_prefix_goes_to_the_prefiller_that_has_it(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, prefillers=2) as made:
        assert await cached(made, "one") == 0
        assert await cached(made, "two") > 1_000
        (first, second) = (engine for engine in made.engines.values() if engine.name.startswith("p"))
        assert sorted((len(first.seen), len(second.seen))) == [0, 2]


async def test_conversations_with_different_prompt_cache_keys_share_cached_prefixes(tmp_path: Path) -> None:
    """Codex sends a `prompt_cache_key` for each conversation, and all its conversations begin alike."""
    async with fleet(tmp_path) as made:
        assert await cached(made, "one", prompt_cache_key="a") == 0
        assert await cached(made, "two", prompt_cache_key="b") > 1_000


async def test_a_prefix_is_not_expected_in_the_cache_for_another_owner_salt_or_tools(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        await cached(made, "one")
        assert await cached(made, "of another owner", key="other") == 0
        assert await cached(made, "with tools, which stand before all", tools=[TOOL]) == 0
        assert await cached(made, "with a salt", cache_salt="mine") == 0
        assert await cached(made, "with the same tools", tools=[TOOL]) > 1_000


@pytest.mark.parametrize("found", [0, 10_000])
async def test_the_expected_length_of_a_cached_prefix_follows_the_hits_that_a_decoder_reports(
    tmp_path: Path, found: int
) -> None:
    """The third conversation's estimate rises again if the second one did not find the prefix."""
    elastic, both = {"first_turns": FirstTurns.ELASTIC}, {"decode": CURVES["prefill"]}
    async with fleet(
        tmp_path, prefillers=0, decoders=1, engine={"cached": found}, placing=elastic, curves=both
    ) as made:
        estimates = []
        for question in ("one", "two", "three"):
            answer = await ask(made.urls[0], [SYSTEM, user(question)])
            assert answer.status == 200
            await made.settle()
            _, told = await get(f"{made.urls[0]}/v1/conversations/{answer.conversation}")
            estimates.append(told["placements"][0]["receipt"]["estimates"]["local_s"])
        first, second, third = estimates
        assert second < first / 2, "it was given this beginning"
        assert (third > 2 * second) == (not found), "less fits there than was thought"
