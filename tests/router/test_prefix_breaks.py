"""Each cause of a broken prefix is recognised from the two turns that break it."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from router.gateway.turn.kv_reuse import PrefixBreak
from tests.support.fake_fleet import ask, assistant, fleet, user

NAMED = {"x-session-id": "s"}
LONG = "a long text " * 50
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def counted() -> dict[str, float]:
    name = "conserve_prefix_broken_tokens_total"
    return {one.value: REGISTRY.get_sample_value(name, {"cause": one}) or 0.0 for one in PrefixBreak}


async def broken(
    tmp_path: Path,
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    *,
    cached: int | None = None,
    engine: dict[str, Any] | None = None,
    **body: Any,
) -> dict[str, float]:
    """Return how many tokens the second of two turns computed again, by the cause of its broken prefix."""
    async with fleet(tmp_path, engine=engine) as made:
        before = counted()
        await ask(made.urls[0], first, headers=NAMED, max_tokens=100, tools=[TOOL])
        await made.settle()
        for one in made.engines.values():
            one.cached = cached
        await ask(made.urls[0], second, headers=NAMED, **{"tools": [TOOL], **body})
        return {cause: value - before[cause] for cause, value in counted().items() if value != before[cause]}


FIRST = [user(LONG)]
LATER = [*FIRST, assistant("w " * 100), user("go on")]


async def test_a_turn_that_continues_its_prefix_is_not_counted_as_broken(tmp_path: Path) -> None:
    assert await broken(tmp_path, FIRST, LATER, cached=10_000) == {}


async def test_a_retry_of_a_turn_does_not_count_as_a_broken_prefix(tmp_path: Path) -> None:
    assert await broken(tmp_path, FIRST, FIRST, cached=600) == {}


async def test_evicted_kv_does_not_count_as_a_broken_prefix(tmp_path: Path) -> None:
    assert await broken(tmp_path, FIRST, LATER, cached=0) == {}


async def test_changed_tools_break_the_whole_prefix(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "g", "parameters": {}}}
    (found,) = (await broken(tmp_path, FIRST, LATER, tools=[TOOL, other])).items()
    assert found[0] == "changed_tools" and found[1] > 700
    turned = dict(reversed(TOOL.items()))
    assert await broken(tmp_path / "b", FIRST, LATER, cached=10_000, tools=[turned]) == {}


@pytest.mark.parametrize(
    "second", [[user("summary")], [*FIRST, user("go on")], [user(LONG + "."), *LATER[1:]]]
)
async def test_an_edited_history_breaks_the_prefix(tmp_path: Path, second: list[dict[str, Any]]) -> None:
    (found,) = (await broken(tmp_path, FIRST, second)).items()
    assert found[0] == "edited_history"


async def test_reasoning_that_is_not_sent_back_breaks_the_prefix(tmp_path: Path) -> None:
    engine = {"reasons": True}
    assert await broken(tmp_path, FIRST, LATER, engine=engine) == {"stripped_reasoning": 100.0}
    kept = [*FIRST, {**assistant("w"), "reasoning_content": "because"}, user("go on")]
    assert await broken(tmp_path / "b", FIRST, kept, engine=engine, cached=10_000) == {}


async def test_a_tool_call_rendered_differently_breaks_the_prefix(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    second = [*FIRST, called, {"role": "tool", "tool_call_id": "c", "content": "r"}]
    got = await broken(tmp_path, FIRST, second, engine={"calls_tools": True}, cached=690)
    assert list(got) == ["rerendered_tool_call"] and 16 < got["rerendered_tool_call"] <= 100


async def test_output_tokenised_differently_breaks_the_prefix(tmp_path: Path) -> None:
    got = await broken(tmp_path, FIRST, LATER, cached=690)
    assert list(got) == ["retokenised_output"] and 16 < got["retokenised_output"] <= 100
