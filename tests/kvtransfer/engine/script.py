"""Scripted conversations, and the answers of plain vLLM to each of their turns."""

import random
from dataclasses import dataclass, field

from tests.kvtransfer.engine.engines import EngineProcess

CONVERSATIONS, TURNS, OUTPUT = 8, 5, 10
BLOCKS = 130  # a third of the conversations' KV at the end
PRIORITY = ("--scheduling-policy", "priority")


@dataclass
class TurnScript:
    prompts: list[list[list[int]]] = field(default_factory=list)  # by conversation and turn
    answers: list[list[list[int]]] = field(default_factory=list)
    computed: float = 0  # prompt tokens that plain vLLM computed for it


def said(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(5, 250) for _ in range(tokens)]


def recorded(plain: EngineProcess, seed: int = 1) -> TurnScript:
    """Return scripted conversations that share a prefix, with plain vLLM's answers to all their turns."""
    rng = random.Random(seed)
    opening = said(rng, 100)
    contexts = [opening + said(rng, 700) for _ in range(CONVERSATIONS)]
    script = TurnScript([[] for _ in contexts], [[] for _ in contexts])
    before = plain.computed_prompt_tokens()
    for _ in range(TURNS):
        for number, context in enumerate(contexts):
            answer = plain.ask(context, OUTPUT).tokens
            script.prompts[number].append(list(context))
            script.answers[number].append(answer)
            context += answer + said(rng, 60)
    script.computed = plain.computed_prompt_tokens() - before
    return script
