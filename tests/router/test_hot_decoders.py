"""An idle conversation leaves a hot decoder, and all gateways serve its next turn where its KV is."""

from pathlib import Path

from tests.support.fake_fleet import ask, assistant, fleet, user
from tests.support.waiting import until


async def test_after_a_move_every_gateway_sends_turns_to_the_new_decoder(tmp_path: Path) -> None:
    async with fleet(tmp_path, gateways=2, sends=True, placing={"relieve_hot": True}) as made:
        messages = [user("hello")]
        first = await ask(made.urls[0], messages)
        await made.settle()
        key = next(iter(made.directory.table.conversations)).key
        left = made.directory.table.describe(key)["decoder"]
        for engine in made.engines.values():
            engine.prompt_tokens_per_s = 1000.0
        made.engines[left].waiting_prompt_tokens = 30_000

        await until(lambda: made.directory.table.describe(key)["decoder"] != left)
        told = made.directory.table.describe(key)
        placement = told["placements"][-1]
        assert (placement["cause"], placement["receipt"]["move"]["reason"]) == ("moved", "hot")
        made.engines[left].waiting_prompt_tokens = 0
        before = len(made.engines[left].seen)
        for url in made.urls:
            messages += [assistant("yes"), user("go on")]
            answer = await ask(url, messages)
            assert (answer.status, answer.conversation) == (200, first.conversation)
        assert len(made.engines[left].seen) == before, "no gateway uses the former binding"
        assert len(made.engines[told["decoder"]].seen) == 2
