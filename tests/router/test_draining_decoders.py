"""Conversations leave a draining decoder turn by turn, and no turn fails."""

import asyncio
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from tests.support.fake_fleet import FakeFleet, ask, assistant, fleet, get, user
from tests.support.waiting import until

MOVED = "conserve_conversations_moved_total"
RECOMPUTED = "conserve_moved_recomputed_tokens_total"


async def drain(made: FakeFleet, engine: str, on: bool = True) -> None:
    made.engines[engine].draining = on
    await until(
        lambda: all(g.directory.engines.load(engine).state.draining is on for g in made.gateways),
    )


async def opened(made: FakeFleet, text: str = "hello") -> tuple[list[dict[str, Any]], str, str]:
    """Start a conversation with one turn; return its messages, its id and its decoder."""
    messages = [user(text)]
    first = await ask(made.urls[0], messages)
    assert first.status == 200
    await made.settle()
    _, told = await get(f"{made.urls[0]}/v1/conversations/{first.conversation}")
    return [*messages, assistant("yes"), user("go on")], first.conversation, told["decoder"]


def moves(outcome: str) -> float:
    return float(REGISTRY.get_sample_value(MOVED, {"reason": "drain", "outcome": outcome}) or 0)


async def test_the_next_turn_leaves_a_draining_decoder_and_its_kv_is_transferred(tmp_path: Path) -> None:
    async with fleet(tmp_path, engine={"cached": 10_000}) as made:
        messages, conversation, left = await opened(made)
        before = moves("with_kv")
        await drain(made, left)
        answer = await ask(made.urls[0], messages)
        assert (answer.status, answer.conversation) == (200, conversation)
        await made.settle()
        _, told = await get(f"{made.urls[0]}/v1/conversations/{conversation}")
        assert told["decoder"] != left
        assert told["placements"][-1]["cause"] == "moved"
        assert (told["transfers"], told["turns"]) == (2, 2)
        receipt = told["placements"][-1]["receipt"]
        assert (receipt["move"]["reason"], receipt["move"]["source"]) == ("drain", left)
        assert receipt["prefiller"]["why"] == "has_kv"
        sends, gets = made.engines[left].seen[-1].params, made.engines[told["decoder"]].seen[-1].params
        assert sends["do_remote_decode"] and gets["do_remote_prefill"]
        assert sends["transfer_id"] == gets["transfer_id"] and gets["remote_port"] == made.engines[left].port
        assert sends["moves"] and gets["moves"] and gets["cached_tokens"] > 0
        assert len(made.prefills()) == 1, "the prefiller had the first turn only"
        assert made.engines[left].released == [made.decoder_requests()[0].conversation]
        assert moves("with_kv") - before == 1


async def test_a_conversation_is_computed_again_if_its_draining_decoder_fails_to_send_kv(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, engine={"cached": 0}) as made:
        messages, _, left = await opened(made)
        before, tokens = moves("recomputed"), REGISTRY.get_sample_value(RECOMPUTED) or 0
        await drain(made, left)
        made.engines[left].fail_status = 500
        answer = await ask(made.urls[0], messages)
        assert answer.status == 200
        await made.settle()
        assert moves("recomputed") - before == 1
        assert (REGISTRY.get_sample_value(RECOMPUTED) or 0) > tokens
        assert made.engines[left].released == [made.decoder_requests()[0].conversation]


async def test_turns_running_when_a_drain_begins_are_answered_completely(tmp_path: Path) -> None:
    async with fleet(tmp_path, engine={"token_s": 0.02}) as made:
        messages, _, left = await opened(made)
        running = asyncio.create_task(ask(made.urls[0], messages, stream=True, max_tokens=40))
        await until(lambda: made.engines[left].running)
        await drain(made, left)
        twin = await ask(made.urls[0], messages, max_tokens=2)
        done = await running
        assert (twin.status, done.status) == (200, 200)
        assert done.body.endswith(b"data: [DONE]\n\n")


async def test_a_conversation_stays_on_a_draining_decoder_if_there_is_no_other(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1) as made:
        messages, conversation, only = await opened(made)
        await drain(made, only)
        assert (await ask(made.urls[0], messages)).status == 200
        await made.settle()
        _, told = await get(f"{made.urls[0]}/v1/conversations/{conversation}")
        assert (told["decoder"], told["turns"], told["transfers"]) == (only, 2, 1)
        refused = await ask(made.urls[0], [user("a new one")])
        assert (refused.status, refused.error["code"]) == (429, "no_capacity")


async def test_a_decoder_accepts_conversations_again_after_draining(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1) as made:
        await drain(made, "d0")
        assert (await ask(made.urls[0], [user("one")])).status == 429
        await drain(made, "d0", on=False)
        assert (await ask(made.urls[0], [user("two")])).status == 200
