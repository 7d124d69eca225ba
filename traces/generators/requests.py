"""Conversations of one turn, as request traces have them: the load of BurstGPT and the co-serving paper."""

from collections.abc import Iterator
from dataclasses import dataclass

from traces.format import Conversation, Turn
from traces.generators import draws


@dataclass(frozen=True, slots=True)
class Lengths:
    """The co-serving paper's online load: 4,096 tokens in, 256 out."""

    prompt_tokens: float = 4_096.0
    prompt_cv: float = 0.0
    output_tokens: float = 256.0
    output_cv: float = 0.0


def conversations(count: int, seed: int, lengths: Lengths | None = None) -> Iterator[Conversation]:
    lengths = lengths or Lengths()
    random = draws.stream(seed, "requests")
    for number in range(count):
        prompt = draws.tokens(random, lengths.prompt_tokens, lengths.prompt_cv)
        output = draws.tokens(random, lengths.output_tokens, lengths.output_cv)
        yield Conversation(f"request-{number:06d}", 0.0, (Turn(prompt, 0, output),))
