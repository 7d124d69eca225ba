"""The conversation paper's workload: SWE-bench tasks solved by SWE-agent, one heavy prompt and a light tail.

The paper gives means, not its traces: 15k tokens into the first turn (25k tokens/s fill the prefiller at
1.634 conversations/s: 15.3k each), 1k tokens out over the conversation, hundreds of tokens appended a turn,
outputs of "large variance". First turns are the upper 30 % of its TTFT curve: 3.3 turns a conversation.
How long tools take it does not say: half a second here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from traces.format import Conversation, Ending, Turn
from traces.generators import draws


@dataclass(frozen=True, slots=True)
class SweBench:
    first_turn_tokens: float = 15_300.0
    first_turn_cv: float = 0.35
    turns: float = 10.0 / 3.0
    appended_tokens: float = 250.0  # a tool's answer
    appended_cv: float = 1.0
    output_tokens: float = 1_000.0  # of a conversation
    output_cv: float = 1.0  # of a turn
    tool_s: float = 0.5
    tool_cv: float = 1.0


def conversations(count: int, seed: int, mix: SweBench | None = None) -> Iterator[Conversation]:
    """Without arrivals (all at 0): a pattern of `arrivals` gives them."""
    mix = mix or SweBench()
    random = draws.stream(seed, "swe-bench")
    a_turn = mix.output_tokens / mix.turns
    for number in range(count):
        turns: list[Turn] = []
        context = 0
        last = draws.geometric(random, mix.turns) - 1
        for index in range(last + 1):
            mean, cv = (
                (mix.first_turn_tokens, mix.first_turn_cv)
                if index == 0
                else (mix.appended_tokens, mix.appended_cv)
            )
            turn = Turn(
                appended_tokens=draws.tokens(random, mean, cv),
                cached_tokens=context,
                output_tokens=draws.tokens(random, a_turn, mix.output_cv),
                wait_s=round(draws.lognormal(random, mix.tool_s, mix.tool_cv), 6) if index else 0.0,
                ending=Ending.END_OF_TURN if index == last else Ending.TOOL_USE,
            )
            context = turn.context_tokens
            turns.append(turn)
        yield Conversation(f"swe-{number:06d}", 0.0, tuple(turns))
