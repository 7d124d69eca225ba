"""When a later turn goes through the prefiller again.

Real agents do it: a prefix breaks, a file is pasted, a context is compacted. Such a turn is a new first turn
in all but name. The rule reads sizes that are known when the turn arrives, and predicts nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Redisaggregation:
    """`uncached` is what the bound decoder would have to compute; `prompt` is the turn's whole input.

    The prefiller computes what the decoder has cached as well, unless it still has it itself. `min_share`
    keeps a turn local when that would be mostly repeated work (docs/simulation.md has what it gains).
    """

    above_tokens: int = 8192
    min_share: float = 0.5

    def through_prefiller(self, uncached: int, prompt: int) -> bool:
        return uncached > self.above_tokens and uncached >= self.min_share * prompt
