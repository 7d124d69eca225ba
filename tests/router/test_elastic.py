"""Over real sockets, a first turn is computed on the engine that yields its first token soonest."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from placement.routing.placer_settings import FirstTurns, PrefillerRoles
from placement.scheduling.prefill_curve import PrefillCurve
from tests.support.fake_fleet import FakeFleet, GatewayAnswer, ask, assistant, fleet, get, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SLOW = {"prefill": PrefillCurve(0.0, 1e-2, 0.0)}  # a prompt of 1000 bytes takes 10 s


@asynccontextmanager
async def elastic(tmp_path: Path, decoders: int = 1, **placing: Any) -> AsyncIterator[FakeFleet]:
    placing = {"first_turns": FirstTurns.ELASTIC, "max_prefill_wait_s": 1e9, **placing}
    async with fleet(tmp_path, decoders=decoders, placing=placing, curves=SLOW) as made:
        yield made


async def placement(made: FakeFleet, conversation: str) -> dict[str, Any]:
    await made.settle()
    _, told = await get(f"{made.urls[0]}/v1/conversations/{conversation}")
    return dict(told["placements"][0])


async def sample(made: FakeFleet, name: str) -> float:
    _, text = await get(f"{made.urls[0]}/metrics")
    line = next(one for one in text.splitlines() if one.startswith(f"{name} "))
    return float(line.rsplit(" ", 1)[1])


def turn(made: FakeFleet, conversation: str) -> "asyncio.Task[GatewayAnswer]":
    return asyncio.create_task(
        ask(
            made.urls[0],
            [user("x" * 1000)],
            headers={"x-conversation-id": conversation},
            stream=True,
            max_tokens=8,
        )
    )


async def test_a_first_turn_is_computed_where_its_first_token_comes_soonest(tmp_path: Path) -> None:
    async with elastic(tmp_path) as made:
        handed_over = await sample(made, "conserve_handover_seconds_sum")
        assert (await turn(made, "unknown")).status == 200
        one = await placement(made, "unknown")
        assert one["prefiller"] == "p0", "nothing is known of the decoder"
        assert one["receipt"]["estimates"]["local_s"] is None
        assert one["took"]["first_token_s"] > 0 and one["took"]["handover_s"] > 0
        assert await sample(made, "conserve_handover_seconds_sum") > handed_over
        made.engines["d0"].prompt_tokens_per_s = 1e6
        await made.settle()
        assert (await turn(made, "known")).status == 200
        one = await placement(made, "known")
        assert one["prefiller"] is None and one["receipt"]["prefiller"]["why"] == "sooner_on_decoder"
        estimates = one["receipt"]["estimates"]
        assert 0 < estimates["local_s"] < estimates["remote_s"]
        assert one["took"]["first_token_s"] > 0 and one["took"]["handover_s"] is None
        assert len(made.prefills()) == 1


async def test_a_conversation_that_fits_on_no_decoder_runs_on_a_prefiller(tmp_path: Path) -> None:
    async with elastic(tmp_path, fill=0.02, headroom_tokens=0) as made:
        assert (await turn(made, "first")).status == 200
        assert (await placement(made, "first"))["decoder"] == "d0"
        assert (await turn(made, "second")).status == 200
        one = await placement(made, "second")
        assert (one["decoder"], one["prefiller"]) == ("p0", None)
        assert one["receipt"]["decoder"]["why"] == "last_resort"
        messages = [user("x" * 1000), assistant("yes"), user("y" * 3000)]
        again = await ask(made.urls[0], messages, headers={"x-conversation-id": "second"}, stream=True)
        assert again.status == 200
        await made.settle()
        assert [bool(seen.params) for seen in made.prefills()] == [True, False, False]
        _, told = await get(f"{made.urls[0]}/v1/conversations/second")
        assert (told["decoder"], told["turns"], told["transfers"]) == ("p0", 2, 0)
        await get(f"{made.urls[0]}/v1/conversations/second", "DELETE")
        await until(lambda: made.engines["p0"].released)
        assert not made.engines["p0"].held


async def test_decoders_compute_first_turns_while_prefillers_are_saturated(
    tmp_path: Path,
) -> None:
    async with elastic(tmp_path, decoders=2, max_prefill_wait_s=5.0) as made:
        made.engines["p0"].prefill_s = made.engines["d0"].prefill_s = made.engines["d1"].prefill_s = 1.0
        asking = [turn(made, f"c{number}") for number in range(6)]
        answers = await asyncio.gather(*asking)
        assert [answer.status for answer in answers] == [200] * 6
        why = [(await placement(made, f"c{number}"))["receipt"]["prefiller"]["why"] for number in range(6)]
        assert "prefillers_saturated" in why and "finishes_first" in why


async def taking(made: FakeFleet, prefillers: int) -> None:
    async with asyncio.timeout(60.0):
        while await sample(made, "conserve_prefillers_taking_conversations") != prefillers:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_an_idle_prefiller_decodes_a_new_conversation_while_decoders_have_a_queue(
    tmp_path: Path,
) -> None:
    async with elastic(tmp_path, roles=PrefillerRoles.ELASTIC) as made:
        decoder = made.engines["d0"]
        assert (await turn(made, "before")).status == 200
        decoder.waiting_prompt_tokens, decoder.prompt_tokens_per_s = 10_000, 1_000.0
        await taking(made, 1)
        assert (await turn(made, "kept")).status == 200
        one = await placement(made, "kept")
        assert (one["decoder"], one["prefiller"]) == ("p0", None)
        assert one["receipt"]["decoder"]["why"] == "idle_prefiller"
        messages = [user("x" * 1000), assistant("yes"), user("y" * 3000)]
        again = await ask(made.urls[0], messages, headers={"x-conversation-id": "kept"}, stream=True)
        assert again.status == 200
        await made.settle()
        _, told = await get(f"{made.urls[0]}/v1/conversations/kept")
        assert (told["decoder"], told["turns"], told["transfers"]) == ("p0", 2, 0)
        await get(f"{made.urls[0]}/v1/conversations/kept", "DELETE")
        await until(lambda: made.engines["p0"].released)
        decoder.waiting_prompt_tokens = 0
        await taking(made, 0)
        assert (await turn(made, "after")).status == 200
        assert (await placement(made, "after"))["decoder"] == "d0"
