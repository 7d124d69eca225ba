"""Conversations as a load: each turn's prompt is what was said before plus something new."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kv_engine import KvEngine
from traces.format import Conversation, load
from traces.scaling import Scale, fit, scale

SAMPLE = Path(__file__).resolve().parent.parent / "traces" / "samples" / "turns.jsonl.gz"


@dataclass(frozen=True)
class LoadShape:
    conversations: int = 40
    lengths: float = 1 / 16
    times: float = 1 / 30
    longest_wait_s: float = 10.0  # of a turn: the benchmark ends
    turns: int = 6
    context: int = 6000
    arrivals_s: float = 45.0
    trace: Path = SAMPLE


@dataclass
class Result:
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    later_first_token_s: list[float] = field(default_factory=list)
    known_tokens: int = 0  # of later prompts: their KV was computed before
    recomputed_tokens: int = 0  # of those, in whole blocks: computed again
    recomputed_tails: int = 0  # of those, in a last block that was not full: vLLM keeps none of them


def conversations(shape: LoadShape) -> list[Conversation]:
    by = Scale(lengths=shape.lengths, waits=shape.times, wait_cap_s=shape.longest_wait_s)
    scaled = fit(scale(load(shape.trace).conversations, by), shape.context, shape.turns)
    return [c for c in scaled if len(c.turns) > 1][: shape.conversations]


def living_tokens(load: list[Conversation]) -> int:
    """What all of them hold in the end: none of them ends before the last has spoken."""
    return sum(c.peak_context_tokens for c in load)


async def play(engine: KvEngine, load: list[Conversation], shape: LoadShape, block_tokens: int) -> Result:
    result = Result()

    async def live(number: int, conversation: Conversation) -> None:
        rng = random.Random(number)
        await asyncio.sleep(shape.arrivals_s * number / max(1, len(load)))
        context: list[int] = []
        for index, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.wait_s)
            kept = context[: turn.cached_tokens]
            prompt = kept + [rng.randrange(5, 250) for _ in range(turn.prompt_tokens - len(kept))]
            answer = await engine.ask(prompt, max(1, turn.output_tokens), conversation.id)
            result.outputs.setdefault(conversation.id, []).append(answer.tokens)
            if index:
                # An answer's last token is never computed, and a prompt's last token always is.
                known = min(len(kept), len(context) - 1, len(prompt) - 1)
                result.later_first_token_s.append(answer.first_token_s)
                result.known_tokens += known
                whole = known // block_tokens * block_tokens
                result.recomputed_tokens += max(0, whole - answer.cached_tokens)
                result.recomputed_tails += known - whole
            context = prompt + answer.tokens

    await asyncio.gather(*(live(number, conversation) for number, conversation in enumerate(load)))
    return result
