"""Plays conversations on fake or real engines, to compare the bindings with those of the simulation."""

import asyncio
from collections.abc import Iterator
from random import Random

import aiohttp

from tests.support.binding_agreement import LiveBinding
from traces.format import TraceConversation, TraceTurn
from traces.replay import client

AT_ONCE = 3


def conversations(
    count: int, headroom: int, at_once: int = AT_ONCE, longest: int = 8_000
) -> Iterator[TraceConversation]:
    """Yield conversations of such sizes that the KV of two decoders always differs clearly.

    A reservation ends when an engine reports its conversation, which happens some milliseconds earlier or
    later in the live run than in the simulation. This changes no binding if the decoders' KV differs by more
    than all reservations.
    """
    random, held, grown = Random(5), [0, 0], 300
    apart = at_once * headroom
    for number in range(count):
        less = held.index(min(held))
        while True:
            prompt = random.randrange(600, longest)
            if abs(held[less] + prompt + grown - held[1 - less]) > apart:
                break
        held[less] += prompt + grown
        turns = (TraceTurn(prompt, 0, 8), TraceTurn(150, prompt + 8, 8, 0.1))
        yield TraceConversation(f"bound-{number}", 0.2 * number, turns)


# Tokens of four prompts that arrive together. The prefiller is idle and twice as fast as a decoder, so it
# gets the first prompt. The second prompt would have to wait there, so a decoder is faster. The third is so
# long that waiting for the prefiller is faster; the fourth is short again. The choices stay the same if
# requests are up to a second late, as on a busy machine.
TOGETHER = (4_000, 230, 6_000, 1_200)
SECONDS_A_TOKEN = {"prefill": 3e-4, "decode": 6e-4}


def bursts(count: int, headroom: int) -> Iterator[list[TraceConversation]]:
    """Yield bursts of four prompts; after each prompt, the KV of two decoders differs clearly.

    `headroom` must be small, because the decoders have to differ by more than 40 times `headroom` tokens.
    """
    random, held = Random(6), (0, 0)
    for number in range(count):
        prompts = [round(tokens * random.uniform(0.8, 1.2)) for tokens in TOGETHER]
        while (after := held_after(held, prompts, apart=40 * headroom)) is None:
            prompts = [round(tokens * random.uniform(0.8, 1.2)) for tokens in TOGETHER]
        held = after
        yield [
            TraceConversation(
                f"burst-{number}-{place}",
                0.0,
                (TraceTurn(prompt, 0, 8), TraceTurn(150, prompt + 8, 8, 0.1)),
            )
            for place, prompt in enumerate(prompts)
        ]


def held_after(held: tuple[int, int], prompts: list[int], apart: int) -> tuple[int, int] | None:
    """Return the KV tokens of two decoders after `prompts`; None if they ever differ by `apart` or less."""
    grown = 300
    for prompt in prompts:
        less, more = sorted(held)
        held = (less + prompt + grown, more)
        if abs(held[0] - held[1]) <= apart:
            return None
    return held


class TraceAgents:
    """Clients that play the conversations of a trace in the trace's order, a few at a time."""

    def __init__(self, session: aiohttp.ClientSession, model: str, at_once: int = AT_ONCE) -> None:
        self._session = session
        self._model = model
        self._chars_per_token = 1.0
        self._places = asyncio.Semaphore(at_once)

    async def learn_sizes(self) -> None:
        """Measure characters per token with a conversation, which is then deleted.

        The gateway learns the ratio from this conversation, too.
        """
        usage = await self._ask("sizes", [{"role": "user", "content": client.text("sizes", 4_000)}], 1)
        self._chars_per_token = 4_000 / usage["prompt_tokens"]
        async with self._session.delete("/v1/conversations/sizes") as answer:
            assert answer.status == 200, await answer.text()

    async def play(self, trace: list[TraceConversation]) -> list[LiveBinding]:
        playing = []
        for conversation in trace:
            await self._places.acquire()
            playing.append(asyncio.create_task(self._play(conversation)))
            await asyncio.sleep(0.05)  # so that the requests arrive in this order
        await asyncio.gather(*playing)
        return [await self._bound(conversation.id) for conversation in trace]

    async def _play(self, conversation: TraceConversation) -> None:
        messages: list[dict[str, str]] = []
        try:
            for number, turn in enumerate(conversation.turns):
                size = round(turn.appended_tokens * self._chars_per_token)
                text = client.text(f"{conversation.id}/{number}", size)
                messages.append({"role": "user", "content": text})
                await self._ask(conversation.id, messages, turn.output_tokens)
                messages.append({"role": "assistant", "content": "yes"})
        finally:
            self._places.release()

    async def _ask(self, conversation: str, messages: list[dict[str, str]], output: int) -> dict[str, int]:
        body = {"model": self._model, "messages": messages, "max_tokens": output, "temperature": 0}
        headers = {"X-Conversation-ID": conversation}
        while True:
            async with self._session.post("/v1/chat/completions", json=body, headers=headers) as answer:
                if answer.status == 429:  # agents retry in the same way
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                    continue
                assert answer.status == 200, await answer.text()
                return dict((await answer.json())["usage"])

    async def _bound(self, conversation: str) -> LiveBinding:
        async with self._session.get(f"/v1/conversations/{conversation}") as answer:
            return LiveBinding.from_placement(conversation, (await answer.json())["placements"][0])
